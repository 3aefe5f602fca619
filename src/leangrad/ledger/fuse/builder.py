"""Builds a pointwise program from the ops of a chain: operands, layouts, and where each element is found."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad.kernels.pointwise import Input, Program, Step, Term

Layout = tuple[torch.Size, tuple[int, ...]]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_TERMS = 4  # most terms in the position of an element of an input


class RefusedError(Exception):
    """This chain cannot be one program; the argument is the reason."""


class Operand(NamedTuple):
    """An operand of a step.

    kind: "leaf" is a tensor that the chain reads, "scalar" a number, "inverse" the reciprocal of a number, "step" the
    result of a step. A number has no dtype.
    """

    kind: str
    number: int  # index among the chain's leaves, the chain's numbers, or the builder's steps
    dtype: torch.dtype | None = None
    shape: torch.Size = torch.Size()
    stride: tuple[int, ...] = ()  # of a leaf; of a step if it is known, else ()


class Builder:
    """The steps that were built so far, and the tensors and numbers that they read.

    ``leaves`` are the tensors that the chain reads; ``variant`` selects one of the formulas of an op for which a
    library has several kernels.

    [Note: views inside a chain] All steps of a chain have their elements in one order, that of the root in memory. An
    output that lies in memory in another order is written row by row to its positions there. A view that keeps the
    order (another shape for the same contiguous memory, a transposition) costs nothing: only broadcast operands have to
    be located by the shape on their side of the view. So each step has a layout of its own, which is computed from the
    result downwards, and the positions of operands are computed at the end, in ``program``.
    """

    def __init__(self, leaves: list[Tensor], variant: int = 0) -> None:
        self.leaves = leaves
        self.variant = variant
        self.inputs: list[tuple[int, Input]] = []  # index of the leaf, and how it is read
        self.scalars: list[tuple[int, bool]] = []  # index in the chain's numbers, and whether it is inverted
        self.layouts: list[Layout | None] = []  # of the steps; None until ``program`` knows it
        self._steps: list[tuple[str, tuple[Operand, ...], torch.dtype]] = []
        self._backs: dict[int, Callable[[Layout], Layout]] = {}  # maps a layout after a view to that before, by step

    def leaf(self, number: int) -> Operand:
        """The operand for a leaf of the chain; raises ``RefusedError`` if a program cannot read its tensor."""
        tensor = self.leaves[number]
        if tensor.dtype not in FLOATS and tensor.dtype is not torch.bool:
            raise RefusedError(f"{tensor.dtype}")
        if tensor.is_neg():
            raise RefusedError("a tensor that is negated when it is read")
        return Operand("leaf", number, tensor.dtype, tensor.shape, tensor.stride())

    def step(self, op: str, dtype: torch.dtype | None, *operands: Operand) -> Operand:
        """Append a step that computes ``op`` and rounds to ``dtype``; returns its result."""
        if dtype not in FLOATS:
            raise RefusedError(f"a result in {dtype}")
        shape = torch.broadcast_shapes(*(s.shape for s in operands))
        strides = {s.stride for s in operands if s.shape == shape}
        self._steps.append((op, operands, dtype))
        return Operand("step", len(self._steps) - 1, dtype, shape, strides.pop() if len(strides) == 1 else ())

    def view(self, slot: Operand, seen: Layout, back: Callable[[Layout], Layout]) -> Operand:
        """View the elements of ``slot`` with the layout ``seen``, in the same order in memory.

        ``back`` maps the layout of the result to that of ``slot``.
        """
        if seen[0].numel() != slot.shape.numel():
            raise RefusedError("a view of a part")
        self._backs[len(self._steps)] = back
        return Operand("step", self.step("cast", slot.dtype, slot).number, slot.dtype, *seen)

    def program(self, outputs: tuple[int, ...], result: Layout) -> Program:
        """The program of all steps. ``outputs``: indices of steps; the last one has the layout ``result``."""
        self.layouts = [None] * len(self._steps)
        self.layouts[outputs[-1]] = result
        placed: list[list[tuple[str, int]]] = []
        for k in reversed(range(len(self._steps))):
            layout = self.layouts[k]
            if layout is None:
                raise RefusedError("a result that nobody reads")
            below = self._backs[k](layout) if k in self._backs else layout
            placed.append([self._place(slot, below) for slot in self._steps[k][1]])
        base = {"input": 0, "scalar": len(self.inputs), "step": len(self.inputs) + len(self.scalars)}
        steps = tuple(
            Step(op, tuple(base[kind] + n for kind, n in operands), dtype)
            for (op, _, dtype), operands in zip(self._steps, reversed(placed), strict=True)
        )
        return Program(tuple(i for _, i in self.inputs), len(self.scalars), steps, outputs)

    def _place(self, slot: Operand, layout: Layout) -> tuple[str, int]:
        """Where a step of this layout finds ``slot``: "input", "scalar" or "step", and the index among those."""
        if slot.kind == "step":
            if self.layouts[slot.number] not in (None, layout):
                raise RefusedError("a value that is seen in two ways")
            self.layouts[slot.number] = layout
            return "step", slot.number
        if slot.kind == "leaf":
            assert slot.dtype is not None
            return "input", _index(
                self.inputs, (slot.number, Input(slot.dtype, find_terms(slot.shape, slot.stride, *layout)))
            )
        return "scalar", _index(self.scalars, (slot.number, slot.kind == "inverse"))


def _index(entries: list[Any], entry: Any) -> int:
    if entry not in entries:
        entries.append(entry)
    return entries.index(entry)


def numbers_of(wanted: list[tuple[int, bool]], scalars: list[float]) -> list[float]:
    """The numbers that a program takes, listed in ``wanted`` (``Builder.scalars``), from those of the chain."""
    return [_inverse(scalars[k]) if inverted else scalars[k] for k, inverted in wanted]


def _inverse(number: float) -> float:
    """1 / number, which ATen computes in float32 on the host: rounding it to double first gives the same float32."""
    rounded = ctypes.c_float(number).value
    return 1.0 / rounded if rounded else math.copysign(math.inf, rounded)


def find_terms(
    shape: torch.Size, stride: tuple[int, ...], full_shape: torch.Size, full_stride: tuple[int, ...]
) -> tuple[Term, ...] | None:
    """Where a tensor, broadcast to ``full_shape``, has the element that lies at i in dense memory of ``full_stride``.

    Returns the terms of ``Input``; None if the element lies at i here too.

    >>> find_terms(torch.Size((3,)), (1,), torch.Size((5, 3)), (3, 1))
    ((1, 3, 1),)
    >>> find_terms(torch.Size((5, 1)), (1, 1), torch.Size((5, 3)), (3, 1))
    ((3, 0, 1),)
    >>> find_terms(torch.Size((5, 3)), (3, 1), torch.Size((5, 3)), (3, 1))
    """
    skipped = len(full_shape) - len(shape)
    dims = [
        (full_stride[d], n, 0 if d < skipped or shape[d - skipped] == 1 else stride[d - skipped])
        for d, n in enumerate(full_shape)
        if n > 1
    ]
    terms: list[Term] = []
    inner = 1
    for place, size, step in sorted(dims):
        if place != inner:
            raise RefusedError("a result that is not dense")
        if terms and step and terms[-1][0] * terms[-1][1] == inner and terms[-1][2] * terms[-1][1] == step:
            terms[-1] = terms[-1][0], terms[-1][1] * size, terms[-1][2]
        elif step:
            terms.append((inner, size, step))
        inner *= size
    if terms == [(1, inner, 1)] or inner == 1:
        return None
    if len(terms) > MAX_TERMS:
        raise RefusedError("an operand whose elements are too scattered")
    return tuple((i, 0 if i * n == inner else n, s) for i, n, s in terms)


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides = [1] if shape else []
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides))


def is_contiguous(layout: Layout) -> bool:
    """Whether the elements lie in the order of their indices, without gaps."""
    shape, stride = layout
    return all(n == 1 or s == t for n, s, t in zip(shape, stride, contiguous_strides(shape), strict=True))


def is_dense(layout: Layout) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order."""
    filled = 1
    for step, size in sorted((step, size) for size, step in zip(*layout, strict=True) if size > 1):
        if step != filled:
            return False
        filled *= size
    return True
