"""Layer norm and RMS norm over the last dimension, forward and backward, on matrices: x (N, D), weight and bias (D,).

    layer    x̂ = (x − mean(x)) r,   r = 1/√(var(x) + ε)     dx = r (gw − mean(gw) − x̂ mean(gw x̂)),   gw = g · weight
    rms      x̂ = x r,               r = 1/√(mean(x²) + ε)   dx = r (gw − x̂ mean(gw x̂))
    y = x̂ · weight + bias           dweight = Σ_rows g x̂,   dbias = Σ_rows g

Each is one frozen record in `NORMS`, with the same two functions:

    y, statistics = forward(x, weight, bias, eps, out)
    dx, dweight, dbias = backward(g, x, statistics, weight, bias, needs, into)

`out` may have another dtype than x: then y is rounded into it. `into` may be g. `needs`: whether dweight and dbias are
needed. The statistics, one or two numbers per row, belong to the x from which they were computed, and are cheap to
compute again.

[Note: rows at a time] Torch has no norm that writes into a given buffer: its `out=` computes a new map and copies it.
On a CPU, where new memory costs page faults, a few rows at a time are processed instead, through scratch that stays in
cache. A norm works row by row, so the bits are those of one call. (The sums over rows of a layer norm are computed in
one call, since torch has one that computes nothing else.)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad._torch import fused_rms_norm, fused_rms_norm_backward

__all__ = ["NORMS", "Norm", "Statistics"]

Statistics = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor | None, Tensor | None]

# Elements that are processed at a time: small enough to stay in cache, large enough that the calls cost little.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Norm:
    """One kind of norm: its forward and its backward.

    >>> y, statistics = NORMS["layer"].forward(torch.tensor([[1.0, 3.0]]), None, None, 0.0, None)
    >>> y, len(statistics)
    (tensor([[-1.,  1.]]), 2)
    """

    name: str
    forward: Callable[[Tensor, Tensor | None, Tensor | None, float, Tensor | None], tuple[Tensor, Statistics]]
    backward: Callable[
        [Tensor, Tensor, Statistics, Tensor | None, Tensor | None, tuple[bool, bool], Tensor | None], Gradients
    ]


def _fits(x: Tensor) -> bool:
    """Whether x is processed as one chunk: it is small, or on a device whose caching allocator keeps freed memory."""
    return x.numel() <= _CHUNK or not x.is_cpu


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the same few rows of each tensor at a time."""
    first = tensors[0]
    if _fits(first):
        return iter((tensors,))
    return zip(*(t.split(max(1, _CHUNK // first.shape[1])) for t in tensors), strict=True)


def _joined(parts: list[Statistics]) -> Statistics:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(part) for part in zip(*parts, strict=True))


# layer norm


def _layer(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor | None
) -> tuple[Tensor, Statistics]:
    if out is None:
        y, *statistics = torch.native_layer_norm(x, x.shape[1:], weight, bias, eps)
        return y, tuple(statistics)
    parts: list[Statistics] = []
    for x_c, out_c in _chunks(x, out):
        y, *statistics = torch.native_layer_norm(x_c, x.shape[1:], weight, bias, eps)
        out_c.copy_(y)
        parts.append(tuple(statistics))
    return out, _joined(parts)


def _layer_backward(
    g: Tensor,
    x: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, bool],
    into: Tensor | None,
) -> Gradients:
    backward, shape = torch.ops.aten.native_layer_norm_backward.default, x.shape[1:]
    at_once = into is None or _fits(x)
    dx, dweight, dbias = backward(g, x, shape, *statistics, weight, bias, (at_once, *needs))
    if into is None:
        return dx, dweight, dbias
    if at_once:
        return into.copy_(dx), dweight, dbias
    for into_c, g_c, x_c, mean_c, rstd_c in _chunks(into, g, x, *statistics):
        into_c.copy_(backward(g_c, x_c, shape, mean_c, rstd_c, weight, bias, (True, False, False))[0])
    return into, dweight, dbias


# RMS norm: one fused kernel if torch has it, else the formula, in float32 or wider, as in torch's own composite


def _rms(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor | None
) -> tuple[Tensor, Statistics]:
    assert bias is None, "an RMS norm has no bias"
    if out is None:
        y, rstd = _rms_rows(x, weight, eps)
        return y, (rstd,)
    parts: list[Statistics] = []
    for x_c, out_c in _chunks(x, out):
        y, rstd = _rms_rows(x_c, weight, eps)
        out_c.copy_(y)
        parts.append((rstd,))
    return out, _joined(parts)


def _rms_rows(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    fused = fused_rms_norm(x, weight, eps)
    if fused is not None:
        return fused
    rstd = _wide(x).square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return F.rms_norm(x, x.shape[1:], weight, eps), rstd


def _rms_backward(
    g: Tensor,
    x: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, bool],
    into: Tensor | None,
) -> Gradients:
    (rstd,) = statistics
    fused = fused_rms_norm_backward(g, x, rstd, weight, needs[0])
    if fused is not None:
        return fused[0] if into is None else into.copy_(fused[0]), fused[1], None
    into = torch.empty_like(x) if into is None else into
    wide_weight = None if weight is None else _wide(weight)
    sums: list[Tensor] = []  # one per chunk: adding each to a running sum would round once per chunk
    for into_c, g_c, x_c, r in _chunks(into, g, x, rstd):
        wide_x, gw = _wide(x_c), _wide(g_c)
        if needs[0]:
            sums.append((gw * (wide_x * r)).sum(0))
        if wide_weight is not None:
            gw = gw * wide_weight
        # As autograd computes it, product by product, for the same bits: g w r − x (r³ Σ g w x)/D.
        slope = (gw * wide_x).sum(-1, keepdim=True).mul_(-0.5).mul_(r.pow(3)).div_(x.shape[1])
        into_c.copy_((gw * r).add_((2 * wide_x).mul_(slope)))
    dweight = torch.stack(sums).sum(0).to(weight.dtype) if sums and weight is not None else None
    return into, dweight, None


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


NORMS: dict[str, Norm] = {
    "layer": Norm("layer", _layer, _layer_backward),
    "rms": Norm("rms", _rms, _rms_backward),
}
