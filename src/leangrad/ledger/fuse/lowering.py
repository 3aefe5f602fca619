"""How each op of a recipe is written as steps of a pointwise program: one line per op, by the name of its node.

Formulas are ATen's, in the order in which ATen rounds; ``kernels/pointwise.py`` says why a program has the same bits.
An op that cannot be written this way raises ``RefusedError``, and the recipe is replayed op by op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad.ledger.fuse.builder import (
    FLOATS,
    Builder,
    Layout,
    Operand,
    RefusedError,
    contiguous_strides,
    is_contiguous,
)
from leangrad.ledger.origins.rules import RULES
from leangrad.ledger.origins.rules.reductions import (
    whole_batch_norm,
    whole_cudnn_batch_norm,
    whole_layer_norm,
    whole_rms_norm,
)
from leangrad.ledger.values.saved_view import view_of

VARIANTS = ("batch_norm", "batch_norm_scaled", "batch_norm_folded")  # cuDNN has a kernel for each of these formulas

Lowering = Callable[..., Operand]
LOWERINGS: dict[Any, Lowering] = {}  # by the function of a recipe
STATIC: set[Any] = set()  # functions whose numbers are constants of the program
VIEWS: set[Any] = set()  # functions of views, which cost nothing: see [Note: views inside a chain]
WEIGHTS: dict[Any, int] = {}  # passes over memory that replaying the op takes
NORMS: dict[Any, Norm] = {}  # functions that a program computes from saved statistics


class Norm(NamedTuple):
    """How to compute a norm together with its statistics."""

    function: Callable[..., tuple[Tensor, ...]]  # like the rule's, but computes and returns the statistics too
    statistics: int  # number of them
    by_rows: bool  # True: over the last dimensions; False: over all dimensions but the channels


def lower(nodes: str, lowering: Lowering, *, static: bool = False, norm: Norm | None = None, weight: int = 1) -> None:
    """Register the lowering of ops, by the names of their nodes.

    lowering: takes what the op's function takes, with an ``Operand`` for each tensor and number
    static: numbers are passed to ``lowering`` as they are, and become constants of the program
    norm: how to compute the statistics, if the op is a norm
    weight: passes over memory that replaying the op takes
    """
    for node in nodes.split():
        function = RULES[node][0].function
        LOWERINGS[function] = lowering
        WEIGHTS[function] = weight
        if static:
            STATIC.add(function)
        if norm is not None:
            NORMS[function] = norm


def _common(*slots: Operand) -> torch.dtype:
    """The dtype in which ATen computes: promoted from the tensors with dimensions, or if there are none, from all."""
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


def _as(b: Builder, dtype: torch.dtype, slot: Operand) -> Operand:
    """Round a tensor without dimensions to ``dtype`` if its own dtype is wider; Python numbers are not rounded."""
    narrower = slot.dtype is not None and torch.promote_types(slot.dtype, dtype) != dtype
    return b.step("cast", dtype, slot) if narrower else slot


def _pointwise(op: str) -> Lowering:
    def lowering(b: Builder, *operands: Operand, alpha: Any = 1) -> Operand:
        if alpha != 1:
            raise RefusedError("alpha")
        dtype = _common(*operands)
        return b.step(op, dtype, *(_as(b, dtype, s) for s in operands))

    return lowering


def _div(b: Builder, x: Operand, other: Operand) -> Operand:
    if other.kind == "scalar":  # ATen multiplies by the reciprocal, computed on the host
        return b.step("mul", _common(x), x, Operand("inverse", other.number))
    return _pointwise("div")(b, x, other)


def _rsub(b: Builder, x: Operand, other: Operand, alpha: Any = 1) -> Operand:
    return _pointwise("sub")(b, other, x, alpha=alpha)


def _pow(b: Builder, x: Operand, exponent: Any) -> Operand:
    if exponent in (2, 3):
        square = b.step("mul", x.dtype, x, x)
        return square if exponent == 2 else b.step("mul", x.dtype, square, x)
    if exponent in (0.5, -0.5):
        return b.step("sqrt" if exponent > 0 else "rsqrt", x.dtype, x)
    raise RefusedError(f"a power of {exponent}")


def _cast(b: Builder, x: Operand, dtype: torch.dtype) -> Operand:
    return b.step("cast", dtype, x)


def _gelu(b: Builder, x: Operand, approximate: str) -> Operand:
    return b.step("gelu" if approximate == "none" else "gelu_tanh", x.dtype, x)


def _where(b: Builder, x: Operand, other: Operand, condition: Operand) -> Operand:
    if condition.dtype is not torch.bool:
        raise RefusedError("a condition that is not bool")
    return b.step("where", _common(x, other), condition, x, other)


def _masked_fill(b: Builder, x: Operand, mask: Operand, value: Operand) -> Operand:
    return _where(b, value, x, mask)


def _clamp(b: Builder, x: Operand, low: Operand | None, high: Operand | None) -> Operand:
    if low is None or high is None:
        return b.step("clamp_max" if low is None else "clamp_min", x.dtype, x, *(s for s in (low, high) if s))
    return b.step("clamp", x.dtype, x, low, high)


def _clone(b: Builder, x: Operand, memory_format: torch.memory_format) -> Operand:
    """A copy, maybe in another memory order. Only whole rows are moved: copying single elements is left to ATen."""
    if memory_format not in (torch.contiguous_format, torch.preserve_format):
        raise RefusedError(f"{memory_format}")
    if x.kind == "leaf" and x.shape and x.shape[-1] > 1 and x.stride[-1] != 1:
        raise RefusedError("a copy of elements that lie apart")
    slot = b.step("cast", x.dtype, x)
    kept = memory_format is torch.preserve_format
    return Operand("step", slot.number, slot.dtype, slot.shape, slot.stride if kept else contiguous_strides(slot.shape))


def _view(b: Builder, x: Operand, shape: tuple[int, ...]) -> Operand:
    def back(layout: Layout) -> Layout:
        if not is_contiguous(layout):
            raise RefusedError("a view of memory that is not contiguous")
        return x.shape, contiguous_strides(x.shape)

    seen = torch.Size(shape)
    return b.view(x, (seen, contiguous_strides(seen)), back)


def _strided_view(b: Builder, x: Operand, shape: torch.Size, stride: tuple[int, ...], offset: float) -> Operand:
    """View all of a contiguous tensor through other strides: another shape, a transposition, or both."""

    def back(layout: Layout) -> Layout:
        if offset or any(n > 1 and s != t for n, s, t in zip(shape, stride, layout[1], strict=True)):
            raise RefusedError("a view of a part")
        return x.shape, contiguous_strides(x.shape)

    return b.view(x, (shape, stride), back)


def _permuted(b: Builder, x: Operand, dims: tuple[int, ...]) -> Operand:
    dims = tuple(d % len(x.shape) for d in dims)

    def back(layout: Layout) -> Layout:
        stride = [0] * len(dims)
        for behind, d in enumerate(dims):
            stride[d] = layout[1][behind]
        return x.shape, tuple(stride)

    return b.view(x, (torch.Size(x.shape[d] for d in dims), tuple(x.stride[d] for d in dims) if x.stride else ()), back)


def _transposed(b: Builder, x: Operand, dim0: float, dim1: float) -> Operand:
    dims = list(range(len(x.shape)))
    dims[int(dim0)], dims[int(dim1)] = dims[int(dim1)], dims[int(dim0)]
    return _permuted(b, x, tuple(dims))


def _layer_norm(
    b: Builder,
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    shape: Any,
    eps: Any,
    mean: Operand,
    rstd: Operand,
) -> Operand:
    if weight is None and bias is None:
        return _by_rows(b, "layer_norm_bare", x, mean, rstd)
    if weight is None:
        raise RefusedError("a norm with a bias alone")
    if bias is None:
        return _by_rows(b, "layer_norm_no_bias", x, mean, rstd, weight)
    return _by_rows(b, "layer_norm", x, mean, rstd, weight, bias)


def _rms_norm(b: Builder, x: Operand, weight: Operand | None, shape: Any, eps: Any, rstd: Operand) -> Operand:
    return _by_rows(b, "rms_norm_bare", x, rstd) if weight is None else _by_rows(b, "rms_norm", x, rstd, weight)


def _by_rows(b: Builder, op: str, x: Operand, *others: Operand) -> Operand:
    """A norm over the last dimensions; ATen's result is contiguous."""
    slot = b.step(op, x.dtype, x, *others)
    return Operand("step", slot.number, slot.dtype, slot.shape, contiguous_strides(slot.shape))


def _batch_norm(*formulas: str) -> Lowering:
    def lowering(
        b: Builder,
        x: Operand,
        weight: Operand,
        bias: Operand,
        eps: Any,
        mean: Operand,
        rstd: Operand,
    ) -> Operand:
        vectors = [_along_channels(s, x) for s in (mean, rstd, weight, bias)]
        return b.step(formulas[b.variant % len(formulas)], x.dtype, x, *vectors)

    return lowering


def _along_channels(vector: Operand, x: Operand) -> Operand:
    """The operand for a vector that is broadcast along dimension 1 of ``x``."""
    if vector.kind != "leaf" or len(vector.shape) != 1 or len(x.shape) < 2:
        raise RefusedError("a vector of channels that is computed")
    others = len(x.shape) - 2
    shape, stride = torch.Size((*vector.shape, *[1] * others)), (*vector.stride, *[0] * others)
    return Operand("leaf", vector.number, vector.dtype, shape, stride)


lower("ToCopyBackward0", _cast)
lower("CloneBackward0", _clone)
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
LOWERINGS[view_of], WEIGHTS[view_of] = _strided_view, 0
STATIC.add(view_of)
VIEWS |= {function for function, weight in WEIGHTS.items() if weight == 0}
