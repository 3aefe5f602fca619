"""The command line `leangrad`, which also runs as `python -m leangrad`; `leangrad --help` lists the commands."""

from leangrad.cli.commands import app

__all__ = ["app"]
