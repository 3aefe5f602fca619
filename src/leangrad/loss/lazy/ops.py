"""What is done to lazy logits without their values: rows, casts, multiples, a tanh, and the cross entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leangrad.functional import autocast_enabled
from leangrad.loss.fused import linear_cross_entropy
from leangrad.loss.lazy.logits import HANDLERS, LazyLogits, derive, is_hooked


def _reshape(logits: LazyLogits, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or not shape or isinstance(shape[0], torch.dtype) or logits._rows.is_transposed:
        return NotImplemented
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if not all(type(n) is int for n in sizes):
        return NotImplemented
    last, new = logits.shape[-1], _resolved(sizes, logits)
    if new is None or not new or new[-1] != last:
        return NotImplemented
    hidden = logits._rows.source.x.shape[-1]
    return derive(logits, lambda t: t.reshape(new), shape=new, pick=lambda x: x.reshape((*new[:-1], hidden)))


def _resolved(sizes: tuple[int, ...], logits: LazyLogits) -> tuple[int, ...] | None:
    """``sizes`` with its -1 filled in; None where it is no shape of these logits, which torch will say better."""
    known, count = 1, logits.numel()
    for n in sizes:
        known *= 1 if n == -1 else n
    if sizes.count(-1) == 1 and known > 0 and count % known == 0:
        return tuple(count // known if n == -1 else n for n in sizes)
    return sizes if -1 not in sizes and known == count else None


def _flatten(logits: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = logits.dim()
    if not (-dims <= start_dim < dims and -dims <= end_dim < dims):
        return NotImplemented
    first, last = start_dim % dims, end_dim % dims
    if not first <= last < dims - 1 or logits._rows.is_transposed:
        return NotImplemented
    shape = logits.shape
    return _reshape(logits, (*shape[:first], shape[first : last + 1].numel(), *shape[last + 1 :]))


def _slice(logits: LazyLogits, index: Any) -> Any:
    """Basic indexing that leaves the vocabulary as it is."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(one is Ellipsis or type(one) in (int, slice) for one in parts) or logits._rows.is_transposed:
        return NotImplemented
    dims = logits.dim()
    explicit = sum(one is not Ellipsis for one in parts)
    if Ellipsis not in parts:
        parts = (*parts, Ellipsis)
    if parts.count(Ellipsis) > 1 or explicit > dims:
        return NotImplemented
    at = parts.index(Ellipsis)
    full = (*parts[:at], *[slice(None)] * (dims - explicit), *parts[at + 1 :])
    if type(full[-1]) is not slice or full[-1].indices(logits.shape[-1]) != (0, logits.shape[-1], 1):
        return NotImplemented
    leading = full[:-1]
    with torch.no_grad():
        shape = torch.empty((), device="meta").expand(logits.shape)[full].shape
    return derive(logits, lambda t: t[full], shape=shape, pick=lambda x: x[leading])


def _transpose(logits: LazyLogits, a: Any, b: Any) -> Any:
    """(rows, length, vocabulary) to (rows, vocabulary, length), as `F.cross_entropy` takes it."""
    if logits.dim() != 3 or logits._rows.is_transposed or {a, b} not in ({1, 2}, {-1, -2}, {1, -1}, {2, -2}):
        return NotImplemented
    rows, length, words = logits.shape
    return derive(logits, lambda t: t.transpose(1, 2), shape=(rows, words, length), is_transposed=True)


def _permute(logits: LazyLogits, *dims: Any) -> Any:
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    return _transpose(logits, 1, 2) if order in ((0, 2, 1), (0, -1, 1), (0, -1, -2), (0, 2, -2)) else NotImplemented


def _cast(logits: LazyLogits, dtype: torch.dtype) -> Any:
    if not dtype.is_floating_point:
        return NotImplemented
    return logits if dtype == logits.dtype else derive(logits, lambda t: t.to(dtype), dtype=dtype)


