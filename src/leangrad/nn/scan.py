"""The scans of state-space models as differentiable functions: `selective_scan` (Mamba) and `rg_lru` (Griffin).

Each is one autograd node over `ops/scan.py`. It keeps the caller's own inputs and the states at chunk boundaries;
backward rebuilds the states between them, chunk by chunk. It overwrites nothing that is kept, so `retain_graph=True`
works. A second derivative, and calls under `torch.compile` and `torch.func`, run `_plain`, the same scan on torch's own
ops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad import _torch
from leangrad.functional import runs_plain
from leangrad.ops import scan as ops
from leangrad.overridable import overridable

__all__ = ["rg_lru", "selective_scan"]

FEW_STEPS = 4  # without gradients, up to this many steps run `_infer`


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    state: Tensor | None = None,
    *,
    softplus: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the selective scan of Mamba, with zero-order hold; returns z and the last state.

    Equals, step by step over t (with `state` starting at 0 if it is None):

        decay = torch.exp(-dt[:, t, :, None] * A)
        state = decay * state + (1 - decay) / A * B[:, t, None, :] * u[:, t, :, None]
        z[:, t] = (C[:, t, None, :] * state).sum(-1) + D * u[:, t]

    but (1 − decay)/A keeps its digits where dt·A is small, and is dt where A is 0.

    Args:
        u, dt: (batch, T, width). z has the dtype of u.
        A: (width, N), positive for a state that decays; D: (width,).
        B, C: (batch, T, N).
        state: (batch, width, N). The last one is float32, or float64 if an input is.
        softplus: use F.softplus(dt), in float32, in place of dt; backward computes it again, it is not kept.
        chunk: steps between two kept states, a power of two; by default near √T / 2, from 16 to 128.

    Keeps for backward the inputs themselves, and ceil(T / chunk) + 1 states of batch · N · width float32 values.

    >>> u, dt, A = torch.randn(2, 100, 4), torch.rand(2, 100, 4), torch.rand(4, 3)
    >>> B, C = torch.randn(2, 100, 3), torch.randn(2, 100, 3)
    >>> z, state = selective_scan(u, dt, A, B, C)
    >>> first, halfway = selective_scan(u[:, :50], dt[:, :50], A, B[:, :50], C[:, :50])
    >>> rest, _ = selective_scan(u[:, 50:], dt[:, 50:], A, B[:, 50:], C[:, 50:], state=halfway)
    >>> torch.allclose(torch.cat([first, rest], 1), z, atol=1e-5)
    True
    """
    batch, T, width = _check_map("u", u)
    if not isinstance(A, Tensor) or A.dim() != 2 or A.shape[0] != width or A.shape[1] == 0:
        raise ValueError(f"A: expected ({width}, N) for u of width {width}, got {_form_of(A)}")
    N = A.shape[1]
    _check("dt", dt, (batch, T, width), u)
    _check("A", A, (width, N), u)
    _check("B", B, (batch, T, N), u)
    _check("C", C, (batch, T, N), u)
    _check("D", D, (width,), u)
    _check("state", state, (batch, width, N), u)
    return _run(_Kind("zoh", softplus), chunk, u, dt, A, B, C, D, None, state)


