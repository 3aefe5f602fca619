"""`python -m benchmarks`: compares all ways on all models, and writes the tables and pictures of README and docs."""
