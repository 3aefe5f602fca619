"""Rules for the ops that may stand between a projection to a vocabulary and its loss, without the logits' values.

Lazy logits (`leangrad.loss.lazy`) apply a rule when an op is called on them, the compiled engine when it finds a loss
in a graph. A rule takes what is known of logits without their values (`Logits`) and the other arguments of the op, and
returns what the op does to the logits (`Change`), or None if the op needs their values. In a graph, sizes may be
symbolic and arguments may be nodes; only the size of the vocabulary must be a number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leangrad.functional import LOW_OR_SINGLE
from leangrad.ledger import MIN_BYTES

__all__ = ["RULES", "Change", "Logits", "fit_dtypes", "is_large", "is_vocabulary", "softcap_and_scale", "takes_loss"]

RATIO = 2  # fewest outputs per input of a projection to a vocabulary
CLASSES = 256  # fewest outputs of one


def is_vocabulary(outputs: int, inputs: int) -> bool:
    """Whether a projection with these numbers of outputs and inputs may be one to a vocabulary.

    >>> is_vocabulary(50257, 768), is_vocabulary(3072, 768), is_vocabulary(768, 768), is_vocabulary(10, 4)
    (True, True, False, False)
    """
    return outputs >= max(CLASSES, RATIO * inputs)


def is_large(nbytes: int) -> bool:
    """Whether logits of ``nbytes`` bytes are large enough to be worth saving."""
    return nbytes >= MIN_BYTES


def fit_dtypes(given: Collection[torch.dtype], *, is_autocast: bool) -> bool:
    """Whether the fused loss accepts a projection whose input, weight and bias have the dtypes ``given``."""
    if is_autocast:
        return LOW_OR_SINGLE.issuperset(given)  # autocast does not cast float64
    return len(set(given)) == 1 and (LOW_OR_SINGLE | {torch.float64}).issuperset(given)


@dataclass(frozen=True)
class Logits:
    """What is known of logits without their values: some rows of before·z, or of after·tanh(before·z).

    z is the output of the projection, x its input.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    hidden: int  # number of columns of x
    before: float = 1.0
    after: float | None = None  # None: there is no tanh
    is_transposed: bool = False  # the vocabulary is the second of three dimensions
    is_part: bool = False  # True: rows were selected or reshaped since the projection
    bias_dtype: torch.dtype | None = None  # dtype of a bias that can still be added; None: none can


@dataclass(frozen=True)
class Change:
    """What an op does to logits: it selects rows, and ``pick`` selects the same rows of x, or it changes each value.

    ``shape``, ``dtype``, ``before`` and ``after`` are those of the result; None: as before.
    """

    op: Callable[..., Any]  # called with the values, and with ``bias`` if there is one
    pick: Callable[[Any], Any] | None = None
    shape: tuple[Any, ...] | None = None  # the new shape, unless ``pick`` determines it
    dtype: torch.dtype | None = None
    before: float | None = None
    after: float | None = None
    bias: Any = None
    is_transposed: bool = False
    is_same: bool = False  # the op returns its input


Rule = Callable[..., Change | None]


def _reshape(logits: Logits, *shape: Any, **kwargs: Any) -> Change | None:
    if kwargs or not shape or isinstance(shape[0], torch.dtype) or logits.is_transposed:
        return None
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    words, hidden = logits.shape[-1], logits.hidden
    if all(type(n) is int for n in (*sizes, *logits.shape)):
        new = _resolved(sizes, logits.shape)
        if not new or new[-1] != words:
            return None
        return Change(lambda t: t.reshape(new), lambda x: x.reshape((*new[:-1], hidden)), shape=new)
    if not sizes or type(sizes[-1]) is not int or sizes[-1] not in (-1, words):
        return None  # in a graph, where the caller reads the shape of the result off the graph
    return Change(lambda t: t.reshape(sizes), lambda x: x.reshape((*sizes[:-1], hidden)))


