"""How each op of a recipe is written as steps of a pointwise program: one line per op, by the name of its node.

Formulas are ATen's, in the order in which ATen rounds; ``kernels/pointwise.py`` says why a program has the same bits.
What cannot be written so raises ``RefusedError``, and the recipe is replayed op by op.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad.kernels.pointwise import Input, Program, Step, Term
from leangrad.ledger.region import _see as see
from leangrad.ledger.rules import RULES
from leangrad.ledger.rules.reductions import (
    whole_batch_norm,
    whole_cudnn_batch_norm,
    whole_layer_norm,
    whole_rms_norm,
)

Layout = tuple[torch.Size, tuple[int, ...]]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
VARIANTS = ("batch_norm", "batch_norm_scaled", "batch_norm_folded")  # cuDNN has a kernel for each
MAX_TERMS = 4  # that it may take to find an element of an input


class RefusedError(Exception):
    """This chain cannot be one program; the argument says why."""


class Slot(NamedTuple):
    """An operand: a tensor at hand ("leaf"), a number ("scalar", or its "inverse"; no dtype), a result ("step")."""

    kind: str
    number: int  # among those of its kind
    dtype: torch.dtype | None = None
    shape: torch.Size = torch.Size()
    stride: tuple[int, ...] = ()  # of a leaf


class Builder:
    """The steps so far, and what they read.

    ``leaves`` are the tensors at hand; ``full`` is the layout of the result; ``variant`` chooses among the formulas of
    an op for which a library has several kernels.

    [Note: views inside a chain] All results of a chain are dense and share one order of elements in memory. A view that
    keeps that order (another shape for the same contiguous memory, a transposition) is no work at all: only operands
    that are broadcast have to be found by the shape on their side of it. So each step has a layout of its own, which is
    known from the result downwards, and operands are placed at the end, in ``program``.
    """

    def __init__(self, leaves: list[Tensor], full: Layout, variant: int = 0) -> None:
        self.leaves = leaves
        self.full = full
        self.variant = variant
        self.inputs: list[tuple[int, Input]] = []  # the number of the leaf, and how it is read
        self.scalars: list[tuple[int, bool]] = []  # the number of the recipe's scalar, and whether it is inverted
        self.layouts: list[Layout | None] = []  # of the steps
        self._steps: list[tuple[str, tuple[Slot, ...], torch.dtype]] = []
        self._backs: dict[int, Callable[[Layout], Layout]] = {}  # the layout before a view from that behind it

    def leaf(self, number: int) -> Slot:
        """A tensor at hand."""
        tensor = self.leaves[number]
        if tensor.dtype not in FLOATS and tensor.dtype is not torch.bool:
            raise RefusedError(f"{tensor.dtype}")
        return Slot("leaf", number, tensor.dtype, tensor.shape, tensor.stride())

    def step(self, op: str, dtype: torch.dtype | None, *operands: Slot) -> Slot:
        """Compute ``op`` and round to ``dtype``."""
        if dtype not in FLOATS:
            raise RefusedError(f"a result in {dtype}")
        shape = torch.broadcast_shapes(*(s.shape for s in operands))
        self._steps.append((op, operands, dtype))
        return Slot("step", len(self._steps) - 1, dtype, shape)

    def view(self, slot: Slot, shape: torch.Size, back: Callable[[Layout], Layout]) -> Slot:
        """See the elements of ``slot`` in another shape, in the same order in memory."""
        if shape.numel() != slot.shape.numel():
            raise RefusedError("a view of a part")
        self._backs[len(self._steps)] = back
        return Slot("step", self.step("cast", slot.dtype, slot).number, slot.dtype, shape)

    def program(self, outputs: tuple[int, ...]) -> Program:
        """What was built; ``outputs`` are numbers of steps, the last one is the result."""
        self.layouts = [None] * len(self._steps)
        self.layouts[outputs[-1]] = self.full
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

    def _place(self, slot: Slot, layout: Layout) -> tuple[str, int]:
        """The operand among the inputs, scalars or steps of the program, for a step of this layout."""
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
    """The scalars of a program, which ``Builder.scalars`` says, from those of the recipe."""
    return [_inverse(scalars[k]) if inverted else scalars[k] for k, inverted in wanted]


def _inverse(number: float) -> float:
    """1 / number in float32, as ATen computes it on the host: rounding to double in between does no harm."""
    rounded = ctypes.c_float(number).value
    return 1.0 / rounded if rounded else math.copysign(math.inf, rounded)


def find_terms(
    shape: torch.Size, stride: tuple[int, ...], full_shape: torch.Size, full_stride: tuple[int, ...]
) -> tuple[Term, ...] | None:
    """Where a tensor, broadcast to ``full_shape``, has the element that lies at i in dense memory of ``full_stride``.

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


# ------------------------------------------------------------------------------------------------------------- lowering

Lowering = Callable[..., Slot]
LOWERINGS: dict[Any, Lowering] = {}  # by the function of a recipe
STATIC: set[Any] = set()  # functions whose numbers are part of the program
VIEWS: set[Any] = set()  # functions that are no work: see [Note: views inside a chain]
WEIGHTS: dict[Any, int] = {}  # passes over memory that a replay of the op takes
NORMS: dict[Any, Norm] = {}  # functions that are applied from saved statistics


