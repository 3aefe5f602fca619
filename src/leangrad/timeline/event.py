"""What happens to memory in a step: blocks that are allocated and released, and how sizes and times are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BEFORE_THE_STEP", "Allocation", "Event", "Phase", "format_bytes", "format_seconds"]

Phase = Literal["forward", "backward", "other"]
BEFORE_THE_STEP = -1  # the block of memory that stood before


@dataclass(frozen=True, slots=True)
class Allocation:
    """One block of memory that the step asked for.

    `op` is the op that asked (in backward, the autograd node and then the op), `module` the path of the module whose
    forward made it or whose backward needed it, both empty where there is none.
    """

    op: str
    module: str
    bytes: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Event:
    """One change of the live bytes: an allocation (`bytes` > 0) or a release (`bytes` < 0).

    `live_bytes` is what is alive after it, above the start of the step. An allocation and its release carry the same
    `block`; memory that stood before the step has block -1. `line` is the source line of the op, where it was noted.
    """

    seconds: float
    bytes: int
    live_bytes: int
    block: int
    op: str
    module: str
    phase: Phase
    line: str = ""


def format_bytes(count: int) -> str:
    """A byte count for people: exact below 10,000, else three or four digits and a decimal unit.

    >>> format_bytes(9999), format_bytes(12_345_678)
    ('9,999 B', '12.35 MB')
    """
    if abs(count) < 10_000:
        return f"{count:,} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if abs(size) < 1000:
            return f"{size:.2f} {unit}"
    return f"{size / 1000:.2f} TB"


def format_seconds(seconds: float) -> str:
    """A duration for people, in milliseconds up to ten seconds.

    >>> format_seconds(0.01234)
    '12.34 ms'
    """
    return f"{seconds * 1000:.2f} ms" if seconds < 10 else f"{seconds:.1f} s"
