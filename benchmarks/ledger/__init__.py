"""Benchmarks of the eager engine: host time, kernel time, bitwise equality, peaks."""
