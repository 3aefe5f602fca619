"""A short convolution over time that sees the past only, and can go on where it stopped."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CausalConv"]


class CausalConv(nn.Conv1d):
    """A depthwise convolution over time: each channel by itself, each step from the last `kernel` ones.

    Equals `F.conv1d(x.mT, weight, bias, groups=width, padding=kernel - 1)[..., :T].mT`, and has the parameters of that
    `nn.Conv1d`. Keeps the caller's own x for backward.

    Called with the last inputs of the part before, (batch, kernel − 1, width), it goes on from there.

    >>> conv = CausalConv(3, kernel=4)
    >>> x = torch.randn(2, 9, 3)
    >>> whole, _ = conv(x)
    >>> first, tail = conv(x[:, :2], conv.initial_state(2))
    >>> rest, tail = conv(x[:, 2:], tail)
    >>> torch.allclose(torch.cat([first, rest], 1), whole, atol=1e-6), tail.shape
    (True, torch.Size([2, 3, 3]))
    """

    def __init__(self, width: int, kernel: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        if not isinstance(kernel, int) or kernel < 1:
            raise ValueError(f"kernel: expected a positive int, got {kernel!r}")
        super().__init__(width, width, kernel, groups=width, padding=kernel - 1, device=device, dtype=dtype)

    def initial_state(self, batch: int) -> Tensor:
        """Zeros, (batch, kernel − 1, width)."""
        return self.weight.new_zeros(batch, self.kernel_size[0] - 1, self.in_channels)

    def forward(self, x: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """(batch, T, width) to the same, and the new tail where there was one."""
        before = self.kernel_size[0] - 1
        if tail is None:
            return self._convolve(x)[:, : x.shape[1]].contiguous(), None
        if tail.shape != (x.shape[0], before, x.shape[2]):
            expected = (x.shape[0], before, x.shape[2])
            raise ValueError(f"state: expected the last inputs of the convolution, {expected}, got {tuple(tail.shape)}")
        x = torch.cat([tail.to(x.dtype), x], 1)
        steps = slice(before, x.shape[1])
        return self._convolve(x)[:, steps].contiguous(), x[:, x.shape[1] - before :].clone()

    def _convolve(self, x: Tensor) -> Tensor:
        """With `kernel − 1` steps more at the end. Contiguous afterwards, as the scan and the projections read it."""
        if x.shape[1] == 0:  # torch refuses to convolve nothing
            return x
        return super().forward(x.mT).mT
