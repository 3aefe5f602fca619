"""Listeners to the step that `leangrad.measure` is running.

A process can have only one profiler. Code that needs the memory curve of a step that is being measured registers a
listener instead of profiling the step itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

__all__ = ["Listener", "MemoryCurve", "clear", "notify", "register"]


MemoryCurve = Sequence[
    tuple[int, int]
]  # after each change of memory: the time, as `time.time_ns`, and the bytes that the step holds


class Listener(Protocol):
    """An object that receives the result of a measured step."""

    def measured(self, peak_bytes: int, curve: MemoryCurve) -> None:
        """Receive the step's peak and its memory curve, after the step was measured."""


_listeners: WeakSet[Listener] = WeakSet()


def register(listener: Listener) -> None:
    """Register ``listener`` for the step that is being measured now, if there is one; it is called once."""
    _listeners.add(listener)


def clear() -> None:
    """Remove all listeners; called before a step is measured: those were registered while another profiler ran."""
    _listeners.clear()


def notify(peak_bytes: int, curve: MemoryCurve) -> None:
    """Call every listener with the result of the measured step, and remove them all."""
    for listener in list(_listeners):
        listener.measured(peak_bytes, curve)
    clear()
