"""`Measurement`: the memory and the time of one step, and its forms as text, report and JSON."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from leangrad.report import Report, StepRecord
from leangrad.timeline.event import BEFORE_THE_STEP, Allocation, Event, Phase, format_bytes, format_seconds

__all__ = ["Measurement", "own_bytes", "temporaries_of"]


@dataclass(frozen=True)
class Measurement:
    """The memory and the time of one step; see `leangrad.measure`.

    - `peak_bytes`: the most bytes that were alive at once, of those that the step allocated.
    - `kept_bytes`: bytes allocated by the step and not released when its first backward began; 0 with no backward.
    - `seconds`: the median of the runs without instruments.
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
        """Return the live bytes when `phase` last ended, minus those at the start of the step.

        After "forward" these are the bytes that backward starts with; after "backward", mostly gradients; after
        "other", which is the optimizer and the end of the step, what the step leaves behind. 0 if the phase did not
        occur.
        """
        if phase not in get_args(Phase):
            raise ValueError(f"expected a phase out of {get_args(Phase)}, got {phase!r}")
        return next((event.live_bytes for event in reversed(self.timeline) if event.phase == phase), 0)

    def alive_at(self, index: int) -> tuple[Allocation, ...]:
        """Return the step's own allocations that are alive after `timeline[index]`, largest first."""
        alive: dict[int, Event] = {}
        for event in self.timeline[: range(len(self.timeline))[index] + 1]:
            if event.bytes > 0:
                alive[event.block] = event
            else:
                alive.pop(event.block, None)
        return _largest_first(Allocation(e.op, e.module, e.bytes, e.phase) for e in alive.values())

    def alive_at_peak(self) -> tuple[Allocation, ...]:
        """Return the step's own allocations that are alive at the peak, largest first."""
        if not self.timeline:
            return ()
        own = own_bytes(self.timeline)
        return self.alive_at(max(range(len(own)), key=own.__getitem__))

    def report(self, title: str = "The memory of a step") -> Report:
        """Return this measurement as a `Report`, which prints as text and saves as an interactive page."""
        step = StepRecord("the step", self.timeline, {}, self.kept_bytes, self.seconds, self.device)
        return Report(title, (step,))

    def save(self, path: str | Path) -> None:
        """Write the report to a file: a page (.html), JSON (.json) or text (any other ending)."""
        self.report().save(path)

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)

    def to_json(self, **kwargs: Any) -> str:
        """Return `as_dict()` as JSON; `kwargs` are passed to `json.dumps`."""
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
    """Return the bytes that the step itself had allocated and not released, after each event."""
    older = 0  # bytes that the step has released, of blocks allocated before it
    own = []
    for event in timeline:
        if event.block == BEFORE_THE_STEP:
            older -= event.bytes
        own.append(event.live_bytes + older)
    return own


def temporaries_of(timeline: tuple[Event, ...], at_most: int = 10) -> tuple[Allocation, ...]:
    """Return the largest allocations that were released in the phase that made them, largest first."""
    alive: dict[int, Event] = {}
    found = []
    for event in timeline:
        if event.bytes > 0:
            alive[event.block] = event
        elif (born := alive.pop(event.block, None)) is not None and born.phase == event.phase:
            found.append(Allocation(born.op, born.module, born.bytes, born.phase))
    return _largest_first(found)[:at_most]


def _largest_first(blocks: Any) -> tuple[Allocation, ...]:
    return tuple(sorted(blocks, key=lambda block: -block.bytes))


def _where(block: Allocation) -> str:
    return "  ".join(part for part in (block.phase, block.op, block.module) if part)
