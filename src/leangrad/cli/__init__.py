"""The command line: `leangrad demo`, `verify`, `floor`, `frontier`, `fit`, `bench`, `profile`, `doctor`; also as `python -m leangrad`."""

from leangrad.cli.commands import app

__all__ = ["app"]
