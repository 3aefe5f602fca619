"""Simulates how a code generator groups the ops of a phase into kernels, and which values these write to memory.

[Note: kernels] A pointwise value is computed inside the kernels that read it, as long as these can do so and the value
is cheap: once it is computed from more memories, or by more ops, than `Fusion` allows, it gets a buffer. The limit is
lower for a value with several readers, because each of them would compute it again. A buffer whose readers all run
before the next heavy op is computed in the kernel of its readers and takes no memory. A value that is computed from
several memories and read by windows that overlap, as a pool reads it, is always written to memory, because each window
would compute it again.

[Note: remade values run early] A kernel that reads what another pointwise kernel writes is fused into that kernel,
however far apart the two were in the graph. So if a value of forward is recomputed from another recomputed value, both
exist from the same time on. If a long chain of links of a residual stream is recomputed at the start of backward, then
everything that is recomputed from any of its links is computed and held from there on too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from leangrad.policy.graph import Graph

__all__ = ["LARGEST", "WINDOWS", "Fusion", "Kernels", "Pass"]

Pass = tuple[int, bool, int, int]  # a stage, whether a wide reduction makes the pass, the memory, how often it is read

# By default Inductor writes up to 64 buffers in one kernel. A kernel with 35 of them, links of a residual stream and
# values computed from each, ran at 1/13 of the speed of one with 11: its threads hold more values than registers.
LARGEST = 16


@dataclass(frozen=True)
class Fusion:
    """The limits of a code generator; the defaults are Inductor's, except for ``size``."""

    reused_reads: int = 4  # a value with several readers gets a buffer if it is computed from more memories than this
    reads: int = 8  # any value gets a buffer if it is computed from more memories than this
    ops: int = 30  # or by more ops than this
    size: int = LARGEST  # the most buffers that one kernel writes


