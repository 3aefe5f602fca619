"""A short causal convolution over time, which can process a sequence in parts."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CausalConv"]


class CausalConv(nn.Conv1d):
    """A causal depthwise convolution over time: each channel by itself, each output from the last `kernel` inputs.

    Equals `F.conv1d(x.mT, weight, bias, groups=width, padding=kernel - 1)[..., :T].mT`, and has the parameters of that
    `nn.Conv1d`. Keeps the caller's own x for backward; with a tail, a copy of the tail and x.

    To process a sequence in parts, pass the last inputs of the previous part as `tail`, (batch, kernel − 1, width);
    then the new tail is returned too.

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
        """Returns the tail of an empty sequence: zeros, (batch, kernel − 1, width)."""
        return self.weight.new_zeros(batch, self.kernel_size[0] - 1, self.in_channels)

    def forward(self, x: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Returns the outputs for x of (batch, T, width), in the same shape, and the new tail; None without `tail`."""
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
        """Returns the convolution of x, with `kernel − 1` more steps at the end.

        Callers drop these steps and make the result contiguous, because the scan and the projections read it so.
        """
        if x.shape[1] == 0:  # torch raises on an empty input
            return x
        return super().forward(x.mT).mT
