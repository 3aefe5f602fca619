"""The end of the attention context's backward in one pass over its maps: dX = g + (s/D)·P, and Σ X⊙P in float64.

Each Triton program sums its tiles and stores one float64 in a table. There are no atomics, so the sum does not depend
on timing. Without this kernel dX takes a pass of its own, and the sum takes three passes for every chunk.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["finish_backward"]

BLOCK, WARPS = 2048, 8
PROGRAMS = 4  # per multiprocessor


@triton.jit
def _finish_kernel(
    g_ptr, p_ptr, x_ptr, strength_ptr, dx_ptr, table_ptr,
    n, width, tiles,
    NEEDS_INPUT: tl.constexpr, NEEDS_STRENGTH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    scale = tl.load(strength_ptr).to(tl.float32) / width
    total = tl.zeros((BLOCK,), tl.float64)
    for tile in range(program, tiles, tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        if WIDE:
            i = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        p = tl.load(p_ptr + i, mask=i < n, other=0.0).to(tl.float32)
        if NEEDS_STRENGTH:
            x = tl.load(x_ptr + i, mask=i < n, other=0.0)
            total += x.to(tl.float64) * p.to(tl.float64)
        if NEEDS_INPUT:
            g = tl.load(g_ptr + i, mask=i < n, other=0.0).to(tl.float32)
            tl.store(dx_ptr + i, g + scale * p, mask=i < n)
    if NEEDS_STRENGTH:
        tl.store(table_ptr + program, tl.sum(total, 0))


def finish_backward(g: Tensor, p: Tensor, x: Tensor | None, strength: Tensor, into: Tensor | None) -> Tensor | None:
    """Write g + (s/D)·P to `into`, if given (it may be g), and return Σ X⊙P if x is given. All maps are contiguous."""
    n = g.numel()
    tiles = triton.cdiv(n, BLOCK)
    programs = min(tiles, PROGRAMS * _processors(g.device))
    table = torch.empty(programs, dtype=torch.float64, device=g.device)
    with torch.cuda.device(g.device) if g.is_cuda else nullcontext():
        _finish_kernel[(programs,)](
            g, p, g if x is None else x, strength, g if into is None else into, table,
            n, g.shape[-1], tiles,
            into is not None, x is not None, n + BLOCK >= 2**31, BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return None if x is None else table.sum()


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
