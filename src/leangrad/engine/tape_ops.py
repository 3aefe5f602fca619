"""Backward of the steps of a tape: each takes the gradient of its output and passes gradients on to its inputs.

    step(tape, g, out, again, *arguments)      `again`: the values must survive for another backward

`g` is a `Lease` that the step has to pass on or to release. After reading a value a step calls `tape.done`: a private
tape writes over the value once its last reader is done; see [Note: two buffers] in ``tape.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leangrad.engine.grad_buffer import Lease
from leangrad.engine.var import Moves, Var
from leangrad.ops.activation import Activation
from leangrad.ops.linear import linear_backward_bias, linear_backward_input, linear_backward_weight

__all__ = ["activate_backward", "add_backward", "linear_backward", "mul_backward", "reshape_backward"]


def room(tape: Moves, x: Var, like: Tensor) -> Lease:
    """Returns memory for the gradient of x. It is no scratch if x is `fixed`, as an input is: its gradient is kept."""
    return tape.pool.give(x.shape, like) if x.fixed else tape.pool.borrow(x.shape, like)


def add_backward(tape: Moves, g: Lease, out: Var, again: bool, a: Var, b: Var) -> None:
    """Pass the same gradient to both inputs; if both need one, each gets a claim on the memory."""
    if a.needs_grad and b.needs_grad:
        tape.receive(a, g.lend())
    tape.receive(b if b.needs_grad else a, g)


def reshape_backward(tape: Moves, g: Lease, out: Var, again: bool, a: Var) -> None:
    """Pass the same memory on in the shape of the input, if it can be viewed so; else a copy."""
    view = g.tensor.reshape(a.shape)
    if view.data_ptr() == g.tensor.data_ptr():
        tape.receive(a, g.viewed_as(view))
    else:
        tape.receive(a, Lease(view))
        tape.pool.release(g)


def mul_backward(tape: Moves, g: Lease, out: Var, again: bool, a: Var, b: Var) -> None:
    """da = g b, db = g a: the last one is written over g if that is owned."""
    if a.needs_grad and b.needs_grad:
        into = room(tape, a, g.tensor)
        torch.mul(g.tensor, b.value, out=into.tensor)
        tape.receive(a, into)
    x, other = (b, a) if b.needs_grad else (a, b)
    into = g if g.owned else room(tape, x, g.tensor)
    torch.mul(g.tensor, other.value, out=into.tensor)
    if into is not g:
        tape.pool.release(g)
    tape.receive(x, into)
    tape.done(a, again)
    tape.done(b, again)


def linear_backward(tape: Moves, g: Lease, out: Var, again: bool, x: Var, weight: Var, bias: Var | None) -> None:
    """dW, db, then dx: dx is written over a rebuilt x, into dead memory, or over a kept output of relu."""
    into = None
    if weight.needs_grad:
        value, into = tape.read(x)
        tape.receive(weight, Lease(linear_backward_weight(g.tensor, value)))
    if bias is not None and bias.needs_grad:
        tape.receive(bias, Lease(linear_backward_bias(g.tensor)))
    if x.needs_grad:
        if into is None:
            into = _write_over(tape, x, again, readers=1 + weight.needs_grad) or room(tape, x, g.tensor)
        linear_backward_input(g.tensor, weight.value, into=into.tensor)
        tape.receive(x, into)
    elif into is not None:
        tape.pool.release(into)
    tape.pool.release(g)
    if weight.needs_grad:
        tape.done(x, again)
    if x.needs_grad and not weight.fixed:
        tape.done(weight, again)


def _write_over(tape: Moves, x: Var, again: bool, readers: int) -> Lease | None:
    """Returns the memory of x, a kept output of relu, after noting its zeros in `x.zeros`.

    None if x is no such output, if the tape has dead memory, or if x is read again or belongs to the caller.
    """
    if not x.maskable or again or x.fixed or not tape.private or x.readers != readers or not tape.pool.is_empty:
        return None
    memory = x.value
    x.zeros, x.tensor = memory <= 0, None
    return Lease(memory)


def activate_backward(
    tape: Moves, g: Lease, out: Var, again: bool, x: Var, record: Activation, kept: Var | None
) -> None:
    """dx, written over g if that is owned; for a gated activation over the kept input, which is as large as dx."""
    if out.zeros is not None:  # `_write_over` has returned the memory of `out` for g; only this tape uses it
        assert g.owned
        g.tensor.masked_fill_(out.zeros, 0)
        out.zeros = None
        tape.receive(x, g)
        return
    if kept is None:
        kept = out
    value = kept.value
    if not record.gated and g.owned:
        into = g
    elif record.gated and tape.private and not again and kept.readers == 1 and not kept.fixed:
        into, kept.tensor = Lease(value), None  # the gradient is as large as the kept input: write it there
    else:
        into = room(tape, x, value)
    record.backward(g.tensor, value, record.parameter, into.tensor)
    if into is not g:
        tape.pool.release(g)
    tape.receive(x, into)
    tape.done(kept, again)
