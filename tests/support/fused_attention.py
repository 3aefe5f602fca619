"""A stand-in on a CPU for the fused attention of CUDA, whose kernel draws its own dropout.

`aten::_scaled_dot_product_efficient_attention` gets kernels for a CPU, and `F.scaled_dot_product_attention` calls it
there, so that autograd makes the very node that it makes on CUDA. The kernels draw from `Philox`, which has what the
ledger asks of a CUDA generator: a seed and an offset that each draw moves on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from leangrad.ledger.observe import rng

aten: Any = torch.ops.aten


class Philox:
    """A generator of masks."""

    def __init__(self) -> None:
        self._seed = self._offset = 0
        self.draws = 0

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def manual_seed(self, seed: int) -> None:
        self._seed, self._offset = seed, 0

    def set_offset(self, offset: int) -> None:
        self._offset = offset

    def draw(self, count: int) -> tuple[int, int]:
        """Move on by ``count`` numbers; the state before."""
        before = self._seed, self._offset
        self._offset += 4 * math.ceil(count / 4)
        self.draws += 1
        return before

    @property
    def state(self) -> tuple[int, int]:
        return self._seed, self._offset


def _mask(shape: torch.Size, p: float, seed: int, offset: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + offset)
    return torch.rand(shape, generator=generator, dtype=torch.float64) >= p


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


@contextmanager
def efficient_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Philox]:
    """In this context attention with dropout on a CPU is one op that draws from the generator which is handed out."""
    philox = Philox()

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Any,
        lse: bool,
        p: float = 0.0,
        causal: bool = False,
        *,
        scale: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weights, log_sum = _weights(q, k, bias, causal, scale or q.shape[-1] ** -0.5)
        seed, offset = philox.draw(weights.numel()) if p else (0, 0)
        if p:
            weights = weights * _mask(weights.shape, p, seed, offset) / (1 - p)
        return weights @ v, log_sum, torch.tensor(seed), torch.tensor(offset)

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Any,
        out: Tensor,
        log_sum: Tensor,
        seed: Tensor,
        offset: Tensor,
        p: float,
        needed: Any,
        causal: bool = False,
        *,
        scale: Any = None,
    ) -> tuple[Tensor, ...]:
        scale = scale or q.shape[-1] ** -0.5
        weights, _ = _weights(q, k, bias, causal, scale)
        kept = _mask(weights.shape, p, int(seed), int(offset)) / (1 - p) if p else torch.ones(())
        kept = kept.to(q.dtype)
        towards = (grad @ v.transpose(-1, -2)) * kept
        # Plain reads the output itself here, so that an output of other bits gives other gradients.
        scores = weights * (towards - (grad * out).sum(-1, keepdim=True))
        along_bias = scores.sum_to_size(bias.shape) if bias is not None else torch.empty(0)
        return (
            scores @ k * scale,
            scores.transpose(-1, -2) @ q * scale,
            (weights * kept).transpose(-1, -2) @ grad,
            along_bias,
        )

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False, **options: Any
    ) -> Any:
        scale = options.get("scale")
        return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, p, causal, scale=scale)[0]

    monkeypatch.setattr(rng, "state_of", lambda device: philox.state)
    monkeypatch.setattr(rng, "_cuda_generator", lambda device: philox)
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
        library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
        library.impl("scaled_dot_product_attention", attend, "AutogradCPU")
        yield philox