def _to(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """A dtype, or the device that it is on."""
    kwargs = {key: value for key, value in kwargs.items() if key != "non_blocking"}
    wanted = [*args, *kwargs.values()]
    if any(key not in ("dtype", "device") for key in kwargs):
        return NotImplemented
    made = logits
    for one in wanted:
        if isinstance(one, torch.dtype):
            made = _cast(made, one)
        elif not isinstance(one, torch.device | str) or torch.device(one) != logits.device:
            return NotImplemented
    return made


def _scaled(logits: LazyLogits, factor: float) -> Any:
    rows = logits._rows
    if rows.after is not None:
        return derive(logits, lambda t: t * factor, after=rows.after * factor)
    return derive(logits, lambda t: t * factor, before=rows.before * factor)


def _multiply(logits: LazyLogits, other: Any) -> Any:
    return _scaled(logits, other) if type(other) in (int, float) else NotImplemented


def _divide(logits: LazyLogits, other: Any, **kwargs: Any) -> Any:
    if kwargs or type(other) not in (int, float) or other == 0:
        return NotImplemented
    rows, factor = logits._rows, 1 / other
    if rows.after is not None:
        return derive(logits, lambda t: t / other, after=rows.after * factor)
    return derive(logits, lambda t: t / other, before=rows.before * factor)


def _add(logits: LazyLogits, other: Any, **kwargs: Any) -> Any:
    """A bias that the head itself does not have; one, and before all else."""
    rows, words = logits._rows, logits.shape[-1]
    if (
        kwargs
        or type(other) not in (Tensor, torch.nn.Parameter)
        or other.dim() > logits.dim()
        or other.numel() != words
        or other.shape[-1:] != (words,)
        or other.dtype != logits.dtype
        or other.dtype != rows.source.x.dtype
        or other.device != logits.device
        or rows.bias is not None
        or rows.is_transposed
        or rows.source.is_autocast
        or rows.before != 1.0
        or rows.after is not None
    ):
        return NotImplemented
    return derive(logits, lambda t, b: t + b.reshape(-1), bias=other)  # of rows, whatever shape they are given


def _tanh(logits: LazyLogits) -> Any:
    return NotImplemented if logits._rows.after is not None else derive(logits, torch.tanh, after=1.0)


def _detach(logits: LazyLogits) -> LazyLogits:
    return derive(logits, Tensor.detach, is_detached=True)


def _argmax(logits: LazyLogits, *args: Any, **kwargs: Any) -> Tensor:
    """A metric, often read beside the loss: of values that nobody keeps."""
    logits._rows.check_writes()
    return torch.argmax(logits._rows.compute(), *args, **kwargs)


def _contiguous(logits: LazyLogits, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    if memory_format not in (torch.contiguous_format, torch.preserve_format):
        return NotImplemented
    if not logits._rows.picks and not logits._rows.is_transposed:
        return logits
    return derive(logits, lambda t: t, shape=logits.shape, pick=lambda x: x)  # a copy, if these are a part of others


def _cross_entropy(
    input: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    rows, source = input._rows, input._rows.source
    if (
        input.dim() != (3 if rows.is_transposed else 2)
        or size_average is not None
        or reduce is not None
        or type(target) is not Tensor
        or target.dtype != torch.int64
        or target.shape != (*input.shape[:1], *input.shape[2:])
        or target.device != input.device
        or (rows.after is not None and not rows.after > 0)
        or (weight is not None and (type(weight) is not Tensor or weight.requires_grad))
        or is_hooked(input)
    ):
        return NotImplemented
    is_graded = torch.is_grad_enabled() and input.requires_grad
    with torch.set_grad_enabled(is_graded):
        x, table, bias = rows.open(input)
        for pick in rows.picks:
            x = pick(x)
        if rows.bias is not None:
            rows.check_bias()
            own = rows.bias.reshape(-1)
            bias = own if bias is None else bias + own
        scale = rows.before if rows.after is None else rows.before * rows.after
        is_autocast = autocast_enabled(x.device.type)
        with source.autocast():
            loss = linear_cross_entropy(
                x,
                table,
                target,
                linear_bias=bias,
                weight=weight,
                reduction=reduction,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                softcap=rows.after,
                logit_scale=None if scale == 1.0 else scale,
            )
    if is_graded:
        source.asked(True)
    return loss if is_autocast else loss.to(input.dtype)


HANDLERS.update(
    {
        "view": _reshape,
        "reshape": _reshape,
        "flatten": _flatten,
        "transpose": _transpose,
        "permute": _permute,
        "contiguous": _contiguous,
        "__getitem__": _slice,
        "float": lambda logits: _cast(logits, torch.float32),
        "half": lambda logits: _cast(logits, torch.float16),
        "bfloat16": lambda logits: _cast(logits, torch.bfloat16),
        "to": _to,
        **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), _multiply),
        **dict.fromkeys(("div", "__truediv__", "true_divide", "divide"), _divide),
        **dict.fromkeys(("add", "__add__", "__radd__"), _add),
        "tanh": _tanh,
        "detach": _detach,
        "argmax": _argmax,
        "cross_entropy": _cross_entropy,
    }
)
