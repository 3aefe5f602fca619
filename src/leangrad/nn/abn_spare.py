"""Which channels of a layer that inverts its output must keep their input as well: the spare ones.

[Note: which channels invert] z is rounded to its dtype, so x̂ = (act⁻¹(z) − β)/γ̂ carries that rounding times
(|x̂| + |β/γ̂|), for elu also times e^−y. A channel inverts if this stays small, and if γ̂ is not so small that z is
subnormal.

[Note: asking the device] That depends on γ and β alone. But these live on the device, and how much is kept must be
known on the host: somebody has to wait. Waiting in every layer would empty the device's queue fifty times in a step, so
the first layer of a pass asks for all layers at once, and the others find their answers. An answer serves one forward,
and only until a version counter moves or a backward of such a layer has run: after that optimizers write parameters,
some of them behind the counter. What is left, a write to `.data` between the question and the forward, is seen by the
forward itself: it makes such a channel's kept weight NaN, and with it the gradient.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from leangrad._torch import version
from leangrad.kernels import INTERPRETED, serves
from leangrad.ops.abn import Activation

__all__ = ["Limits", "limits_of", "note_backward", "poison", "spare_channels"]


class Limits(NamedTuple):
    """A channel inverts if γ̂ ≥ `lower`, |β| ≤ `ratio`·γ̂ and 6·γ̂ + |β| ≤ `upper`, where γ̂ is |γ| + `shift`."""

    lower: float
    ratio: float
    upper: float
    shift: float

    def wider(self) -> Limits:
        """Limits that nobody passes who keeps to these, however the comparison is rounded."""
        return Limits(self.lower / 2, 2 * self.ratio, 2 * self.upper, self.shift)


@lru_cache
def limits_of(act: Activation, dtype: torch.dtype, shift: float) -> Limits:
    """See [Note: which channels invert]."""
    info = torch.finfo(dtype)
    slope = min(1.0, act.param) if act.name == "leaky_relu" else 1.0
    upper = -0.5 * math.log(info.eps) if act.name == "elu" else math.inf
    return Limits(info.smallest_normal / slope, 4.0, upper, shift)


@dataclass
class Answer:
    """What the device said about one layer."""

    weight: Tensor
    bias: Tensor | None
    versions: tuple[int, int]
    limits: Limits
    passes: int
    channels: Tensor | None
    used: bool = False

    def serves(self, weight: Tensor, bias: Tensor | None, limits: Limits) -> bool:
        """Whether it still holds, for one forward."""
        same = not self.used and self.weight is weight and self.bias is bias and self.limits == limits
        return same and self.passes == _passes and self.versions == _versions(weight, bias)


_answers: WeakKeyDictionary[Any, Answer] = WeakKeyDictionary()
_passes = 0


def note_backward() -> None:
    """Parameters may change from now on, also behind their version counters."""
    global _passes
    _passes += 1


def spare_channels(layer: Any, weight: Tensor | None, bias: Tensor | None, limits: Limits) -> Tensor | None:
    """The channels of `layer` that cannot be inverted, or None; see [Note: asking the device]."""
    if weight is None:
        return None  # γ = 1, β = 0
    if not (weight.is_cuda or INTERPRETED) or weight.dtype == torch.float64:
        channels = _unfit(weight.detach(), bias, *limits).nonzero().squeeze(1)
        return channels if channels.numel() else None
    answer = _answers.get(layer)
    if answer is None or not answer.serves(weight, bias, limits):
        _ask({layer: limits, **_others(layer, weight.device)})
        answer = _answers[layer]
    answer.used = True
    return answer.channels


def poison(vectors: Tensor, channels: Tensor | None, limits: Limits) -> None:
    """Make γ̂ NaN in the channels that do not invert and are not spare: their gradients must not look right."""
    unfit = _unfit(vectors[2], vectors[3], *limits.wider()._replace(shift=0.0))
    if channels is not None:
        unfit.index_fill_(0, channels, False)
    vectors[2].masked_fill_(unfit, math.nan)


def _versions(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    return version(weight), -1 if bias is None else version(bias)


def _unfit(weight: Tensor, bias: Tensor | None, lower: Any, ratio: Any, upper: Any, shift: Any) -> Tensor:
    gamma = weight.abs() + shift
    beta = torch.zeros_like(gamma) if bias is None else bias.detach().abs()
    fits: Tensor = (gamma >= lower) & (beta <= ratio * gamma) & (6 * gamma + beta <= upper)
    return fits.logical_not_()


def _others(first: nn.Module, device: torch.device) -> dict[Any, Limits]:
    """The other layers that have asked before and whose parameters are there to be read."""
    return {
        layer: answer.limits
        for layer, answer in _answers.items()
        if layer is not first and all(_is_there(t, layer.num_features, device) for t in (layer.weight, layer.bias))
    }


def _is_there(t: Tensor | None, size: int, device: torch.device) -> bool:
    """Whether `t` has memory on this device. Sharded and offloaded parameters have it during their own forward only."""
    if type(t) not in (Tensor, nn.Parameter) or t is None or t.numel() != size or t.device != device:
        return False
    return t.untyped_storage().nbytes() >= (t.storage_offset() + size) * t.element_size()


@cache
def _kernels() -> Any:
    """Imported on first use: Triton is not everywhere."""
    return importlib.import_module("leangrad.kernels.abn")


def _ask(layers: dict[Any, Limits]) -> None:
    """One question to the device for all layers, and one wait; another one for each layer that has such channels."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    counts = [1] * len(layers)
    if all(
        _is_plain(t, layer, weights[0].device)
        for both in (weights, biases)
        for t, layer in zip(both, layers, strict=True)
    ):
        counts = _kernels().unfit_counts(weights, biases, tuple(layers.values()), weights[0].device)
    for (layer, limits), weight, bias, count in zip(layers.items(), weights, biases, counts, strict=True):
        channels = _unfit(weight.detach(), bias, *limits).nonzero().squeeze(1) if count else None
        if channels is not None and channels.numel() == 0:
            channels = None
        _answers[layer] = Answer(weight, bias, _versions(weight, bias), limits, _passes, channels)


def _is_plain(t: Tensor | None, layer: Any, device: torch.device) -> bool:
    """Whether the kernel can read this weight or bias by its address."""
    if t is None or not serves(t) or t.dtype != torch.float32 or not t.is_contiguous():
        return False
    return _is_there(t, layer.num_features, device)
