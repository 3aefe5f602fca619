"""Benchmarks of the compiled engine against torch's own backends."""
