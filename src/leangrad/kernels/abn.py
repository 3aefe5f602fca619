"""Activated batch norm on CUDA: how a map is cut into tiles, and the launches for a layer.

Maps are used as they are, dense and all of one layout: channels as the fastest dimension (`rows`), or planes. A layer's
forward takes two launches, and so does its backward; over a small map each takes one. `leangrad.kernels.abn_passes`
says why.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from leangrad.kernels import abn_passes as passes
from leangrad.kernels.abn_question import BLOCK, Question, asking_stats_kernel
from leangrad.kernels.launch import Launch, scratch, stream_for

__all__ = ["Kind", "Layer", "layer"]


class Shape(NamedTuple):
    """How the work of one pass is divided among Triton programs."""

    tile: int  # elements per tile
    warps: int
    programs: int  # per multiprocessor; the registers of all of them must fit at once


# Each thread loads 32 bytes of bf16 per map and tile, or 16 bytes if it also holds sums. That takes 64 or 80
# registers, so that this many programs fit on a multiprocessor at once. More of them would only lengthen the table of
# partial results.
FORWARD = Shape(tile=8192, warps=16, programs=2)
BACKWARD = Shape(tile=2048, warps=8, programs=3)
SINGLE = Shape(tile=4096, warps=8, programs=4)  # one tile per program
MERGED = 4096  # elements of the table of partial results that are read at a time

# Up to this many elements per program, one program processes all values of its channels (`once`). In the `rows` layout
# it then has few channels, so that there are many programs. Measured on an H200, forward and backward: with 2048
# elements 6 µs of device time instead of 14, with 32768 already 30 instead of 18. The host saves two launches, of 10 µs
# and more each.
ONCE = 1 << 14
ONCE_CHANNELS = 8

NO_CHECK = (0.0, 0.0, 0.0)


class Grid(NamedTuple):
    """How a map is cut into tiles."""

    M: int  # values per channel
    C: int  # channels
    S: int  # positions of a plane; 1 for rows
    rows: bool
    wide: bool  # offsets need 64 bits
    block_m: int
    block_c: int
    block_p: int
    tiles: int
    c_blocks: int
    splits: int  # programs that share the tiles of a block of channels

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The constants that every pass over a map takes first."""
        return self.M, self.C, self.S, self.tiles

    @property
    def blocks(self) -> tuple[bool, bool, int, int]:
        """The constants that every pass over a map takes after its flags."""
        return self.rows, self.wide, self.block_m, self.block_c


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def plan(size: torch.Size, rows: bool, device: torch.device, shape: Shape, once: bool = False) -> Grid:
    """How to cut a map into tiles; with `once` the tiles of a channel all belong to one program."""
    C, S = size[1], 1 if rows else size[2:].numel()
    M = size.numel() // max(1, C)
    block_c = min(ONCE_CHANNELS if once else 64, triton.next_power_of_2(C)) if rows else 1
    block_m = min(shape.tile // block_c, max(16, triton.next_power_of_2(M)))
    tiles, c_blocks = triton.cdiv(M, block_m), triton.cdiv(C, block_c)
    splits = 1 if once else max(1, min(tiles, shape.programs * _processors(device) // c_blocks))
    block_p = min(max(1, MERGED // block_c), triton.next_power_of_2(splits))
    wide = (M + block_m) * (C + block_c) >= 2**31
    return Grid(M, C, S, rows, wide, block_m, block_c, block_p, tiles, c_blocks, splits)


# ---- a layer --------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """All that a layer's kernels are specialized on, including the dtypes of all pointers; see kernels/launch.py."""

    size: torch.Size
    rows: bool
    dtype: torch.dtype
    device: torch.device
    act: str = "identity"
    p: float = 0.0
    inverted: bool = False
    added: bool = False  # a residual is added
    absolute: bool = False  # γ̂ = |γ| + ε
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    running: torch.dtype | None = None
    counted: bool = False  # forward increments a counter of batches


@lru_cache(maxsize=1 << 12)  # bounded, for models whose maps have a new size in every step
def layer(kind: Kind) -> Layer:
    """The launches for this kind of layer, cached."""
    return Layer(kind)


class Layer:
    """The launches for one kind of layer. `vectors` is (mean, invstd, γ̂, β), a (4, channels) float32 tensor."""

    def __init__(self, kind: Kind) -> None:
        k = self.kind = kind
        self.first, self.second, self.single = (
            plan(k.size, k.rows, k.device, shape) for shape in (FORWARD, BACKWARD, SINGLE)
        )
        self.device, self.count = k.device, self.first.M  # values per channel
        self._first_size, self._second_size = (2 * g.splits * g.C for g in (self.first, self.second))  # of the tables
        self._p = (k.p,)
        self._unbias = self.count / max(1, self.count - 1)
        per_program = k.size.numel() // max(1, k.size[1]) * (min(ONCE_CHANNELS, k.size[1]) if k.rows else 1)
        self.once = per_program <= ONCE
        given = (k.weight is not None, k.bias is not None, k.absolute, k.running is not None, k.counted)
        masked = k.added and k.act != "identity"
        self._stats = self._shared(passes.stats_kernel, self.first, FORWARD)
        self._asking_stats = self._shared(asking_stats_kernel, self.first, FORWARD, BLOCK)
        self._finish_stats = self._merge(passes.finish_stats_kernel, self.first, 1)
        # Pairs: forward without and with a check of γ̂ and β; sums and backward without and with dy stored in a map.
        g = plan(k.size, k.rows, k.device, FORWARD, True) if self.once else self.first
        self._forward = [
            self._shared(passes.forward_kernel, g, FORWARD, k.act, k.added, *given, check, self.once, merges=True)
            for check in (False, True)
        ]
        self._sums = [
            self._shared(passes.sums_kernel, self.second, BACKWARD, k.act, k.inverted, masked, stored)
            for stored in (False, True)
        ]
        self._finish_sums = self._merge(passes.finish_sums_kernel, self.second, 2)
        self._backward = [
            self._shared(passes.backward_kernel, self.second, BACKWARD, act, k.inverted, residual, False, merges=True)
            for act, residual in ((k.act, masked), ("identity", False))
        ]
        if self.once:
            g, flags = plan(k.size, k.rows, k.device, SINGLE, True), (k.act, k.inverted, masked, True)
            self._backward[0] = self._shared(passes.backward_kernel, g, SINGLE, *flags, merges=True)
        self._normalize = self._tiled(passes.normalize_kernel, k.act, k.added)
        # Templates of results: `empty_like` is cheaper than `empty` with all its arguments.
        self.vectors, self._dweight, self._dbias = (
            torch.empty(size, dtype=dtype or torch.float32, device=k.device)
            for size, dtype in (((4, k.size[1]), None), (k.size[1], k.weight), (k.size[1], k.bias))
        )
        self._nowhere = torch.empty(1, dtype=torch.int32, device=k.device)
        self._input = [self._tiled(passes.input_kernel, k.act, k.inverted, masked, means) for means in (False, True)]

    def _shared(self, kernel: Any, g: Grid, shape: Shape, *flags: Any, merges: bool = False) -> Launch:
        """The launch of a pass whose programs share all tiles."""
        constants = (*g.sizes, *flags, *g.blocks, *((g.block_p,) if merges else ()))
        return Launch(kernel, self.kind.device, (g.c_blocks, g.splits), constants, shape.warps)

    def _tiled(self, kernel: Any, *flags: Any) -> Launch:
        """The launch of a pass with one tile per program."""
        g = self.single
        return Launch(kernel, self.kind.device, (g.tiles, g.c_blocks), (*g.sizes, *flags, *g.blocks), SINGLE.warps)

    def _merge(self, kernel: Any, g: Grid, rows: int) -> Launch:
        """The launch that reduces a table of partial results, for a caller that needs only the result."""
        constants = (g.M, g.C, g.tiles, g.splits, g.block_m, g.block_c, g.block_p)
        return Launch(kernel, self.kind.device, (g.c_blocks, rows), constants, 4)

    def _empty(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=self.kind.device)

    def stats(self, x: Tensor) -> Tensor:
        """(mean, biased variance) as a (2, channels) tensor."""
        g, stream = self.first, stream_for(self.device)
        table, out = scratch(self.device, stream, self._first_size), self._empty(2, g.C)
        self._stats(stream, (x, table))
        self._finish_stats(stream, (table, out))
        return out

    def begin(self, x: Tensor, asked: tuple[Question, int, Tensor] | None = None) -> tuple[int | None, Tensor]:
        """Launch the pass over the statistics, if there is one; the result is for `finish`, which must follow.

        `asked`, a question with its mark and the tensor for its answers, is answered by this launch. If forward is a
        single launch, made by `finish`, the question has a launch of its own.
        """
        stream = stream_for(self.device)
        if self.once:
            if asked is not None:
                asked[0].ask(*asked[1:])
            return stream, x  # forward is a single launch, and has no table
        table = scratch(self.device, stream, self._first_size)
        if asked is None:
            self._stats(stream, (x, table))
        else:
            question, mark, words = asked
            maps = (x, table, question.rows, question.limits, words)
            self._asking_stats(stream, maps, (mark, question.layers))
        return stream, table

    def finish(
        self, begun: tuple[int | None, Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, out: Tensor, vectors: Tensor, *, eps: float, running: tuple[Tensor, Tensor] | None,
        momentum: float, counter: Tensor | None, check: tuple[float, float, float] | None, late: Tensor | None,
    ) -> None:  # fmt: skip
        """The second launch, or the only one: z to `out`, the vectors to `vectors`; updates the running statistics too.

        With `check` (lower, ratio, upper), γ̂ in `vectors` is NaN for each channel that does not invert. If there is
        such a channel, the number of all channels is written to `late`, which may be host memory.
        """
        stream, table = begun
        running_mean, running_var = (vectors, vectors) if running is None else running
        self._forward[check is not None](
            stream,
            (
                x, x if residual is None else residual, out, table, vectors, vectors if weight is None else weight,
                vectors if bias is None else bias, running_mean, running_var, vectors if counter is None else counter,
                self._nowhere if late is None else late,
            ),
            (eps, momentum, self._unbias, *self._p, *(check or NO_CHECK)),
        )  # fmt: skip

    def normalize(self, x: Tensor, vectors: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Write z to `out`, computed with the given vectors."""
        tensors = (x, x if residual is None else residual, out, vectors)
        self._normalize(stream_for(self.device), tensors, self._p)

    def _table(
        self, stream: int | None, kept: Tensor, dz: Tensor, residual: Tensor | None, dy_out: Tensor | None, v: Tensor
    ) -> Tensor:
        table = scratch(self.device, stream, self._second_size)
        maps = (kept, dz, kept if residual is None else residual, dz if dy_out is None else dy_out)
        self._sums[dy_out is not None](stream, (*maps, table, v), self._p)
        return table

    def backward_sums(
        self, kept: Tensor, dz: Tensor, residual: Tensor | None, dy_out: Tensor | None, vectors: Tensor
    ) -> Tensor:
        """Returns (Σ dy, Σ x̂·dy) as a (2, channels) tensor; writes dy to `dy_out` if that is given."""
        stream, out = stream_for(self.device), self._empty(2, self.second.C)
        self._finish_sums(stream, (self._table(stream, kept, dz, residual, dy_out, vectors), out))
        return out

    def backward_input(
        self, kept: Tensor, dz: Tensor, residual: Tensor | None, sums: Tensor | None, count: float, vectors: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Write dx to `out`; without `sums`, dx of eval mode."""
        tensors = (kept, dz, kept if residual is None else residual, out, vectors if sums is None else sums, vectors)
        self._input[sums is not None](stream_for(self.device), tensors, (self.kind.p, 1.0 / count))

    def backward(
        self, kept: Tensor, dz: Tensor, residual: Tensor | None, vectors: Tensor, *, dy_out: Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both passes, in at most two launches: write dy to `dy_out` if given, and dx to `out`; returns dγ̂ and dβ."""
        stream = stream_for(self.device)
        dweight, dbias = torch.empty_like(self._dweight), torch.empty_like(self._dbias)
        table = vectors  # a placeholder: a single launch reads no table
        if not self.once or dy_out is not None:
            table = self._table(stream, kept, dz, residual, dy_out, vectors)
        if dy_out is not None:
            dz, residual = dy_out, None
        maps = (kept, dz, kept if residual is None else residual, out)
        self._backward[dy_out is not None](stream, (*maps, table, vectors, dweight, dbias), self._p)
        return dweight, dbias
