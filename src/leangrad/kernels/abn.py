"""Activated batch norm in Triton: two passes over the map forward, two backward; all formulas are in `ops/abn.py`.

A map comes as a matrix view: (rows, channels) for channels_last, where M counts rows and S is 1, or (samples, channels,
positions) for planes, where M counts samples × positions and S positions. A program owns a tile of BLOCK_M by BLOCK_C.

Reducing passes walk the tiles in steps of the grid, so all programs move through memory together, and the pass that
follows walks backwards: it finds the end of the map still in the L2 cache. Partial results go to a (programs, channels)
table that a third, tiny kernel reduces; there are no atomics, so results do not depend on timing.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from leangrad.kernels.activation import activate, derivative, invert

__all__ = ["backward_input", "backward_sums", "batch_vectors", "normalize", "stats"]

TILE = 4096  # elements per tile: with 8 warps, 16 per thread, so two 16-byte loads of bf16 per map
WARPS = 8
PROGRAMS_PER_PROCESSOR = 4  # of a reducing pass; more would only make the table of partial results longer


class Grid(NamedTuple):
    """How a map is cut into tiles."""

    M: int
    C: int
    S: int
    rows: bool
    block_m: int
    block_c: int
    tiles: int
    c_blocks: int
    splits: int
    wide: bool  # offsets need 64 bits


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def plan(x: Tensor) -> Grid:
    """The tiles of a matrix view."""
    rows = x.dim() == 2
    C, S = x.shape[1], 1 if rows else x.shape[2]
    M = x.shape[0] * S
    block_c = min(64, triton.next_power_of_2(C)) if rows else 1
    block_m = min(TILE // block_c, max(16, triton.next_power_of_2(M)))
    tiles, c_blocks = triton.cdiv(M, block_m), triton.cdiv(C, block_c)
    splits = max(1, min(tiles, PROGRAMS_PER_PROCESSOR * _processors(x.device) // c_blocks))
    wide = (M + block_m) * (C + block_c) >= 2**31
    return Grid(M, C, S, rows, block_m, block_c, tiles, c_blocks, splits, wide)


# ---- pieces ---------------------------------------------------------------------------------------------------------


@triton.jit
def _tile(tile, c, M, C, S, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Offsets and mask of one tile."""
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (m < M)[:, None] & (c < C)[None, :]
    if WIDE:
        m = m.to(tl.int64)
        c = c.to(tl.int64)
    if ROWS:
        offsets = m[:, None] * C + c[None, :]
    else:
        sample = m // S
        offsets = (sample * C * S + (m - sample * S))[:, None] + c[None, :] * S
    return offsets, inside


