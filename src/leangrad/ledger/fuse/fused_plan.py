"""The program of a chain, for tensors of one kind: it is built, compiled, compared with ATen, and run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, empty_strided

from leangrad import kernels
from leangrad.kernels.launch import stream_for
from leangrad.kernels.pointwise import BLOCK, Kernel, Program, Term, compiled
from leangrad.ledger.fuse.bit_exactness import is_exact, same_bits
from leangrad.ledger.fuse.builder import Builder, Layout, Operand, RefusedError, find_terms, is_dense, numbers_of
from leangrad.ledger.fuse.chain import Chain
from leangrad.ledger.fuse.lowering import LOWERINGS, VARIANTS
from leangrad.ledger.values.value import Value

PROOFS = 3  # comparisons that a program has to pass before it is used
PIECE = 1 << 22  # elements that are compared at a time
ROW = 32  # fewest elements that may lie together in an output whose memory order differs from the root's
MAX_VARIETY = 32  # programs for one sequence of ops; with more, shapes change too often to compile for each


class InexactError(Exception):
    """An op does not give ATen's bits on this machine; the argument is the value that it makes."""


class CutError(Exception):
    """The chain has to end at a value that has another layout or fewer elements; the argument is its index."""


class RemainingChecks:
    """How often a program must still be compared before it is used, and whether a comparison has failed."""

    def __init__(self) -> None:
        self.missing = PROOFS
        self.failed = False


_proofs: dict[Any, RemainingChecks] = {}  # by program; with the shape and strides too if a norm has variants
_variety: defaultdict[tuple[str, ...], set[Program]] = defaultdict(set)  # the programs for each sequence of ops


class Plan:
    """A program for one kind of chain, over leaves of given shapes, strides and dtypes.

    n           elements of the result
    leaves      indices of the chain's leaves that the program reads, in the order of its arguments
    scalars     for each number that the program takes: its index in the chain, and whether it is inverted
    outputs     shape, strides and dtype of each output; the last is the root
    uses        for each output: how often the chain itself reads it
    pick        selects the tensors that the program reads from those of all leaves
    rooms       for each output: the leaf that it may overwrite if that is owned (−1: none), and its allocator
    """

    def __init__(self, chain: Chain, leaves: list[Tensor], variant: int = 0) -> None:
        if not any(kernels.serves(t) for t in leaves) or any(t.device != leaves[0].device for t in leaves):
            raise RefusedError("not on one device that Triton serves")
        builder = Builder(leaves, variant)
        slots: list[Operand] = []
        scalars = iter(range(len(chain.scalars)))
        for value, (_, _, _, *parts) in zip(chain.values, chain.key, strict=False):
            operands = _operands(builder, value, parts, slots, scalars)
            slots.append(_lower(builder, value, operands))
            if not is_exact(value, operands, chain.scalars, builder):
                raise InexactError(value)
        shape, stride = _layout(chain.values[-1], slots[-1])
        program = builder.program(tuple(slots[k].number for k in chain.outputs), (shape, stride))
        layouts, places = zip(*(_output(k, chain.values[k], slots[k], builder) for k in chain.outputs), strict=True)
        if any(place is not None for place in places):
            program = Program(*program[:-1], places)
        self.n = shape.numel()
        self.leaves = [k for k, _ in builder.inputs]
        self.scalars = builder.scalars  # the builder itself is not kept: it holds the leaves' tensors
        self.uses = [chain.uses[k] for k in chain.outputs]
        self.outputs = [(*layouts[j], slots[k].dtype or torch.float32) for j, k in enumerate(chain.outputs)]
        wide = max(self.n, *(_reach(leaves[k]) for k in self.leaves)) >= 2**31 - BLOCK
        self.kernel: Kernel = _compiled(chain, program, wide)
        self.device = leaves[0].device
        self.launch = self.kernel.launcher(self.device, self.n)
        self.pick = _picker(self.leaves)
        allocations = [partial(empty_strided, *layout, dtype=d, device=self.device) for *layout, d in self.outputs]
        self.rooms = list(zip(self._find_over(builder, leaves), allocations, strict=True))
        varies = any(step.op in VARIANTS for step in program.steps)
        self.proof = _proofs.setdefault((program, shape, stride) if varies else program, RemainingChecks())
        self.launches = 0

    def _find_over(self, builder: Builder, leaves: list[Tensor]) -> list[int]:
        """For each output, the index of a leaf that it may overwrite if that leaf is owned, or −1.

        An output with ``places`` overwrites none: it is written at other positions than the leaf is read from, where
        other blocks may still have to read.
        """
        found: list[int] = []
        for (shape, stride, dtype), places in zip_longest(self.outputs, self.kernel.program.places):
            fitting = [
                k
                for k, t in enumerate(leaves)
                if places is None
                and (t.dtype, t.shape, t.stride()) == (dtype, shape, stride)
                and k not in found
                and all(i.terms is None for number, i in builder.inputs if number == k)
            ]
            found.append(fitting[0] if fitting else -1)
        return found

    def run(self, leaves: Sequence[Tensor], owned: Sequence[bool] | None, scalars: list[float]) -> list[Tensor]:
        """Run the kernel; returns the outputs, in memory that nothing else uses. ``owned`` None: no leaf is owned."""
        if owned is None:
            outputs = [allocate() for _, allocate in self.rooms]
        else:
            outputs = [leaves[k] if k >= 0 and owned[k] else allocate() for k, allocate in self.rooms]
        numbers = tuple(numbers_of(self.scalars, scalars)) if self.scalars else ()
        self.launch(stream_for(self.device), (*self.pick(leaves), *outputs), numbers)
        self.launches += 1
        return outputs

    def agrees(self, leaves: list[Tensor], scalars: list[float], expected: list[Tensor]) -> bool:
        """Whether the program gives the bits of ``expected``, compared piece by piece; any NaN equals any NaN."""
        inputs, numbers = [leaves[k] for k in self.leaves], numbers_of(self.scalars, scalars)
        flat: list[Tensor] = []
        whole: dict[int, Tensor] = {}  # outputs in another memory order, allocated whole: a piece would be scattered
        for t, (shape, stride, dtype) in zip(expected, self.outputs, strict=True):
            if t.shape != shape or t.dtype != dtype or not _alike(t.stride(), stride, shape):
                return False
            flat.append(t.as_strided((self.n,), (1,)))
        for k, places in enumerate(self.kernel.program.places):
            if places is not None:
                whole[k] = torch.empty(self.n, dtype=self.outputs[k][2], device=self.device)
        for start in range(0, self.n, PIECE):
            n = min(PIECE, self.n - start)
            pieces = [
                whole[k] if k in whole else torch.empty(n, dtype=d, device=self.device)
                for k, (_, _, d) in enumerate(self.outputs)
            ]
            self.kernel.launch(inputs, numbers, pieces, n, start)
            for k, (mine, f) in enumerate(zip(pieces, flat, strict=True)):
                if k not in whole and not same_bits(mine, f[start : start + n]):
                    return False
        parts = range(0, self.n, PIECE)
        return all(same_bits(mine[a : a + PIECE], flat[k][a : a + PIECE]) for k, mine in whole.items() for a in parts)


