"""What each block of a step is, told by when it is made and how long it lives.

[Note: categories] A block that forward makes and backward finds is a kept activation. One that backward makes and
leaves behind is a gradient; one that the optimizer makes and leaves behind is its state. All else is temporary. No name
is asked for: what a program calls its tensors does not change what they cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leangrad.timeline.event import BEFORE_THE_STEP, Event

__all__ = ["ACTIVATIONS", "CATEGORIES", "GRADIENTS", "OTHER", "PARAMETERS", "STATE", "TEMPORARIES", "Curve"]

PARAMETERS, STATE, GRADIENTS = "parameters", "optimizer state", "gradients"
ACTIVATIONS, TEMPORARIES, OTHER = "kept activations", "temporaries", "other"
CATEGORIES = (PARAMETERS, STATE, GRADIENTS, ACTIVATIONS, TEMPORARIES, OTHER)


def categories_of(timeline: Sequence[Event]) -> list[str]:
    """The category of each event's block, event by event; see [Note: categories]. Older blocks have none."""
    ends: dict[int, int] = {}  # of a block: the event that releases it
    for index, event in enumerate(timeline):
        if event.bytes < 0:
            ends[event.block] = index
    after = _changes_of_phase(timeline)
    of_block = {BEFORE_THE_STEP: ""}
    for index, event in enumerate(timeline):
        if event.bytes > 0:
            end = ends.get(event.block, len(timeline))
            lasts = end >= after[index]  # beyond the phase that made it
            follows = timeline[after[index]].phase if after[index] < len(timeline) else ""
            if event.phase == "forward" and lasts and follows == "backward":
                of_block[event.block] = ACTIVATIONS
            elif event.phase == "backward" and lasts:
                of_block[event.block] = GRADIENTS
            elif event.phase == "other" and end == len(timeline):
                of_block[event.block] = STATE
            else:
                of_block[event.block] = TEMPORARIES
    return [of_block[event.block] for event in timeline]


def _changes_of_phase(timeline: Sequence[Event]) -> list[int]:
    """For each event the first one after it that is of another phase; at the end, their number."""
    found = [len(timeline)] * len(timeline)
    for index in range(len(timeline) - 2, -1, -1):
        same = timeline[index].phase == timeline[index + 1].phase
        found[index] = found[index + 1] if same else index + 1
    return found


class Curve:
    """The live bytes of each category after each event, with what stood before the step.

    What stood before and is released in the step was a gradient, as long as so many bytes of gradients stood, or else
    something of the rest; what nobody counted when the step began is not counted when it is released.
    """

    def __init__(self, timeline: Sequence[Event], standing: Mapping[str, int]) -> None:
        self.standing = {name: standing.get(name, 0) for name in CATEGORIES}
        self.timeline: list[Event] = []
        self.categories: list[str] = []  # of each event
        left = dict(self.standing)
        for event, own in zip(timeline, categories_of(timeline), strict=True):
            category = own or next((name for name in (GRADIENTS, OTHER) if left[name] + event.bytes >= 0), "")
            if category:
                left[category] += 0 if own else event.bytes
                self.timeline.append(event)
                self.categories.append(category)
        total = highest = sum(self.standing.values())
        self.peak_index = -1  # the event after which most is alive; -1: before the first
        for index, event in enumerate(self.timeline):
            total += event.bytes
            if total > highest:
                highest, self.peak_index = total, index
        self.peak_bytes = highest

    def at(self, index: int) -> dict[str, int]:
        """The live bytes of each category after the event of that number; -1: before the first."""
        live = dict(self.standing)
        for event, category in zip(self.timeline[: index + 1], self.categories, strict=False):
            live[category] += event.bytes
        return live

    def alive_at(self, index: int) -> list[tuple[Event, str]]:
        """The step's own blocks that are alive then, as they were made, largest first, with their category."""
        alive: dict[int, tuple[Event, str]] = {}
        for event, category in zip(self.timeline[: index + 1], self.categories, strict=False):
            if event.bytes > 0:
                alive[event.block] = event, category
            else:
                alive.pop(event.block, None)
        return sorted(alive.values(), key=lambda found: -found[0].bytes)
