"""The diagonal scan in Triton, forward and backward; all formulas are in `ops/scan.py`.

Time is cut into chunks of L steps. A program processes a tile of L steps by BLOCK channels, one state after another.
Forward and backward take three launches each:

    1. what each chunk alone adds to the state at its end (forward), or to the gradient of its start (backward);
    2. these sums carried from chunk to chunk: the states, or their gradients, at the boundaries;
    3. everything inside each chunk, from its boundary: a scan of the tile in registers.

In 1 and 3 all chunks run in parallel. There are no atomics: sums over channels go through a table with one row per
tile, so results do not depend on timing. Lanes beyond the end of a sequence load dt = 0, for which every form has ā = 1
and w = 0, so they change nothing.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward"]

TILE = 2048  # elements per tile: 16 per thread
WARPS = 4
CARRY_STEPS = 64  # chunks that `_carry_kernel` crosses in one tile


# ---- pieces ---------------------------------------------------------------------------------------------------------


@triton.jit
def _then(a1, b1, a2, b2):
    """Two steps of s = a·s + b in a row, as one."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def _weight(x, dt, A, decay, FORM: tl.constexpr):
    """w of `ops/scan.py`; below 1/2 the series of 1 − exp(−x), which would cancel."""
    y = -x
    series = 1 / 720 + y * (1 / 5040 + y * (1 / 40320))
    series = 1.0 + y * (0.5 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * series))))
    small = tl.abs(x) < 0.5
    if FORM == "zoh":
        w = tl.where(small, dt * series, (1.0 - decay) / A)
    elif FORM == "ema":
        w = tl.where(small, x * series, 1.0 - decay)
    else:  # 1 − ā² = (1 − ā)(1 + ā)
        w = tl.sqrt(tl.maximum(tl.where(small, x * series, 1.0 - decay) * (1.0 + decay), 0.0))
    return w


@triton.jit
def _zoh_slope(x, dt, A, decay, w):
    """∂w/∂A = (dt·ā − w)/A; below 1/2 by its series."""
    y = -x
    series = 6 / 5040 + y * (7 / 40320 + y * (8 / 362880 + y * (9 / 3628800)))
    series = 0.5 + y * (2 / 6 + y * (3 / 24 + y * (4 / 120 + y * (5 / 720 + y * series))))
    return tl.where(tl.abs(x) < 0.5, -dt * dt * series, (dt * decay - w) / A)