@triton.jit
def _gradient(kept, dz, residual, mean, invstd, weight, bias, p, ACT: tl.constexpr, INVERTED: tl.constexpr):
    """x̂ and dy of a tile; `residual` is 0 where there is none."""
    if INVERTED:
        y, d = invert(kept, p, ACT)
        xhat = (y - bias[None, :]) / weight[None, :]
        dy = dz * d
    else:
        xhat = (kept - mean[None, :]) * invstd[None, :]
        dy = dz
        if ACT != "identity":
            dy = dz * derivative(xhat * weight[None, :] + bias[None, :] + residual, p, ACT)
    return xhat, dy


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _stats_kernel(
    x_ptr, table_ptr, M, C, S, tiles,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Count, mean and squared deviations of this program's share, by Welford's update in every lane of the tile."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split, splits = tl.program_id(1), tl.num_programs(1)
    mean = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    m2 = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tile in range(split, tiles, splits):
        offsets, inside = _tile(tile, c, M, C, S, ROWS, WIDE, BLOCK_M)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        step = (tile - split) // splits + 1
        delta = tl.where(inside, x - mean, 0.0)
        mean += delta * (1.0 / step)
        m2 += delta * (x - mean)
    # Every lane saw every step, but for those that the last tile of the map leaves out.
    steps = (tiles - 1 - split) // splits + 1
    m = (split + (steps - 1) * splits) * BLOCK_M + tl.arange(0, BLOCK_M)
    count = tl.where(m < M, steps, steps - 1).to(tl.float32)[:, None]
    total = tl.sum(count, 0)
    center = tl.sum(count * mean, 0) / total
    away = mean - center[None, :]
    at = table_ptr + split * C + c
    tl.store(at, tl.zeros([BLOCK_C], tl.float32) + total, mask=c < C)
    tl.store(at + splits * C, center, mask=c < C)
    tl.store(at + 2 * splits * C, tl.sum(m2 + count * away * away, 0), mask=c < C)


@triton.jit
def _merged(table_ptr, c, C, splits, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Mean and biased variance of all shares."""
    total = tl.zeros([BLOCK_C], tl.float32)
    weighted = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, splits, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        inside = (row < splits)[:, None] & (c < C)[None, :]
        at = table_ptr + row[:, None] * C + c[None, :]
        count = tl.load(at, mask=inside, other=0.0)
        total += tl.sum(count, 0)
        weighted += tl.sum(count * tl.load(at + splits * C, mask=inside, other=0.0), 0)
    total = tl.maximum(total, 1.0)  # columns beyond C
    mean = weighted / total
    m2 = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, splits, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        inside = (row < splits)[:, None] & (c < C)[None, :]
        at = table_ptr + row[:, None] * C + c[None, :]
        count = tl.load(at, mask=inside, other=0.0)
        away = tl.load(at + splits * C, mask=inside, other=0.0) - mean[None, :]
        m2 += tl.sum(tl.load(at + 2 * splits * C, mask=inside, other=0.0) + count * away * away, 0)
    return mean, m2 / total


@triton.jit
def _finish_stats_kernel(table_ptr, out_ptr, C, splits, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean, var = _merged(table_ptr, c, C, splits, BLOCK_P, BLOCK_C)
    tl.store(out_ptr + c, mean, mask=c < C)
    tl.store(out_ptr + C + c, var, mask=c < C)


@triton.jit(do_not_specialize=["eps", "momentum", "unbias"])
def _finish_vectors_kernel(
    table_ptr, out_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, eps, momentum, unbias, C, splits,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ABSOLUTE: tl.constexpr, HAS_RUNNING: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(mean, invstd, γ̂, β), and the running statistics: one launch for what would be a dozen of a few bytes each."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean, var = _merged(table_ptr, c, C, splits, BLOCK_P, BLOCK_C)
    weight = tl.full([BLOCK_C], 1.0, tl.float32)
    bias = tl.zeros([BLOCK_C], tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + c, mask=c < C, other=1.0).to(tl.float32)
        if ABSOLUTE:
            weight = tl.abs(weight) + eps
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out_ptr + c, mean, mask=c < C)
    tl.store(out_ptr + C + c, 1.0 / tl.sqrt(var + eps), mask=c < C)
    tl.store(out_ptr + 2 * C + c, weight, mask=c < C)
    tl.store(out_ptr + 3 * C + c, bias, mask=c < C)
    if HAS_RUNNING:
        old_mean = tl.load(running_mean_ptr + c, mask=c < C, other=0.0).to(tl.float32)
        old_var = tl.load(running_var_ptr + c, mask=c < C, other=0.0).to(tl.float32)
        new_mean = old_mean + momentum * (mean - old_mean)
        new_var = old_var + momentum * (var * unbias - old_var)
        tl.store(running_mean_ptr + c, new_mean.to(running_mean_ptr.dtype.element_ty), mask=c < C)
        tl.store(running_var_ptr + c, new_var.to(running_var_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def _normalize_kernel(
    x_ptr, residual_ptr, out_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, p, M, C, S, tiles,
    ACT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    offsets, inside = _tile(tiles - 1 - tl.program_id(0), c, M, C, S, ROWS, WIDE, BLOCK_M)
    mean = tl.load(mean_ptr + c, mask=c < C, other=0.0)
    scale = tl.load(invstd_ptr + c, mask=c < C, other=0.0) * tl.load(weight_ptr + c, mask=c < C, other=0.0)
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, activate(y, p, ACT).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sums_kernel(
    kept_ptr, dz_ptr, residual_ptr, dy_ptr, table_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, p, M, C, S, tiles,
    ACT: tl.constexpr, INVERTED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, STORE_DY: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Σ dy and Σ x̂·dy of this program's share; stores dy where it is the gradient of a residual."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split, splits = tl.program_id(1), tl.num_programs(1)
    mean = tl.load(mean_ptr + c, mask=c < C, other=0.0)
    invstd = tl.load(invstd_ptr + c, mask=c < C, other=0.0)
    weight = tl.load(weight_ptr + c, mask=c < C, other=1.0)
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0)
    sum_dy = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    sum_xhat_dy = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tile in range(split, tiles, splits):
        offsets, inside = _tile(tile, c, M, C, S, ROWS, WIDE, BLOCK_M)
        kept = tl.load(kept_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        dz = tl.load(dz_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        residual = 0.0
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        xhat, dy = _gradient(kept, dz, residual, mean, invstd, weight, bias, p, ACT, INVERTED)
        if STORE_DY:
            tl.store(dy_ptr + offsets, dy.to(dy_ptr.dtype.element_ty), mask=inside)
        sum_dy += dy
        sum_xhat_dy += dy * xhat
    at = table_ptr + split * C + c
    tl.store(at, tl.sum(sum_dy, 0), mask=c < C)
    tl.store(at + splits * C, tl.sum(sum_xhat_dy, 0), mask=c < C)


@triton.jit
def _finish_sums_kernel(table_ptr, out_ptr, C, splits, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    which = tl.program_id(1)
    total = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, splits, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        inside = (row < splits)[:, None] & (c < C)[None, :]
        at = table_ptr + (which * splits + row)[:, None] * C + c[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0), 0)
    tl.store(out_ptr + which * C + c, total, mask=c < C)


@triton.jit(do_not_specialize=["scale"])
def _input_kernel(
    kept_ptr, dz_ptr, residual_ptr, out_ptr, sums_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, p, scale,
    M, C, S, tiles,
    ACT: tl.constexpr, INVERTED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TRAINING: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx; `scale` turns sums into means."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    offsets, inside = _tile(tiles - 1 - tl.program_id(0), c, M, C, S, ROWS, WIDE, BLOCK_M)
    mean = tl.load(mean_ptr + c, mask=c < C, other=0.0)
    invstd = tl.load(invstd_ptr + c, mask=c < C, other=0.0)
    weight = tl.load(weight_ptr + c, mask=c < C, other=1.0)
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0)
    kept = tl.load(kept_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dz = tl.load(dz_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    xhat, dx = _gradient(kept, dz, residual, mean, invstd, weight, bias, p, ACT, INVERTED)
    if TRAINING:
        mean_dy = tl.load(sums_ptr + c, mask=c < C, other=0.0) * scale
        mean_xhat_dy = tl.load(sums_ptr + C + c, mask=c < C, other=0.0) * scale
        dx = dx - mean_dy[None, :] - xhat * mean_xhat_dy[None, :]
    dx = dx * (weight * invstd)[None, :]
    tl.store(out_ptr + offsets, dx.to(out_ptr.dtype.element_ty), mask=inside)


# ---- launches -------------------------------------------------------------------------------------------------------


def _shares(x: Tensor) -> tuple[Tensor, Grid, int]:
    """The first pass: the table of shares, its grid, and the block that reduces it."""
    g = plan(x)
    table = torch.empty(3, g.splits, g.C, dtype=torch.float32, device=x.device)
    _stats_kernel[(g.c_blocks, g.splits)](
        x, table, g.M, g.C, g.S, g.tiles, g.rows, g.wide, g.block_m, g.block_c, num_warps=WARPS
    )
    return table, g, min(256, triton.next_power_of_2(g.splits))


def stats(x: Tensor) -> Tensor:
    """(mean, biased variance) as a (2, channels) float32 tensor."""
    table, g, block_p = _shares(x)
    out = torch.empty(2, g.C, dtype=torch.float32, device=x.device)
    _finish_stats_kernel[(triton.cdiv(g.C, 16),)](table, out, g.C, g.splits, block_p, 16)
    return out


def batch_vectors(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, absolute: bool,
    running: tuple[Tensor, Tensor] | None, momentum: float,
) -> Tensor:  # fmt: skip
    """(mean, invstd, γ̂, β) as a (4, channels) float32 tensor; moves the running statistics on."""
    table, g, block_p = _shares(x)
    out = torch.empty(4, g.C, dtype=torch.float32, device=x.device)
    parameters = (out if weight is None else weight, out if bias is None else bias)
    _finish_vectors_kernel[(triton.cdiv(g.C, 16),)](
        table, out, *parameters, *(running or (out, out)), eps, momentum, g.M / max(1, g.M - 1), g.C, g.splits,
        weight is not None, bias is not None, absolute, running is not None, block_p, 16,
    )  # fmt: skip
    return out


def normalize(x: Tensor, vectors: tuple[Tensor, ...], act: str, p: float, residual: Tensor | None, out: Tensor) -> None:
    """out = act(γ·x̂ + β + residual)."""
    g = plan(x)
    _normalize_kernel[(g.tiles, g.c_blocks)](
        x, x if residual is None else residual, out, *vectors, p, g.M, g.C, g.S, g.tiles,
        act, residual is not None, g.rows, g.wide, g.block_m, g.block_c, num_warps=WARPS,
    )  # fmt: skip


def backward_sums(
    kept: Tensor, dz: Tensor, residual: Tensor | None, dy_out: Tensor | None,
    vectors: tuple[Tensor, ...], act: str, p: float, inverted: bool,
) -> Tensor:  # fmt: skip
    """(Σ dy, Σ x̂·dy) as a (2, channels) float32 tensor."""
    g = plan(dz)
    table = torch.empty(2, g.splits, g.C, dtype=torch.float32, device=dz.device)
    out = torch.empty(2, g.C, dtype=torch.float32, device=dz.device)
    _sums_kernel[(g.c_blocks, g.splits)](
        kept, dz, kept if residual is None else residual, dz if dy_out is None else dy_out, table, *vectors, p,
        g.M, g.C, g.S, g.tiles, act, inverted, residual is not None, dy_out is not None,
        g.rows, g.wide, g.block_m, g.block_c, num_warps=WARPS,
    )  # fmt: skip
    block_p = min(256, triton.next_power_of_2(g.splits))
    _finish_sums_kernel[(triton.cdiv(g.C, 16), 2)](table, out, g.C, g.splits, block_p, 16)
    return out


def backward_input(
    kept: Tensor, dz: Tensor, residual: Tensor | None, sums: Tensor | None, count: float,
    vectors: tuple[Tensor, ...], act: str, p: float, inverted: bool, out: Tensor,
) -> None:  # fmt: skip
    """Writes dx into `out`; without `sums`, as in eval mode."""
    g = plan(dz)
    _input_kernel[(g.tiles, g.c_blocks)](
        kept, dz, kept if residual is None else residual, out, kept if sums is None else sums, *vectors, p, 1.0 / count,
        g.M, g.C, g.S, g.tiles, act, inverted, residual is not None, sums is not None,
        g.rows, g.wide, g.block_m, g.block_c, num_warps=WARPS,
    )  # fmt: skip