def rg_lru(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    lam: Tensor,
    state: Tensor | None = None,
    *,
    rms: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the real-gated linear recurrent unit; returns h and the last state.

    Equals, step by step over t (with `state` starting at 0 if it is None):

        a = torch.exp(8 * r[:, t] * F.logsigmoid(lam))
        state = a * state + (1 - a) * i[:, t] * x[:, t]      # rms=True: sqrt(1 - a**2) in place of 1 - a
        h[:, t] = state

    Args:
        x, r, i: (batch, T, width): the input, the recurrence gate and the input gate, both between 0 and 1.
        lam: (width,), λ.
        state: (batch, width). The last one is float32, or float64 if an input is.
        rms: use the form that preserves the variance of its input. Its slope is infinite at r = 0, where 0 is used.
        chunk: steps between two kept states, a power of two; by default near √T / 2, from 16 to 128.

    Keeps for backward the inputs themselves, and ceil(T / chunk) + 1 states of batch · width float32 values.

    >>> x, gate = torch.randn(2, 100, 4), torch.full((2, 100, 4), 0.5)
    >>> h, state = rg_lru(x, gate, gate, torch.zeros(4))
    >>> torch.equal(h[:, -1], state)
    True
    """
    batch, T, width = _check_map("x", x)
    _check("r", r, (batch, T, width), x)
    _check("i", i, (batch, T, width), x)
    _check("lam", lam, (width,), x)
    _check("state", state, (batch, width), x)
    rate = 8 * F.softplus(-lam if lam.dtype == torch.float64 else -lam.float())  # −8·log σ(λ)
    start = None if state is None else state.unsqueeze(-1)
    h, end = _run(_Kind("rms" if rms else "ema"), chunk, x, r, rate.unsqueeze(-1), None, None, None, i, start)
    return h, end.squeeze(-1)


# ---- arguments ------------------------------------------------------------------------------------------------------


def _form_of(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _check_map(name: str, x: Tensor) -> tuple[int, int, int]:
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise ValueError(f"{name}: expected (batch, T, width), got {_form_of(x)}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
    batch, T, width = x.shape
    return batch, T, width


def _check(name: str, x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> None:
    if x is None and name in ("D", "state"):
        return
    if not isinstance(x, Tensor) or x.shape != shape:
        raise ValueError(f"{name}: expected {shape}, got {_form_of(x)}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected the device of the input, {like.device}, got {x.device}")


class _Kind(NamedTuple):
    form: str  # of w, see `ops/scan.py`
    softplus: bool = False  # apply softplus to dt


def _run(kind: _Kind, chunk: int | None, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a scan; returns its output and the last state.

    tensors: u, dt, A (width, N), B, C, D, gate, state (batch, width, N).
    """
    u = tensors[0]
    assert u is not None
    if chunk is None:
        chunk = ops.chunk_length(u.shape[1])
    elif not isinstance(chunk, int) or chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk: expected a power of two, got {chunk!r}")
    if runs_plain(*tensors):
        return _plain(kind, *tensors)
    if u.shape[1] <= FEW_STEPS and not (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    ):
        return _infer(kind, *tensors)
    out: tuple[Tensor, Tensor] = _apply_scan(kind, chunk, *tensors)
    return out


# ---- autograd -------------------------------------------------------------------------------------------------------


class _ScanFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: _Kind, chunk: int, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        scan, state = _scan_of(kind, tensors), tensors[-1]
        with _without_autocast(scan.u):
            z, bounds = ops.forward(scan, None if state is None else state.transpose(1, 2), chunk)
        ctx.kind, ctx.chunk = kind, chunk
        ctx.save_for_backward(*tensors, bounds)
        ctx.set_materialize_grads(False)
        # A copy: the boundaries are kept for backward, and the caller may change the last state in place.
        return z, bounds[-1].transpose(1, 2).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, end: Tensor | None) -> tuple[Tensor | None, ...]:
        if dz is None and end is None:
            return (None,) * len(ctx.needs_input_grad)
        *tensors, bounds = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        with _without_autocast(tensors[0]):
            if torch.is_grad_enabled():
                return (None, None, *_differentiate(ctx.kind, tensors, needs, (dz, end)))
            if not all(g is None or _torch.has_memory(g) for g in (dz, end)):
                # A batch of gradients (`is_grads_batched`): only torch's own ops support it.
                leaves = [None if t is None else t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
                return (None, None, *_differentiate(ctx.kind, leaves, needs, (dz, end), create_graph=False))
            gradients = _backward(ctx.kind, tensors, bounds, (dz, end), ctx.chunk, needs)
        cast = (
            g.to(t.dtype) if need and t is not None and g is not None else None
            for g, t, need in zip(gradients, tensors, needs, strict=True)
        )
        return (None, None, *cast)


_apply_scan = overridable(_ScanFunction.apply, product=True)


def _scan_of(kind: _Kind, tensors: Sequence[Tensor | None]) -> ops.Scan:
    u, dt, A, B, C, D, gate, _ = tensors
    assert u is not None
    assert dt is not None
    assert A is not None
    if kind.softplus:
        dt = F.softplus(dt if dt.dtype == torch.float64 else dt.float())
    return ops.Scan(kind.form, u, dt, A.t().contiguous(), B, C, D, gate)


def _backward(
    kind: _Kind,
    tensors: Sequence[Tensor | None],
    bounds: Tensor,
    outer: tuple[Tensor | None, Tensor | None],
    chunk: int,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the tensors of `_run`, in that order and those shapes.

    outer: gradients of the output and of the last state.
    """
    scan, (dz, end) = _scan_of(kind, tensors), outer
    dz = torch.zeros_like(scan.u) if dz is None else dz
    found = ops.backward(scan, bounds, dz, None if end is None else end.transpose(1, 2), chunk, needs_dA=needs[2])
    ddt, raw = found.dt, tensors[1]
    if kind.softplus and raw is not None:
        ddt.mul_(torch.sigmoid(raw.to(ddt.dtype)))
    dA = None if found.A is None else found.A.t()
    return found.u, ddt, dA, found.B, found.C, found.D, found.gate, found.start.transpose(1, 2)


def _differentiate(
    kind: _Kind,
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    outer: tuple[Tensor | None, Tensor | None],
    *,
    create_graph: bool = True,
) -> list[Tensor | None]:
    """Returns the gradients of `_plain`; with `create_graph` they can be differentiated again."""
    with torch.enable_grad():
        # One alias per argument: a tensor that is passed twice must get two gradients.
        aliases = [None if t is None else t.view_as(t) for t in tensors]
        wanted = [alias for alias, need in zip(aliases, needs, strict=True) if alias is not None and need]
        pairs = [(y, g) for y, g in zip(_plain(kind, *aliases), outer, strict=True) if g is not None]
    outputs, grads = [y for y, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=create_graph, allow_unused=True))
    return [next(found) if alias is not None and need else None for alias, need in zip(aliases, needs, strict=True)]


def _without_autocast(u: Tensor) -> AbstractContextManager[Any]:
    """Returns a context without autocast: products over states and channels sum many terms, and stay in float32."""
    return _torch.autocast_off(u.device.type)


# ---- on torch's own ops ---------------------------------------------------------------------------------------------


def _plain(kind: _Kind, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the scan on torch's own ops, by doubling: log2(T) passes over all states, not T steps for a compiler."""
    scan, start = _scan_of(kind, tensors), tensors[-1]
    dtype = ops.state_dtype(scan)
    u, dt = scan.u.to(dtype), scan.dt.to(dtype)
    v = u if scan.gate is None else u * scan.gate.to(dtype)
    A = scan.A.t().to(dtype)
    x = dt.unsqueeze(-1) * A
    decays, states = torch.exp(-x), _plain_weight(kind.form, x, dt.unsqueeze(-1)) * v.unsqueeze(-1)
    if scan.B is not None:
        states = states * scan.B.to(dtype).unsqueeze(2)
    if start is not None:
        states = torch.cat([start.to(dtype).unsqueeze(1), states], 1)
        decays = torch.cat([torch.ones_like(decays[:, :1]) if decays.shape[1] else decays, decays], 1)
    shift = 1
    while shift < states.shape[1]:
        later = states[:, shift:] + decays[:, shift:] * states[:, :-shift]
        states = torch.cat([states[:, :shift], later], 1)
        decays = torch.cat([decays[:, :shift], decays[:, shift:] * decays[:, :-shift]], 1)
        shift *= 2
    end = states[:, -1] if states.shape[1] else states.new_zeros(u.shape[0], *A.shape)
    states = states if start is None else states[:, 1:]
    z = (states if scan.C is None else states * scan.C.to(dtype).unsqueeze(2)).sum(-1)
    if scan.D is not None:
        z = z + scan.D.to(dtype) * u
    return z.to(scan.u.dtype), end


def _plain_weight(form: str, x: Tensor, dt: Tensor) -> Tensor:
    """Returns w of `ops/scan.py`, for x = dt·A, by formulas whose derivatives are right at x = 0 too."""
    if form == "ema":
        return -torch.expm1(-x)
    if form == "rms":
        square = -torch.expm1(-2 * x)
        is_zero = square <= 0
        return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, square).sqrt())
    near_zero = x.abs() < 1 / 16
    series = torch.zeros_like(x)
    for k in range(10, 0, -1):
        series = 1 / math.factorial(k) - x * series
    away = torch.where(near_zero, 1.0, x)
    return dt * torch.where(near_zero, series, -torch.expm1(-away) / away)