class Norm(NamedTuple):
    """A norm with its statistics."""

    function: Callable[..., tuple[Tensor, ...]]  # as the rule's, without statistics; it gives them too
    statistics: int
    by_rows: bool  # over the last dimensions; else over all but the channels


def lower(nodes: str, lowering: Lowering, *, static: bool = False, norm: Norm | None = None, weight: int = 1) -> None:
    """Enter ops by the names of their nodes. ``lowering`` takes what the function takes, with slots for tensors."""
    for node in nodes.split():
        function = RULES[node][0].function
        LOWERINGS[function] = lowering
        WEIGHTS[function] = weight
        if static:
            STATIC.add(function)
        if norm is not None:
            NORMS[function] = norm


def _common(*slots: Slot) -> torch.dtype:
    """The dtype in which ATen computes: of the tensors with dimensions, else of those without."""
    tensors = [s for s in slots if s.dtype is not None]
    deciding = [s for s in tensors if s.shape] or tensors
    dtype = deciding[0].dtype
    for s in deciding[1:]:
        assert dtype is not None
        assert s.dtype is not None
        dtype = torch.promote_types(dtype, s.dtype)
    if dtype not in FLOATS or any(s.dtype not in FLOATS for s in tensors):
        raise RefusedError(f"computed in {dtype}")
    return dtype


def _as(b: Builder, dtype: torch.dtype, slot: Slot) -> Slot:
    """A tensor without dimensions has no say, and is rounded first; Python numbers are not."""
    narrower = slot.dtype is not None and torch.promote_types(slot.dtype, dtype) != dtype
    return b.step("cast", dtype, slot) if narrower else slot


def _pointwise(op: str) -> Lowering:
    def lowering(b: Builder, *operands: Slot, alpha: Any = 1) -> Slot:
        if alpha != 1:
            raise RefusedError("alpha")
        dtype = _common(*operands)
        return b.step(op, dtype, *(_as(b, dtype, s) for s in operands))

    return lowering


def _div(b: Builder, x: Slot, other: Slot) -> Slot:
    if other.kind == "scalar":  # ATen multiplies by the reciprocal, computed on the host
        return b.step("mul", _common(x), x, Slot("inverse", other.number))
    return _pointwise("div")(b, x, other)


def _rsub(b: Builder, x: Slot, other: Slot, alpha: Any = 1) -> Slot:
    return _pointwise("sub")(b, other, x, alpha=alpha)


def _pow(b: Builder, x: Slot, exponent: Any) -> Slot:
    if exponent in (2, 3):
        square = b.step("mul", x.dtype, x, x)
        return square if exponent == 2 else b.step("mul", x.dtype, square, x)
    if exponent in (0.5, -0.5):
        return b.step("sqrt" if exponent > 0 else "rsqrt", x.dtype, x)
    raise RefusedError(f"a power of {exponent}")


def _cast(b: Builder, x: Slot, dtype: torch.dtype) -> Slot:
    return b.step("cast", dtype, x)


def _gelu(b: Builder, x: Slot, approximate: str) -> Slot:
    return b.step("gelu" if approximate == "none" else "gelu_tanh", x.dtype, x)


def _where(b: Builder, x: Slot, other: Slot, condition: Slot) -> Slot:
    if condition.dtype is not torch.bool:
        raise RefusedError("a condition that is not bool")
    return b.step("where", _common(x, other), condition, x, other)


def _masked_fill(b: Builder, x: Slot, mask: Slot, value: Slot) -> Slot:
    return _where(b, value, x, mask)


def _clamp(b: Builder, x: Slot, low: Slot | None, high: Slot | None) -> Slot:
    if low is None or high is None:
        return b.step("clamp_max" if low is None else "clamp_min", x.dtype, x, *(s for s in (low, high) if s))
    return b.step("clamp", x.dtype, x, low, high)


def _view(b: Builder, x: Slot, shape: tuple[int, ...]) -> Slot:
    def back(layout: Layout) -> Layout:
        if not _is_contiguous(layout):
            raise RefusedError("a view of memory that is not contiguous")
        return x.shape, _strides(x.shape)

    return b.view(x, torch.Size(shape), back)


def _seen(b: Builder, x: Slot, shape: torch.Size, stride: tuple[int, ...], offset: float) -> Slot:
    """All of a contiguous tensor through other strides: a shape, a transposition, or both."""

    def back(layout: Layout) -> Layout:
        if offset or any(n > 1 and s != t for n, s, t in zip(shape, stride, layout[1], strict=True)):
            raise RefusedError("a view of a part")
        return x.shape, _strides(x.shape)

    return b.view(x, shape, back)


def _permuted(b: Builder, x: Slot, dims: tuple[int, ...]) -> Slot:
    dims = tuple(d % len(x.shape) for d in dims)

    def back(layout: Layout) -> Layout:
        stride = [0] * len(dims)
        for behind, d in enumerate(dims):
            stride[d] = layout[1][behind]
        return x.shape, tuple(stride)

    return b.view(x, torch.Size(x.shape[d] for d in dims), back)


