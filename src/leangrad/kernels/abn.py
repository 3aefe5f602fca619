"""Activated batch norm on CUDA: which tiles a map is cut into, and the launches for it.

Every function takes maps as they are, dense and of one layout: channels as the fastest dimension (`rows`), or planes.
A layer's forward is two launches, its backward two; `leangrad.kernels.abn_passes` has the kernels and says why.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from leangrad.kernels import abn_passes as passes
from leangrad.kernels.launch import Launch

__all__ = ["backward", "backward_input", "backward_sums", "forward", "normalize", "stats"]


class Shape(NamedTuple):
    """How the programs of one pass share the chip."""

    tile: int  # elements per tile
    warps: int
    programs: int  # per processor; their registers must fit side by side


# Each thread loads 32 bytes of bf16 per map and tile, 16 where it also holds sums: 64 and 80 registers, so that this
# many programs fit side by side. More of them would only make the table of partial results longer.
FORWARD = Shape(tile=8192, warps=16, programs=2)
BACKWARD = Shape(tile=2048, warps=8, programs=3)
SINGLE = Shape(tile=4096, warps=8, programs=4)  # one tile per program
MERGED = 4096  # elements of the table that are read at a time


class Grid(NamedTuple):
    """How a map is cut into tiles."""

    M: int
    C: int
    S: int
    rows: bool
    wide: bool  # offsets need 64 bits
    block_m: int
    block_c: int
    block_p: int
    tiles: int
    c_blocks: int
    splits: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What every pass takes first."""
        return self.M, self.C, self.S, self.tiles

    @property
    def blocks(self) -> tuple[bool, bool, int, int]:
        """What every pass takes last."""
        return self.rows, self.wide, self.block_m, self.block_c


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def plan(size: torch.Size, rows: bool, device: torch.device, shape: Shape) -> Grid:
    """The tiles of a map."""
    C, S = size[1], 1 if rows else size[2:].numel()
    M = size.numel() // max(1, C)
    block_c = min(64, triton.next_power_of_2(C)) if rows else 1
    block_m = min(shape.tile // block_c, max(16, triton.next_power_of_2(M)))
    tiles, c_blocks = triton.cdiv(M, block_m), triton.cdiv(C, block_c)
    splits = max(1, min(tiles, shape.programs * _processors(device) // c_blocks))
    block_p = min(max(1, MERGED // block_c), triton.next_power_of_2(splits))
    wide = (M + block_m) * (C + block_c) >= 2**31
    return Grid(M, C, S, rows, wide, block_m, block_c, block_p, tiles, c_blocks, splits)


# ---- launches, one set per kind of layer ----------------------------------------------------------------------------
# All that a kernel is specialized on is an argument here, the dtypes of every pointer included; see kernels/launch.py.

once = lru_cache(maxsize=1 << 12)  # bounded, for those whose maps have a new size in every step


@once
def _stats_launches(
    size: torch.Size, rows: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Grid, Launch, Launch]:
    g = plan(size, rows, device, FORWARD)
    finish = (g.M, g.C, g.tiles, g.splits, g.block_m, g.block_c, g.block_p)
    return (
        g,
        Launch(passes.stats_kernel, device, (g.c_blocks, g.splits), (*g.sizes, *g.blocks), FORWARD.warps),
        Launch(passes.finish_stats_kernel, device, (g.c_blocks,), finish, 4),
    )


@once
def _forward_launch(
    size: torch.Size, rows: bool, dtypes: tuple[torch.dtype | None, ...], device: torch.device, act: str,
    absolute: bool, added: bool, counted: bool, checked: bool,
) -> Launch:  # fmt: skip
    g = plan(size, rows, device, FORWARD)
    _, weight, bias, running = dtypes
    flags = (act, added, weight is not None, bias is not None, absolute, running is not None, counted, checked)
    constants = (*g.sizes, *flags, *g.blocks, g.block_p)
    return Launch(passes.forward_kernel, device, (g.c_blocks, g.splits), constants, FORWARD.warps)


@once
def _normalize_launch(
    size: torch.Size, rows: bool, dtype: torch.dtype, device: torch.device, act: str, added: bool
) -> Launch:
    g = plan(size, rows, device, SINGLE)
    constants = (*g.sizes, act, added, *g.blocks)
    return Launch(passes.normalize_kernel, device, (g.tiles, g.c_blocks), constants, SINGLE.warps)


@once
def _sums_launches(
    size: torch.Size, rows: bool, dtype: torch.dtype, device: torch.device, act: str, inverted: bool, added: bool,
    stored: bool,
) -> tuple[Grid, Launch, Launch]:  # fmt: skip
    g = plan(size, rows, device, BACKWARD)
    constants = (*g.sizes, act, inverted, added, stored, *g.blocks)
    finish = (g.C, g.splits, g.block_c, g.block_p)
    return (
        g,
        Launch(passes.sums_kernel, device, (g.c_blocks, g.splits), constants, BACKWARD.warps),
        Launch(passes.finish_sums_kernel, device, (g.c_blocks, 2), finish, 4),
    )


@once
def _backward_launch(
    size: torch.Size, rows: bool, dtypes: tuple[torch.dtype, ...], device: torch.device, act: str, inverted: bool,
    added: bool,
) -> Launch:  # fmt: skip
    g = plan(size, rows, device, BACKWARD)
    constants = (*g.sizes, act, inverted, added, *g.blocks, g.block_p)
    return Launch(passes.backward_kernel, device, (g.c_blocks, g.splits), constants, BACKWARD.warps)


@once
def _input_launch(
    size: torch.Size, rows: bool, dtype: torch.dtype, device: torch.device, act: str, inverted: bool, added: bool,
    training: bool,
) -> Launch:  # fmt: skip
    g = plan(size, rows, device, SINGLE)
    constants = (*g.sizes, act, inverted, added, training, *g.blocks)
    return Launch(passes.input_kernel, device, (g.tiles, g.c_blocks), constants, SINGLE.warps)


# ---- what ops/abn.py calls ------------------------------------------------------------------------------------------


def stats(x: Tensor, rows: bool) -> Tensor:
    """(mean, biased variance) as a (2, channels) float32 tensor."""
    g, share, finish = _stats_launches(x.shape, rows, x.dtype, x.device)
    table = torch.empty((2, g.splits, g.C), dtype=torch.float32, device=x.device)
    out = torch.empty((2, g.C), dtype=torch.float32, device=x.device)
    share((x, table))
    finish((table, out))
    return out


def forward(
    x: Tensor, rows: bool, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, out: Tensor, *,
    eps: float, absolute: bool, running: tuple[Tensor, Tensor] | None, momentum: float, counter: Tensor | None,
    act: str, p: float, check: tuple[float, float, float] | None,
) -> Tensor:  # fmt: skip
    """z into `out`; returns (mean, invstd, γ̂, β) as a (4, channels) float32 tensor, moves running statistics on.

    With `check` (lower, ratio, upper), γ̂ is returned as NaN where the channel does not invert.
    """
    size, device = x.shape, x.device
    g, share, _ = _stats_launches(size, rows, x.dtype, device)
    dtypes = (
        x.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        None if running is None else running[0].dtype,
    )
    flags = (absolute, residual is not None, counter is not None, check is not None)
    finish = _forward_launch(size, rows, dtypes, device, act, *flags)
    table = torch.empty((2, g.splits, g.C), dtype=torch.float32, device=device)
    vectors = torch.empty((4, g.C), dtype=torch.float32, device=device)
    share((x, table))
    running_mean, running_var = (vectors, vectors) if running is None else running
    finish(
        (
            x, x if residual is None else residual, out, table, vectors, vectors if weight is None else weight,
            vectors if bias is None else bias, running_mean, running_var, vectors if counter is None else counter,
        ),
        (eps, momentum, g.M / max(1, g.M - 1), p, *(check or (0.0, 0.0, 0.0))),
    )  # fmt: skip
    return vectors


def normalize(
    x: Tensor, rows: bool, vectors: Tensor, act: str, p: float, residual: Tensor | None, out: Tensor
) -> None:  # fmt: skip
    """out = act(γ·x̂ + β + residual)."""
    launch = _normalize_launch(x.shape, rows, x.dtype, x.device, act, residual is not None)
    launch((x, x if residual is None else residual, out, vectors), (p,))


def backward_sums(
    kept: Tensor, dz: Tensor, rows: bool, residual: Tensor | None, dy_out: Tensor | None,
    vectors: Tensor, act: str, p: float, inverted: bool,
) -> Tensor:  # fmt: skip
    """(Σ dy, Σ x̂·dy) as a (2, channels) float32 tensor."""
    table, finish = _shares(kept, dz, rows, residual, dy_out, vectors, act, p, inverted)
    out = torch.empty((2, dz.shape[1]), dtype=torch.float32, device=dz.device)
    finish((table, out))
    return out


def _shares(
    kept: Tensor, dz: Tensor, rows: bool, residual: Tensor | None, dy_out: Tensor | None,
    vectors: Tensor, act: str, p: float, inverted: bool,
) -> tuple[Tensor, Launch]:  # fmt: skip
    g, share, finish = _sums_launches(
        dz.shape, rows, dz.dtype, dz.device, act, inverted, residual is not None, dy_out is not None
    )
    table = torch.empty((2, g.splits, g.C), dtype=torch.float32, device=dz.device)
    share((kept, dz, kept if residual is None else residual, dz if dy_out is None else dy_out, table, vectors), (p,))
    return table, finish


def backward(
    kept: Tensor, dz: Tensor, rows: bool, residual: Tensor | None, dy_out: Tensor | None, vectors: Tensor, act: str,
    p: float, inverted: bool, *, out: Tensor, dweight: Tensor, dbias: Tensor,
) -> None:  # fmt: skip
    """Both passes: dy into `dy_out` if that is given, then dx into `out`, dγ̂ and dβ into theirs."""
    table, _ = _shares(kept, dz, rows, residual, dy_out, vectors, act, p, inverted)
    if dy_out is not None:
        assert not inverted
        dz, residual, act = dy_out, None, "identity"
    dtypes = (dz.dtype, dweight.dtype, dbias.dtype)
    launch = _backward_launch(dz.shape, rows, dtypes, dz.device, act, inverted, residual is not None)
    launch((kept, dz, kept if residual is None else residual, out, table, vectors, dweight, dbias), (p,))


def backward_input(
    kept: Tensor, dz: Tensor, rows: bool, residual: Tensor | None, sums: Tensor | None, count: float,
    vectors: Tensor, act: str, p: float, inverted: bool, out: Tensor,
) -> None:  # fmt: skip
    """Writes dx into `out`; without `sums`, as in eval mode."""
    launch = _input_launch(
        dz.shape, rows, dz.dtype, dz.device, act, inverted, residual is not None, sums is not None
    )  # fmt: skip
    tensors = (kept, dz, kept if residual is None else residual, out, vectors if sums is None else sums, vectors)
    launch(tensors, (p, 1.0 / count))
