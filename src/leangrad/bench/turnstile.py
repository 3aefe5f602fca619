"""One process at a time on a device that several share: a lock on a file, and processors for who holds it.

What the others do meanwhile keeps processors busy: they compile. So a quarter of the processors is for the process that
has the device, and for nobody else: plain's steps took up to 1.5 times as long beside eight others that compiled.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["alone", "make_room", "split_processors"]

_FEWEST = 8  # processors of which some can be spared
_SHARE = 4  # one of so many is spared


@contextmanager
def alone(path: str) -> Iterator[None]:
    """Wait for the other processes that name this file, and keep them waiting. Without a name, nobody waits."""
    if not path:
        yield
        return
    import fcntl  # not on Windows, where nobody names a file

    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the file's end releases it, and so does the process's
        with _on(_SPARED):
            yield


def make_room() -> None:
    """Run this process, and those that it starts, beside the processors of who has the device."""
    if _SPARED:
        _move(_ALL - _SPARED)


def split_processors(processors: set[int], siblings: dict[int, set[int]]) -> set[int]:
    """Those that are spared, out of all; two that are one core (`siblings`) stay together.

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
    """All threads of this process; backward has one of its own."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
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