def _transposed(b: Builder, x: Slot, dim0: float, dim1: float) -> Slot:
    dims = list(range(len(x.shape)))
    dims[int(dim0)], dims[int(dim1)] = dims[int(dim1)], dims[int(dim0)]
    return _permuted(b, x, tuple(dims))


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of contiguous memory."""
    strides = [1] if shape else []
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides))


def _is_contiguous(layout: Layout) -> bool:
    shape, stride = layout
    return all(n == 1 or s == t for n, s, t in zip(shape, stride, _strides(shape), strict=True))


def _layer_norm(
    b: Builder, x: Slot, weight: Slot | None, bias: Slot | None, shape: Any, eps: Any, mean: Slot, rstd: Slot
) -> Slot:
    if weight is None and bias is None:
        return b.step("layer_norm_bare", x.dtype, x, mean, rstd)
    if weight is None:
        raise RefusedError("a norm with a bias alone")
    if bias is None:
        return b.step("layer_norm_no_bias", x.dtype, x, mean, rstd, weight)
    return b.step("layer_norm", x.dtype, x, mean, rstd, weight, bias)


def _rms_norm(b: Builder, x: Slot, weight: Slot | None, shape: Any, eps: Any, rstd: Slot) -> Slot:
    if weight is None:
        return b.step("rms_norm_bare", x.dtype, x, rstd)
    return b.step("rms_norm", x.dtype, x, rstd, weight)


def _batch_norm(*formulas: str) -> Lowering:
    def lowering(b: Builder, x: Slot, weight: Slot, bias: Slot, eps: Any, mean: Slot, rstd: Slot) -> Slot:
        vectors = [_along_channels(s, x) for s in (mean, rstd, weight, bias)]
        return b.step(formulas[b.variant % len(formulas)], x.dtype, x, *vectors)

    return lowering


def _along_channels(vector: Slot, x: Slot) -> Slot:
    """A vector that belongs to dimension 1 of ``x``."""
    if vector.kind != "leaf" or len(vector.shape) != 1 or len(x.shape) < 2:
        raise RefusedError("a vector of channels that is computed")
    others = len(x.shape) - 2
    shape, stride = torch.Size((*vector.shape, *[1] * others)), (*vector.stride, *[0] * others)
    return Slot("leaf", vector.number, vector.dtype, shape, stride)


lower("ToCopyBackward0", _cast)
lower("AddBackward0", _pointwise("add"))
lower("SubBackward0", _pointwise("sub"))
lower("RsubBackward0 RsubBackward1", _rsub)
lower("MulBackward0 MulBackward1", _pointwise("mul"))
lower("DivBackward0 DivBackward1", _div)
lower("NegBackward0", _pointwise("neg"))
lower("ReluBackward0", _pointwise("relu"))
lower("LeakyReluBackward0 LeakyReluBackward1", _pointwise("leaky_relu"))
lower("HardtanhBackward0", _pointwise("clamp"))
lower("ClampBackward1", _clamp)
lower("ClampMinBackward0", _pointwise("clamp_min"))
lower("ClampMaxBackward0", _pointwise("clamp_max"))
lower("HardswishBackward0", _pointwise("hardswish"))
lower("HardsigmoidBackward0", _pointwise("hardsigmoid"))
lower("AbsBackward0", _pointwise("abs"))
lower("ReciprocalBackward0", _pointwise("reciprocal"))
lower("SqrtBackward0", _pointwise("sqrt"))
lower("RsqrtBackward0", _pointwise("rsqrt"))
lower("ExpBackward0", _pointwise("exp"))
lower("TanhBackward0", _pointwise("tanh"))
lower("SigmoidBackward0", _pointwise("sigmoid"))
lower("SiluBackward0", _pointwise("silu"))
lower("GeluBackward0", _gelu)
lower("PowBackward0", _pow, static=True)
lower("WhereBackward0", _where)
lower("MaskedFillBackward0", _masked_fill)
lower("NativeLayerNormBackward0", _layer_norm, norm=Norm(whole_layer_norm, 2, by_rows=True))
lower("FusedRmsNormBackward0", _rms_norm, norm=Norm(whole_rms_norm, 1, by_rows=True))
lower("NativeBatchNormBackward0", _batch_norm("batch_norm"), norm=Norm(whole_batch_norm, 2, by_rows=False), weight=2)
lower("CudnnBatchNormBackward0", _batch_norm(*VARIANTS), norm=Norm(whole_cudnn_batch_norm, 2, by_rows=False), weight=2)

lower("ViewBackward0 UnsafeViewBackward0", _view, static=True, weight=0)
lower("TransposeBackward0", _transposed, static=True, weight=0)
lower("PermuteBackward0", _permuted, static=True, weight=0)
LOWERINGS[see], WEIGHTS[see] = _seen, 0
STATIC.add(see)
VIEWS |= {function for function, weight in WEIGHTS.items() if weight == 0}
