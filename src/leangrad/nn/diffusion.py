"""`DiffusionBlock`, a Transformer block with a condition such as the timestep; EDM preconditioning; time embeddings.

Preconditioning (Karras et al. 2022), for data of standard deviation σ_d and a noise level σ, σ² = (1 − ᾱ)/ᾱ:

    D(x; σ) = c_skip x + c_out F(c_in x)        c_in = 1/√(σ² + σ_d²)    c_skip = σ_d²/(σ² + σ_d²)
                                                c_out = σ σ_d/√(σ² + σ_d²)

so that both the input and the target of the network F have variance 1 at every noise level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.nn.transformer import Film, ResidualBlock

__all__ = ["DiffusionBlock", "Preconditioning", "embed_time", "precondition"]


class DiffusionBlock(ResidualBlock):
    """A `TransformerBlock` whose norms are scaled and shifted by a condition, such as an embedding of the timestep.

    Equals, on the modules of the same names that it consists of::

        scale1, shift1, scale2, shift2 = film(silu(condition)).unsqueeze(1).chunk(4, -1)
        r = x + dropout(attention(norm1(x) * (1 + scale1) + shift1))
        y = r + dropout(ffn(norm2(r) * (1 + scale2) + shift2))

    The weight and bias of `film` are zero at first, so the condition has no effect at the start of training. Keeps for
    backward the same as a `TransformerBlock`, and the scales and shifts, 4·B·width elements. `options` are those of
    `TransformerBlock`.

    >>> block = DiffusionBlock(16, 4, condition_width=8)
    >>> block(torch.ones(2, 5, 16), embed_time(torch.tensor([1.0, 10.0]), 8)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, width: int, heads: int, *, condition_width: int, **options: Any):
        super().__init__(width, heads, **options)
        if not isinstance(condition_width, int) or condition_width < 1:
            raise ValueError(f"condition_width: expected a positive int, got {condition_width!r}")
        place: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        self.condition_width = condition_width
        self.film = nn.Linear(condition_width, 4 * width, **place)
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns (B, T, width) for x of (B, T, width) and a condition of (B, condition_width).

        mask: as in `TransformerBlock`.
        """
        return self._run(x, mask, self._film_of(x, condition))

    def plain(self, x: Tensor, condition: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the same on autograd's own ops: the child modules of the block, one after another."""
        return self._run_plain(x, mask, self._film_of(x, condition))

    def _film_of(self, x: Tensor, condition: Tensor) -> Film:
        self._check(x)
        if not isinstance(condition, Tensor) or condition.shape != (x.shape[0], self.condition_width):
            found = tuple(condition.shape) if isinstance(condition, Tensor) else type(condition).__name__
            raise ValueError(f"condition: expected ({x.shape[0]}, {self.condition_width}), got {found}")
        scale1, shift1, scale2, shift2 = self.film(F.silu(condition)).chunk(4, -1)
        return scale1, shift1, scale2, shift2


@dataclass(frozen=True)
class Preconditioning:
    """EDM coefficients of the noise levels `sigma`: `input` is c_in, `skip` c_skip, `output` c_out; all of one shape.

    >>> c = precondition(torch.tensor([2.0]), data_std=1.0)
    >>> c.skip
    tensor([0.2000])
    """

    sigma: Tensor
    input: Tensor
    skip: Tensor
    output: Tensor

    def denoise(self, network: Any, x: Tensor) -> Tensor:
        """Returns D(x; σ) = c_skip x + c_out F(c_in x) for F = `network`; σ belongs to the first dimension of x.

        >>> x = torch.randn(3, 2)
        >>> c = precondition(torch.zeros(3))
        >>> torch.equal(c.denoise(torch.zeros_like, x), x)  # where there is no noise, nothing is changed
        True
        """
        c_in, c_skip, c_out = (c.reshape(-1, *[1] * (x.dim() - 1)) for c in (self.input, self.skip, self.output))
        y: Tensor = c_skip * x + c_out * network(c_in * x)
        return y

    @property
    def loss_weight(self) -> Tensor:
        """The loss weight 1/c_out², which makes the loss of the network F the same at every noise level."""
        return self.output.square().reciprocal()


def precondition(
    sigma: Tensor | None = None, *, alpha_bar: Tensor | None = None, data_std: float = 0.5
) -> Preconditioning:
    """Returns the EDM coefficients for noise levels, which are given as σ or as ᾱ, with σ² = (1 − ᾱ)/ᾱ.

    >>> precondition(alpha_bar=torch.tensor([0.5])).sigma
    tensor([1.])
    """
    if (sigma is None) == (alpha_bar is None):
        raise ValueError("sigma and alpha_bar: expected one of the two, got " + ("none" if sigma is None else "both"))
    if not data_std > 0:
        raise ValueError(f"data_std: expected a positive number, got {data_std}")
    if sigma is None:
        assert alpha_bar is not None
        sigma = ((1 - alpha_bar) / alpha_bar).sqrt()
    variance = sigma.square() + data_std**2
    return Preconditioning(sigma, variance.rsqrt(), data_std**2 / variance, sigma * data_std * variance.rsqrt())


def embed_time(time: Tensor, width: int, longest: float = 10_000.0) -> Tensor:
    """Returns the embedding (B, width) of times (B,): cosines, then sines, with frequencies from 1 towards 1/longest.

    >>> embed_time(torch.zeros(1), 4)
    tensor([[1., 1., 0., 0.]])
    """
    if time.dim() != 1:
        raise ValueError(f"time: expected one dimension, got {tuple(time.shape)}")
    if width < 2 or width % 2:
        raise ValueError(f"width: expected an even number, got {width}")
    dtype = torch.promote_types(time.dtype, torch.float32)
    powers = torch.arange(width // 2, device=time.device, dtype=dtype) / (width // 2)
    angles = time.to(dtype).unsqueeze(1) * torch.exp(-math.log(longest) * powers)
    return torch.cat([angles.cos(), angles.sin()], 1)
