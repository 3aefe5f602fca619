"""Compare all ways to train one model, leangrad's, torch's and other packages', each in its own process.

Read in this order: `peers` (alternatives to leangrad), `ways` (the table of all ways), `job` (the input and the output
of one process), `machine` (hardware and versions), `turnstile` (one process at a time on a device), `worker` (measures
one way), `run` (runs all ways, each in its own process), `result` (rows as a table and as JSON), and `builtin` (small
models).
"""

from leangrad.bench.job import Job, Row
from leangrad.bench.result import Bench
from leangrad.bench.run import bench
from leangrad.bench.ways import WAYS

__all__ = ["WAYS", "Bench", "Job", "Row", "bench"]
