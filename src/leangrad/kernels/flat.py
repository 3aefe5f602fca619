"""Passes over many flat buffers at once, at memory bandwidth: their norms, and their product with a factor.

    norms of pieces:  sqrt(Σ x²)                       product:  out = x · factor, rounded once

torch multiplies a bfloat16 vector by a float32 number on the device at a quarter of an H200's memory bandwidth, because
its kernel for mixed operands loads element by element. It computes the norm of many vectors at half the bandwidth.

[Note: tables]
One launch processes all buffers, because a launch takes the host longer than a buffer takes the device. The kernel gets
a table with one column for each buffer: the number of its first piece, the address to read, the address to write, the
number of elements. A program finds its buffer by its program id. The table is copied to the device once, and reused as
long as the buffers keep their addresses.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from leangrad._torch import raw_stream

__all__ = ["piece_norms", "scale"]

BLOCK, WARPS = 4096, 8
PIECE = 4 * BLOCK
ALIGNMENT = 16  # of counts (elements) and addresses (bytes): allows vector loads

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _place(
    table_ptr, ROW: tl.constexpr, TYPE: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The address in ROW of the table of this program's buffer, the first element of its piece, the buffer's end."""
    piece = tl.program_id(0)
    firsts = tl.load(table_ptr + tl.arange(0, COLUMNS))
    column = tl.sum((firsts <= piece).to(tl.int32), 0) - 1
    start = (piece - tl.load(table_ptr + column)) * PIECE
    end = tl.load(table_ptr + 3 * COLUMNS + column)
    pointer = tl.load(table_ptr + ROW * COLUMNS + column).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer, end = tl.multiple_of(pointer, 16), tl.multiple_of(end, 16)
    return pointer, start, end


@triton.jit
def _norm_kernel(
    table_ptr, norms_ptr,
    TYPE: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    x_ptr, start, end = _place(table_ptr, 1, TYPE, COLUMNS, ALIGNED, PIECE)
    total = tl.zeros((BLOCK,), tl.float32)
    for offset in tl.static_range(0, PIECE, BLOCK):
        i = start + offset + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < end, other=0.0).to(tl.float32)
        total += x * x
    tl.store(norms_ptr + tl.program_id(0), tl.sqrt(tl.sum(total, 0)))


@triton.jit
def _scale_kernel(
    table_ptr, factor_ptr,
    TYPE: tl.constexpr, OUT_TYPE: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    x_ptr, start, end = _place(table_ptr, 1, TYPE, COLUMNS, ALIGNED, PIECE)
    out_ptr, _, _ = _place(table_ptr, 2, OUT_TYPE, COLUMNS, ALIGNED, PIECE)
    factor = tl.load(factor_ptr)
    for offset in tl.static_range(0, PIECE, BLOCK):
        i = start + offset + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < end, other=0.0).to(tl.float32)
        tl.store(out_ptr + i, (x * factor).to(OUT_TYPE), mask=i < end)


class _Table:
    """A table on the device: see [Note: tables]. `places`: (read address, write address, elements) of each buffer."""

    def __init__(self, places: tuple[tuple[int, int, int], ...], device: torch.device) -> None:
        pieces = [triton.cdiv(count, PIECE) for _, _, count in places]
        self.pieces = sum(pieces)
        self.columns = max(16, triton.next_power_of_2(len(places)))
        self.is_aligned = all(value % ALIGNMENT == 0 for place in places for value in place)
        padding = [(torch.iinfo(torch.int64).max, 0, 0, 0)] * (self.columns - len(places))
        firsts = accumulate(pieces[:-1], initial=0)
        columns = [(first, *place) for first, place in zip(firsts, places, strict=True)] + padding
        on_host = torch.tensor(list(zip(*columns, strict=True)), pin_memory=device.type == "cuda")
        self.tensor = on_host.to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _table(places: tuple[tuple[int, int, int], ...], device: torch.device, stream: int) -> _Table:
    """The table for buffers with these addresses and sizes, copied to the device on this stream; cached."""
    return _Table(places, device)


def _table_of(flats: Sequence[Tensor], outs: Sequence[Tensor]) -> _Table:
    device = flats[0].device
    places = tuple((flat.data_ptr(), out.data_ptr(), flat.numel()) for flat, out in zip(flats, outs, strict=True))
    return _table(places, device, raw_stream(device) if device.type == "cuda" else 0)


def piece_norms(flats: Sequence[Tensor]) -> Tensor:
    """The 2-norms of all pieces of the vectors, in float32; the vectors share a device and a dtype.

    The norm of these norms is that of all vectors together.
    """
    table = _table_of(flats, flats)
    norms = torch.empty(table.pieces, dtype=torch.float32, device=flats[0].device)
    with torch.cuda.device(flats[0].device) if flats[0].is_cuda else nullcontext():
        _norm_kernel[(table.pieces,)](
            table.tensor, norms, _TYPES[flats[0].dtype], table.columns, table.is_aligned, PIECE, BLOCK, num_warps=WARPS
        )
    return norms


def scale(flats: Sequence[Tensor], factor: Tensor, outs: Sequence[Tensor]) -> None:
    """`out = flat * factor` for each pair, computed in float32. `factor` is one float32 number on the device.

    All flats share a device and a dtype, and so do all outs, which may be the flats themselves.
    """
    table = _table_of(flats, outs)
    with torch.cuda.device(flats[0].device) if flats[0].is_cuda else nullcontext():
        _scale_kernel[(table.pieces,)](
            table.tensor, factor, _TYPES[flats[0].dtype], _TYPES[outs[0].dtype],
            table.columns, table.is_aligned, PIECE, BLOCK, num_warps=WARPS,
        )  # fmt: skip
