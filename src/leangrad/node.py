"""A program on a tape as one autograd node: any model sees a single op, and inside it every buffer has one owner."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leangrad._torch import graph_is_kept
from leangrad.errors import ConsumedError
from leangrad.own import owned
from leangrad.tape import Tape, Var

__all__ = ["run"]


def run(program: Callable[..., Var], plain: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Run `program(tape, *vars)` on a private tape as one autograd node.

    `plain(*tensors)` computes the same on autograd's own ops; it is what a double backward differentiates. `tensors`
    must hold everything that the program reads: the node saves them as autograd does, so that a change in place
    before backward is an error, and a gradient goes back to each that needs one.

    Keeps for backward: the tensors given, and what the program's steps keep.

    >>> x, w = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    >>> y = run(lambda tape, x, w: tape.activate(tape.linear(x, w), "relu"), lambda x, w: (x @ w.T).relu(), x, w)
    >>> y.sum().backward()
    >>> x.grad
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    y: Tensor = _Node.apply(program, plain, *tensors)
    return y


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Callable[..., Var], plain: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        tape = Tape(private=True)
        inputs = [
            None if t is None else tape.watch(t, needs_grad=needs)
            for t, needs in zip(tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        out = program(tape, *inputs)
        y = out.value
        # The output belongs to the caller from here on. Autograd saves it (and notes its version) if a step reads it.
        ctx.save_for_backward(*tensors, y if out.readers and out.rebuilt is None else None)
        out.fixed = out.rebuilt is None
        tape.forget_values(out)
        tape.pool.close()
        ctx.tape, ctx.inputs, ctx.out, ctx.plain, ctx.lock = tape, inputs, out, plain, threading.Lock()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ours = owned(grad)
        tape: Tape = ctx.tape
        with ctx.lock:  # two threads may run backward over one kept graph
            if tape.consumed:
                raise ConsumedError(
                    "the activations of this module were moved out by an earlier backward; "
                    "pass retain_graph=True to that one to run backward again"
                )
            *tensors, y = ctx.saved_tensors
            if torch.is_grad_enabled():
                return (None, None, *_differentiate(ctx.plain, tensors, ctx.needs_input_grad[2:], grad))
            for var, tensor in zip(ctx.inputs, tensors, strict=True):
                if var is not None:
                    var.tensor = tensor
            if y is not None:
                ctx.out.tensor = y
            tape.backward(ctx.out, grad, ours=ours, again=graph_is_kept())
            gradients = [None if var is None else var.grad for var in ctx.inputs]
            tape.forget_values(ctx.out)
            for var in ctx.inputs:
                if var is not None:
                    var.gradient = None
        return (None, None, *gradients)


def _differentiate(
    plain: Callable[..., Tensor], tensors: list[Tensor | None], needs: tuple[bool, ...], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of `plain`, with a graph of their own."""
    # A tensor that is given twice must get two gradients: one alias for each place.
    aliases = [None if t is None else t.view_as(t) for t in tensors]
    wanted = [alias for alias, need in zip(aliases, needs, strict=True) if alias is not None and need]
    found = iter(torch.autograd.grad(plain(*aliases), wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if alias is not None and need else None for alias, need in zip(aliases, needs, strict=True)]
