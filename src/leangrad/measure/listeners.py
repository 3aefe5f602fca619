"""Who wants to know what `leangrad.measure` finds of the step that it runs: there is one profiler in a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

__all__ = ["Course", "Listener", "forget", "listen", "tell"]


Course = Sequence[tuple[int, int]]  # after each change of memory: the time, as `time.time_ns`, and what the step holds


class Listener(Protocol):
    """What is told of a measured step."""

    def measured(self, peak_bytes: int, course: Course) -> None:
        """The step has run, and took so much at most."""


_listeners: WeakSet[Listener] = WeakSet()


def listen(listener: Listener) -> None:
    """Tell ``listener`` of the step that is being measured now, if one is; once."""
    _listeners.add(listener)


def forget() -> None:
    """A step is about to be measured: who listened before heard of another profiler."""
    _listeners.clear()


def tell(peak_bytes: int, course: Course) -> None:
    """A step was measured."""
    for listener in list(_listeners):
        listener.measured(peak_bytes, course)
    forget()
