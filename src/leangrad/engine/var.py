"""`Var`: a value on a tape. `Moves`: what the backward of a step calls on its tape."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from leangrad.engine.grad_buffer import Lease, Pool
from leangrad.errors import ConsumedError
from leangrad.ops.activation import Activation

__all__ = ["Moves", "Var"]


class Var:
    """One value on a tape, and the slot for its gradient.

    The value is a tensor, or it is `rebuilt` by an activation from another value whenever it is read. If it is `fixed`,
    its memory is never overwritten: it belongs to the caller, or a view shares it.
    """

    __slots__ = (
        "dtype",
        "fixed",
        "gradient",
        "maskable",
        "needs_grad",
        "readers",
        "rebuilt",
        "shape",
        "tensor",
        "zeros",
    )

    def __init__(self, tensor: Tensor | None, like: Tensor | Var, needs_grad: bool, fixed: bool = False):
        self.tensor, self.needs_grad, self.fixed = tensor, needs_grad, fixed
        self.shape: torch.Size = like.shape
        self.dtype: torch.dtype = like.dtype
        self.rebuilt: tuple[Activation, Var] | None = None
        self.gradient: Lease | None = None
        self.readers = 0  # number of steps that will still read the value in backward
        self.maskable = False  # whether backward of the activation that made it reads only where it is zero
        self.zeros: Tensor | None = None  # True where the value was zero; set if a gradient was written over the value

    @property
    def value(self) -> Tensor:
        """The value, rebuilt if it is not stored; raises ConsumedError if the tape no longer has it."""
        if self.tensor is not None:
            return self.tensor
        if self.rebuilt is None:
            raise ConsumedError(
                "this value was overwritten or released by its tape; a Tape that is not private keeps it"
            )
        activation, source = self.rebuilt
        return activation.forward(source.value, activation.parameter, None)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, if backward left one, else None: on inputs, and with `Tape(keep=True)` on every value."""
        return None if self.gradient is None else self.gradient.tensor


class Moves(Protocol):
    """What the backward of a step calls on its tape; see `Tape`."""

    pool: Pool
    private: bool

    def read(self, x: Var) -> tuple[Tensor, Lease | None]:
        """Returns the value of an input and, if it was rebuilt, the lease on its memory."""

    def done(self, x: Var, again: bool) -> None:
        """Called when the step does not read this input any more."""

    def receive(self, x: Var, arriving: Lease) -> None:
        """Store a gradient of an input, or add it to the one that is stored."""
