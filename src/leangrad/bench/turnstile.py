"""One process at a time on a device that several share: a lock on a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["alone"]


@contextmanager
def alone(path: str) -> Iterator[None]:
    """Wait for the other processes that name this file, and keep them waiting. Without a name, nobody waits."""
    if not path:
        yield
        return
    import fcntl  # not on Windows, where nobody names a file

    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the file's end releases it, and so does the process's
        yield
