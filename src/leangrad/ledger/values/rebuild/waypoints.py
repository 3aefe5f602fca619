"""Waypoints: values inside a long recipe that are rebuilt before it, one after the other.

[Note: waypoints] A replay is recursive, and Python's stack is limited, so a recipe may nest at most LONGEST_RECIPE ops.
But a saved tensor whose rebuild runs a product is cached for its readers once it is rebuilt. So a plan that keeps
little may have recipes of any length, if such values, the waypoints, lie inside them at intervals. Before a tensor is
rebuilt ``reach_waypoints`` rebuilds the waypoints under it, beginning with those nearest to the anchors, and no replay
is deeper than from one waypoint to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

LONGEST_RECIPE = 200  # nested ops of a recipe: each uses a frame or two of the 1,000 that Python allows
FAR = 100  # a value is made a waypoint if its recipe nests more ops; nearer ones would lie inside fused kernels


class ReplayedValue(Protocol):
    """What this file needs of the values in a recipe: see the attributes of `Value`."""

    tensor: Tensor | None  # the kept tensor
    is_waypoint: bool
    length: int  # nested ops of its recipe
    products: int  # nested products of its recipe
    fleeting: bool  # recipes that read it do not cache it
    readers: int  # saved tensors that are this value

    @property
    def inputs(self) -> Sequence[ReplayedValue]:
        """The values that its recipe reads."""

    def has_memo(self) -> bool:
        """Whether its tensor was rebuilt already and is cached."""

    def rebuild_ahead(self, task: int) -> None:
        """Rebuild its tensor and cache it for its readers."""


def mark_waypoint(value: ReplayedValue, least: int) -> None:
    """Make ``value`` a waypoint if its recipe nests more than ``least`` ops and it is cached once it is rebuilt."""
    if value.length > least and value.products and not value.fleeting and value.tensor is None:
        value.is_waypoint = True


def reach_waypoints(value: ReplayedValue, task: int) -> None:
    """Rebuild the waypoints under ``value`` that are not cached, in the order in which one is rebuilt from another."""
    stack = [(v, False) for v in value.inputs]
    seen: set[int] = set()
    while stack:
        v, is_reached = stack.pop()
        if is_reached:
            if not v.has_memo():
                v.rebuild_ahead(task)
        elif v.tensor is None and v.products and not v.has_memo() and id(v) not in seen:
            seen.add(id(v))
            if v.is_waypoint and v.readers:
                stack.append((v, True))
            stack.extend((i, False) for i in v.inputs)