def _infer(kind: _Kind, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a few steps without gradients, as step-by-step generation does: no buffers, and as few calls as possible."""
    scan, state = _scan_of(kind, tensors), tensors[-1]
    dtype, form = ops.state_dtype(scan), scan.form
    u, dt, A = scan.u.to(dtype), scan.dt.to(dtype).unsqueeze(2), scan.A.to(dtype)
    v = (u if scan.gate is None else u * scan.gate).unsqueeze(2)
    x = dt * A  # (batch, T, N, width)
    drives = -torch.expm1(-x if form != "rms" else -2 * x)
    if form == "zoh":
        drives = torch.where(x == 0, dt, dt * drives / x)
    elif form == "rms":
        drives = drives.clamp_min_(0).sqrt_()
    drives = drives * v if scan.B is None else drives * v * scan.B.unsqueeze(-1)
    s = drives.new_zeros(u.shape[0], *A.shape) if state is None else state.to(dtype).transpose(1, 2)
    decays, outputs = torch.exp(-x), []
    for decay, drive in zip(decays.unbind(1), drives.unbind(1), strict=True):
        s = torch.addcmul(drive, decay, s)
        outputs.append(s)
    states = torch.stack(outputs, 1) if outputs else drives
    z = (states if scan.C is None else states * scan.C.unsqueeze(-1)).sum(2)
    if scan.D is not None:
        z = z + scan.D * u
    return z.to(scan.u.dtype), s.transpose(1, 2).clone(memory_format=torch.contiguous_format)
