"""The scans by name, the loops that define them, and random inputs for both."""

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.nn.scan import rg_lru, selective_scan

INPUTS = {"mamba": ("u", "dt", "A", "B", "C", "D", "state"), "rg_lru": ("x", "r", "i", "lam", "state")}
FUNCTIONS = {"mamba": selective_scan, "rg_lru": rg_lru, "rg_lru rms": lambda *xs, **o: rg_lru(*xs, rms=True, **o)}


def loop(form: str, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as it is defined, one step after another."""
    return mamba_loop(*inputs) if form == "mamba" else rg_lru_loop(*inputs, rms=form.endswith("rms"))


def mamba_loop(u, dt, A, B, C, D, state):
    outputs = []
    for t in range(u.shape[1]):
        step = dt[:, t, :, None]
        weight = torch.where(A == 0, step, -torch.expm1(-step * A) / torch.where(A == 0, 1, A))
        state = torch.exp(-step * A) * state + weight * B[:, t, None, :] * u[:, t, :, None]
        outputs.append((C[:, t, None, :] * state).sum(-1) + D * u[:, t])
    return torch.stack(outputs, 1), state


def rg_lru_loop(x, r, i, lam, state, *, rms):
    outputs = []
    for t in range(x.shape[1]):
        log = 8 * r[:, t] * F.logsigmoid(lam)
        weight = torch.sqrt(-torch.expm1(2 * log)) if rms else -torch.expm1(log)
        state = torch.exp(log) * state + weight * i[:, t] * x[:, t]
        outputs.append(state)
    return torch.stack(outputs, 1), state


def make(form: str, batch=2, T=11, width=3, N=2, dtype=torch.float64) -> list[Tensor]:
    """Inputs in the order of the function, all of them requiring grad."""
    maps = [torch.randn(batch, T, width), torch.rand(batch, T, width), torch.rand(batch, T, width)]
    if form == "mamba":
        columns = [torch.randn(batch, T, N), torch.randn(batch, T, N)]
        inputs = [*maps[:2], 3 * torch.rand(width, N), *columns, torch.randn(width), torch.randn(batch, width, N)]
    else:
        inputs = [*maps, torch.randn(width), torch.randn(batch, width)]
    return [x.to(dtype).requires_grad_() for x in inputs]


def outputs_and_grads(function, inputs, grads) -> list[Tensor]:
    outputs = function(*inputs)
    used = [(y, g.to(y.dtype)) for y, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = torch.autograd.grad([y for y, _ in used], wanted, [g for _, g in used], allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True))]


def random_grads(form, batch=2, T=11, width=3, N=2) -> tuple[Tensor, Tensor]:
    last = (batch, width, N) if form == "mamba" else (batch, width)
    return torch.randn(batch, T, width, dtype=torch.float64), torch.randn(last, dtype=torch.float64)
