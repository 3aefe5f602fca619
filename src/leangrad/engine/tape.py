"""A Wengert list whose backward moves gradients: it takes, lends and adds them in place instead of cloning them.

A gradient is a `Lease` on memory, which counts the claims (`engine.grad_buffer`). The holder of the only claim may
overwrite the memory:

    take         a step takes the gradient out of its output's slot; the slot is empty afterwards, unless `keep`
    lend         an op that passes one gradient to two inputs (add) gives both a claim on the same memory
    accumulate   a second gradient is added in place into whichever of the two is owned, else out of place
    release      the last claim returns the memory to the tape, and the next gradient is written there

A gradient is copied by a reshape that needs a copy, and at the end if the gradient of an input is not owned or lies in
larger memory.

[Note: two buffers] Backward of a linear step reads the gradient of its output and writes that of its input, and no
other tensor of that size is alive: two buffers, for any depth. On a private tape the result of an activation that keeps
its input is not stored, unless it is small: it is rebuilt into scratch whenever it is read, and in backward its
gradient is written over it. The kept input is dead after that, and becomes the buffer for the next layer. A kept output
of relu is still needed when the gradient of that output has been written. Where there is no dead memory (at the top of
a chain), backward notes the zeros of the output, one byte each, and writes the gradient over the output.

`Tape` can be used on its own; `engine.single_node.run` runs a program on a private tape as a single autograd node.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.engine.custom_step import Backward, Forward, fix_shared, share_memory, step_backward
from leangrad.engine.grad_buffer import Lease, Pool, borrowed
from leangrad.engine.tape_ops import activate_backward, add_backward, linear_backward, mul_backward, reshape_backward
from leangrad.engine.var import Var
from leangrad.errors import ConsumedError
from leangrad.ops.activation import Activation, resolve

__all__ = ["Tape", "Var"]


class Tape:
    """A list of steps, each of which passes the gradient of its output on to its inputs.

    `keep=True` leaves every intermediate gradient readable and lets backward run again, each time with fresh gradients.
    A `private` tape overwrites and rebuilds its values, which only its steps may read; see [Note: two buffers].

    >>> tape = Tape()
    >>> x = tape.watch(torch.tensor([2.0]))
    >>> y = tape.add(tape.mul(x, x), x)
    >>> tape.backward(y)
    >>> x.grad
    tensor([5.])
    """

    def __init__(self, *, keep: bool = False, private: bool = False):
        self.keep, self.private = keep, private
        self.consumed = False
        self.pool = Pool()
        self._inputs: list[Var] = []
        self._kept: list[Var] = []
        self._steps: list[tuple[Callable[..., None], Var, tuple[Any, ...]]] = []

    def watch(self, tensor: Tensor, *, needs_grad: bool = True) -> Var:
        """Returns `tensor` as an input of the tape. Its memory belongs to the caller and is only read."""
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor = tensor.detach()
        var = Var(tensor, tensor, needs_grad, fixed=True)
        self._inputs.append(var)
        return var

    def add(self, a: Var, b: Var) -> Var:
        """Returns a + b, both of one shape. Keeps nothing for backward."""
        return self._push(add_backward, _pair(torch.add, a, b), (a, b), a.needs_grad or b.needs_grad)

    def mul(self, a: Var, b: Var) -> Var:
        """Returns a · b, elementwise, both of one shape. Keeps both."""
        return self._push(mul_backward, _pair(torch.mul, a, b), (a, b), a.needs_grad or b.needs_grad, (a, b))

    def reshape(self, a: Var, shape: tuple[int, ...]) -> Var:
        """Returns the same numbers in another shape. Keeps nothing."""
        out = self._push(reshape_backward, a.value.reshape(shape), (a,), a.needs_grad)
        a.fixed = out.fixed = True
        return out

    def linear(self, x: Var, weight: Var, bias: Var | None = None) -> Var:
        """Returns x Wᵀ + b, with x of (N, in). Keeps x if the weight needs a gradient.

        The weight is usually an input of the tape and belongs to the caller; another weight is kept if x needs a
        gradient.
        """
        value, scratch = x.tensor, None
        if value is None:
            value, scratch = self.read(x)
        y = F.linear(value, weight.value, None if bias is None else bias.value)
        if scratch is not None:
            self.pool.release(scratch)
        needs_grad = x.needs_grad or weight.needs_grad or (bias is not None and bias.needs_grad)
        reads = (x,) if weight.needs_grad else ()
        if x.needs_grad and not weight.fixed:
            reads = (*reads, weight)
        return self._push(linear_backward, y, (x, weight, bias), needs_grad, reads)

    def activate(self, x: Var, activation: str | Activation) -> Var:
        """Returns the activation of x. Keeps its input or its output, whichever it `keeps`; see [Note: two buffers]."""
        record = resolve(activation)
        value, needs_grad = x.tensor, x.needs_grad
        if record.keeps == "input" and needs_grad and self.private and value is not None and _pays_to_rebuild(value):
            y = self._push(activate_backward, None, (x, record, x), True, (x,))
            if record.gated:
                y.shape = torch.Size((*x.shape[:-1], x.shape[-1] // 2))
            y.rebuilt = (record, x)
            return y
        # Write over x if no step reads it in backward.
        over = self.private and record.in_place and not x.fixed and x.readers == 0 and value is not None
        if record.keeps == "input":
            over = over and not needs_grad
            reads: tuple[Var, ...] = (x,)
        else:
            reads = ()
        out = record.forward(x.value, record.parameter, value if over else None)
        if over:
            x.tensor = None
        y = self._push(activate_backward, out, (x, record, x if reads else None), needs_grad, reads)
        y.readers += needs_grad and not reads
        y.maskable = _is_maskable(record, out)
        return y

    def step(
        self,
        forward: Forward,
        backward: Backward,
        *inputs: Var | None,
        reads: Iterable[int] = (),
        reads_output: bool = False,
    ) -> Var:
        """Record an op of your own, a pair of functions on tensors, and return its output.

        `forward(*values)` returns its output in memory of its own, then whatever else backward needs: statistics, a
        mask. `backward(turn)` returns one gradient, or None, for each input; see `Turn`. A gradient may be in memory of
        its own, in `turn.room(i)`, or be `turn.grad` or a view of it, which is overwritten only if `turn.owned`. Keeps
        the inputs numbered in `reads`, the output with `reads_output`, and what else forward returned.

        >>> tape = Tape()
        >>> x = tape.watch(torch.tensor([0.5]))
        >>> y = tape.step(lambda x: (x.exp(),), lambda turn: [turn.grad * turn.output], x, reads_output=True)
        >>> tape.backward(y)
        >>> x.grad
        tensor([1.6487])
        """
        found = [(None, None) if x is None else self.read(x) for x in inputs]
        y, *rest = forward(*(value for value, _ in found))
        if any(share_memory(y, t) for t in rest):
            raise ValueError("forward: what it returns beside its output lies in the output; use `reads_output=True`")
        needs_grad, reads = any(x is not None and x.needs_grad for x in inputs), frozenset(reads)
        kept = tuple(Var(t, t, False) for t in rest) if needs_grad else ()
        out = self._push(
            step_backward,
            y,
            (backward, inputs, reads, reads_output, kept),
            needs_grad,
            tuple(x for i, x in enumerate(inputs) if x is not None and i in reads),
        )
        out.readers += needs_grad and reads_output
        for var in kept:
            var.readers = 1
        self._kept += kept
        for x, (value, scratch) in zip(inputs, found, strict=True):
            if x is not None and value is not None and fix_shared(x, value, (out, *kept)):
                continue
            if scratch is not None:
                self.pool.release(scratch)
        return out

    def backward(self, output: Var, grad: Tensor | None = None, *, ours: bool = False, again: bool = False) -> None:
        """Walk the list in reverse, from the gradient of `output` to those of the inputs.

        grad: the gradient of `output`; ones if None.
        ours: `grad` may be overwritten.
        again: the values must survive for another backward.
        """
        if self.consumed:
            raise ConsumedError(
                "this tape was consumed by an earlier backward; record it with Tape(keep=True) to run backward again"
            )
        if grad is None:
            grad, ours = torch.ones_like(output.value), True
        if grad.shape != output.shape:
            raise ValueError(f"grad: expected the output's shape {tuple(output.shape)}, got {tuple(grad.shape)}")
        again = again or self.keep
        self.consumed = not again
        if again:
            for var in (*self._inputs, *(out for _, out, _ in self._steps)):
                var.gradient = None
        self.receive(output, Lease(grad) if ours else borrowed(grad))
        steps = self._steps
        for i in range(len(steps) - 1, -1, -1):
            step, out, arguments = steps[i] if again else steps.pop()
            gradient = out.gradient
            if gradient is not None:
                out.gradient = gradient.lend() if self.keep else None
                step(self, gradient, out, again, *arguments)
        for var in self._inputs:
            if var.gradient is not None:
                self._settle(var, var.gradient)
        self.pool.close()

    def read(self, x: Var) -> tuple[Tensor, Lease | None]:
        """Returns the value of x and, if it had to be rebuilt, the lease on the scratch in which it lies."""
        if x.rebuilt is None:
            return x.value, None
        activation, source = x.rebuilt
        lease = self.pool.borrow(x.shape, source.value)
        activation.forward(source.value, activation.parameter, lease.tensor)
        return lease.tensor, lease

    def done(self, x: Var, again: bool) -> None:
        """Count one reader of the value of x as done; after the last one a private tape reuses the memory."""
        if again:
            return
        x.readers -= 1
        if x.readers == 0 and self.private and not x.fixed and x.tensor is not None:
            self.pool.bury(x.tensor)
            x.tensor = None

    def receive(self, x: Var, arriving: Lease) -> None:
        """Store the first gradient of x as it is; add the next in place into whichever is owned, else out of place."""
        held = x.gradient
        if held is None:
            x.gradient = arriving
        elif held.owned:
            held.tensor.add_(arriving.tensor)
            self.pool.release(arriving)
        elif arriving.owned:
            arriving.tensor.add_(held.tensor)
            self.pool.release(held)
            x.gradient = arriving
        else:
            x.gradient = Lease(held.tensor + arriving.tensor)
            self.pool.release(held)
            self.pool.release(arriving)

    def forget_values(self, output: Var) -> None:
        """Drop the values that no step reads in backward, and those that autograd saves: the inputs and the output."""
        output.tensor = None
        for var in self._inputs:
            var.tensor = None
        for _, out, _ in self._steps:
            if out.readers == 0:
                out.tensor = None

    def held_values(self) -> list[Var]:
        """Returns the intermediate values that are held for backward."""
        return [var for var in (*(out for _, out, _ in self._steps), *self._kept) if var.tensor is not None]

    def _settle(self, x: Var, lease: Lease) -> None:
        """Copy the gradient of an input, unless it is owned and its memory is no larger than it."""
        if lease.owned and (lease.memory is lease.tensor or lease.memory.numel() == x.shape.numel()):
            return
        x.gradient = Lease(lease.tensor.clone())
        self.pool.release(lease)

    def _push(
        self,
        backward: Callable[..., None],
        value: Tensor | None,
        arguments: tuple[Any, ...],
        needs_grad: bool,
        reads: tuple[Var, ...] = (),
    ) -> Var:
        """Record a step, if one of its inputs needs a gradient, and return its output. `reads`: what backward reads."""
        out = Var(value, arguments[0] if value is None else value, needs_grad)
        if needs_grad:
            for x in reads:
                x.readers += 1
            self._steps.append((backward, out, arguments))
        return out


# A smaller map is stored, as plain PyTorch stores it: another kernel launch costs more than its bytes are worth.
_REBUILD_MIN_BYTES = 1 << 20


def _pays_to_rebuild(value: Tensor) -> bool:
    return value.numel() * value.element_size() >= _REBUILD_MIN_BYTES


def _is_maskable(record: Activation, out: Tensor) -> bool:
    """Whether backward may note the zeros of `out` and write over it; see [Note: two buffers].

    Only on the CPU: on an accelerator noting the zeros costs a launch, and memory from the caching allocator nothing.
    """
    return record.zero_where_masked and out.is_cpu


def _pair(op: Callable[[Tensor, Tensor], Tensor], a: Var, b: Var) -> Tensor:
    if a.shape != b.shape:
        raise ValueError(f"a and b: expected one shape, got {tuple(a.shape)} and {tuple(b.shape)}; expand one first")
    return op(a.value, b.value)
