"""Norms (with FiLM) and activations before a product, on a tape: their outputs are not kept.

The output of a `Prepare` is written to scratch, read by the product and dropped. Backward computes it again for the
gradient of the weight, and then writes the output's own gradient over it.
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
    """An op on x before a product, which works row by row, and its backward."""

    @property
    def needs_grad(self) -> bool:
        """Whether something else than x that the op reads needs a gradient."""

    def forward(self, tape: Tape, x: Tensor, dtype: torch.dtype) -> tuple[Lease, Statistics]:
        """Returns the output for x, in scratch and in `dtype`, and the statistics that backward reads too."""

    def backward(self, tape: Tape, g: Lease, x: Var, value: Tensor, statistics: Statistics, again: bool) -> None:
        """Compute the gradients of x, and of all else that needs one, from g, and send them to `tape`.

        g: gradient of the output, owned. value: that of x. again: another backward may follow.
        """


@dataclass(frozen=True)
class Activated:
    """An activation as a `Prepare`."""

    record: Activation
    needs_grad = False

    def forward(self, tape: Tape, x: Tensor, dtype: torch.dtype) -> tuple[Lease, Statistics]:
        """Returns the activation of x; a gated one is half as wide as x."""
        width = x.shape[1] // 2 if self.record.gated else x.shape[1]
        lease = tape.pool.borrow(torch.Size((x.shape[0], width)), x)
        self.record.forward(x, self.record.parameter, lease.tensor)
        return lease, ()

    def backward(self, tape: Tape, g: Lease, x: Var, value: Tensor, statistics: Statistics, again: bool) -> None:
        """Write the gradient of x over g.

        For a gated activation that gradient is larger than g, and as large as x. On a CPU it is written over x if
        nothing reads x any more, a few rows at a time; on other devices each of these steps would be a launch. Else it
        is written to memory of the pool.
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
    """A norm as a `Prepare`, followed by a scale and a shift for each sequence if they are given (FiLM).

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
        """Whether a parameter, the scale or the shift needs a gradient."""
        return any(v is not None and v.needs_grad for v in (self.weight, self.bias, self.scale, self.shift))

    def forward(self, tape: Tape, x: Tensor, dtype: torch.dtype) -> tuple[Lease, Statistics]:
        """Returns norm(x), with FiLM if it is given, and the statistics.

        FiLM runs in the dtype of x, as in plain PyTorch under autocast; the result is then cast to `dtype`.
        """
        lease, statistics = self._normalize(tape, x, x.dtype if self.scale is not None else dtype)
        if self.scale is not None and self.shift is not None:
            y = self._by_sequence(lease.tensor, self.scale)
            y.mul_(1 + self.scale.value.unsqueeze(1)).add_(self.shift.value.unsqueeze(1))
            lease = _in_dtype(tape, lease, dtype)
        return lease, statistics

    def backward(self, tape: Tape, g: Lease, x: Var, value: Tensor, statistics: Statistics, again: bool) -> None:
        """Write the gradient of x over g on a CPU, if g has the dtype of x; else into other memory."""
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
        """dshift = Σ_T g, dscale = Σ_T g · norm(x); then turns g into the gradient of norm(x), in place."""
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
        """Returns norm(x), on a CPU in scratch, and statistics; see [Note: rows at a time] in `leangrad.ops.norm`."""
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
    """Returns the memory of x, with its value, if this is its last reader; None if the value may be read again."""
    if again or x.fixed or not tape.private or x.readers != 1 or x.tensor is None:
        return None
    memory, x.tensor = x.tensor, None
    return Lease(memory)


def _in_dtype(tape: Tape, lease: Lease, dtype: torch.dtype) -> Lease:
    """Returns `lease`, or releases it and returns one on a copy in `dtype`."""
    if lease.tensor.dtype == dtype:
        return lease
    copy = tape.pool.borrow(lease.tensor.shape, lease.tensor.new_empty(0, dtype=dtype))
    copy.tensor.copy_(lease.tensor)
    tape.pool.release(lease)
    return copy


def _needs(var: Var | None) -> bool:
    return var is not None and var.needs_grad
