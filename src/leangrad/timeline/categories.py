"""The category of each block of a step, decided by when the block is made and how long it lives.

[Note: categories] A block that forward makes and that is still alive when backward begins is a kept activation. One
that backward makes and that outlives it is a gradient. One that the optimizer makes (phase "other") and that is still
alive at the end of the step is optimizer state. All other blocks are temporaries. The names that a program gives its
tensors play no part, since they do not change what the tensors cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leangrad.timeline.event import BEFORE_THE_STEP, Event

__all__ = ["ACTIVATIONS", "CATEGORIES", "GRADIENTS", "OTHER", "PARAMETERS", "STATE", "TEMPORARIES", "Curve"]

PARAMETERS, STATE, GRADIENTS = "parameters", "optimizer state", "gradients"
ACTIVATIONS, TEMPORARIES, OTHER = "kept activations", "temporaries", "other"
CATEGORIES = (PARAMETERS, STATE, GRADIENTS, ACTIVATIONS, TEMPORARIES, OTHER)


def categories_of(timeline: Sequence[Event]) -> list[str]:
    """The category of the block of each event; see [Note: categories]. Blocks from before the step have none: ""."""
    ends: dict[int, int] = {}  # by block: the index of the event that releases it
    for index, event in enumerate(timeline):
        if event.bytes < 0:
            ends[event.block] = index
    after = _changes_of_phase(timeline)
    of_block = {BEFORE_THE_STEP: ""}
    for index, event in enumerate(timeline):
        if event.bytes > 0:
            end = ends.get(event.block, len(timeline))
            lasts = end >= after[index]  # whether the block outlives the phase that made it
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
    """For each event the index of the first later event in another phase; if there is none, the number of events."""
    found = [len(timeline)] * len(timeline)
    for index in range(len(timeline) - 2, -1, -1):
        same = timeline[index].phase == timeline[index + 1].phase
        found[index] = found[index + 1] if same else index + 1
    return found


class Curve:
    """The live bytes of each category after each event, including those allocated before the step.

    A block from before the step that is released in it counts as a gradient, as long as that many bytes of gradients
    are left, else as other memory, as long as that many bytes of it are left. If neither is left, the block was not
    counted when the step began, and its release is not counted either.

    - `standing`: the bytes allocated before the step, by category.
    - `timeline`, `categories`: the events that are counted, and the category of each.
    - `peak_index`, `peak_bytes`: the event after which the most bytes are alive, and these bytes.
    """

    def __init__(self, timeline: Sequence[Event], standing: Mapping[str, int]) -> None:
        self.standing = {name: standing.get(name, 0) for name in CATEGORIES}
        self.timeline: list[Event] = []
        self.categories: list[str] = []  # the category of each event of `timeline`
        left = dict(self.standing)
        for event, own in zip(timeline, categories_of(timeline), strict=True):
            category = own or next((name for name in (GRADIENTS, OTHER) if left[name] + event.bytes >= 0), "")
            if category:
                left[category] += 0 if own else event.bytes
                self.timeline.append(event)
                self.categories.append(category)
        total = highest = sum(self.standing.values())
        self.peak_index = -1  # index of the event after which the most bytes are alive; -1: before the first event
        for index, event in enumerate(self.timeline):
            total += event.bytes
            if total > highest:
                highest, self.peak_index = total, index
        self.peak_bytes = highest

    def at(self, index: int) -> dict[str, int]:
        """The live bytes of each category after the event with this index; -1: before the first event."""
        live = dict(self.standing)
        for event, category in zip(self.timeline[: index + 1], self.categories, strict=False):
            live[category] += event.bytes
        return live

    def alive_at(self, index: int) -> list[tuple[Event, str]]:
        """The step's own blocks that are alive after the event with this index, largest first.

        Each is given by the event of its allocation and its category.
        """
        alive: dict[int, tuple[Event, str]] = {}
        for event, category in zip(self.timeline[: index + 1], self.categories, strict=False):
            if event.bytes > 0:
                alive[event.block] = event, category
            else:
                alive.pop(event.block, None)
        return sorted(alive.values(), key=lambda found: -found[0].bytes)
