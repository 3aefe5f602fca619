"""Benchmarks of the modules of `leangrad.nn` against their plain forms."""