def _resolved(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return ``sizes`` with its -1 filled in; None if they do not fit ``shape``, for which torch's own call raises."""
    known, count = 1, torch.Size(shape).numel()
    for n in sizes:
        known *= 1 if n == -1 else n
    if sizes.count(-1) == 1 and known > 0 and count % known == 0:
        return tuple(count // known if n == -1 else n for n in sizes)
    return sizes if -1 not in sizes and known == count else None


def _flatten(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Change | None:
    dims = len(logits.shape)
    if not (-dims <= start_dim < dims and -dims <= end_dim < dims):
        return None
    first, last = start_dim % dims, end_dim % dims
    if not first <= last < dims - 1 or logits.is_transposed:
        return None
    return Change(lambda t: t.flatten(first, last), lambda x: x.flatten(first, last))


def _slice(logits: Logits, index: Any) -> Change | None:
    """Basic indexing that does not index the vocabulary."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(one is Ellipsis or type(one) in (int, slice) for one in parts) or logits.is_transposed:
        return None
    ends = [end for one in parts if type(one) is slice for end in (one.start, one.stop, one.step)]
    if any(isinstance(end, Tensor) for end in ends):
        return None  # it may change before the values are computed
    dims = len(logits.shape)
    explicit = sum(one is not Ellipsis for one in parts)
    if sum(one is Ellipsis for one in parts) == 0:
        parts = (*parts, Ellipsis)
    if len(parts) > explicit + 1 or explicit > dims:
        return None
    at = next(place for place, one in enumerate(parts) if one is Ellipsis)
    full = (*parts[:at], *[slice(None)] * (dims - explicit), *parts[at + 1 :])
    if type(full[-1]) is not slice or not _is_whole(full[-1], logits.shape[-1]):
        return None
    leading = full[:-1]
    return Change(lambda t: t[full], lambda x: x[leading])


def _is_whole(part: slice, count: int) -> bool:
    ends = (part.start, part.stop, part.step)
    return all(one is None or type(one) is int for one in ends) and part.indices(count) == (0, count, 1)


def _transpose(logits: Logits, a: Any, b: Any) -> Change | None:
    """Transpose (rows, length, vocabulary) to (rows, vocabulary, length), which `F.cross_entropy` expects."""
    if len(logits.shape) != 3 or logits.is_transposed or {a, b} not in ({1, 2}, {-1, -2}, {1, -1}, {2, -2}):
        return None
    rows, length, words = logits.shape
    return Change(lambda t: t.transpose(1, 2), shape=(rows, words, length), is_transposed=True)


def _permute(logits: Logits, *dims: Any) -> Change | None:
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    return _transpose(logits, 1, 2) if order in ((0, 2, 1), (0, -1, 1), (0, -1, -2), (0, 2, -2)) else None


def _contiguous(logits: Logits, *, memory_format: torch.memory_format = torch.contiguous_format) -> Change | None:
    if memory_format not in (torch.contiguous_format, torch.preserve_format):
        return None
    if not logits.is_part and not logits.is_transposed:
        return Change(_same, is_same=True)
    if logits.is_transposed:
        return Change(lambda t: t.contiguous(), shape=logits.shape)
    return Change(_same, _same, shape=logits.shape)  # a copy of some of the rows


def _same(t: Any) -> Any:
    return t


def _cast(logits: Logits, dtype: torch.dtype) -> Change | None:
    if not dtype.is_floating_point:
        return None
    return Change(lambda t: t.to(dtype), dtype=dtype, is_same=dtype == logits.dtype)


def _to(logits: Logits, *args: Any, **kwargs: Any) -> Change | None:
    """A cast to a dtype; a device is accepted only if the logits are on it."""
    kwargs = {key: value for key, value in kwargs.items() if key != "non_blocking"}
    if any(key not in ("dtype", "device") for key in kwargs):
        return None
    change: Change | None = Change(_same, is_same=True)
    for one in (*args, *kwargs.values()):
        if isinstance(one, torch.dtype):
            change = _cast(logits, one)
        elif not isinstance(one, torch.device | str) or torch.device(one) != logits.device:
            return None
    return change


def _scaled(logits: Logits, factor: float, op: Callable[..., Any]) -> Change:
    if logits.after is not None:
        return Change(op, after=logits.after * factor)
    return Change(op, before=logits.before * factor)


def _multiply(logits: Logits, other: Any) -> Change | None:
    return _scaled(logits, other, lambda t: t * other) if type(other) in (int, float) else None


def _divide(logits: Logits, other: Any, **kwargs: Any) -> Change | None:
    if kwargs or type(other) not in (int, float) or other == 0:
        return None
    return _scaled(logits, 1 / other, lambda t: t / other)


def _add(logits: Logits, other: Any, **kwargs: Any) -> Change | None:
    """Add a bias to the projection's output: one bias, and before any other change of the values."""
    words = logits.shape[-1]
    if (
        kwargs
        or not isinstance(other, Tensor)
        or other.dim() > len(logits.shape)
        or other.numel() != words
        or other.shape[-1:] != (words,)
        or other.dtype != logits.dtype
        or other.dtype != logits.bias_dtype
        or other.device != logits.device
        or logits.is_transposed
        or logits.before != 1.0
        or logits.after is not None
    ):
        return None
    return Change(lambda t, b: t + b.reshape(-1), bias=other)  # whatever shape ``other`` has


def _tanh(logits: Logits) -> Change | None:
    return None if logits.after is not None else Change(torch.tanh, after=1.0)


def takes_loss(
    logits: Logits, target_dtype: torch.dtype, *, size_average: Any, reduce: Any, weight: Tensor | None
) -> bool:
    """Whether the fused loss can compute `F.cross_entropy` of these logits, with targets of ``target_dtype``."""
    return (
        len(logits.shape) == (3 if logits.is_transposed else 2)
        and size_average is None
        and reduce is None
        and target_dtype == torch.int64
        and (logits.after is None or logits.after > 0)
        and not (weight is not None and weight.requires_grad)
    )


def softcap_and_scale(logits: Logits) -> tuple[float | None, float | None]:
    """Return the ``softcap`` and ``logit_scale`` of the fused loss that equal ``before`` and ``after``.

    >>> of = {"shape": (2, 3), "dtype": torch.float32, "device": torch.device("cpu"), "hidden": 4}
    >>> softcap_and_scale(Logits(**of)), softcap_and_scale(Logits(**of, before=0.5, after=2.0))
    ((None, None), (2.0, None))
    """
    scale = logits.before if logits.after is None else logits.before * logits.after
    return logits.after, None if scale == 1.0 else scale


# The rules, by the name of the function or method.
RULES: dict[str, Rule] = {
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
}
