"""What is done to the input of a product, and never stored: a norm (with FiLM) or an activation, on a tape.

A `Prepare` is written into scratch, read by the product and forgotten; in backward it is written again for the
gradient of the weight, and the gradient is then written over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from leangrad.engine.grad_buffer import Lease
from leangrad.engine.tape import Tape, Var
from leangrad.ops.activation import Activation
from leangrad.ops.norm import Norm, Statistics

__all__ = ["Activated", "Normed", "Prepare", "take_over"]


class Prepare(Protocol):
    """What is done to x before a product, row by row, and undone in backward."""

    @property
    def needs_grad(self) -> bool:
        """Whether something that it reads beside x wants a gradient."""

    def forward(self, tape: Tape, x: Tensor, dtype: torch.dtype) -> tuple[Lease, Statistics]:
        """What it makes of x, in scratch and in this dtype, and what else backward reads."""

    def backward(self, tape: Tape, g: Lease, x: Var, value: Tensor, statistics: Statistics, again: bool) -> None:
        """Move g, which is owned, on to x, whose value is given, and to what else wants a gradient."""


@dataclass(frozen=True)
class Activated:
    """An activation as a `Prepare`."""

    record: Activation
    needs_grad = False

    def forward(self, tape: Tape, x: Tensor, dtype: torch.dtype) -> tuple[Lease, Statistics]:
        """Half as wide as x where x has gates."""
        width = x.shape[1] // 2 if self.record.gated else x.shape[1]
        lease = tape.pool.borrow(torch.Size((x.shape[0], width)), x)
        self.record.forward(x, self.record.parameter, lease.tensor)
        return lease, ()

    def backward(self, tape: Tape, g: Lease, x: Var, value: Tensor, statistics: Statistics, again: bool) -> None:
        """Over g; a gated one over x, which is as large as its gradient, where nobody else reads it.

        That goes a few rows at a time, which is right for a CPU; elsewhere every launch counts.
        """
        into = g
        if self.record.gated:
            into = (take_over(tape, x, again) if value.is_cpu else None) or tape.pool.borrow(x.shape, g.tensor)
        self.record.backward(g.tensor, value, self.record.parameter, into.tensor)
        if into is not g:
            tape.pool.release(g)
        tape.receive(x, into)


@dataclass(frozen=True)
class Normed:
    """A norm as a `Prepare`, with a scale and a shift for each sequence where they are given (FiLM).

    Equals `norm(x) * (1 + scale) + shift`, with scale and shift of (B, D) for x of (B·T, D).
    """

    norm: Norm
    eps: float
    weight: Var | None = None
    bias: Var | None = None
    scale: Var | None = None
    shift: Var | None = None

    @property
    def needs_grad(self) -> bool:
        """Whether a parameter or the condition wants one."""
        return any(v is not None and v.needs_grad for v in (self.weight, self.bias, self.scale, self.shift))

    def forward(self, tape: Tape, x: Tensor, dtype: torch.dtype) -> tuple[Lease, Statistics]:
        """In the dtype of x until it is done, as plain code has it under autocast."""
        lease, statistics = self._normalize(tape, x, x.dtype if self.scale is not None else dtype)
        if self.scale is not None and self.shift is not None:
            y = self._by_sequence(lease.tensor, self.scale)
            y.mul_(1 + self.scale.value.unsqueeze(1)).add_(self.shift.value.unsqueeze(1))
            lease = _in_dtype(tape, lease, dtype)
        return lease, statistics

    def backward(self, tape: Tape, g: Lease, x: Var, value: Tensor, statistics: Statistics, again: bool) -> None:
        """Over g where it has the dtype of x."""
        g = _in_dtype(tape, g, value.dtype)
        if self.scale is not None:
            self._film_backward(tape, g.tensor, value)
        weight, bias = (None if v is None else v.value for v in (self.weight, self.bias))
        needs = (_needs(self.weight), _needs(self.bias))
        into = g.tensor if value.is_cpu else None
        dx, dweight, dbias = self.norm.backward(g.tensor, value, statistics, weight, bias, needs, into)
        for var, gradient in ((self.weight, dweight), (self.bias, dbias)):
            if var is not None and gradient is not None:
                tape.receive(var, Lease(gradient))
        if into is None:
            tape.pool.release(g)
            g = Lease(dx)
        if x.needs_grad:
            tape.receive(x, g)
        else:
            tape.pool.release(g)

    def _film_backward(self, tape: Tape, g: Tensor, x: Tensor) -> None:
        """dshift = Σ_T g, dscale = Σ_T g · norm(x); then g is that of norm(x)."""
        assert self.scale is not None
        by_sequence = self._by_sequence(g, self.scale)
        if self.shift is not None and self.shift.needs_grad:
            tape.receive(self.shift, Lease(by_sequence.sum(1).to(self.shift.dtype)))
        if self.scale.needs_grad:
            lease, _ = self._normalize(tape, x, x.dtype)
            product = self._by_sequence(lease.tensor.mul_(g), self.scale)
            tape.receive(self.scale, Lease(product.sum(1).to(self.scale.dtype)))
            tape.pool.release(lease)
        by_sequence.mul_(1 + self.scale.value.unsqueeze(1))

    def _normalize(self, tape: Tape, x: Tensor, dtype: torch.dtype) -> tuple[Lease, Statistics]:
        """In scratch on a CPU; see [Note: rows at a time] in `leangrad.ops.norm`. Elsewhere torch allocates it."""
        weight, bias = (None if v is None else v.value for v in (self.weight, self.bias))
        if not x.is_cpu:
            y, statistics = self.norm.forward(x, weight, bias, self.eps, None)
            return _in_dtype(tape, Lease(y), dtype), statistics
        lease = tape.pool.borrow(x.shape, x.new_empty(0, dtype=dtype))
        return lease, self.norm.forward(x, weight, bias, self.eps, lease.tensor)[1]

    @staticmethod
    def _by_sequence(rows: Tensor, condition: Var) -> Tensor:
        return rows.view(condition.shape[0], -1, rows.shape[1])


def take_over(tape: Tape, x: Var, again: bool) -> Lease | None:
    """The memory of x, with the value still in it, where this reader is the last; None where somebody may yet read."""
    if again or x.fixed or not tape.private or x.readers != 1 or x.tensor is None:
        return None
    memory, x.tensor = x.tensor, None
    return Lease(memory)


def _in_dtype(tape: Tape, lease: Lease, dtype: torch.dtype) -> Lease:
    """The same lease, or one on a copy in this dtype."""
    if lease.tensor.dtype == dtype:
        return lease
    copy = tape.pool.borrow(lease.tensor.shape, lease.tensor.new_empty(0, dtype=dtype))
    copy.tensor.copy_(lease.tensor)
    tape.pool.release(lease)
    return copy


def _needs(var: Var | None) -> bool:
    return var is not None and var.needs_grad
