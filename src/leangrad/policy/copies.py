"""Finds the readers in backward that should compute a recomputed value once more rather than read it from memory.

[Note: copies] A value that backward recomputes is written to memory if a product reads it: the input of a convolution,
for the gradient of its weight. Other kernels may read the same memory later. ReLU's derivative does, to see where the
result was cut off. If such a kernel also reads what the value is computed from, as the derivative of batch norm reads
the output of the convolution before it, it is better to compute the value again in registers: the kernel reads one
memory less, and the value is freed as soon as the product has run. The engine then gives this reader a copy of the ops,
because a code generator never computes again what is in memory.

Only a value that is computed from what forward has kept is copied. If it were computed from values that backward makes
itself, each copy could make them live longer, or be read once more: on a DenseNet, whose layers read slices of joined
maps, the kernels of backward moved a third more bytes.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from leangrad.policy.kernels import Kernels, Pass

__all__ = ["Copy", "find_copies"]

SHARE = 4  # for its copy a reader may read 1/4 of the value's bytes that it does not read yet: statistics of a norm


@dataclass(frozen=True)
class Copy:
    """A value that some of its readers compute once more."""

    value: int
    ops: frozenset[int]  # the values that the copy computes: the value itself, and what its kernel inlines
    readers: frozenset[int]  # the values that use the copy in place of the value
    inlined: frozenset[int]  # what is computed from the copy in registers: each kernel has a copy of these ops too
    kernels: frozenset[int]  # the values whose kernels compute the copy
    spared: frozenset[Pass]  # the passes over the value that are not made


def find_copies(kernels: Kernels) -> list[Copy]:
    """Return the copies that spare reads of recomputed values in the kernels of backward."""
    read: dict[tuple[int, bool], set[int]] = {}  # the memories that are read in each stage
    for n in kernels.order:
        for stage, is_wide, b, _ in kernels.passes(n):
            read.setdefault((stage, is_wide), set()).add(b)
    found = []
    for n in kernels.order:
        if _may_be_copied(kernels, n) and (copy := _copy(kernels, n, read)):
            found.append(copy)
            for stage, is_wide, b, _ in copy.spared:  # a copy of what is computed from this value would read it there
                read[stage, is_wide].discard(b)
    return found


def _may_be_copied(kernels: Kernels, n: int) -> bool:
    """Whether value ``n`` is recomputed, from what forward has kept alone, and is written to memory."""
    value = kernels.graph.values[n]
    if value.is_backward or not value.is_inlined or not kernels.written[n] or n in kernels.lasting:
        return False
    if kernels.across[n] or kernels.windows[n]:
        return False
    return not any(b in kernels.place for b in kernels.reads[n])


def _copy(kernels: Kernels, n: int, read: dict[tuple[int, bool], set[int]]) -> Copy | None:
    """Return the copy of value ``n`` for all readers whose kernels read what it is computed from; None without any.

    read: the memories that the kernels of each stage read.
    """
    values = kernels.graph.values

    def is_too_much(one: Pass) -> bool:
        stage, is_wide, _, times = one
        anew = kernels.reads[n] - read[stage, is_wide]
        return times > 1 or SHARE * sum(values[b].nbytes for b in anew) > values[n].nbytes

    readers: set[int] = set()
    inlined: set[int] = set()
    ends: set[int] = set()
    wanted: set[Pass] = set()
    needed: set[Pass] = set()  # by the readers that do not use the copy
    for r in (r for r in kernels.graph.readers[n] if r in kernels.place):
        can_copy, through, found = _kernels_of(kernels, r, n)
        passes = {one for k in found for one in kernels.passes(k) if one[2] == n}
        if can_copy and not any(map(is_too_much, passes)):
            readers.add(r)
            inlined |= through
            ends |= found
            wanted |= passes
        else:
            needed |= passes
    ops = _ops(kernels, n)
    if not wanted - needed or any(values[i].is_fixed for i in ops) or _would_be_written(kernels, n, ops, inlined, ends):
        return None
    return Copy(n, ops, frozenset(readers), frozenset(inlined), frozenset(ends), frozenset(wanted - needed))


def _ops(kernels: Kernels, n: int) -> frozenset[int]:
    """Return value ``n`` and the values that its kernel computes for it in registers."""
    found, frontier = {n}, [n]
    while frontier:
        for i in kernels.graph.values[frontier.pop()].inputs:
            if i in kernels.place and not kernels.has_buffer[i] and i not in found:
                found.add(i)
                frontier.append(i)
    return frozenset(found)


def _kernels_of(kernels: Kernels, reader: int, n: int) -> tuple[bool, set[int], set[int]]:
    """Return whether a reader can use a copy of value ``n``, what is computed from it in registers, and the kernels.

    A product cannot use a copy.
    """
    graph, values = kernels.graph, kernels.graph.values
    inlined: set[int] = set()
    ends: set[int] = set()
    can_copy = True
    frontier = [reader]
    while frontier:
        x = frontier.pop()
        is_view = values[x].view_of is not None
        if not is_view and not values[x].can_inline:
            can_copy = False
        elif not is_view and kernels.has_buffer[x]:
            ends.add(x)
        elif x not in inlined:
            inlined.add(x)
            frontier += [r for r in graph.readers[x] if r in kernels.place]
    return can_copy, inlined, ends


def _would_be_written(
    kernels: Kernels, n: int, ops: AbstractSet[int], inlined: AbstractSet[int], ends: AbstractSet[int]
) -> bool:
    """Whether a part of the copy of value ``n``, or what is computed from it, would get a buffer of its own.

    That depends on the readers within one kernel, since each kernel has its own copy; value ``n`` itself has one reader
    in each copy. A value with a single reader may get a buffer if its kernel's result must have one, or the only value
    made from that: the kernel takes it in. Else the result is computed from the buffer alone, and its readers read the
    buffer in its place: a norm's derivative in single precision, not its cast. See `Fusion`.
    """
    graph, fusion = kernels.graph, kernels.fusion
    most = min(fusion.reused_reads, fusion.reads)

    def is_too_large(x: int, most: int = most) -> bool:
        if x in ops:
            return len(kernels.reads[x]) > most or len(ops) > fusion.ops
        return len(kernels.reads[x] - {n} | kernels.reads[n]) > most or kernels.ops[x] + len(ops) > fusion.ops

    def takes_in(end: int) -> bool:
        while not kernels.must[end]:
            readers = [r for r in graph.readers[end] if r in kernels.place]
            if len(readers) != 1:
                return False
            (end,) = readers
        return True

    def is_reused(x: int, within: AbstractSet[int]) -> bool:
        return sum(r in within for r in graph.readers[x]) > 1

    if any(is_reused(x, ops) and is_too_large(x) for x in ops):
        return True
    if any(is_too_large(x, fusion.reads) for x in inlined) and not all(map(takes_in, ends)):
        return True
    suspects = {x for x in inlined - ops if len(graph.readers[x]) > 1 and is_too_large(x)}
    return bool(suspects) and any(
        is_reused(x, within) for within in (_made_in(kernels, end, inlined) for end in ends) for x in suspects & within
    )


def _made_in(kernels: Kernels, end: int, inlined: AbstractSet[int]) -> set[int]:
    """Return the values of ``inlined`` that the kernel of value ``end`` computes, and ``end``."""
    found, frontier = {end}, [end]
    while frontier:
        for i in kernels.graph.values[frontier.pop()].inputs:
            if i in inlined and i not in found:
                found.add(i)
                frontier.append(i)
    return found