def _picker(places: list[int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Return a function that selects the entries at ``places`` from a sequence, in one call instead of a loop."""
    first, *others = places
    return itemgetter(first, *others) if others else itemgetter(slice(first, first + 1))


def _operands(b: Builder, value: Value, parts: list[Any], slots: list[Operand], scalars: Iterator[int]) -> list[Any]:
    """The arguments of one op, with an ``Operand`` for each tensor and number; ``slots``: results of earlier ops."""
    operands: list[Any] = []
    for part, a in zip(parts, value.args, strict=False):
        if type(a) is Value:
            operands.append(slots[part] if part >= 0 else b.leaf(-1 - part))
        else:
            operands.append(Operand("scalar", next(scalars)) if part is float else part)
    return operands


def _lower(b: Builder, value: Value, operands: list[Any]) -> Operand:
    """Append the steps of one op to ``b``; returns its result."""
    try:
        slot = LOWERINGS[value.function](b, *operands, **value.kwargs)
    except (TypeError, AttributeError, RuntimeError) as error:  # an operand is missing, or of another kind or shape
        raise RefusedError(f"{value.op}: {error}") from error
    return slot if value.dtype is None or value.dtype == slot.dtype else b.step("cast", value.dtype, slot)


def _layout(root: Value, slot: Operand) -> Layout:
    """The layout that the root had when it was saved; if that is not known, the one that follows from its operands."""
    layout = root.layout or (slot.shape, slot.stride)
    if layout[0] != slot.shape or len(layout[1]) != len(layout[0]):
        raise RefusedError("a layout that only ATen knows")
    return layout


def _output(number: int, value: Value, slot: Operand, b: Builder) -> tuple[Layout, tuple[Term, ...] | None]:
    """The layout that an output had when it was saved; and its ``places`` if its order differs from the root's."""
    layout = b.layouts[slot.number]
    if layout is None or slot.shape != layout[0]:
        raise CutError(number)  # a later op of the chain broadcasts it
    if value.layout is None or (value.layout[0] == layout[0] and _alike(value.layout[1], layout[1], layout[0])):
        return value.layout or layout, None
    if value.layout[0] != layout[0] or not is_dense(value.layout):
        raise CutError(number)
    try:
        places = find_terms(*value.layout, *layout)
    except RefusedError as reason:
        raise CutError(number) from reason
    if places is None or places[0][0] != 1 or places[0][2] != 1 or places[0][1] < ROW:
        raise CutError(number)  # single elements would be written far apart
    return value.layout, places


def _alike(a: tuple[int, ...], b: tuple[int, ...], shape: torch.Size) -> bool:
    """Whether the strides ``a`` and ``b`` lay out ``shape`` in the same way."""
    return a == b or all(n == 1 or x == y for x, y, n in zip(a, b, shape, strict=True))


def _compiled(chain: Chain, program: Program, wide: bool) -> Kernel:
    """The kernel of ``program``; raises ``RefusedError`` if this sequence of ops already has too many programs."""
    alike = _variety[tuple(v.op for v in chain.values)]
    if program not in alike and len(alike) >= MAX_VARIETY:
        raise RefusedError("too many shapes")
    alike.add(program)
    return compiled(program, wide)


def _reach(tensor: Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
