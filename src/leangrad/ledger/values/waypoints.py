"""Waypoints: values on the way of a long recipe that are rebuilt before it, one after the other.

[Note: waypoints] A replay is recursive, and Python's stack is not deep: so a recipe is LONGEST_RECIPE ops long at most.
But what a product was run for, and autograd has saved, is held once it is rebuilt, for its readers. So a plan that
keeps little has recipes of any length, with such values every so often on their way. Before a tensor is rebuilt these
are, from the far end on, one after the other (``reach_waypoints``), and no replay is deeper than the way from one to
the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

LONGEST_RECIPE = 200  # ops of a recipe, one inside the other: each takes a frame or two of the 1,000 that Python allows
FAR = 100  # ops after which a value that is held is a waypoint: nearer ones stand inside of fused kernels


class ReplayedValue(Protocol):
    """What is asked of the values on the way of a recipe."""

    tensor: Tensor | None
    is_waypoint: bool
    length: int
    products: int
    fleeting: bool
    readers: int

    @property
    def inputs(self) -> Sequence[ReplayedValue]:
        """The values that it is rebuilt from."""

    def is_at_hand(self) -> bool:
        """Whether it was rebuilt already, and is held."""

    def rebuild_ahead(self, task: int) -> None:
        """Rebuild it, and hold it for its readers."""


def mark_waypoint(value: ReplayedValue, least: int) -> None:
    """Let lengths begin anew after ``value``, if it is more than ``least`` ops long and held once it is rebuilt."""
    if value.length > least and value.products and not value.fleeting and value.tensor is None:
        value.is_waypoint = True


def reach_waypoints(value: ReplayedValue, task: int) -> None:
    """Rebuild the waypoints under ``value`` that are not at hand, those that others are rebuilt from first."""
    stack = [(v, False) for v in value.inputs]
    seen: set[int] = set()
    while stack:
        v, is_reached = stack.pop()
        if is_reached:
            if not v.is_at_hand():
                v.rebuild_ahead(task)
        elif v.tensor is None and v.products and not v.is_at_hand() and id(v) not in seen:
            seen.add(id(v))
            if v.is_waypoint and v.readers:
                stack.append((v, True))
            stack.extend((i, False) for i in v.inputs)
