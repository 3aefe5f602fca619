"""A parameter in autocast's dtype: half of what a model rebuilds that trains under autocast, so it has a short way.

It needs no walk and no value: a parameter, its version and a dtype say all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leangrad.ledger.value import Bare, Value, is_there, leaf_value

NODE = "ToCopyBackward0"


# ``parameter.to`` and ``made.as_strided`` in the forms that torch parses fastest: together 5 µs for 8.
cast, as_strided = Tensor.type, torch.as_strided


class Cast:
    """``parameter.to(dtype)``, or a view of it, made anew whenever it is read."""

    __slots__ = ("__weakref__", "dtype", "tensor", "version", "view")

    def __init__(self, parameter: Tensor, tensor: Tensor, owner: Tensor) -> None:
        """``tensor`` is ``owner``, the cast of ``parameter``, or a view of it."""
        self.tensor, self.version = parameter, parameter._version
        self.dtype = tensor.dtype
        self.view: tuple[Any, ...] | None = None  # shape and strides; and where it starts, if that is not at 0
        if tensor is not owner:
            offset = tensor.storage_offset() - owner.storage_offset()
            self.view = (tensor.shape, tensor.stride(), offset) if offset else (tensor.shape, tensor.stride())

    def read(self) -> Tensor:
        """The tensor."""
        parameter = self.tensor
        if parameter._version != self.version or not is_there(parameter):
            leaf_value(parameter, self.version).read()  # which says what is wrong
        made = cast(parameter, self.dtype)
        if made is parameter:  # it had that dtype already
            made = parameter.detach().clone()
        return made if self.view is None else as_strided(made, *self.view)

    def value(self) -> Value:
        """The same as a value, for a recipe that reads it."""
        value = Value(NODE)
        value.set_recipe(self.read, (), {})
        return value


Anchor = Value | Cast  # what holds a tensor that recipes read
Packed = Value | Bare | Cast  # what becomes of a saved tensor
