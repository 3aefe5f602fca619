"""What backward holds at its worst moment if what is not kept is rebuilt op by op, when it is asked for.

So does an eager engine: the ops of backward run one after another, each reads values of forward, and one that was not
kept is rebuilt from its inputs and these from theirs. (``peak`` is the same for a compiled step, whose kernels fuse.)

[Note: recipes] What is rebuilt on the way to another value is held until its own readers in backward have come, or each
link of a chain would be rebuilt from the first. For as long it has its recipe, and the recipe holds what it reads.

[Note: made again] A link that is one cheap pass over the link before it, in the same memory (a batch norm with its
addition and activation as one layer), may be let go instead and made again: then a chain of any length takes one map.
It is held where that does not raise the peak, and where all else would rebuild too much.

[Note: what was not foreseen] An op may take more than anybody knew: a convolution its workspace, the first layers maps
that nobody saves, most of all where forward begins, and backward ends, and little else is held. Where a step was
measured from one saved tensor to the next, what it took beyond what was foreseen is the scratch of the ops that ran
then, under any cut; it is none of those at the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from leangrad.policy.graph import Graph
from leangrad.policy.peak import EQUAL, Outcome

__all__ = ["Replay"]

AGAIN = 2  # times the bytes of rebuilding each link once: so much may be rebuilt, where links are made again


Measured = tuple[int, int]  # a place, and bytes


class _Run(NamedTuple):
    """How a step plays out, from value to value."""

    standing: int  # what stands when backward begins
    work: float
    forward: list[int]  # what is held while each value of forward is being made
    backward: list[int]  # and while each op of backward runs


class Replay:
    """Backward over one graph, to be played under many cuts."""

    def __init__(self, graph: Graph, costs: Sequence[float] | None = None) -> None:
        """``costs``: of each value, what it takes to make it again; without them, its bytes."""
        self.graph = graph
        values = graph.values
        self.costs = [value.nbytes for value in values] if costs is None else costs
        self._made = [n for n, value in enumerate(values) if not value.is_backward]
        self._ops = [n for n, value in enumerate(values) if value.is_backward]
        self._reads = [[i for i in values[n].inputs if not values[i].is_backward] for n in self._ops]
        self._readers = [sum(values[r].is_backward for r in readers) for readers in graph.readers]
        self._outputs = [n for n, value in enumerate(values) if value.is_output and not value.is_backward]

    @cached_property
    def repeatable(self) -> frozenset[int]:
        """What may be let go and made again."""
        return frozenset(n for n, value in enumerate(self.graph.values) if value.is_repeatable)

    def play(self, kept: frozenset[int]) -> Outcome:
        """Play backward through with ``kept``; what may be made again is held as `held` says."""
        outcome = self._play(kept, frozenset())
        if self.repeatable and outcome.work > AGAIN * (once := self._play(kept, self.repeatable)).work:
            outcome = self._play(kept, self._held(kept))
            return outcome if outcome.work <= AGAIN * once.work else once
        return outcome

    def held(self, kept: frozenset[int]) -> frozenset[int]:
        """Of what may be made again, what is held all the same: see [Note: made again]."""
        if not self.repeatable:
            return frozenset()
        held = self._held(kept)
        once = self._play(kept, self.repeatable).work
        return held if self._play(kept, held).work <= AGAIN * once else self.repeatable

    def _held(self, kept: frozenset[int]) -> frozenset[int]:
        held: frozenset[int] = frozenset()
        limit = self._play(kept, held).peak_bytes * EQUAL
        waiting = [sorted(self.repeatable - kept)]
        while waiting:  # the last ones first: many at once where they can all be held, else each half by itself
            some = waiting.pop()
            if self._play(kept, held.union(some)).peak_bytes <= limit:
                held = held.union(some)
            elif len(some) > 1:
                waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
        return held

    def raised(self, kept: frozenset[int], made: Sequence[Measured], read: Sequence[Measured]) -> Replay:
        """The same with more scratch, where a step that kept ``kept`` took more: see [Note: what was not foreseen].

        made: values of forward, in order, and the most that was held from each of them on until the next.
        read: the same of ops of backward, by their place among all of these.
        """
        run, values = self._run(kept, self.held(kept)), list(self.graph.values)

        def add(places: Sequence[int], levels: Sequence[int], measured: Sequence[Measured], beyond: int) -> None:
            for (first, most), (next_one, _) in pairwise([*measured, (len(places), 0)]):
                end = max(next_one, first + 1)
                more = most - max(levels[first : end + beyond], default=most)
                if more > 0:
                    for n in places[first:end]:
                        values[n] = replace(values[n], scratch=values[n].scratch + more)

        add(self._made, run.forward, made, 1)  # a value is saved when it was made, so the next one is counted too
        add(self._ops, run.backward, read, 0)
        return Replay(Graph(tuple(values)), self.costs)

    def _play(self, kept: AbstractSet[int], held: AbstractSet[int]) -> Outcome:
        """Of what may be made again, only what is ``held`` waits for its readers."""
        run = self._run(kept, held)
        peak, at = max(run.backward, default=0), 0
        if peak > run.standing:
            at = self._ops[run.backward.index(peak)]
        return Outcome(max(peak, run.standing), at, run.standing, run.work, max(run.forward, default=0))

    def _run(self, kept: AbstractSet[int], held: AbstractSet[int]) -> _Run:
        values, costs = self.graph.values, self.costs
        change = [0] * (len(self._reads) + 1)
        standing, forward = 0, list[int]()
        last_uses = self._last_uses(kept)
        for n, value in enumerate(values):
            if not value.is_backward:
                forward.append(standing + value.nbytes + value.scratch)
            if n in last_uses:
                standing += value.nbytes
                change[last_uses[n] + 1] -= value.nbytes
        left = self._readers.copy()
        there: set[int] = set()  # what was rebuilt and is held
        work: float = 0
        for tick, read in enumerate(self._reads):
            stack, seen = list(read), set()
            while stack:
                n = stack.pop()
                if n in seen or n in there or n in kept:
                    continue
                seen.add(n)
                value = values[n]
                work += costs[n]
                stack.extend(value.inputs)
                if n in read or n in held or not value.is_repeatable:
                    there.add(n)
                    change[tick] += value.nbytes
            for n in read:
                left[n] -= 1
            for n in seen.union(read):  # all else that is there waits for a reader to come
                if left[n] <= 0 and n in there:
                    there.discard(n)
                    change[tick + 1] -= values[n].nbytes
        live, backward = standing, list[int]()
        for n, added in zip(self._ops, change, strict=False):
            live += added
            backward.append(live + values[n].scratch)
        return _Run(standing, work, forward, backward)

    def _last_uses(self, kept: AbstractSet[int]) -> dict[int, int]:
        """Of what stands when backward begins: when it is last read, itself or by a recipe that is still there."""
        last = {n: tick for tick, read in enumerate(self._reads) for n in read}
        values = self.graph.values
        for n in range(len(values) - 1, -1, -1):
            if n in last and n not in kept:
                for i in values[n].inputs:
                    last[i] = max(last.get(i, 0), last[n])
        found = {n: tick for n, tick in last.items() if n in kept}
        return found | dict.fromkeys(self._outputs, len(self._reads) - 1)
