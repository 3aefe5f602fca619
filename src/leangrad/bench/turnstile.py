"""A file lock that lets one process at a time use a shared device, and reserves processors for the lock's holder.

The processes that wait for the lock may be compiling, which keeps processors busy. So a quarter of the processors is
reserved for the process that holds the lock: without that, plain steps took up to 1.5 times as long beside eight
processes that compiled.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["alone", "make_room", "split_processors"]

_FEWEST = 8  # with fewer processors than this, none are reserved
_SHARE = 4  # one of this many processors is reserved


@contextmanager
def alone(path: str) -> Iterator[None]:
    """Hold the lock on the file ``path``, and run on the reserved processors; with an empty ``path``, do nothing.

    Other processes that call this with the same ``path`` wait until the lock is released.
    """
    if not path:
        yield
        return
    import fcntl  # does not exist on Windows; `path` is always empty there

    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed or the process ends
        with _on(_SPARED):
            yield


def make_room() -> None:
    """Keep this process, and the processes that it starts, off the processors reserved for the lock's holder."""
    if _SPARED:
        _move(_ALL - _SPARED)


def split_processors(processors: set[int], siblings: dict[int, set[int]]) -> set[int]:
    """Return the processors to reserve, about a quarter of ``processors``; none if there are fewer than eight.

    siblings: for a processor, the processors on the same core (hyperthreads); they are reserved together.

    >>> sorted(split_processors(set(range(8)), {0: {0, 4}, 4: {0, 4}}))
    [0, 4]
    >>> split_processors({0, 1}, {})
    set()
    """
    spared: set[int] = set()
    if len(processors) < _FEWEST:
        return spared
    for one in sorted(processors):
        if len(spared) >= len(processors) // _SHARE:
            break
        spared |= siblings.get(one, {one}) & processors
    return spared


@contextmanager
def _on(processors: set[int]) -> Iterator[None]:
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    _move(processors)
    try:
        yield
    finally:
        _move(before)


def _move(processors: set[int]) -> None:
    """Set the CPU affinity of all threads of this process to ``processors``; backward runs in its own thread."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), processors)


def _siblings(processors: set[int]) -> dict[int, set[int]]:
    found = {}
    for one in processors:
        with suppress(OSError, ValueError):
            text = Path(f"/sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list").read_text()
            ends = [part.split("-") for part in text.strip().split(",")]
            found[one] = {n for part in ends for n in range(int(part[0]), int(part[-1]) + 1)}
    return found


_ALL: set[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
_SPARED = split_processors(_ALL, _siblings(_ALL))
