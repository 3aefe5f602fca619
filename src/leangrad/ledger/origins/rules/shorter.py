"""CPU replays with the same bits as forward's op in less time, for ops that are slow on a CPU.

[Note: a shorter way]
The arithmetic is ATen's in each case; what differs is how much of it runs again. A shorter replay is used only after it
was compared with the op itself, once for each dtype, on inputs that could show a difference. In a release of torch in
which they differ, the op itself runs. A replay that only copies elements needs no such proof.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

WIDE = (torch.float32, torch.float64)  # dtypes of statistics, and of maps to pool, for which a shorter replay is tried


def _numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers of both signs without a pattern, for comparisons; it draws from no random generator."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64, device="cpu").mul_(12.9898).sin_().mul_(3).view(shape).to(dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# ----------------------------------------------------------------------------------------------------------- batch norm


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, inverse: Tensor | None
) -> Tensor | None:
    """Batch norm from the saved mean and 1/deviation of each channel, in one pass over ``x`` instead of three.

    Returns None if this is not possible, or was not proven to give the same bits.

    ATen computes ``x * alpha + (bias - mean * alpha)`` with ``alpha = inverse * weight``, both in training and in
    evaluation. In evaluation ``inverse = 1 / sqrt(var + eps)``. With a variance of one and no eps that is one, so
    ``alpha`` can be passed as the weight: it is rounded once, as in forward.
    """
    if mean is None or inverse is None or not x.is_cpu or not _is_dense(x):
        return None
    dtype = inverse.dtype
    # With bfloat16 parameters ``alpha`` would be rounded once more; for those not contiguous ATen has another formula.
    if weight is not None and (weight.dtype != dtype or not weight.is_contiguous()):
        return None
    if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
        return None
    return _apply_batch_norm(x, weight, bias, mean, inverse) if _batch_norm_is_exact(x.dtype, dtype) else None


def _is_dense(x: Tensor) -> bool:
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def _apply_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor) -> Tensor:
    alpha = inverse if weight is None else torch.mul(inverse, weight)
    return torch.native_batch_norm(x, alpha, bias, mean, _ones(len(inverse), inverse.dtype), False, 0.0, 0.0)[0]


@functools.lru_cache(maxsize=32)
def _ones(count: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(count, dtype=dtype, device="cpu")


@functools.cache
def _batch_norm_is_exact(dtype: torch.dtype, statistics: torch.dtype) -> bool:
    if statistics not in WIDE:
        return False
    weight, bias = _numbers(37, dtype=statistics), _numbers(3, 37, dtype=statistics)[2]
    maps = _numbers(5, 37, 3, 7, dtype=dtype).add_(1)
    for x in (maps, maps.to(memory_format=torch.channels_last), maps[:, :, 0, 0].contiguous()):
        for w, b in ((weight, bias), (weight, None), (None, bias)):
            y, mean, inverse = torch.native_batch_norm(x, w, b, None, None, True, 0.0, 1e-3)
            if inverse.dtype != statistics or not _same(y, _apply_batch_norm(x, w, b, mean, inverse)):
                return False
    return True


# ---------------------------------------------------------------------------------------------------------- max pooling

PIECE = 1 << 18  # elements that are copied to channels_last at once
FEWEST, FEWEST_CHANNELS = 1 << 14, 8  # elements and channels below which there is nothing to gain


def max_pool2d(which: int) -> Callable[..., Tensor]:
    """Returns a function that computes the values (``which`` 0) or the indices (1) of a max pooling.

    A contiguous map is copied to the channels_last layout, a few samples at a time. There ATen compares many channels
    at once, while it compares one element at a time in a contiguous map. These are the same comparisons in the same
    order, three times as fast with the copies into that layout and back.
    """

    def pool(x: Tensor, *settings: Any) -> Tensor:
        if not _gains(x) or not _pool_is_exact(x.dtype):
            return _pool(x, *settings)[which]
        return _pool_turned(x, which, settings)

    return pool


_pool: Callable[..., tuple[Tensor, Tensor]] = aten.max_pool2d_with_indices.default


def _gains(x: Tensor) -> bool:
    is_map = x.dim() == 4 and x.device.type == "cpu" and x.dtype in WIDE
    return is_map and x.shape[1] >= FEWEST_CHANNELS and x.numel() >= FEWEST and _is_planes(x)


def _is_planes(x: Tensor) -> bool:
    """Whether ATen certainly returns a larger map made from ``x`` as a contiguous one.

    Not if ``x`` is channels_last as well, as a contiguous map of one position or one channel is: it may return either.
    """
    return x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)


def _pool_turned(x: Tensor, which: int, settings: Sequence[Any]) -> Tensor:
    samples = max(1, PIECE * len(x) // x.numel())
    out: Tensor | None = None
    for start in range(0, len(x), samples):
        piece = x[start : start + samples].contiguous(memory_format=torch.channels_last)
        found = _pool(piece, *settings)[which]
        if out is None:
            out = torch.empty((len(x), *found.shape[1:]), dtype=found.dtype, device="cpu")
        out[start : start + samples].copy_(found)
    assert out is not None
    return out


@functools.cache
def _pool_is_exact(dtype: torch.dtype) -> bool:
    """Whether both layouts give the same bits, compared on ties, zeros of both signs, infinities and NaN."""
    x = _numbers(3, 21, 12, 14, dtype=dtype).round_()
    x.view(-1)[::5], x.view(-1)[3::17], x.view(-1)[7::29] = -0.0, float("-inf"), float("nan")
    for settings in (((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((2, 3), (1, 2), (1, 1), (2, 1), True)):
        if not all(_same(_pool(x, *settings)[n], _pool_turned(x, n, settings)) for n in (0, 1)):
            return False
    return True


# ----------------------------------------------------------------------------------------------------------- resampling

_upsample: Callable[..., Tensor] = aten.upsample_nearest2d.default


def upsample_nearest2d(x: Tensor, size: Sequence[int], *scales: float | None) -> Tensor:
    """Nearest-neighbour resampling. A contiguous map is doubled in size by strided copies, which is six times as fast.

    ATen looks up each element of the output. Halves are exact, so it is certain which element it finds.
    """
    doubled = x.dim() == 4 and list(size) == [2 * n for n in x.shape[2:]] and all(s in (None, 2.0) for s in scales)
    if not doubled or not x.is_cpu or not _is_planes(x):
        return _upsample(x, size, *scales)
    batch, channels, height, width = x.shape
    out = x.new_empty(batch, channels, 2 * height, 2 * width)
    places = out.view(batch, channels, height, 2, width, 2)
    upper = places[:, :, :, 0]
    upper[..., 0] = x
    upper[..., 1] = x
    places[:, :, :, 1] = upper
    return out
