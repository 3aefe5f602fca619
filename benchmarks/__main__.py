"""`python -m benchmarks` compares all ways on all models; see `bench/side_by_side.py`."""

from benchmarks.bench.side_by_side import main

main()
