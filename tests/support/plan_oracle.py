"""What a step comes to under a cut, by the plainest means: sets, tick by tick, and every cut there is.

It shares nothing with ``policy.replay`` but what that promises: what is kept lives from the beginning of
backward to the last read of it or of what is rebuilt from it; what is rebuilt lives from the read that needs it for as
long as it will be read itself; and an op of which nothing else is known holds two gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from tests.support.steps import Step


def simulate(step: Step, cut: frozenset[int]) -> tuple[int, int, int]:
    """Peak, kept and rebuilt bytes of backward if the items of ``cut`` are kept, and those that have no sources."""
    items, reads = step.items, step.reads
    held: set[int] = set()  # rebuilt before, and to be read again
    alive: list[set[int]] = []  # by tick: what is rebuilt and not yet let go
    used: list[set[int]] = []  # by tick: what is kept and the item that is read, or its recipe, holds
    rebuilt_bytes = 0
    for tick, read in enumerate(reads):
        fresh, _ = needs(step, cut, read, held)
        rebuilt_bytes += sum(items[n].nbytes for n in fresh)
        alive.append(held | fresh)
        used.append(needs(step, cut, read, set())[1])
        held = (held | fresh) & set(reads[tick + 1 :])
    kept = set().union(*used)
    peak = sum(items[n].nbytes for n in kept)
    for tick, read in enumerate(reads):
        live = set().union(*used[tick:]) | alive[tick]
        gradients = step.gradients[tick] if step.gradients else 2 * items[read].nbytes
        peak = max(peak, sum(items[n].nbytes for n in live) + gradients)
    return peak, sum(items[n].nbytes for n in kept), rebuilt_bytes


def needs(step: Step, cut: frozenset[int], item: int, held: set[int]) -> tuple[set[int], set[int]]:
    """What has to be rebuilt so that ``item`` can be read, and the kept items that this uses."""
    if item in held:
        return set(), set()
    sources = step.items[item].sources
    if not sources or item in cut:
        return set(), {item}
    fresh, touched = {item}, set()
    for source in sources:
        below = needs(step, cut, source, held)
        fresh |= below[0]
        touched |= below[1]
    return fresh, touched


def every_cut(step: Step) -> Iterator[frozenset[int]]:
    """All sets of items that the plan may choose to keep."""
    choices = [n for n, item in enumerate(step.items) if item.link]
    for size in range(len(choices) + 1):
        for cut in combinations(choices, size):
            yield frozenset(cut)
