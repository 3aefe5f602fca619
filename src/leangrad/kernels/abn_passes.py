"""The passes of activated batch norm over a map, in Triton; all formulas are in `ops/abn.py`.

A map with M values per channel is either rows, (rows, channels), with S = 1; or planes, (samples, channels, positions),
with M = samples × positions and S = positions. A program processes a block of channels, and of these every `splits`-th
tile of BLOCK_M values, so that all programs move through memory together.

[Note: two launches] A reduction stores one row per program in a (splits, channels) table. Each program of the next pass
reads the rows of its channels and reduces them itself. That costs a few µs of reading from the L2 cache, less than a
third launch would, and needs no atomics: results do not depend on timing. The second pass walks backwards, so that it
finds the end of the map still in the cache. If a map is so small that one program can process all values of its
channels (`ONCE`), that program reduces them itself, and there is a single launch.

`vectors` is (mean, invstd, γ̂, β), a (4, channels) float32 tensor.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from leangrad.kernels.activation import activate, derivative, invert

__all__ = [
    "backward_kernel", "finish_stats_kernel", "finish_sums_kernel", "forward_kernel", "input_kernel",
    "normalize_kernel", "share", "stats_kernel", "sums_kernel",
]  # fmt: skip


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
def _vectors(vectors_ptr, c, C):
    mean = tl.load(vectors_ptr + c, mask=c < C, other=0.0)
    invstd = tl.load(vectors_ptr + C + c, mask=c < C, other=0.0)
    weight = tl.load(vectors_ptr + 2 * C + c, mask=c < C, other=1.0)
    bias = tl.load(vectors_ptr + 3 * C + c, mask=c < C, other=0.0)
    return mean, invstd, weight, bias


@triton.jit
def _output(x, residual, mean, scale, bias, p, ACT: tl.constexpr):
    """z of a tile; one function for the forward and for rebuilding, so that both give the same bits."""
    return activate((x - mean[None, :]) * scale[None, :] + bias[None, :] + residual, p, ACT)


@triton.jit
def _gradient(kept, dz, residual, center, scale, bias, p, ACT: tl.constexpr, INVERTED: tl.constexpr):
    """(source − center) and dy of a tile; x̂ is the former times a factor of the channel. `residual` may be 0."""
    if INVERTED:
        y, d = invert(kept, p, ACT)
        away = y - center[None, :]
        dy = dz * d
    else:
        away = kept - center[None, :]
        dy = dz
        if ACT != "identity":
            # The formula of `_output`, so that y has the same sign as in forward.
            dy = dz * derivative(away * scale[None, :] + bias[None, :] + residual, p, ACT)
    return away, dy


@triton.jit
def _source(vectors_ptr, c, C, INVERTED: tl.constexpr):
    """(center, factor, scale, bias): x̂ = (source − center)·factor, where the source is act⁻¹(z) or x."""
    mean, invstd, weight, bias = _vectors(vectors_ptr, c, C)
    scale = invstd * weight
    center = mean
    factor = invstd
    if INVERTED:
        center = bias
        factor = 1.0 / weight
    return center, factor, scale, bias


@triton.jit
def share(
    x_ptr, c, split, splits, M, C, S, tiles,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of every `splits`-th tile, by Welford's update in every lane of the tile."""
    mean = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    m2 = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tile in range(split, tiles, splits):
        offsets, inside = _tile(tile, c, M, C, S, ROWS, WIDE, BLOCK_M)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        step = (tile - split) // splits + 1
        delta = tl.where(inside, x - mean, 0.0)
        mean += delta * (1.0 / step)
        m2 += delta * (x - mean)
    # Every lane has a value in every step, except lanes beyond the end of the map in its last tile.
    steps = (tiles - 1 - split) // splits + 1
    m = (split + (steps - 1) * splits) * BLOCK_M + tl.arange(0, BLOCK_M)
    count = tl.where(m < M, steps, steps - 1).to(tl.float32)[:, None]
    center = tl.sum(count * mean, 0) / tl.sum(count, 0)
    away = mean - center[None, :]
    return center, tl.sum(m2 + count * away * away, 0)