@dataclass
class Kernels:
    """The kernels of one phase, forward or backward: when each value is computed, and which are written to memory."""

    graph: Graph
    order: Sequence[int]
    lasting: AbstractSet[int]  # memories that are held to the end of the phase
    fusion: Fusion
    is_backward: bool
    place: dict[int, int] = field(default_factory=dict)  # of each value: its position when it is computed
    stage: dict[int, int] = field(default_factory=dict)  # of each value: how many heavy ops run before it
    must: dict[int, bool] = field(default_factory=dict)  # whether each gets a buffer in any case
    has_buffer: dict[int, bool] = field(default_factory=dict)  # whether each value is the result of a kernel
    written: dict[int, bool] = field(default_factory=dict)  # whether each value is written to memory
    ops: dict[int, int] = field(default_factory=dict)  # of a value without a buffer: the ops that compute it
    reads: dict[int, frozenset[int]] = field(default_factory=dict)  # the memories that a value is computed from
    across: dict[int, frozenset[int]] = field(default_factory=dict)  # those of them that it reads across their rows
    windows: dict[int, frozenset[int]] = field(default_factory=dict)  # those of them that it reads by windows

    def __post_init__(self) -> None:
        values = self.graph.values
        self._kernel: dict[int, int] = {}  # of a value fused into an earlier kernel: the first value of that kernel
        self._size: dict[int, int] = {}
        heavy = 0
        for k, n in enumerate(self.order):
            self.place[n], self.stage[n] = k, heavy
            heavy += values[n].view_of is None and not values[n].can_inline and values[n].nbytes > 0
        for n in self.order:
            self._add(n)

    def _add(self, n: int) -> None:
        graph, fusion = self.graph, self.fusion
        value = graph.values[n]
        inlined = [i for i in value.inputs if i in self.place and not self.has_buffer[i]]
        found = {graph.base(i) for i in value.inputs if i not in inlined}.union(*(self.reads[i] for i in inlined))
        ops = 1 + len(set(value.inputs).difference(inlined)) + sum(self.ops[i] for i in inlined)
        self.across[n] = self._read_across(n, inlined)
        self.windows[n] = self._read_by_windows(n, inlined)
        if value.view_of is not None:
            self.must[n] = self.must.get(value.view_of, True)
            self.has_buffer[n] = self.has_buffer.get(value.view_of, True)
            self.written[n] = False
            self.reads[n] = frozenset({graph.base(n)} if self.has_buffer[n] else self.reads[value.view_of])
            self.ops[n] = self.ops.get(value.view_of, 1)
            return
        readers = self._readers(n)
        must = n in self.lasting or not value.is_inlined or any(not graph.values[r].can_inline for r in readers)
        must |= len(found) > 1 and any(self._is_base_of(n, graph.values[r].windows) for r in readers)
        is_reused = sum(r in self.place for r in graph.readers[n]) > 1
        most = min(fusion.reused_reads, fusion.reads) if is_reused else fusion.reads
        has_buffer = must or len(found) > most or ops > fusion.ops
        if has_buffer and self.is_backward and value.can_inline and not value.is_backward:
            self._fuse(n, found)
        self.must[n], self.has_buffer[n] = must, has_buffer
        self.written[n] = must or (has_buffer and any(self.stage[r] > self.stage[n] for r in readers))
        self.reads[n] = frozenset(found)
        self.ops[n] = 1 if has_buffer else ops

    def _read_across(self, n: int, inlined: Sequence[int]) -> frozenset[int]:
        """Return the memories that value ``n`` reads across their rows; inlined inputs are computed in its order."""
        value = self.graph.values[n]
        found: set[int] = set()
        for i in value.inputs:
            if i in inlined:
                found |= self.reads[i] - self.across[i] if i in value.across else self.across[i]
            elif i in value.across:
                found.add(self.graph.base(i))
        return frozenset(found)

    def _read_by_windows(self, n: int, inlined: Sequence[int]) -> frozenset[int]:
        """Return the memories that value ``n`` reads by windows that overlap."""
        value = self.graph.values[n]
        found = {self.graph.base(i) for i in value.windows if i not in inlined}
        return frozenset(found.union(*(self.reads[i] if i in value.windows else self.windows[i] for i in inlined)))

    def _is_base_of(self, n: int, values: Sequence[int]) -> bool:
        return any(self.graph.base(i) == n for i in values)

    def _fuse(self, n: int, found: AbstractSet[int]) -> None:
        """Fuse value ``n`` into the kernel that writes what it reads, if any: see [Note: remade values run early].

        found: the memories that the value is computed from.
        """
        values = self.graph.values
        makers = [
            b
            for b in found
            if self.written.get(b)
            and values[b].can_inline
            and not values[b].is_backward
            and 4 * values[b].nbytes >= values[n].nbytes  # not a statistic
        ]
        if not makers:
            return
        maker = max(makers, key=lambda b: (self.place[b], b))
        kernel = self._kernel.get(maker, maker)
        if self._size.get(kernel, 1) < self.fusion.size:
            self._size[kernel] = self._size.get(kernel, 1) + 1
            self._kernel[n] = kernel
            self.place[n], self.stage[n] = self.place[kernel], self.stage[kernel]

    def _readers(self, n: int) -> list[int]:
        """Return the values of the phase that are computed from value ``n`` or from a view of it."""
        graph = self.graph
        found: list[int] = []
        frontier = [n]
        while frontier:
            for r in graph.readers[frontier.pop()]:
                if r in self.place:
                    (found if graph.values[r].view_of is None else frontier).append(r)
        return found

    def passes(self, n: int) -> Iterator[Pass]:
        """Yield the passes over memories that the kernel of value ``n`` needs, if the value has a kernel that inlines.

        Pointwise kernels between two heavy ops read each memory once. A reduction over a whole map (see ``WIDE``) needs
        a pass of its own, and so does a read by windows.
        """
        values = self.graph.values
        value = values[n]
        if value.view_of is not None or not self.has_buffer[n] or not value.can_inline:
            return
        made = value.nbytes or sum(values[r].nbytes for r in self.graph.readers[n])  # of a tuple: its elements
        is_wide = any(values[b].nbytes > WIDE * max(made, 1) for b in self.reads[n])
        for b in self.reads[n]:
            is_from_here = self.stage.get(b) == self.stage[n] and values[b].can_inline
            by_windows = b in self.windows[n]
            if self.written.get(b, True) and (is_wide or by_windows or not is_from_here):
                yield self.stage[n], is_wide, b, WINDOWS if by_windows else ACROSS if b in self.across[n] else 1

    def work(self, spared: AbstractSet[Pass] = frozenset()) -> int:
        """Return the work of the kernels of the phase, in bytes moved: that of heavy ops, and what the others move.

        spared: passes that are not made.
        """
        values = self.graph.values
        total = 0
        passes: set[Pass] = set()
        for n in self.order:
            value = values[n]
            if value.view_of is not None or not self.has_buffer[n]:
                continue
            if not value.can_inline:
                total += value.work
                continue
            total += value.nbytes if self.written[n] else 0
            passes.update(self.passes(n))
        return total + sum(values[b].nbytes * times for _, _, b, times in passes - spared)


WINDOWS = 4  # cost of reading a memory by windows that overlap, as a multiple of reading it once
ACROSS = 4  # cost of reading a memory across its rows, as a multiple of reading it along them
WIDE = 8192  # a reduction by more than this factor does not run in the kernel that reads its result