@triton.jit
def _load(ptr, t, first, last, c, D):
    """Rows t of a (T, D) map as float32, 0 outside [first, last)."""
    inside = ((t >= first) & (t < last))[:, None] & (c < D)[None, :]
    return tl.load(ptr + t[:, None] * D + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_drive(u_ptr, gate_ptr, t, first, last, c, D, HAS_GATE: tl.constexpr):
    """v = gate·u."""
    v = _load(u_ptr, t, first, last, c, D)
    if HAS_GATE:
        v *= _load(gate_ptr, t, first, last, c, D)
    return v


@triton.jit
def _load_column(ptr, t, first, last, n, N):
    """Column n of a (T, N) map as float32, 0 outside [first, last)."""
    return tl.load(ptr + t * N + n, mask=(t >= first) & (t < last), other=0.0).to(tl.float32)


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T", "N", "batch"])
def _ends_kernel(
    u_ptr, gate_ptr, dt_ptr, A_ptr, B_ptr, bounds_ptr, totals_ptr, T, D, N, batch,
    FORM: tl.constexpr, HAS_GATE: tl.constexpr, HAS_B: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what the chunk's own steps add to the state at its end, and the sum of its dt."""
    k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    t = k * L + tl.arange(0, L)
    last = tl.minimum(k * L + L, T)
    dt = _load(dt_ptr + b * T * D, t, 0, last, c, D)
    v = _load_drive(u_ptr + b * T * D, gate_ptr + b * T * D, t, 0, last, c, D, HAS_GATE)
    rest = tl.cumsum(_load(dt_ptr + b * T * D, t + 1, 0, last, c, D), 0, reverse=True)  # time from t to the end
    tl.store(totals_ptr + (k * batch + b) * D + c, tl.sum(dt, 0), mask=c < D)
    for n in range(N):
        A = tl.load(A_ptr + n * D + c, mask=c < D, other=0.0)[None, :]
        x = dt * A
        drive = _weight(x, dt, A, tl.exp(-x), FORM) * v
        if HAS_B:
            drive *= _load_column(B_ptr + b * T * N, t, 0, last, n, N)[:, None]
        end = tl.sum(tl.exp(-rest * A) * drive, 0)
        tl.store(bounds_ptr + (((k + 1) * batch + b) * N + n) * D + c, end, mask=c < D)


@triton.jit(do_not_specialize=["T", "N", "batch"])
def _starts_kernel(
    dz_ptr, dt_ptr, A_ptr, C_ptr, grads_ptr, totals_ptr, T, D, N, batch,
    HAS_C: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what the chunk's own outputs add to the gradient of the state at its start, and the sum of its dt."""
    k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    t = k * L + tl.arange(0, L)
    last = tl.minimum(k * L + L, T)
    dt = _load(dt_ptr + b * T * D, t, 0, last, c, D)
    dz = _load(dz_ptr + b * T * D, t, 0, last, c, D)
    past = tl.cumsum(dt, 0)  # time from the start to t
    tl.store(totals_ptr + (k * batch + b) * D + c, tl.sum(dt, 0), mask=c < D)
    for n in range(N):
        A = tl.load(A_ptr + n * D + c, mask=c < D, other=0.0)[None, :]
        pull = tl.exp(-past * A) * dz
        if HAS_C:
            pull *= _load_column(C_ptr + b * T * N, t, 0, last, n, N)[:, None]
        tl.store(grads_ptr + ((k * batch + b) * N + n) * D + c, tl.sum(pull, 0), mask=c < D)


@triton.jit(do_not_specialize=["chunks", "N", "batch"])
def _carry_kernel(
    bounds_ptr, totals_ptr, A_ptr, chunks, D, N, batch,
    REVERSE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Carry boundaries from chunk to chunk, in place: from 0 up to `chunks`, or from there down to 0."""
    b, n = (tl.program_id(0) // N).to(tl.int64), tl.program_id(0) % N
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    A = tl.load(A_ptr + n * D + c, mask=c < D, other=0.0)
    first = chunks if REVERSE else 0
    carry = tl.load(bounds_ptr + ((first * batch + b) * N + n) * D + c, mask=c < D, other=0.0)
    step = tl.arange(0, STEPS)
    for start in range(0, chunks, STEPS):
        k = start + step  # the chunks in the order in which they are crossed
        inside = (k < chunks)[:, None] & (c < D)[None, :]
        crossed = chunks - 1 - k if REVERSE else k
        reached = crossed if REVERSE else crossed + 1
        total = tl.load(totals_ptr + (crossed * batch + b)[:, None] * D + c[None, :], mask=inside, other=0.0)
        at = bounds_ptr + ((reached * batch + b) * N + n)[:, None] * D + c[None, :]
        own = tl.load(at, mask=inside, other=0.0)
        decay = tl.exp(-total * A[None, :])
        own = tl.where((step == 0)[:, None], own + decay * carry[None, :], own)
        _, state = tl.associative_scan((decay, own), 0, _then)
        tl.store(at, state, mask=inside)
        carry = tl.sum(tl.where((step == STEPS - 1)[:, None], state, 0.0), 0)


@triton.jit(do_not_specialize=["T", "N", "batch"])
def _output_kernel(
    u_ptr, gate_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bounds_ptr, z_ptr, T, D, N, batch,
    FORM: tl.constexpr, HAS_GATE: tl.constexpr, HAS_B: tl.constexpr, HAS_C: tl.constexpr, HAS_D: tl.constexpr,
    L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, L)
    t = k * L + row
    last = tl.minimum(k * L + L, T)
    dt = _load(dt_ptr + b * T * D, t, 0, last, c, D)
    v = _load_drive(u_ptr + b * T * D, gate_ptr + b * T * D, t, 0, last, c, D, HAS_GATE)
    z = tl.zeros([L, BLOCK], tl.float32)
    if HAS_D:
        z = tl.load(D_ptr + c, mask=c < D, other=0.0)[None, :] * _load(u_ptr + b * T * D, t, 0, last, c, D)
    for n in range(N):
        A = tl.load(A_ptr + n * D + c, mask=c < D, other=0.0)[None, :]
        start = tl.load(bounds_ptr + ((k * batch + b) * N + n) * D + c, mask=c < D, other=0.0)
        x = dt * A
        decay = tl.exp(-x)
        drive = _weight(x, dt, A, decay, FORM) * v
        if HAS_B:
            drive *= _load_column(B_ptr + b * T * N, t, 0, last, n, N)[:, None]
        drive = tl.where((row == 0)[:, None], drive + decay * start[None, :], drive)
        _, state = tl.associative_scan((decay, drive), 0, _then)
        if HAS_C:
            state *= _load_column(C_ptr + b * T * N, t, 0, last, n, N)[:, None]
        z += state
    inside = (t < last)[:, None] & (c < D)[None, :]
    tl.store(z_ptr + b * T * D + t[:, None] * D + c[None, :], z.to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "N", "batch"])
def _inputs_kernel(
    u_ptr, gate_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bounds_ptr, dz_ptr,
    grads_ptr, du_ptr, dgate_ptr, ddt_ptr, dB_ptr, dC_ptr, dD_ptr, T, D, N, batch,
    FORM: tl.constexpr, HAS_GATE: tl.constexpr, HAS_B: tl.constexpr, HAS_C: tl.constexpr, HAS_D: tl.constexpr,
    L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All gradients of a chunk. Its share of dA replaces the gradient of its end, which no other program reads."""
    k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, L)
    t = k * L + row
    begin = k * L
    last = tl.minimum(begin + L, T)
    at = b * T * D
    u = _load(u_ptr + at, t, begin, last, c, D)
    dt = _load(dt_ptr + at, t, begin, last, c, D)
    dz = _load(dz_ptr + at, t, begin, last, c, D)
    v = _load_drive(u_ptr + at, gate_ptr + at, t, begin, last, c, D, HAS_GATE)
    # Loaded from one step earlier, for the state before each step; from one later, for the gradient of that later step.
    dt_before = _load(dt_ptr + at, t - 1, begin, last, c, D)
    v_before = _load_drive(u_ptr + at, gate_ptr + at, t - 1, begin, last, c, D, HAS_GATE)
    dt_after = _load(dt_ptr + at, t + 1, begin, last, c, D)
    dv = tl.zeros([L, BLOCK], tl.float32)
    ddt = tl.zeros([L, BLOCK], tl.float32)
    for n in range(N):
        A = tl.load(A_ptr + n * D + c, mask=c < D, other=0.0)[None, :]
        start = tl.load(bounds_ptr + ((k * batch + b) * N + n) * D + c, mask=c < D, other=0.0)[None, :]
        end_at = grads_ptr + (((k + 1) * batch + b) * N + n) * D + c
        end = tl.load(end_at, mask=c < D, other=0.0)[None, :]
        Bn = tl.full([L, 1], 1.0, tl.float32)
        Bn_before = tl.full([L, 1], 1.0, tl.float32)
        Cn = tl.full([L, 1], 1.0, tl.float32)
        if HAS_B:
            Bn = _load_column(B_ptr + b * T * N, t, begin, last, n, N)[:, None]
            Bn_before = _load_column(B_ptr + b * T * N, t - 1, begin, last, n, N)[:, None]
        if HAS_C:
            Cn = _load_column(C_ptr + b * T * N, t, begin, last, n, N)[:, None]

        x_before = dt_before * A
        decay_before = tl.exp(-x_before)
        drive_before = _weight(x_before, dt_before, A, decay_before, FORM) * v_before * Bn_before
        _, before = tl.associative_scan((decay_before, tl.where((row == 0)[:, None], start, drive_before)), 0, _then)
        pull = tl.where((row == L - 1)[:, None], Cn * dz + end, Cn * dz)
        _, g = tl.associative_scan((tl.exp(-dt_after * A), pull), 0, _then, reverse=True)

        x = dt * A
        decay = tl.exp(-x)
        w = _weight(x, dt, A, decay, FORM)
        drive = v * Bn
        dv += g * w * Bn
        if FORM == "zoh":
            ddt += g * decay * (drive - A * before)
            dA = g * (drive * _zoh_slope(x, dt, A, decay, w) - dt * decay * before)
        else:
            slope = decay
            if FORM == "rms":
                slope = tl.where(w > 0.0, decay * decay / w, 0.0)
            dx = g * (drive * slope - decay * before)
            ddt += A * dx
            dA = dt * dx
        tl.store(end_at, tl.sum(dA, 0), mask=c < D)
        table_at = ((tl.program_id(2).to(tl.int64) * batch + b) * N + n) * T + t
        if HAS_B:
            tl.store(dB_ptr + table_at, tl.sum(g * w * v, 1), mask=t < last)
        if HAS_C:
            tl.store(dC_ptr + table_at, tl.sum(dz * (decay * before + w * drive), 1), mask=t < last)

    inside = (t < last)[:, None] & (c < D)[None, :]
    to = at + t[:, None] * D + c[None, :]
    du = dv
    if HAS_GATE:
        tl.store(dgate_ptr + to, (dv * u).to(dgate_ptr.dtype.element_ty), mask=inside)
        du = dv * _load(gate_ptr + at, t, begin, last, c, D)
    if HAS_D:
        du += tl.load(D_ptr + c, mask=c < D, other=0.0)[None, :] * dz
        tl.store(dD_ptr + (k * batch + b) * D + c, tl.sum(dz * u, 0), mask=c < D)
    tl.store(du_ptr + to, du.to(du_ptr.dtype.element_ty), mask=inside)
    tl.store(ddt_ptr + to, ddt.to(ddt_ptr.dtype.element_ty), mask=inside)


# ---- launches -------------------------------------------------------------------------------------------------------
# `maps` are (u, gate, dt) and `columns` (B, C), contiguous; A is (N, D) and D (D,), float32. An absent input is None.

Maps = tuple[Tensor, Tensor | None, Tensor]
Columns = tuple[Tensor | None, Tensor | None]


def _grid(u: Tensor, chunks: int, L: int) -> tuple[tuple[int, int, int], int]:
    """The grid of a launch with one program per tile, and the channels per tile."""
    batch, _, D = u.shape
    block = min(max(16, TILE // L), max(16, triton.next_power_of_2(D)))
    return (chunks, batch, triton.cdiv(D, block)), block


def _carry(bounds: Tensor, totals: Tensor, A: Tensor, reverse: bool) -> None:
    chunks, batch, N, D = bounds.shape[0] - 1, *bounds.shape[1:]
    block = min(32, max(16, triton.next_power_of_2(D)))
    steps = min(CARRY_STEPS, triton.next_power_of_2(chunks))
    _carry_kernel[(batch * N, triton.cdiv(D, block))](
        bounds, totals, A, chunks, D, N, batch, reverse, steps, block, num_warps=WARPS
    )


def forward(
    maps: Maps, A: Tensor, columns: Columns, D: Tensor | None, bounds: Tensor, z: Tensor, *, form: str, chunk: int
) -> None:
    """Write `z`, and the states at the end of every chunk to `bounds[1:]`; `bounds[0]` is the state at the start."""
    (u, gate, dt), (B, C) = maps, columns
    chunks, (batch, T, width), N = bounds.shape[0] - 1, u.shape, A.shape[0]
    grid, block = _grid(u, chunks, chunk)
    totals = bounds.new_empty(chunks, batch, width)
    g = u if gate is None else gate
    Bp, Cp, Dp = (u if x is None else x for x in (B, C, D))
    has_gate, has_B, has_C, has_D = (x is not None for x in (gate, B, C, D))
    _ends_kernel[grid](
        u, g, dt, A, Bp, bounds, totals, T, width, N, batch, form, has_gate, has_B, chunk, block, num_warps=WARPS
    )
    _carry(bounds, totals, A, reverse=False)
    _output_kernel[grid](
        u, g, dt, A, Bp, Cp, Dp, bounds, z, T, width, N, batch, form, has_gate, has_B, has_C, has_D, chunk, block,
        num_warps=WARPS,
    )  # fmt: skip


def backward(
    maps: Maps, A: Tensor, columns: Columns, D: Tensor | None, bounds: Tensor, dz: Tensor, end: Tensor | None,
    *, form: str, chunk: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of u, gate, dt, A, B, C, D and the start; from A on they are float32.

    dz: the gradient of z. end: the gradient of the last state, None for 0.
    """
    (u, gate, dt), (B, C) = maps, columns
    chunks, (batch, T, width), N = bounds.shape[0] - 1, u.shape, A.shape[0]
    grid, block = _grid(u, chunks, chunk)
    totals, grads = bounds.new_empty(chunks, batch, width), torch.empty_like(bounds)  # float32, as the bounds are
    if end is None:
        grads[chunks].zero_()
    else:
        grads[chunks].copy_(end)
    du, ddt = torch.empty_like(u), torch.empty_like(dt)
    dgate = None if gate is None else torch.empty_like(gate)
    dB, dC = (None if x is None else bounds.new_empty(grid[2], batch, N, T) for x in (B, C))
    dD = None if D is None else bounds.new_empty(chunks, batch, width)
    g = u if gate is None else gate
    Bp, Cp, Dp, dgp, dBp, dCp, dDp = (u if x is None else x for x in (B, C, D, dgate, dB, dC, dD))
    has_gate, has_B, has_C, has_D = (x is not None for x in (gate, B, C, D))
    _starts_kernel[grid](dz, dt, A, Cp, grads, totals, T, width, N, batch, has_C, chunk, block, num_warps=WARPS)
    _carry(grads, totals, A, reverse=True)
    _inputs_kernel[grid](
        u, g, dt, A, Bp, Cp, Dp, bounds, dz, grads, du, dgp, ddt, dBp, dCp, dDp, T, width, N, batch,
        form, has_gate, has_B, has_C, has_D, chunk, block, num_warps=WARPS,
    )  # fmt: skip
    dA = grads[1:].sum((0, 1))
    dB, dC = (None if x is None else x.sum(0).transpose(1, 2) for x in (dB, dC))
    return du, dgate, ddt, dA, dB, dC, None if dD is None else dD.sum((0, 1)), grads[0].clone()