@triton.jit
def _moments(
    table_ptr, c, M, C, tiles, splits, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Mean and biased variance from the table of shares: merged in every lane, then over lanes."""
    count = tl.zeros([BLOCK_P], tl.float32)
    mean = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    m2 = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for start in range(0, splits, BLOCK_P):
        split = start + tl.arange(0, BLOCK_P)
        inside = (split < splits)[:, None] & (c < C)[None, :]
        at = table_ptr + split[:, None] * C + c[None, :]
        steps = (tiles - 1 - split) // splits + 1
        # The share with the last tile lacks the part of that tile that lies beyond the end of the map.
        size = steps * BLOCK_M - tl.where((tiles - 1) % splits == split, tiles * BLOCK_M - M, 0)
        size = tl.where(split < splits, size, 0).to(tl.float32)
        total = count + size
        part = size / tl.maximum(total, 1.0)
        delta = tl.load(at, mask=inside, other=0.0) - mean
        delta = tl.where(inside, delta, 0.0)
        mean += delta * part[:, None]
        m2 += tl.load(at + splits * C, mask=inside, other=0.0) + delta * delta * (count * part)[:, None]
        count = total
    center = tl.sum(count[:, None] * mean, 0) / M
    away = mean - center[None, :]
    return center, tl.sum(m2 + count[:, None] * away * away, 0) / M


@triton.jit
def _share_of_sums(
    kept_ptr, dz_ptr, residual_ptr, dy_ptr, vectors_ptr, p, c, split, splits, M, C, S, tiles,
    ACT: tl.constexpr, INVERTED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, STORE_DY: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Σ dy and Σ x̂·dy of every `splits`-th tile."""
    center, factor, scale, bias = _source(vectors_ptr, c, C, INVERTED)
    sum_dy = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    sum_away_dy = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tile in range(split, tiles, splits):
        offsets, inside = _tile(tile, c, M, C, S, ROWS, WIDE, BLOCK_M)
        kept = tl.load(kept_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        dz = tl.load(dz_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        residual = 0.0
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        away, dy = _gradient(kept, dz, residual, center, scale, bias, p, ACT, INVERTED)
        if STORE_DY:
            tl.store(dy_ptr + offsets, dy.to(dy_ptr.dtype.element_ty), mask=inside)
        sum_dy += dy
        sum_away_dy += dy * away
    return tl.sum(sum_dy, 0), tl.sum(sum_away_dy, 0) * factor


@triton.jit
def _total(table_ptr, c, C, splits, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr):
    """The sum of a table's rows."""
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for start in range(0, splits, BLOCK_P):
        split = start + tl.arange(0, BLOCK_P)
        inside = (split < splits)[:, None] & (c < C)[None, :]
        total += tl.load(table_ptr + split[:, None] * C + c[None, :], mask=inside, other=0.0)
    return tl.sum(total, 0)


# ---- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def stats_kernel(
    x_ptr, table_ptr, M, C, S, tiles,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store the mean and the sum of squared deviations of this program's share of the tiles."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split, splits = tl.program_id(1), tl.num_programs(1)
    center, m2 = share(x_ptr, c, split, splits, M, C, S, tiles, ROWS, WIDE, BLOCK_M, BLOCK_C)
    at = table_ptr + split * C + c
    tl.store(at, center, mask=c < C)
    tl.store(at + splits * C, m2, mask=c < C)


@triton.jit
def finish_stats_kernel(
    table_ptr, out_ptr, M, C, tiles, splits, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Store (mean, biased variance), for a caller that needs only these."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean, var = _moments(table_ptr, c, M, C, tiles, splits, BLOCK_M, BLOCK_C, BLOCK_P)
    tl.store(out_ptr + c, mean, mask=c < C)
    tl.store(out_ptr + C + c, var, mask=c < C)


@triton.jit
def forward_kernel(
    x_ptr, residual_ptr, out_ptr, table_ptr, vectors_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr,
    counter_ptr, late_ptr, eps, momentum, unbias, p, lower, ratio, upper, M, C, S, tiles,
    ACT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ABSOLUTE: tl.constexpr, HAS_RUNNING: tl.constexpr, HAS_COUNTER: tl.constexpr, CHECK: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """z from x and the table of shares; split 0 also stores the vectors and updates the running statistics."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split, splits = tl.program_id(1), tl.num_programs(1)
    if ONCE:
        mean, var = share(x_ptr, c, split, splits, M, C, S, tiles, ROWS, WIDE, BLOCK_M, BLOCK_C)
        var = var / M
    else:
        mean, var = _moments(table_ptr, c, M, C, tiles, splits, BLOCK_M, BLOCK_C, BLOCK_P)
    invstd = 1.0 / tl.sqrt(var + eps)
    weight = tl.full([BLOCK_C], 1.0, tl.float32)
    bias = tl.zeros([BLOCK_C], tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + c, mask=c < C, other=1.0).to(tl.float32)
        if ABSOLUTE:
            weight = tl.abs(weight) + eps
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    if split == 0:
        tl.store(vectors_ptr + c, mean, mask=c < C)
        tl.store(vectors_ptr + C + c, invstd, mask=c < C)
        kept_weight = weight
        if CHECK:  # as `poison` in nn/abn/invertibility.py does
            gamma, beta = tl.abs(weight), tl.abs(bias)
            inverts = (gamma >= lower) & (beta <= ratio * gamma) & (6 * gamma + beta <= upper)
            kept_weight = tl.where(inverts, weight, float("nan"))
            if tl.max(tl.where(inverts | (c >= C), 0, 1), 0) > 0:
                tl.store(late_ptr, C)
        tl.store(vectors_ptr + 2 * C + c, kept_weight, mask=c < C)
        tl.store(vectors_ptr + 3 * C + c, bias, mask=c < C)
        if HAS_RUNNING:
            old_mean = tl.load(running_mean_ptr + c, mask=c < C, other=0.0).to(tl.float32)
            old_var = tl.load(running_var_ptr + c, mask=c < C, other=0.0).to(tl.float32)
            new_mean = old_mean + momentum * (mean - old_mean)
            new_var = old_var + momentum * (var * unbias - old_var)
            tl.store(running_mean_ptr + c, new_mean.to(running_mean_ptr.dtype.element_ty), mask=c < C)
            tl.store(running_var_ptr + c, new_var.to(running_var_ptr.dtype.element_ty), mask=c < C)
        if HAS_COUNTER and tl.program_id(0) == 0:
            tl.store(counter_ptr, tl.load(counter_ptr) + 1)
    scale = invstd * weight
    for step in range(split, tiles, splits):
        offsets, inside = _tile(tiles - 1 - step, c, M, C, S, ROWS, WIDE, BLOCK_M)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        residual = 0.0
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        z = _output(x, residual, mean, scale, bias, p, ACT)
        tl.store(out_ptr + offsets, z.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normalize_kernel(
    x_ptr, residual_ptr, out_ptr, vectors_ptr, p, M, C, S, tiles,
    ACT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """z from x and given vectors, one tile per program."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    offsets, inside = _tile(tl.program_id(0), c, M, C, S, ROWS, WIDE, BLOCK_M)
    mean, invstd, weight, bias = _vectors(vectors_ptr, c, C)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    z = _output(x, residual, mean, invstd * weight, bias, p, ACT)
    tl.store(out_ptr + offsets, z.to(out_ptr.dtype.element_ty), mask=inside)


# ---- backward -------------------------------------------------------------------------------------------------------


@triton.jit
def sums_kernel(
    kept_ptr, dz_ptr, residual_ptr, dy_ptr, table_ptr, vectors_ptr, p, M, C, S, tiles,
    ACT: tl.constexpr, INVERTED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, STORE_DY: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store Σ dy and Σ x̂·dy of this program's share; with STORE_DY, also dy, the gradient of a residual."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split, splits = tl.program_id(1), tl.num_programs(1)
    sum_dy, sum_xhat_dy = _share_of_sums(
        kept_ptr, dz_ptr, residual_ptr, dy_ptr, vectors_ptr, p, c, split, splits, M, C, S, tiles,
        ACT, INVERTED, HAS_RESIDUAL, STORE_DY, ROWS, WIDE, BLOCK_M, BLOCK_C,
    )  # fmt: skip
    at = table_ptr + split * C + c
    tl.store(at, sum_dy, mask=c < C)
    tl.store(at + splits * C, sum_xhat_dy, mask=c < C)


@triton.jit
def finish_sums_kernel(
    table_ptr, out_ptr, M, C, tiles, splits, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Store (Σ dy, Σ x̂·dy), for a caller that needs only these."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    which = tl.program_id(1)  # 0: Σ dy, 1: Σ x̂·dy
    tl.store(
        out_ptr + which * C + c, _total(table_ptr + which * splits * C, c, C, splits, BLOCK_C, BLOCK_P), mask=c < C
    )


@triton.jit
def backward_kernel(
    kept_ptr, dz_ptr, residual_ptr, out_ptr, table_ptr, vectors_ptr, dweight_ptr, dbias_ptr, p, M, C, S, tiles,
    ACT: tl.constexpr, INVERTED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ONCE: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """dx from the table of sums; split 0 also stores dγ̂ and dβ."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split, splits = tl.program_id(1), tl.num_programs(1)
    if ONCE:
        sum_dy, sum_xhat_dy = _share_of_sums(
            kept_ptr, dz_ptr, residual_ptr, dz_ptr, vectors_ptr, p, c, split, splits, M, C, S, tiles,
            ACT, INVERTED, HAS_RESIDUAL, False, ROWS, WIDE, BLOCK_M, BLOCK_C,
        )  # fmt: skip
    else:
        sum_dy = _total(table_ptr, c, C, splits, BLOCK_C, BLOCK_P)
        sum_xhat_dy = _total(table_ptr + splits * C, c, C, splits, BLOCK_C, BLOCK_P)
    if split == 0:
        tl.store(dweight_ptr + c, sum_xhat_dy.to(dweight_ptr.dtype.element_ty), mask=c < C)
        tl.store(dbias_ptr + c, sum_dy.to(dbias_ptr.dtype.element_ty), mask=c < C)
    center, factor, scale, bias = _source(vectors_ptr, c, C, INVERTED)
    constant, slope = scale * (sum_dy / M), scale * (sum_xhat_dy / M) * factor
    for step in range(split, tiles, splits):
        offsets, inside = _tile(tiles - 1 - step, c, M, C, S, ROWS, WIDE, BLOCK_M)
        kept = tl.load(kept_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        dz = tl.load(dz_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        residual = 0.0
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        away, dy = _gradient(kept, dz, residual, center, scale, bias, p, ACT, INVERTED)
        dx = scale[None, :] * dy - constant[None, :] - slope[None, :] * away
        tl.store(out_ptr + offsets, dx.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def input_kernel(
    kept_ptr, dz_ptr, residual_ptr, out_ptr, sums_ptr, vectors_ptr, p, part, M, C, S, tiles,
    ACT: tl.constexpr, INVERTED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TRAINING: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx from given sums (`part` · sum is the mean), or without sums, of eval mode; one tile per program."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    offsets, inside = _tile(tiles - 1 - tl.program_id(0), c, M, C, S, ROWS, WIDE, BLOCK_M)
    center, factor, scale, bias = _source(vectors_ptr, c, C, INVERTED)
    kept = tl.load(kept_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dz = tl.load(dz_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    away, dy = _gradient(kept, dz, residual, center, scale, bias, p, ACT, INVERTED)
    dx = scale[None, :] * dy
    if TRAINING:
        constant = scale * (tl.load(sums_ptr + c, mask=c < C, other=0.0) * part)
        slope = scale * (tl.load(sums_ptr + C + c, mask=c < C, other=0.0) * part) * factor
        dx = dx - constant[None, :] - slope[None, :] * away
    tl.store(out_ptr + offsets, dx.to(out_ptr.dtype.element_ty), mask=inside)
