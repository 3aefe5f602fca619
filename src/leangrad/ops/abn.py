"""Activated batch norm: statistics, forward, and a backward that reads one map and writes one buffer.

    y  = γ·(x − μ)·s + β          s = 1/√(σ² + ε)
    z  = act(y + residual)
    dy = dz·act'(y + residual)    which is also the gradient of the residual
    x̂  = (x − μ)·s                from a kept input, or
    x̂  = (act⁻¹(z) − β)/γ         from a kept output
    dγ = Σ x̂·dy,  dβ = Σ dy
    dx = γ·s·(dy − mean(dy) − x̂·mean(x̂·dy))

Nothing here uses autograd. Low-precision maps are read and written as they are; vectors and sums are float32 (float64
for float64 maps). On CUDA `leangrad.kernels.abn` does the work. The code below is for all other maps: it works in
chunks that stay in cache, so that its scratch does not grow with the map.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from leangrad.kernels import INTERPRETED, kernels_of, serves
from leangrad.ops.abn_activation import Activation, activate_, activation_backward, invert

__all__ = ["Activation", "Kept", "backward_input", "backward_sums", "forward", "fused_layer", "normalize"]
__all__ += ["stack_vectors", "stats", "update_running"]

aten: Any = torch.ops.aten

# Elements per scratch buffer: large enough that a chunk costs more than the Python around it, small enough for a cache.
CHUNK = 1 << 18


@dataclass(frozen=True)
class Vectors:
    """The vectors of a layer, one element per channel, in the accumulation dtype; `weight` is γ̂, as it is applied.

    Layers keep them as one (4, channels) tensor, called `vectors` in all signatures here.
    """

    mean: Tensor
    invstd: Tensor
    weight: Tensor
    bias: Tensor

    def at(self, channels: slice) -> Vectors:
        """Returns the vectors of a range of channels."""
        if channels == slice(None):
            return self
        return Vectors(*(v[channels] for v in (self.mean, self.invstd, self.weight, self.bias)))


@dataclass(frozen=True)
class Kept:
    """The one map that a layer keeps for backward: its output (`inverted`) or its input.

    `spare_input` holds the input of the `spare_channels` only: those whose input cannot be computed from the output.
    """

    map: Tensor
    inverted: bool
    residual: Tensor | None = None
    spare_channels: Tensor | None = None
    spare_input: Tensor | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float64 for float64 maps, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_rows(t: Tensor) -> bool | None:
    """True if channels are the fastest dimension, False if they are planes, None if the map is neither."""
    return _layout(t.shape, t.stride())


def is_dense(t: Tensor) -> bool:
    """Whether `is_rows` is not None; cheaper to call."""
    return t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last) or is_rows(t) is not None


@lru_cache(maxsize=1 << 12)
def _layout(shape: torch.Size, stride: tuple[int, ...]) -> bool | None:
    t = torch.empty_strided(shape, stride, device="meta")
    if t.is_contiguous():
        return shape[2:].numel() == 1
    return True if t.movedim(1, -1).is_contiguous() else None


def as_matrix(t: Tensor) -> Tensor:
    """Returns a dense map as a view: (rows, channels), or (samples, channels, positions)."""
    if is_rows(t):
        return t.movedim(1, -1).reshape(-1, t.shape[1])
    return t.view(t.shape[0], t.shape[1], -1)


def stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance of each channel, from deviations, so that a large mean does not cancel digits.

    >>> mean, var = stats(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    >>> mean.tolist(), var.tolist()
    ([2.0, 4.0], [1.0, 4.0])
    """
    if serves(x):
        mean, var = _layer(x).stats(x)
        return mean, var
    if x.is_cpu and is_rows(x) is False:
        return _stats_of_planes(x)
    unused = x.new_zeros(x.shape[1], dtype=accumulation_dtype(x.dtype))
    # With running statistics in float32, ATen also returns float32 statistics of a low-precision map.
    mean, var = torch.batch_norm_update_stats(x, unused, unused.clone(), 0.0)
    return mean, var


