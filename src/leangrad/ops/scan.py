"""The diagonal scan of state-space models, forward and backward, which keeps the states at chunk boundaries only.

    ā_t = exp(−dt_t·A)                  A is (N, D): N states for each of D channels
    s_t = ā_t·s_{t−1} + w_t·B_t·v_t     v = gate·u
    z_t = Σ_n C_t·s_t + D·u_t

and w depends on the form:

    "zoh"   (1 − ā)/A        zero-order hold, as in Mamba; dt where A is 0
    "ema"   1 − ā            as in the RG-LRU
    "rms"   √(1 − ā²)        the RG-LRU's other form

Backward rebuilds the states of one chunk at a time. With the gradient of s_t, g_t = C_t·dz_t + ā_{t+1}·g_{t+1}:

    dv = Σ_n g·w·B    dB = Σ_d g·w·v    dC = Σ_d dz·s    dD = Σ dz·u
    d(dt) = Σ_n g·(B·v·∂w/∂dt − A·ā·s_{t−1})       dA = Σ_t g·(B·v·∂w/∂A − dt·ā·s_{t−1})

Nothing here uses autograd. Maps may be in a low precision; states and sums are float32, or float64 if a map is. On CUDA
`leangrad.kernels.scan` does the work; the code below is for all else. It computes everything but the recurrence for a
whole chunk at once; a step of the recurrence is one `addcmul` into a buffer that is reused for every chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad.kernels import kernels_of, serves

__all__ = ["Gradients", "Scan", "backward", "chunk_length", "forward"]

# States of one time step that are processed together: enough that an op costs more than its call, and a bound for the
# scratch, which does not grow with the batch.
STEP_STATES = 1 << 15
# Where |dt·A| is smaller, a series replaces the direct formula. At this bound it rounds as a plain (1 − ā)/A does.
NEAR = 1 / 4


class Scan(NamedTuple):
    """The inputs of one scan: u, dt and gate (batch, T, D), A (N, D), B and C (batch, T, N), D (D,)."""

    form: str
    u: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor | None = None
    C: Tensor | None = None
    D: Tensor | None = None
    gate: Tensor | None = None


class Gradients(NamedTuple):
    """The gradients, in the shapes of the inputs; `start` is (batch, N, D). A's is None if it was not needed."""

    u: Tensor
    dt: Tensor
    A: Tensor | None
    B: Tensor | None
    C: Tensor | None
    D: Tensor | None
    gate: Tensor | None
    start: Tensor


def chunk_length(steps: int) -> int:
    """Returns the steps between two kept states: a power of two near √steps / 2, from 16 to 128.

    The kept states, steps / chunk of them, and the rebuilt ones, about six buffers of a chunk, are then about as large.

    >>> [chunk_length(steps) for steps in (1, 100, 4096, 10**6)]
    [16, 16, 32, 128]
    """
    length = 16
    while length < 128 and 4 * length * length < steps:
        length *= 2
    return length


def state_dtype(scan: Scan) -> torch.dtype:
    """Returns float64 if one of the inputs is, else float32."""
    double = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in scan)
    return torch.float64 if double else torch.float32


