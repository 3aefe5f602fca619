"""What a measurement holds, and how it reads as text and as JSON."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["Allocation", "Event", "Measurement", "Phase", "format_bytes", "format_seconds"]

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


@dataclass(frozen=True)
class Measurement:
    """The memory and the time of one step; see `leangrad.measure`.

    - `peak_bytes`: the most that was alive at once of what the step allocated.
    - `kept_bytes`: what the step had allocated and not yet released when its first backward began; 0 with no backward.
    - `seconds`: the median of the untouched runs.
    - `temporaries`: the largest allocations that were released in the phase that made them, largest first.
    - `timeline`: every allocation and release, in order.
    - `device`: where the bytes are counted, such as "cpu" or "cuda:0".
    """

    peak_bytes: int
    kept_bytes: int
    seconds: float
    temporaries: tuple[Allocation, ...]
    timeline: tuple[Event, ...] = dataclasses.field(repr=False)
    device: str

    def live_bytes_after(self, phase: Phase) -> int:
        """The bytes alive when `phase` last ended, above the start of the step.

        After "forward" that is what backward will find; after "backward", mostly gradients; after "other", which
        holds the optimizer and the end of the step, what the step leaves behind. 0 if the phase did not occur.
        """
        if phase not in get_args(Phase):
            raise ValueError(f"expected a phase out of {get_args(Phase)}, got {phase!r}")
        return next((event.live_bytes for event in reversed(self.timeline) if event.phase == phase), 0)

    def alive_at(self, index: int) -> tuple[Allocation, ...]:
        """The step's own allocations that are alive after `timeline[index]`, largest first."""
        alive: dict[int, Event] = {}
        for event in self.timeline[: range(len(self.timeline))[index] + 1]:
            if event.bytes > 0:
                alive[event.block] = event
            else:
                alive.pop(event.block, None)
        return _largest_first(Allocation(e.op, e.module, e.bytes, e.phase) for e in alive.values())

    def alive_at_peak(self) -> tuple[Allocation, ...]:
        """The step's own allocations that are alive at the peak, largest first."""
        if not self.timeline:
            return ()
        own = own_bytes(self.timeline)
        return self.alive_at(max(range(len(own)), key=own.__getitem__))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)

    def to_json(self, **kwargs: Any) -> str:
        """`as_dict()` as JSON; `kwargs` go to `json.dumps`."""
        return json.dumps(self.as_dict(), **kwargs)

    def __str__(self) -> str:
        rows = [
            ("device", self.device),
            ("peak", format_bytes(self.peak_bytes)),
            ("kept for backward", format_bytes(self.kept_bytes)),
            ("time", format_seconds(self.seconds)),
        ]
        for title, blocks in (("alive at the peak", self.alive_at_peak()), ("largest temporaries", self.temporaries)):
            for i, block in enumerate(blocks[:5]):
                rows.append((title if i == 0 else "", f"{format_bytes(block.bytes)}  {_where(block)}"))
        return "\n".join(f"{name:<20} {value}".rstrip() for name, value in rows)


def own_bytes(timeline: tuple[Event, ...]) -> list[int]:
    """What the step itself had allocated and not released, after each event."""
    older = 0  # bytes of blocks from before the step that it has released
    own = []
    for event in timeline:
        if event.block == BEFORE_THE_STEP:
            older -= event.bytes
        own.append(event.live_bytes + older)
    return own


def temporaries_of(timeline: tuple[Event, ...], at_most: int = 10) -> tuple[Allocation, ...]:
    """The largest allocations that were released in the phase that made them, largest first."""
    alive: dict[int, Event] = {}
    found = []
    for event in timeline:
        if event.bytes > 0:
            alive[event.block] = event
        elif (born := alive.pop(event.block, None)) is not None and born.phase == event.phase:
            found.append(Allocation(born.op, born.module, born.bytes, born.phase))
    return _largest_first(found)[:at_most]


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


def _largest_first(blocks: Any) -> tuple[Allocation, ...]:
    return tuple(sorted(blocks, key=lambda block: -block.bytes))


def _where(block: Allocation) -> str:
    return "  ".join(part for part in (block.phase, block.op, block.module) if part)
