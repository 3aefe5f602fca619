"""Asking the device which layers of in-place batch norm have channels that do not invert; see nn/abn_spare.py."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from leangrad.kernels.launch import Launch, stream_for

__all__ = ["Question"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of parameters, as `_magnitudes` counts them


@triton.jit
def _magnitudes(address, dtype, c, inside):
    """|values| at an address."""
    if dtype == 0:
        v = tl.load(address.to(tl.pointer_type(tl.float32)) + c, mask=inside, other=0.0)
    elif dtype == 1:
        v = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + c, mask=inside, other=0.0).to(tl.float32)
    else:
        v = tl.load(address.to(tl.pointer_type(tl.float16)) + c, mask=inside, other=0.0).to(tl.float32)
    return tl.abs(v)


@triton.jit(do_not_specialize=["mark"])
def unfit_kernel(rows_ptr, limits_ptr, out_ptr, mark, BLOCK: tl.constexpr):
    """2·mark for each layer, or one more if a channel does not invert; a row is (γ's address, β's, channels, dtype)."""
    row = tl.program_id(0)
    weights, biases = tl.load(rows_ptr + 4 * row), tl.load(rows_ptr + 4 * row + 1)
    C, dtype = tl.load(rows_ptr + 4 * row + 2).to(tl.int32), tl.load(rows_ptr + 4 * row + 3)
    lower, ratio = tl.load(limits_ptr + 4 * row), tl.load(limits_ptr + 4 * row + 1)
    upper, shift = tl.load(limits_ptr + 4 * row + 2), tl.load(limits_ptr + 4 * row + 3)
    unfit = tl.zeros([BLOCK], tl.int32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        gamma, beta = _magnitudes(weights, dtype, c, c < C) + shift, _magnitudes(biases, dtype, c, c < C)
        fits = (gamma >= lower) & (beta <= ratio * gamma) & (6 * gamma + beta <= upper)
        unfit = tl.maximum(unfit, tl.where(fits | (c >= C), 0, 1))
    tl.store(out_ptr + row, 2 * mark + tl.max(unfit, 0))


class Question:
    """Which of many layers have channels that do not invert, asked again and again for the same parameters."""

    def __init__(self, layers: list[tuple[Any, tuple[float, ...]]], device: torch.device) -> None:
        """Take (γ's address, β's, channels, dtype) of each layer, and its limits, both as in nn/abn_spare.py."""
        self.device = device
        rows = [(*row[:3], DTYPES.index(row[3])) for row, _ in layers]
        self._rows = torch.tensor(rows, dtype=torch.int64).to(device)
        self._limits = torch.tensor([limits for _, limits in layers], dtype=torch.float32).to(device)
        self._launch = Launch(unfit_kernel, device, (len(layers),), (512,), 4)

    def __call__(self, mark: int, out: Tensor) -> None:
        """Write a word for each layer into `out`, which may be pinned memory of the host; does not wait."""
        self._launch(stream_for(self.device), (self._rows, self._limits, out), (mark,))