def forward(scan: Scan, start: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """Returns z, and the states at the chunk boundaries, (chunks + 1, batch, N, D).

    bounds[0] is `start`, zeros if that is None; bounds[-1] is the last state.

    >>> one = torch.ones(1, 3, 1)
    >>> z, bounds = forward(Scan("ema", one, one, torch.full((1, 1), math.log(2))), None, 2)
    >>> z.flatten().tolist(), bounds.flatten().tolist()
    ([0.5, 0.75, 0.875], [0.0, 0.75, 0.875])
    """
    batch, T, D = scan.u.shape
    bounds = scan.u.new_empty(-(-T // chunk) + 1, batch, scan.A.shape[0], D, dtype=state_dtype(scan))
    if start is None:
        bounds[0].zero_()
    else:
        bounds[0].copy_(start)
    z = torch.empty_like(scan.u, memory_format=torch.contiguous_format)
    if _kernels_serve(scan):
        maps, columns, vectors = _for_kernels(scan)
        with torch.cuda.device_of(z):
            kernels_of("scan").forward(maps, vectors[0], columns, vectors[1], bounds, z, form=scan.form, chunk=chunk)
    else:
        for rows in _row_groups(scan):
            _forward_rows(scan, rows, bounds, z, chunk)
    return z, bounds


def backward(
    scan: Scan, bounds: Tensor, dz: Tensor, end: Tensor | None, chunk: int, *, needs_dA: bool = True
) -> Gradients:
    """Returns all gradients, from `dz`, that of z, and `end`, that of the last state (batch, N, D), zero if None.

    >>> one = torch.ones(1, 3, 1)
    >>> scan = Scan("ema", one, one, torch.full((1, 1), math.log(2)))
    >>> _, bounds = forward(scan, None, 2)
    >>> backward(scan, bounds, one, None, 2).u.flatten().tolist()
    [0.875, 0.75, 0.5]
    """
    if _kernels_serve(scan):
        maps, columns, vectors = _for_kernels(scan)
        with torch.cuda.device_of(bounds):
            du, dgate, ddt, dA, dB, dC, dD, start = kernels_of("scan").backward(
                maps, vectors[0], columns, vectors[1], bounds, dz.contiguous(), end, form=scan.form, chunk=chunk
            )
        return Gradients(du, ddt, dA, dB, dC, dD, dgate, start)
    into = _empty_gradients(scan, bounds, end, needs_dA)
    for rows in _row_groups(scan):
        _backward_rows(scan, rows, bounds, dz, chunk, into)
    return into


# ---- without kernels ------------------------------------------------------------------------------------------------


class _Rates(NamedTuple):
    """A, −A and 1/A."""

    A: Tensor
    minus: Tensor
    inverse: Tensor


def _rates(scan: Scan, dtype: torch.dtype) -> _Rates:
    A = scan.A.to(dtype)
    if scan.form == "zoh":
        # Where A is 0, or so small that dt·A could underflow, a tiny A gives the same w, which is dt to the last bit.
        tiny = math.sqrt(torch.finfo(dtype).tiny)
        A = torch.where(A.abs() < tiny, tiny, A)
    return _Rates(A, -A, 1 / A)


class _Block(NamedTuple):
    """One chunk of some rows of the batch, time first: u, v, dt are (L, R, 1, D); B, C (L, R, N)."""

    u: Tensor
    v: Tensor
    dt: Tensor
    B: Tensor | None
    C: Tensor | None


_Numbered = tuple[int, slice, _Block]


def _blocks(scan: Scan, rows: slice, chunk: int, dtype: torch.dtype, reverse: bool = False) -> Iterator[_Numbered]:
    """Yields (index, times, block) of every chunk."""
    T = scan.u.shape[1]
    indices = range(-(-T // chunk))
    for k in reversed(indices) if reverse else indices:
        times = slice(k * chunk, min(T, (k + 1) * chunk))
        u, dt = (_cut(x, rows, times, dtype).unsqueeze(2) for x in (scan.u, scan.dt))
        v = u if scan.gate is None else u * _cut(scan.gate, rows, times, dtype).unsqueeze(2)
        B, C = (None if x is None else _cut(x, rows, times, dtype) for x in (scan.B, scan.C))
        yield k, times, _Block(u, v, dt, B, C)


def _cut(x: Tensor, rows: slice, times: slice, dtype: torch.dtype) -> Tensor:
    return x[rows, times].transpose(0, 1).to(dtype)


def _row_groups(scan: Scan) -> list[slice]:
    """Returns groups of rows of the batch whose states fit in cache together."""
    batch, step = scan.u.shape[0], max(1, STEP_STATES // scan.A.numel())
    return [slice(first, min(batch, first + step)) for first in range(0, batch, step)]


def _buffers(count: int, scan: Scan, rows: slice, chunk: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns `count` buffers (L, R, N, D), in one allocation."""
    L = min(chunk, scan.u.shape[1])
    return list(scan.u.new_empty(count, L, rows.stop - rows.start, *scan.A.shape, dtype=dtype))


def _forward_rows(scan: Scan, rows: slice, bounds: Tensor, z: Tensor, chunk: int) -> None:
    rates = _rates(scan, bounds.dtype)
    decays, states, *spare = _buffers(5, scan, rows, chunk, bounds.dtype)
    decay_steps, state_steps = decays.unbind(), states.unbind()
    for k, times, block in _blocks(scan, rows, chunk, bounds.dtype):
        L = times.stop - times.start
        _weigh(scan.form, rates, block, decays[:L], states[:L], *(x[:L] for x in spare))
        _drive(block, states[:L], into=states[:L])
        _recur(decay_steps[:L], state_steps[:L], bounds[k, rows])
        bounds[k + 1, rows] = state_steps[L - 1]
        y = _over_states(block.C, states[:L], scratch=states[:L])
        if scan.D is not None:
            y = torch.addcmul(y, block.u[:, :, 0], scan.D.to(y.dtype))
        z[rows, times] = y.transpose(0, 1)


def _weigh(
    form: str, rates: _Rates, block: _Block, decays: Tensor, weights: Tensor, slopes: Tensor, *spare: Tensor
) -> None:
    """Write ā, w, and the slope of w: −∂w/∂A for "zoh", else ∂w/∂x, where x = dt·A."""
    torch.mul(block.dt, rates.minus, out=decays)
    if form == "zoh":
        _weigh_zoh(rates, block, decays, weights, slopes, *spare)
    elif form == "ema":
        torch.expm1(decays, out=weights).neg_()
        slopes.copy_(decays.exp_())
    else:
        torch.mul(decays, 2, out=weights).expm1_().neg_().clamp_min_(0).sqrt_()
        # ā²/w; where w is 0, at dt = 0, there is no slope: 0 is its limit times dt.
        torch.mul(decays.exp_(), decays, out=slopes).div_(weights).masked_fill_(weights == 0, 0)


def _weigh_zoh(
    rates: _Rates, block: _Block, decays: Tensor, weights: Tensor, slopes: Tensor, far: Tensor, direct: Tensor
) -> None:
    """Write the slope q = (w − dt·ā)/A first, then w = dt·ā + A·q, in which nothing cancels.

    For |x| < NEAR, where the direct form loses digits, q is its series dt²·Σ_k (−x)^(k−1)·k/(k+1)!. On a CPU `expm1`
    costs as much as 27 products, and `torch.where` as 14. So w is computed from the series as well, and `lerp` selects
    between the two forms. Both must be finite for that: the series gets a clamped x, and a dt whose square does not
    overflow.
    """
    minus_x = decays
    terms = 12 if minus_x.dtype == torch.float64 else 6  # the next one is below the rounding at x = NEAR
    clamped = torch.clamp(minus_x, -NEAR, NEAR, out=far)
    series = torch.mul(clamped, terms / math.factorial(terms + 1), out=slopes)
    for k in range(terms - 1, 1, -1):
        series.add_(k / math.factorial(k + 1)).mul_(clamped)
    series.add_(1 / 2)
    limit = math.sqrt(torch.finfo(minus_x.dtype).max)
    series.mul_(block.dt.clamp(-limit, limit).square_())
    torch.abs(minus_x, out=far).ge_(NEAR)
    decays.exp_()
    dt_decays = torch.mul(block.dt, decays, out=weights)
    torch.neg(decays, out=direct).add_(1).mul_(rates.inverse).sub_(dt_decays).mul_(rates.inverse)
    torch.lerp(series, direct, far, out=slopes)
    torch.addcmul(dt_decays, rates.A, slopes, out=weights)


def _drive(block: _Block, weights: Tensor, into: Tensor) -> None:
    """Write w·B·v into `into`."""
    torch.mul(weights, block.v, out=into)
    if block.B is not None:
        into.mul_(block.B.unsqueeze(-1))


def _recur(decays: tuple[Tensor, ...], states: tuple[Tensor, ...], state: Tensor) -> None:
    """s_t = ā_t·s_{t−1} + states_t, written over `states`; `state` is the one before the first."""
    for decay, after in zip(decays, states, strict=True):
        state = torch.addcmul(after, decay, state, out=after)


def _recur_back(decays: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
    """g_t = ā_{t+1}·g_{t+1} + grads_t, written over `grads`."""
    later = grads[-1]
    for decay, earlier in zip(reversed(decays[1:]), reversed(grads[:-1]), strict=True):
        later = torch.addcmul(earlier, decay, later, out=earlier)


def _over_states(weights: Tensor | None, states: Tensor, scratch: Tensor) -> Tensor:
    """Returns Σ_n weights·states: (L, R, N) and (L, R, N, D) to (L, R, D)."""
    if weights is None:
        return states.sum(2)
    # Not `bmm`, which on some CPUs makes one call for each of its small matrices.
    return torch.mul(states, weights.unsqueeze(-1), out=scratch).sum(2)


def _over_channels(states: Tensor, weights: Tensor, scratch: Tensor) -> Tensor:
    """Returns Σ_d states·weights: (L, R, N, D) and (L, R, 1, D) to (L, R, N)."""
    return torch.mul(states, weights, out=scratch).sum(3)


def _empty_gradients(scan: Scan, bounds: Tensor, end: Tensor | None, needs_dA: bool) -> Gradients:
    """Returns buffers for all gradients. `start` begins as the gradient of the last state; backward carries it back."""
    u, dt, B, C, gate = (
        None if x is None else torch.empty_like(x) for x in (scan.u, scan.dt, scan.B, scan.C, scan.gate)
    )
    assert u is not None
    assert dt is not None
    A = torch.zeros_like(scan.A, dtype=bounds.dtype) if needs_dA else None
    D = None if scan.D is None else torch.zeros_like(scan.D, dtype=bounds.dtype)
    start = torch.zeros_like(bounds[0])
    return Gradients(u, dt, A, B, C, D, gate, start if end is None else start.copy_(end))


def _backward_rows(scan: Scan, rows: slice, bounds: Tensor, dz: Tensor, chunk: int, into: Gradients) -> None:
    dtype = bounds.dtype
    rates = _rates(scan, dtype)
    decays, weights, slopes, states, grads, spare = _buffers(6, scan, rows, chunk, dtype)
    decay_steps, state_steps, grad_steps = decays.unbind(), states.unbind(), grads.unbind()
    carried = into.start[rows]
    for k, times, block in _blocks(scan, rows, chunk, dtype, reverse=True):
        L = times.stop - times.start
        a, w, q, s, g = (x[:L] for x in (decays, weights, slopes, states, grads))
        first = bounds[k, rows]
        _weigh(scan.form, rates, block, a, w, q, s, g)
        _drive(block, w, into=s)
        _recur(decay_steps[:L], state_steps[:L], first)

        dy = _cut(dz, rows, times, dtype).unsqueeze(2)
        if block.C is None:
            g.copy_(dy)
        else:
            torch.mul(block.C.unsqueeze(-1), dy, out=g)
        g[-1] += carried
        _recur_back(decay_steps[:L], grad_steps[:L])
        torch.mul(a[0], g[0], out=carried)

        if into.C is not None:
            into.C[rows, times] = _over_channels(s, dy, scratch=spare[:L]).transpose(0, 1)
        gw = w.mul_(g)
        if into.B is not None:
            into.B[rows, times] = _over_channels(gw, block.v, scratch=spare[:L]).transpose(0, 1)
        dv = _over_states(block.B, gw, scratch=spare[:L])
        du = dv if scan.gate is None else dv * _cut(scan.gate, rows, times, dtype)
        if scan.D is not None and into.D is not None:
            du = torch.addcmul(du, dy[:, :, 0], scan.D.to(dtype))
            into.D.add_((dy * block.u).sum((0, 1, 2)))
        into.u[rows, times] = du.transpose(0, 1)
        if into.gate is not None:
            into.gate[rows, times] = (dv * block.u[:, :, 0]).transpose(0, 1)

        ddt = _backward_rates(scan.form, rates, block, _Chunk(a, g, q, s, first, spare[:L], w), into.A)
        into.dt[rows, times] = ddt.transpose(0, 1)


class _Chunk(NamedTuple):
    """The buffers of a chunk in backward. All but the first two are overwritten by `_backward_rates`."""

    decays: Tensor
    grads: Tensor
    slopes: Tensor
    states: Tensor
    first: Tensor
    spare: Tensor
    scratch: Tensor


def _backward_rates(form: str, rates: _Rates, block: _Block, c: _Chunk, dA: Tensor | None) -> Tensor:
    """Returns the gradient of dt, (L, R, D), and adds that of A to `dA`."""
    decayed = torch.mul(c.grads, c.decays, out=c.spare)  # g·ā
    if form == "zoh":  # ∂w/∂dt = ā
        ddt = _over_states(block.B, decayed, c.scratch).mul_(block.v[:, :, 0])
    decayed[1:].mul_(c.states[:-1])
    decayed[0].mul_(c.first)  # g·ā·s_{t−1}
    sloped = c.slopes.mul_(c.grads)
    if form == "zoh" and dA is None:
        return ddt.sub_(decayed.mul_(rates.A).sum(2))
    _drive(block, sloped, into=sloped)  # g·B·v·slope
    if form == "zoh":
        assert dA is not None
        ddt -= torch.mul(decayed, rates.A, out=c.states).sum(2)
        dA -= decayed.mul_(block.dt).add_(sloped).sum((0, 1))
        return ddt
    dx = sloped.sub_(decayed)
    if dA is not None:
        dA += torch.mul(dx, block.dt, out=c.states).sum((0, 1))
    return dx.mul_(rates.A).sum(2)


# ---- kernels --------------------------------------------------------------------------------------------------------


def _kernels_serve(scan: Scan) -> bool:
    """Whether the kernels apply: the scan is not empty, they serve its tensors, and the batch fits in a grid."""
    batch_fits = scan.u.shape[0] < 1 << 16
    return scan.u.numel() > 0 and batch_fits and all(serves(x) for x in scan if isinstance(x, Tensor))


def _for_kernels(scan: Scan) -> tuple[Any, Any, Any]:
    """Returns (u, gate, dt), (B, C) and (A, D) as the kernels need them: contiguous, A and D in float32."""
    u, dt, B, C, gate = (None if x is None else x.contiguous() for x in (scan.u, scan.dt, scan.B, scan.C, scan.gate))
    A, D = (None if x is None else x.float().contiguous() for x in (scan.A, scan.D))
    return (u, gate, dt), (B, C), (A, D)
