"""A program on a tape as one autograd node: any model sees a single op, and inside it every buffer has one owner."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from leangrad._torch import graph_is_kept, saved_tensor_hooks_active
from leangrad.own import owned, take
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
        out.fixed = out.rebuilt is None
        saved_y = y if out.readers and out.fixed else None
        tape.forget_values(out)
        tape.pool.close()
        # Whoever hooks into saving (checkpointing, offloading) gets all that is kept, and decides what becomes of it.
        hooked = tape.held_values() if saved_tensor_hooks_active() else []
        ctx.save_for_backward(*tensors, saved_y, *(var.tensor for var in hooked))
        for var in hooked:
            var.tensor, var.fixed = None, True
        ctx.tape, ctx.plain, ctx.lock = tape, plain, threading.Lock()
        ctx.inputs, ctx.out, ctx.hooked = inputs, out, hooked
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ours = owned(grad)
        with ctx.lock:  # two threads may run backward over one kept graph
            tape: Tape = take(ctx, "tape", keep="pass retain_graph=True to that one to run backward again")
            again = graph_is_kept()
            if again:
                ctx.tape = tape
            saved = ctx.saved_tensors
            tensors = saved[: len(ctx.inputs)]
            if torch.is_grad_enabled():
                return (None, None, *_differentiate(ctx.plain, tensors, ctx.needs_input_grad[2:], grad))
            bound = (*ctx.inputs, ctx.out, *ctx.hooked)
            for var, tensor in zip(bound, saved, strict=True):
                if var is not None:
                    var.tensor = tensor
            tape.backward(ctx.out, grad, ours=ours, again=again)
            gradients = [None if var is None else var.grad for var in ctx.inputs]
            for var in bound:
                if var is not None:
                    var.tensor = var.gradient = None
        return (None, None, *gradients)


def _differentiate(
    plain: Callable[..., Tensor], tensors: Sequence[Tensor | None], needs: tuple[bool, ...], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of `plain`, with a graph of their own."""
    # A tensor that is given twice must get two gradients: one alias for each place.
    aliases = [None if t is None else t.view_as(t) for t in tensors]
    wanted = [alias for alias, need in zip(aliases, needs, strict=True) if alias is not None and need]
    found = iter(torch.autograd.grad(plain(*aliases), wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if alias is not None and need else None for alias, need in zip(aliases, needs, strict=True)]
