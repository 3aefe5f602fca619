"""The command line, `leangrad --help`; also as `python -m leangrad`."""

from leangrad.cli.commands import app

__all__ = ["app"]
