"""Events of memory in a step, the allocations and releases of blocks; and the text form of sizes and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BEFORE_THE_STEP", "Allocation", "Event", "Phase", "format_bytes", "format_seconds"]

Phase = Literal["forward", "backward", "other"]
BEFORE_THE_STEP = -1  # the block number of all memory that was allocated before the step


@dataclass(frozen=True, slots=True)
class Allocation:
    """One block of memory that the step allocated.

    `op` is the op that allocated it (in backward, the autograd node and then the op), `module` the path of the module
    in whose forward or backward it was allocated; both are empty if there is none.
    """

    op: str
    module: str
    bytes: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Event:
    """One change of the live bytes: an allocation (`bytes` > 0) or a release (`bytes` < 0).

    `live_bytes` is the number of live bytes after the event, minus those at the start of the step. An allocation and
    its release have the same `block`; memory that was allocated before the step has block -1. `line` is the source line
    of the op, if it was noted.
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
    """Format a byte count for people: exact below 10,000, else three or four digits and a decimal unit.

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
    """Format a duration for people: in milliseconds up to ten seconds, in seconds above.

    >>> format_seconds(0.01234)
    '12.34 ms'
    """
    return f"{seconds * 1000:.2f} ms" if seconds < 10 else f"{seconds:.1f} s"