def _stats_of_planes(x: Tensor) -> tuple[Tensor, Tensor]:
    """`stats` of planes: sums the map, then the deviations from that mean, which also correct its rounding.

    1.0 ms for 2²⁰ values on one ARM core, where ATen's own op takes 2.0 ms.
    """
    dtype = accumulation_dtype(x.dtype)
    count = x.numel() // x.shape[1]
    mean = as_matrix(x).sum((0, 2), dtype=dtype) / count
    zero, one = torch.zeros_like(mean), torch.ones_like(mean)
    left, squares = zero.clone(), zero.clone()
    for (part, *_), channels in _chunks(Kept(x, False), x, None):
        away = part.to(dtype) - mean[channels, None]
        _, dot, total = _sums(away, away, zero[channels], one[channels])
        left[channels] += total
        squares[channels] += dot
    left /= count
    return mean + left, (squares / count).addcmul_(left, left, value=-1)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, act: Activation, *, eps: float, absolute: bool,
    running: tuple[Tensor, Tensor] | None = None, momentum: float = 0.0, residual: Tensor | None = None, out: Tensor,
) -> Tensor:  # fmt: skip
    """Run `normalize` with the statistics of the batch, and update the running ones; returns the vectors."""
    mean, var = stats(x)
    if running is not None:
        update_running(running, mean, var, x.numel() // x.shape[1], momentum)
    vectors = stack_vectors(mean, var, weight, bias, eps=eps, absolute=absolute)
    normalize(x, vectors, act, residual=residual, out=out)
    return vectors


def fused_layer(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, act: Activation, *, absolute: bool, inverted: bool,
    running: tuple[Tensor, Tensor] | None, counter: Tensor | None, added: bool,
) -> Any:  # fmt: skip
    """Returns the kernels of a whole layer with batch statistics (`leangrad.kernels.abn.Layer`); None if none apply."""
    if not (x.is_cuda or INTERPRETED):
        return None
    shape, place = x.shape, x.get_device()
    channels = shape[1]
    dtypes: list[torch.dtype | None] = []
    # The kernels get addresses only, so the tensors are checked here, in every call.
    for t in (weight, bias, *(running or (None, None))):
        if t is None:
            dtypes.append(None)
        elif t.numel() == channels and t.get_device() == place and t.is_contiguous():
            dtypes.append(t.dtype)
        else:
            return None
    if dtypes[2] is not dtypes[3]:
        return None
    if counter is not None and (counter.dtype != torch.int64 or counter.numel() != 1 or counter.get_device() != place):
        return None
    key = (shape, x.stride(), x.dtype, place, act.name, act.param, inverted, added, absolute, counter is None, *dtypes)
    layer = _fused.get(key)
    if layer is None:
        if not serves(x):
            return None
        if len(_fused) >= 1 << 12:  # maps have a new size in every step
            _fused.clear()
        layer = _fused[key] = _layer(x, act, inverted, added, absolute, *dtypes[:3], counter is not None)
    return layer


_fused: dict[tuple[Any, ...], Any] = {}  # a faster cache than that of `_layer`, for calls that recur every step


def update_running(running: tuple[Tensor, Tensor], mean: Tensor, var: Tensor, count: Any, momentum: float) -> None:
    """Update the running mean and unbiased variance; `count` may be a tensor, which is not copied to the host."""
    others = (count - 1).clamp(min=1) if isinstance(count, Tensor) else max(count - 1, 1)
    running[0].lerp_(mean.to(running[0].dtype), momentum)
    running[1].lerp_((var * (count / others)).to(running[1].dtype), momentum)


def stack_vectors(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, absolute: bool
) -> Tensor:
    """Returns (mean, invstd, γ̂, β) as one tensor, from given statistics."""
    gamma = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    if absolute and weight is not None:
        gamma = gamma.abs() + eps
    beta = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
    return torch.stack((mean, (var + eps).rsqrt_(), gamma, beta))


def normalize(x: Tensor, vectors: Tensor, act: Activation, *, residual: Tensor | None = None, out: Tensor) -> Tensor:
    """out = act(γ·(x − μ)·s + β + residual); `out` may be `x` or `residual` itself."""
    if serves(x):
        _layer(x, act, False, residual is not None).normalize(x, vectors, residual, out)
        return out
    v = Vectors(*vectors)
    if residual is None:
        return activate_(_affine(x, v, out=out), act)
    step = max(1, CHUNK * x.shape[0] // max(1, x.numel()))
    for x_part, r_part, out_part in zip(x.split(step), residual.split(step), out.split(step), strict=True):
        activate_(torch.add(_affine(x_part, v), r_part, out=out_part), act)
    return out


def backward_sums(kept: Kept, dz: Tensor, vectors: Tensor, act: Activation, *, dy_out: Tensor | None = None) -> Tensor:
    """Returns (Σ dy, Σ x̂·dy) as one (2, channels) tensor.

    dy_out: if given, dy is written there; it may be `dz` itself. Ignored if `kept` has spare channels.
    """
    sums: Tensor
    if kept.spare_channels is not None:
        safe, spare = _without_spare(kept, vectors), _spare(kept, dz, vectors)
        sums = backward_sums(Kept(kept.map, True), dz, safe, act)
        return sums.index_copy_(1, kept.spare_channels, backward_sums(*spare, act))
    if serves(dz):
        layer = _layer(dz, act, kept.inverted, kept.residual is not None)
        sums = layer.backward_sums(kept.map, dz, kept.residual, dy_out, vectors)
        return sums
    v = Vectors(*vectors)
    sums = v.mean.new_zeros(2, v.mean.numel())
    for part, channels in _chunks(kept, dz, dy_out):
        at = v.at(channels)
        source, dy = _prepare(part, at, act, kept.inverted)
        if dy_out is not None and dy is not part[3]:
            part[3].copy_(dy)
        center, factor = _center_and_factor(at, kept.inverted)
        _, dot, total = _sums(dy, source, center, factor)
        sums[0, channels] += total
        sums[1, channels] += dot
    return sums


def backward_input(
    kept: Kept, dz: Tensor, vectors: Tensor, act: Activation, sums: Tensor | None, count: int, *, out: Tensor
) -> Tensor:
    """Write dx into `out`, which may be `dz` or `kept.map`; `sums / count` are the two means, None in eval mode."""
    if kept.spare_channels is not None:
        safe, (spare, spare_dz, spare_vectors) = _without_spare(kept, vectors), _spare(kept, dz, vectors)
        spare_sums = None if sums is None else sums.index_select(1, kept.spare_channels)
        backward_input(Kept(kept.map, True), dz, safe, act, sums, count, out=out)
        backward_input(spare, spare_dz, spare_vectors, act, spare_sums, count, out=spare_dz)
        return out.index_copy_(1, kept.spare_channels, spare_dz)
    if serves(dz):
        layer = _layer(dz, act, kept.inverted, kept.residual is not None)
        layer.backward_input(kept.map, dz, kept.residual, sums, count, vectors, out)
        return out
    v = Vectors(*vectors)
    means = None if sums is None else sums / count
    for part, channels in _chunks(kept, dz, out):
        at = v.at(channels)
        source, dy = _prepare([*part[:3], None], at, act, kept.inverted)
        scale = at.weight * at.invstd
        line = None
        if means is not None:
            center, factor = _center_and_factor(at, kept.inverted)
            slope = scale * factor * means[1, channels]
            line = (source * _spread(slope, dy)).add_(_spread(scale * means[0, channels] - slope * center, dy))
        # Computed in the result's memory, unless its dtype is too coarse for the subtraction.
        dx = torch.mul(dy, _spread(scale, dy), out=part[3] if part[3].dtype == dy.dtype else None)
        if line is not None:
            dx.sub_(line)
        if dx is not part[3]:
            part[3].copy_(dx)
    return out


def _sums(dy: Tensor, source: Tensor, center: Tensor, factor: Tensor) -> Any:
    """Returns (None, Σ dy·(source − center)·factor, Σ dy) per channel, from ATen's backward without its dx."""
    # Without a weight, for which any vector will do, ATen returns no sums on CUDA.
    mask = [False, True, True]
    return aten.native_batch_norm_backward(dy, source, factor, None, None, center, factor, True, 0.0, mask)


def _center_and_factor(v: Vectors, inverted: bool) -> tuple[Tensor, Tensor]:
    """Returns (center, factor) of x̂ = (source − center)·factor, where source is act⁻¹(z) if `inverted`, else x."""
    return (v.bias, v.weight.reciprocal()) if inverted else (v.mean, v.invstd)


def _affine(x: Tensor, v: Vectors, out: Tensor | None = None) -> Tensor:
    """γ·(x − μ)·s + β."""
    # In eval mode ATen applies given statistics; a variance of 1 and an eps of 0 leave the scale to the weight.
    arguments = (x, v.weight * v.invstd, v.bias, v.mean, torch.ones_like(v.mean), False, 0.0, 0.0)
    if out is None:
        return torch.native_batch_norm(*arguments)[0]
    unused = v.mean.new_empty(0)
    torch.native_batch_norm(*arguments, out=(out, unused, unused.clone()))
    return out


def _prepare(part: list[Any], v: Vectors, act: Activation, inverted: bool) -> tuple[Tensor, Tensor]:
    """Returns the source of x̂, and dy, of one chunk; either may be the map itself, so do not write to them."""
    maps: list[Any] = [None if t is None else t.to(v.mean.dtype).contiguous() for t in part[:3]]
    kept, dz, residual = maps
    out = part[3]
    if out is not None and (out.dtype != dz.dtype or not out.is_contiguous()):
        out = None
    if inverted:
        return invert(kept, act), activation_backward(dz, kept, act, True, out)
    if act.name == "identity":
        return kept, dz
    y = _affine(kept, v)
    if residual is not None:
        y.add_(residual)
    return kept, activation_backward(dz, y, act, False, out)


def _spread(vector: Tensor, like: Tensor) -> Tensor:
    return vector[:, None] if like.dim() == 3 else vector


def _chunks(kept: Kept, dz: Tensor, out: Tensor | None) -> Iterator[tuple[list[Any], slice]]:
    """Yields views of (map, dz, residual, out) and the slice of channels, chunk by chunk."""
    maps = [_matrix(t) for t in (kept.map, dz, kept.residual, out)]
    shape = as_matrix(dz).shape
    # Whole rows or samples are contiguous; a sample that is too large by itself is cut by channels instead.
    along = 0 if shape[1:].numel() <= CHUNK else 1
    step = max(1, CHUNK * shape[along] // shape.numel())
    for start in range(0, shape[along], step):
        size = min(step, shape[along] - start)
        channels = slice(start, start + size) if along == 1 else slice(None)
        yield [None if t is None else t.narrow(along, start, size) for t in maps], channels


def _layer(x: Tensor, act: Activation = Activation("identity"), *rest: Any) -> Any:  # noqa: B008
    """Returns the kernels for maps like `x`; `rest`: the further fields of `leangrad.kernels.abn.Kind`."""
    kernels = kernels_of("abn")
    return kernels.layer(kernels.Kind(x.shape, is_rows(x), x.dtype, x.device, act.name, float(act.param), *rest))


def _matrix(t: Tensor | None) -> Tensor | None:
    return None if t is None else as_matrix(t)


def _spare(kept: Kept, dz: Tensor, vectors: Tensor) -> tuple[Kept, Tensor, Tensor]:
    """Returns (kept, dz, vectors) of the spare channels, as a small layer of its own that keeps its input."""
    assert kept.spare_channels is not None
    assert kept.spare_input is not None
    small = Kept(kept.spare_input, inverted=False)
    spare_dz = dz.index_select(1, kept.spare_channels).contiguous()
    return small, spare_dz, vectors.index_select(1, kept.spare_channels)


def _without_spare(kept: Kept, vectors: Tensor) -> Tensor:
    """Returns `vectors` with weights of 1 in the spare channels, where dividing by the true ones would overflow.

    The results of these channels are overwritten afterwards.
    """
    assert kept.spare_channels is not None
    safe = vectors.clone()
    safe[2].index_fill_(0, kept.spare_channels, 1.0)
    return safe
