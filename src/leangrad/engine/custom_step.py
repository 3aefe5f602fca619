"""A step of the user's own on a tape: what its backward is given, and what becomes of the gradients it returns.

`Tape.step(forward, backward, *inputs)` puts a pair of plain functions on a tape. They see tensors and never leases:
whom each returned gradient belongs to is read off the memory that it lies in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from leangrad.engine.grad_buffer import Lease, borrowed
from leangrad.engine.var import Moves, Var

__all__ = ["Backward", "Forward", "Turn"]


class Turn:
    """One step's turn in backward: the gradient of its output, the values it reads, and memory to write to.

    `grad`     the gradient of the output; where `owned` is True it may be overwritten
    `values`   the inputs, in order; None for those that the step does not read in backward
    `output`   the output of the step, where it said that it reads it
    `kept`     what forward returned beside its output
    `needs`    which inputs want a gradient
    """

    __slots__ = ("_inputs", "_rooms", "_tape", "grad", "kept", "needs", "output", "owned", "values")

    def __init__(self, tape: Moves, gradient: Lease, inputs: tuple[Var | None, ...]):
        self.grad, self.owned = gradient.tensor, gradient.owned
        self.needs = tuple(x is not None and x.needs_grad for x in inputs)
        self.values: tuple[Tensor | None, ...] = ()
        self.kept: tuple[Tensor, ...] = ()
        self.output: Tensor | None = None
        self._tape, self._inputs = tape, inputs
        self._rooms: dict[int, Lease] = {_address(gradient.memory): gradient}

    def room(self, i: int) -> Tensor:
        """Memory of the shape, dtype and device of input i, with anything in it, for its gradient."""
        x = self._inputs[i]
        if x is None:
            raise ValueError(f"i: input {i} of this step is None and gets no gradient")
        pool = self._tape.pool
        like = self.grad.new_empty(0, dtype=x.dtype)
        lease = pool.give(x.shape, like) if x.fixed else pool.borrow(x.shape, like)
        self._rooms[_address(lease.memory)] = lease
        return lease.tensor


Forward = Callable[..., tuple[Tensor, ...]]
Backward = Callable[[Turn], Sequence[Tensor | None]]


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether one can be changed through the other."""
    return _address(a) == _address(b) != 0  # what is empty lies nowhere


def fix_shared(x: Var, value: Tensor, made: tuple[Var, ...]) -> bool:
    """Mark x, and what forward made of it, as never to be overwritten where they share memory; say whether they do."""
    sharing = [var for var in made if var.tensor is not None and share_memory(var.tensor, value)]
    for var in (x, *sharing):
        var.fixed = var.fixed or bool(sharing)
    return bool(sharing)


def step_backward(
    tape: Moves,
    gradient: Lease,
    out: Var,
    again: bool,
    backward: Backward,
    inputs: tuple[Var | None, ...],
    reads: frozenset[int],
    reads_output: bool,
    kept: tuple[Var, ...],
) -> None:
    """Run the backward of a step and move what it returns on to the inputs."""
    turn = Turn(tape, gradient, inputs)
    found = [tape.read(x) if i in reads and x is not None else (None, None) for i, x in enumerate(inputs)]
    turn.values = tuple(value for value, _ in found)
    turn.output = out.value if reads_output else None
    turn.kept = tuple(var.value for var in kept)
    gradients = backward(turn)
    if len(gradients) != len(inputs):
        raise ValueError(f"backward: expected {len(inputs)} gradients, one for each input, got {len(gradients)}")
    read_only = {_address(t) for t in (*turn.values, turn.output, *turn.kept) if t is not None}
    claimed: dict[int, Lease] = {}
    for i, (x, grad) in enumerate(zip(inputs, gradients, strict=True)):
        if x is not None and x.needs_grad and grad is not None:
            if grad.shape != x.shape or grad.dtype != x.dtype:
                raise ValueError(
                    f"backward: expected a gradient of {tuple(x.shape)} and {x.dtype} for input {i}, "
                    f"got {tuple(grad.shape)} and {grad.dtype}"
                )
            tape.receive(x, _claim(grad, turn._rooms, claimed, read_only))
    for address, lease in turn._rooms.items():
        if address not in claimed:
            tape.pool.release(lease)
    for (_, scratch), i in zip(found, range(len(inputs)), strict=True):
        x = inputs[i]
        if scratch is not None:
            tape.pool.release(scratch)
        if i in reads and x is not None:
            tape.done(x, again)
    for var in (*((out,) if reads_output else ()), *kept):
        tape.done(var, again)


def _claim(grad: Tensor, rooms: dict[int, Lease], claimed: dict[int, Lease], read_only: set[int]) -> Lease:
    """A lease on the memory of a returned gradient; memory that somebody else still reads is never owned."""
    address = _address(grad)
    lease = rooms.get(address)
    if address in read_only or (lease is None and not grad.is_contiguous()):
        return borrowed(grad)
    if lease is not None and not grad.is_contiguous():
        lease.lend()  # a claim that is never given back: what may overlap itself is never overwritten
    if address in claimed:  # returned for another input as well: lent to both
        lent = claimed[address].lend()
        return lent if lent.tensor is grad else lent.viewed_as(grad)
    if lease is None:
        lease = Lease(grad)
    elif lease.tensor is not grad:
        lease = lease.viewed_as(grad)
    claimed[address] = lease
    return lease


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
