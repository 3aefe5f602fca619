"""`python -m benchmarks`: everything side by side. See `side_by_side.py`."""

from benchmarks.side_by_side import main

main()
