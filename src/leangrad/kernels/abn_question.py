"""Checks on the device which layers of in-place batch norm have channels that do not invert.

nn/abn/invertibility.py says which channels these are, and when they are checked.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from leangrad.kernels.abn_passes import share
from leangrad.kernels.launch import Launch, stream_for

__all__ = ["BLOCK", "Question", "asking_stats_kernel"]

BLOCK = 512  # channels that are checked at a time
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of parameters; `_magnitudes` takes the index


@triton.jit
def _magnitudes(address, dtype, c, inside):
    """Load |values| from an address; `dtype` is an index in `DTYPES`."""
    if dtype == 0:
        v = tl.load(address.to(tl.pointer_type(tl.float32)) + c, mask=inside, other=0.0)
    elif dtype == 1:
        v = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + c, mask=inside, other=0.0).to(tl.float32)
    else:
        v = tl.load(address.to(tl.pointer_type(tl.float16)) + c, mask=inside, other=0.0).to(tl.float32)
    return tl.abs(v)


@triton.jit
def _answer(rows_ptr, limits_ptr, words_ptr, mark, row, BLOCK: tl.constexpr):
    """Write the word of one layer: 2·mark, or 2·mark + 1 if one of its channels does not invert."""
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
    tl.store(words_ptr + row, 2 * mark + tl.max(unfit, 0), cache_modifier=".wt")  # written through: the host waits


@triton.jit(do_not_specialize=["mark"])
def unfit_kernel(rows_ptr, limits_ptr, words_ptr, mark, BLOCK: tl.constexpr):
    """Write the word of each layer, as `_answer` does; one layer per program."""
    _answer(rows_ptr, limits_ptr, words_ptr, mark, tl.program_id(0), BLOCK)


@triton.jit(do_not_specialize=["mark", "layers"])
def asking_stats_kernel(
    x_ptr, table_ptr, rows_ptr, limits_ptr, words_ptr, mark, layers, M, C, S, tiles, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the word of each layer, then do as `stats_kernel`: the host gets the words before the map is read."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    for row in range(tl.program_id(0) * splits + split, layers, tl.num_programs(0) * splits):
        _answer(rows_ptr, limits_ptr, words_ptr, mark, row, BLOCK)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    center, m2 = share(x_ptr, c, split, splits, M, C, S, tiles, ROWS, WIDE, BLOCK_M, BLOCK_C)
    at = table_ptr + split * C + c
    tl.store(at, center, mask=c < C)
    tl.store(at + splits * C, m2, mask=c < C)


class Question:
    """Finds which of many layers have channels that do not invert, repeatedly for the same parameters."""

    def __init__(self, layers: list[tuple[Any, tuple[float, ...]]], device: torch.device) -> None:
        """`layers`: (address of γ, of β, channels, dtype) and limits of each layer, as in nn/abn/invertibility.py."""
        rows = [(*row[:3], DTYPES.index(row[3])) for row, _ in layers]
        self.device, self.layers = device, len(layers)
        self.rows = torch.tensor(rows, dtype=torch.int64).to(device)
        self.limits = torch.tensor([limits for _, limits in layers], dtype=torch.float32).to(device)
        self._launch = Launch(unfit_kernel, device, (len(layers),), (BLOCK,), 4)

    def ask(self, mark: int, words: Tensor) -> None:
        """Launch a kernel that writes one word per layer to `words`, which may be pinned host memory; does not wait."""
        self._launch(stream_for(self.device), (self.rows, self.limits, words), (mark,))
