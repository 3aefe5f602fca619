"""The command line: `leangrad demo`, `leangrad verify`, `leangrad doctor`; also as `python -m leangrad`."""

from leangrad.cli.commands import app

__all__ = ["app"]
