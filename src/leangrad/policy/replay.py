"""Simulates an eager backward: its peak memory if values that are not kept are rebuilt op by op, when they are read.

An eager engine works like this: the ops of backward run one after another, each reads values of forward, and a value
that was not kept is rebuilt from its inputs, these from theirs, and so on. (``peak`` simulates a compiled step, whose
kernels fuse.)

[Note: recipes] A value that is rebuilt on the way to another one is held until its own readers in backward have run;
otherwise each link of a chain would be rebuilt from the first. Until then the value also has its recipe, and the recipe
holds the values that it reads.

[Note: made again] A link that is one cheap pass over the link before it, in the same memory (a batch norm with its
addition and activation as one layer), may be freed instead and rebuilt again for each reader: then a chain of any
length takes the memory of one feature map. Such a link is held where that does not raise the peak. All of them are held
where anything else would rebuild too much.

[Note: what forward holds] While a value of forward is made, the kept ones before it are held, and the others as long as
a later value is made from them: a residual sum until the next one, logits until they are cast. So what the model holds
itself counts once, whether a plan keeps it too or not.

[Note: what was not foreseen] An op may allocate more than the graph says: a convolution its workspace, the first layers
feature maps that are not saved. This shows most where forward begins and backward ends, when little else is held. If a
step was measured from one saved tensor to the next, what it held beyond the simulated bytes is counted as scratch of
the ops that ran in that interval, under any cut. It is not counted as scratch of the ops at the peak.
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

AGAIN = 2  # most work, as a multiple of rebuilding each value once, where repeatable values are freed


Measured = tuple[int, int]  # a position, and bytes


class _Run(NamedTuple):
    """The simulated outcome of a step, value by value."""

    standing: int  # bytes that are held when backward begins
    work: float  # of all rebuilds
    forward: list[int]  # bytes that are held while each value of forward is computed
    backward: list[int]  # bytes that are held while each op of backward runs


class Replay:
    """Simulates backward over one graph, under many cuts."""

    def __init__(self, graph: Graph, costs: Sequence[float] | None = None) -> None:
        """``costs``: of each value, the cost of rebuilding it; None: its bytes."""
        self.graph = graph
        values = graph.values
        self.costs = [value.nbytes for value in values] if costs is None else costs
        self._made = [n for n, value in enumerate(values) if not value.is_backward]
        self._ops = [n for n, value in enumerate(values) if value.is_backward]
        self._reads = [[i for i in values[n].inputs if not values[i].is_backward] for n in self._ops]
        self._readers = [sum(values[r].is_backward for r in readers) for readers in graph.readers]
        self._outputs = [n for n, value in enumerate(values) if value.is_output and not value.is_backward]
        # By value of forward, the last value of forward that is made from it; and the other way round.
        self._last_made = {i: n for n in self._made for i in values[n].inputs}
        self._ends_at: dict[int, list[int]] = {}
        for i, n in self._last_made.items():
            self._ends_at.setdefault(n, []).append(i)

    @cached_property
    def repeatable(self) -> frozenset[int]:
        """The values that may be freed and rebuilt again."""
        return frozenset(n for n, value in enumerate(self.graph.values) if value.is_repeatable)

    def play(self, kept: frozenset[int]) -> Outcome:
        """Simulate backward with ``kept``.

        No repeatable value is held for its readers, if that does not rebuild too much; else those that `held` returns.
        """
        outcome = self._play(kept, frozenset())
        if self.repeatable and outcome.work > AGAIN * (once := self._play(kept, self.repeatable)).work:
            outcome = self._play(kept, self._held(kept))
            return outcome if outcome.work <= AGAIN * once.work else once
        return outcome

    def held(self, kept: frozenset[int]) -> frozenset[int]:
        """Return the repeatable values that are held for their readers all the same: see [Note: made again]."""
        if not self.repeatable:
            return frozenset()
        held = self._held(kept)
        once = self._play(kept, self.repeatable).work
        return held if self._play(kept, held).work <= AGAIN * once else self.repeatable

    def _held(self, kept: frozenset[int]) -> frozenset[int]:
        held: frozenset[int] = frozenset()
        limit = self._play(kept, held).peak_bytes * EQUAL
        waiting = [sorted(self.repeatable - kept)]
        while waiting:  # the last values first: many at once if all can be held, else each half by itself
            some = waiting.pop()
            if self._play(kept, held.union(some)).peak_bytes <= limit:
                held = held.union(some)
            elif len(some) > 1:
                waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
        return held

    def raised(self, kept: frozenset[int], made: Sequence[Measured], read: Sequence[Measured]) -> Replay:
        """Return a replay with more scratch, where a measured step held more: see [Note: what was not foreseen].

        kept: what the measured step kept.
        made: positions among the values of forward, in order, and the most bytes held from each of them until the next.
        read: the same for positions among the ops of backward.
        """
        run, values = self._run(kept, self.held(kept)), list(self.graph.values)

        def add(places: Sequence[int], levels: Sequence[int], measured: Sequence[Measured], beyond: int) -> None:
            for (first, most), (next_one, _) in pairwise([*measured, (len(places), 0)]):
                end = max(next_one, first + 1)
                more = most - max(levels[first : end + beyond], default=most)
                if more > 0:
                    for n in places[first:end]:
                        values[n] = replace(values[n], scratch=values[n].scratch + more)

        add(self._made, run.forward, made, 1)  # it is saved after it is computed: the next one counts too
        add(self._ops, run.backward, read, 0)
        return Replay(Graph(tuple(values)), self.costs)

    def _play(self, kept: AbstractSet[int], held: AbstractSet[int]) -> Outcome:
        """Simulate backward; of the repeatable values only those in ``held`` are held for their readers."""
        run = self._run(kept, held)
        peak, at = max(run.backward, default=0), 0
        if peak > run.standing:
            at = self._ops[run.backward.index(peak)]
        return Outcome(max(peak, run.standing), at, run.standing, run.work, max(run.forward, default=0))

    def _run(self, kept: AbstractSet[int], held: AbstractSet[int]) -> _Run:
        values, costs = self.graph.values, self.costs
        change = [0] * (len(self._reads) + 1)
        standing, passing, forward = 0, 0, list[int]()  # ``passing``: see [Note: what forward holds]
        last_uses = self._last_uses(kept)
        for n in self._made:
            value = values[n]
            forward.append(standing + passing + value.nbytes + value.scratch)
            if n in last_uses:
                standing += value.nbytes
                change[last_uses[n] + 1] -= value.nbytes
            elif n in self._last_made:
                passing += value.nbytes
            passing -= sum(values[i].nbytes for i in self._ends_at.get(n, ()) if i not in last_uses)
        left = self._readers.copy()
        there: set[int] = set()  # values that were rebuilt and are held
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
            overwrites = values[self._ops[tick]].overwrites  # then only its result is counted, not what it reads
            for n in seen.union(read):  # all other values in ``there`` have readers to come
                if left[n] <= 0 and n in there:
                    there.discard(n)
                    change[tick if overwrites and n in read else tick + 1] -= values[n].nbytes
        live, backward = standing, list[int]()
        for n, added in zip(self._ops, change, strict=False):
            live += added
            backward.append(live + values[n].scratch)
        return _Run(standing, work, forward, backward)

    def _last_uses(self, kept: AbstractSet[int]) -> dict[int, int]:
        """Return the last op that needs each value held when backward begins, to read it or to run a recipe with it."""
        last = {n: tick for tick, read in enumerate(self._reads) for n in read}
        values = self.graph.values
        for n in range(len(values) - 1, -1, -1):
            if n in last and n not in kept:
                for i in values[n].inputs:
                    last[i] = max(last.get(i, 0), last[n])
        found = {n: tick for n, tick in last.items() if n in kept}
        return found | dict.fromkeys(self._outputs, len(self._reads) - 1)
