"""Who wants to know what `leangrad.measure` finds of the step that it runs: there is one profiler in a process."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

__all__ = ["Listener", "forget", "listen", "tell"]


class Listener(Protocol):
    """What is told of a measured step."""

    def measured(self, peak_bytes: int) -> None:
        """The step has run, and took so much at most."""


_listeners: WeakSet[Listener] = WeakSet()


def listen(listener: Listener) -> None:
    """Tell ``listener`` of the step that is being measured now, if one is; once."""
    _listeners.add(listener)


def forget() -> None:
    """A step is about to be measured: who listened before heard of another profiler."""
    _listeners.clear()


def tell(peak_bytes: int) -> None:
    """A step was measured."""
    for listener in list(_listeners):
        listener.measured(peak_bytes)
    forget()
