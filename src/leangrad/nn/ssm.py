"""State-space blocks whose scans keep the states at chunk boundaries only: `RGLRU`, `RGLRUBlock`, `MambaBlock`.

Inputs and outputs are (batch, T, width). Called with a sequence alone, a module returns the outputs, and so works in an
`nn.Sequential`. Called with a state too, it returns (outputs, state), and the next call takes that state: so it can run
step by step, or over a sequence in parts. The model around the modules adds norms and residual sums.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from leangrad.functional import activate
from leangrad.nn.causal_conv import CausalConv
from leangrad.nn.gate import HeadLinear, gated
from leangrad.nn.scan import rg_lru, selective_scan

__all__ = ["RGLRU", "MambaBlock", "RGLRUBlock"]

BlockState = tuple[Tensor, Tensor]  # the last inputs of the convolution, and the state of the scan


class RGLRU(nn.Module):
    """The real-gated linear recurrent unit: computes two gates from the input, then runs the scan.

    Equals, with r and i from linear maps of x by heads,

        r, i = torch.sigmoid(recurrence_gate(x)), torch.sigmoid(input_gate(x))
        a = torch.exp(8 * r * F.logsigmoid(lam))
        h[:, t] = a[:, t] * h[:, t - 1] + (1 - a[:, t]) * i[:, t] * x[:, t]

    Args:
        width: of the input, the gates and the state.
        heads: number of heads; the gates of a head depend only on that head's part of the input. Must divide width.
        rms: use √(1 − a²) in place of 1 − a, as published.

    Keeps for backward the input, the two gates, and one state per `leangrad.ops.scan.chunk_length(T)` steps.

    >>> unit = RGLRU(8, heads=2)
    >>> x = torch.randn(3, 10, 8)
    >>> unit(x).shape
    torch.Size([3, 10, 8])
    >>> first, state = unit(x[:, :4], unit.initial_state(3))
    >>> rest, state = unit(x[:, 4:], state)
    >>> torch.allclose(torch.cat([first, rest], 1), unit(x), atol=1e-6)
    True
    """

    def __init__(
        self,
        width: int,
        heads: int = 1,
        *,
        rms: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.heads, self.rms = _positive("width", width), _positive("heads", heads), rms
        kind = partial(nn.Linear, width) if heads == 1 else partial(HeadLinear, heads)
        self.recurrence_gate = kind(width, device=device, dtype=dtype)
        self.input_gate = kind(width, device=device, dtype=dtype)
        self.lam = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the gates as `nn.Linear`, and λ such that a at r = 1, σ(λ)^8, is uniform in [0.9, 0.999]."""
        self.recurrence_gate.reset_parameters()
        self.input_gate.reset_parameters()
        with torch.no_grad():
            a = torch.empty_like(self.lam, dtype=torch.float32).uniform_(0.9, 0.999).pow_(1 / 8)
            self.lam.copy_(torch.logit(a))

    def initial_state(self, batch: int) -> Tensor:
        """Returns the state before the first step: zeros, (batch, width)."""
        return torch.zeros(batch, self.width, device=self.lam.device, dtype=_state_dtype(self.lam))

    @overload
    def forward(self, x: Tensor, state: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Returns outputs of (batch, T, width) for x of (batch, T, width); with a state, (outputs, state)."""
        _check_input(x, self.width)
        r, i = torch.sigmoid(self.recurrence_gate(x)), torch.sigmoid(self.input_gate(x))
        h, end = rg_lru(x, r, i, self.lam, state, rms=self.rms)
        return h if state is None else (h, end)

    def extra_repr(self) -> str:
        """Show the sizes and the form."""
        return f"{self.width}, heads={self.heads}, rms={self.rms}"


class RGLRUBlock(nn.Module):
    """The recurrent block of Griffin: a short convolution and an RG-LRU in one branch, multiplied by a GELU branch.

    Equals, with a causal depthwise convolution,

        gate, y = in_proj(x).chunk(2, -1)
        out_proj(unit(conv(y)) * F.gelu(gate))

    Args:
        width: of input and output.
        inner: width of the two branches; `width` by default.
        heads, rms: see `RGLRU`.
        kernel: steps that the convolution reads.
        bias: whether the two projections have biases.

    Keeps for backward each map once: the input, both halves of the projection, the unit's input, its gates and output,
    and the gated output; and the scan's boundary states.

    >>> block = RGLRUBlock(8)
    >>> nn.Sequential(nn.LayerNorm(8), block)(torch.randn(3, 10, 8)).shape
    torch.Size([3, 10, 8])
    >>> y, state = block(torch.randn(3, 1, 8), block.initial_state(3))  # one step
    """

    def __init__(
        self,
        width: int,
        inner: int | None = None,
        heads: int = 1,
        *,
        rms: bool = False,
        kernel: int = 4,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.inner = _positive("width", width), _positive("inner", width if inner is None else inner)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(width, 2 * self.inner, bias=bias, **made)
        self.conv = CausalConv(self.inner, kernel, **made)
        self.unit = RGLRU(self.inner, heads, rms=rms, **made)
        self.out_proj = nn.Linear(self.inner, width, bias=bias, **made)

    def initial_state(self, batch: int) -> BlockState:
        """Returns zeros: the last inputs of the convolution, (batch, kernel − 1, inner), and the state of the unit."""
        return self.conv.initial_state(batch), self.unit.initial_state(batch)

    @overload
    def forward(self, x: Tensor, state: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, state: BlockState) -> tuple[Tensor, BlockState]: ...
    def forward(self, x: Tensor, state: BlockState | None = None) -> Tensor | tuple[Tensor, BlockState]:
        """Returns outputs of (batch, T, width) for x of (batch, T, width); with a state, (outputs, state)."""
        _check_input(x, self.width)
        gate, y = self.in_proj(x).chunk(2, -1)
        tail, start = (None, None) if state is None else state
        y, tail = self.conv(y, tail)
        h = self.unit(y, start)
        if tail is None:
            return self.out_proj(gated(h, gate, "gelu"))  # type: ignore[no-any-return]
        h, end = h
        return self.out_proj(gated(h, gate, "gelu")), (tail, end)


class MambaBlock(nn.Module):
    """The block of Mamba: a short convolution and a selective scan, gated.

    Equals, with a causal depthwise convolution and `leangrad.nn.scan.selective_scan`,

        u, gate = in_proj(x).chunk(2, -1)
        u = F.silu(conv(u))
        dt, B, C = x_proj(u).split([rank, states, states], -1)
        z, _ = selective_scan(u, F.softplus(dt_proj(dt)), torch.exp(A_log), B, C, D)
        out_proj(z * F.silu(gate))

    Args:
        width: of input and output; the inner width is expand · width.
        states: N, the number of states per channel.
        kernel: steps that the convolution reads.
        rank: of the map that computes dt; width / 16, rounded up, by default.
        dt_min, dt_max: range of the initial dt, whose logarithm is drawn uniformly.
        bias: whether in_proj and out_proj have biases.

    Keeps for backward each map once: the input, both halves of the first projection, the convolution's output, u, dt
    before softplus, z and the gated z; the output of x_proj; and the scan's boundary states.

    >>> block = MambaBlock(8, states=4)
    >>> nn.Sequential(nn.LayerNorm(8), block)(torch.randn(3, 10, 8)).shape
    torch.Size([3, 10, 8])
    >>> y, state = block(torch.randn(3, 1, 8), block.initial_state(3))  # one step
    """

    def __init__(
        self,
        width: int,
        *,
        expand: int = 2,
        states: int = 16,
        kernel: int = 4,
        rank: int | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.states = _positive("width", width), _positive("states", states)
        self.inner = _positive("expand", expand) * width
        self.rank = math.ceil(width / 16) if rank is None else _positive("rank", rank)
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min: expected 0 < dt_min <= dt_max, got {dt_min} and {dt_max}")
        self.dt_min, self.dt_max = dt_min, dt_max
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(width, 2 * self.inner, bias=bias, **made)
        self.conv = CausalConv(self.inner, kernel, **made)
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * states, bias=False, **made)
        self.dt_proj = nn.Linear(self.rank, self.inner, **made)
        self.A_log = nn.Parameter(torch.empty(self.inner, states, **made))
        self.D = nn.Parameter(torch.empty(self.inner, **made))
        self.out_proj = nn.Linear(self.inner, width, bias=bias, **made)
        self._reset_scan()

    def reset_parameters(self) -> None:
        """Initialize the projections as `nn.Linear`, A = 1 … N, D = 1, and the bias of dt_proj for the range of dt."""
        for part in (self.in_proj, self.conv, self.x_proj, self.dt_proj, self.out_proj):
            part.reset_parameters()
        self._reset_scan()

    def _reset_scan(self) -> None:
        with torch.no_grad():
            bound = self.rank**-0.5
            self.dt_proj.weight.uniform_(-bound, bound)
            low, high = math.log(self.dt_min), math.log(self.dt_max)
            dt = torch.empty_like(self.dt_proj.bias, dtype=torch.float32).uniform_(low, high).exp_()
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
            rates = torch.arange(1, self.states + 1, device=self.A_log.device, dtype=torch.float32)
            self.A_log.copy_(rates.log().expand_as(self.A_log))
            self.D.fill_(1)

    def initial_state(self, batch: int) -> BlockState:
        """Returns zeros: the last inputs of the convolution, (batch, kernel − 1, inner), and (batch, inner, states)."""
        scan = torch.zeros(batch, *self.A_log.shape, device=self.A_log.device, dtype=_state_dtype(self.A_log))
        return self.conv.initial_state(batch), scan

    @overload
    def forward(self, x: Tensor, state: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, state: BlockState) -> tuple[Tensor, BlockState]: ...
    def forward(self, x: Tensor, state: BlockState | None = None) -> Tensor | tuple[Tensor, BlockState]:
        """Returns outputs of (batch, T, width) for x of (batch, T, width); with a state, (outputs, state)."""
        _check_input(x, self.width)
        u, gate = self.in_proj(x).chunk(2, -1)
        tail, start = (None, None) if state is None else state
        u, tail = self.conv(u, tail)
        u = activate(u, "silu")
        dt, B, C = self.x_proj(u).split([self.rank, self.states, self.states], -1)
        A = torch.exp(self.A_log.to(_state_dtype(self.A_log)))
        z, end = selective_scan(u, self.dt_proj(dt), A, B, C, self.D, start, softplus=True)
        y: Tensor = self.out_proj(gated(z, gate, "silu"))
        return y if tail is None else (y, (tail, end))

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.width}, states={self.states}, rank={self.rank}"


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a positive int, got {value!r}")
    return value


def _check_input(x: Tensor, width: int) -> None:
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != width:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x: expected (batch, T, {width}), got {found}")
