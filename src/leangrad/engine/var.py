"""A value on a tape, and what a step of the tape asks of the tape in backward."""

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

    The value is a tensor, or it is `rebuilt` by an activation from another value whenever it is read. `fixed` memory is
    never overwritten: it belongs to the caller, or a view shares it.
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
        self.readers = 0  # steps that will read the value in backward
        self.maskable = False  # the activation that made it needs only its zeros
        self.zeros: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The value, where the tape still has it."""
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
        """The gradient, where backward has left one: on inputs, and with `Tape(keep=True)` on every value."""
        return None if self.gradient is None else self.gradient.tensor


class Moves(Protocol):
    """What the backward of a step asks of its tape."""

    pool: Pool
    private: bool

    def read(self, x: Var) -> tuple[Tensor, Lease | None]:
        """The value of an input."""

    def done(self, x: Var, again: bool) -> None:
        """The step reads this input no more."""

    def receive(self, x: Var, arriving: Lease) -> None:
        """A gradient of an input, to be taken or added."""
