"""User-defined steps of a tape: the arguments of their backward, and who owns the gradients that it returns.

`Tape.step(forward, backward, *inputs)` records a pair of plain functions as a step. The functions get tensors and no
`Lease`: whether a returned gradient may be overwritten follows from the memory in which it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from leangrad.engine.grad_buffer import Lease, borrowed
from leangrad.engine.var import Moves, Var

__all__ = ["Backward", "Forward", "Turn"]


class Turn:
    """The argument of a user-defined backward: the gradient of the output, the values it reads, memory to write to.

    `grad`     the gradient of the output; it may be overwritten if `owned` is True
    `values`   the inputs, in order; None for those that are not among the step's `reads`
    `output`   the output of the step if it was recorded with `reads_output`, else None
    `kept`     what forward returned beside its output
    `needs`    for each input, whether it needs a gradient
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
        """Returns memory for the gradient of input i: of its shape and dtype, with arbitrary contents."""
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
    """Whether both tensors lie in one storage, so that one may be changed through the other."""
    return _address(a) == _address(b) != 0  # the address of an empty storage is 0


def fix_shared(x: Var, value: Tensor, made: tuple[Var, ...]) -> bool:
    """Make x, and those of `made` that share its memory, `fixed`; returns whether there are any that share it.

    value: the value of x; made: what forward returned.
    """
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
    """Run the backward of a user-defined step, and pass the gradients that it returns on to the inputs."""
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
    """Returns a lease on the memory of a returned gradient; it is not owned if something else still reads that memory.

    rooms: the leases on memory that backward could write to; claimed: those of gradients returned for earlier inputs;
    read_only: the values that backward read. All by address.
    """
    address = _address(grad)
    lease = rooms.get(address)
    if address in read_only or (lease is None and not grad.is_contiguous()):
        return borrowed(grad)
    if lease is not None and not grad.is_contiguous():
        lease.lend()  # a claim that is never released: a tensor that may overlap itself is never overwritten
    if address in claimed:  # returned for another input as well: each has a claim
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
