"""All ways to train one model side by side, each in a process of its own: leangrad's, torch's, and other people's.

Read in this order: `peers` (what a user would pick in leangrad's stead), `ways` (the table of all ways), `job` (what a
process is asked and what it answers), `machine` (where that was), `turnstile` (one process at a time on a device),
`worker` (one way, measured), `run` (all of them, each in its process), `result` (rows as a table and as JSON), and
`builtin` (small models).
"""

from leangrad.bench.job import Job, Row
from leangrad.bench.result import Bench
from leangrad.bench.run import bench
from leangrad.bench.ways import WAYS

__all__ = ["WAYS", "Bench", "Job", "Row", "bench"]
