"""A view that autograd saved: what it is a view of, seen through strides. It is kept or rebuilt once for all views."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, as_strided

from leangrad.ledger.values.saved import PackedTensor
from leangrad.ledger.values.value import Value

Sight = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, and how far from where the other begins


def sight_of(tensor: Tensor, base: Tensor) -> Sight:
    """How ``tensor``, a view of ``base``, sees it."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset() - base.storage_offset())


def see(base: Tensor, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """The view of ``base``."""
    if offset:
        return as_strided(base, shape, stride, base.storage_offset() + offset)
    return as_strided(base, shape, stride)  # from where the other begins, and a third cheaper


class SavedPart(PackedTensor):
    """A DTensor whose local part is a tensor of the graph, which is kept or rebuilt."""

    __slots__ = ("__weakref__", "_shape", "_wrap", "nbytes", "owner")
    tensor = None  # it has none of its own

    def __init__(self, owner: Value, local: Tensor, wrap: Callable[[Tensor], Tensor]) -> None:
        """``owner``: the value of the tensor that ``local`` is a view of; ``wrap``: makes a DTensor of it."""
        self.owner, self.nbytes = owner, local.nbytes
        self._shape, self._wrap = local.shape, wrap

    def read(self) -> Tensor:
        """The DTensor."""
        return self._wrap(self.owner.read().view(self._shape))


class SavedView(PackedTensor):
    """A view of a tensor that is kept or rebuilt."""

    __slots__ = ("__weakref__", "nbytes", "owner", "sight")
    tensor = None  # it has none of its own

    def __init__(self, owner: Value, tensor: Tensor, base: Tensor) -> None:
        """``owner``: the value of ``base``, which ``tensor`` is a view of."""
        self.owner, self.sight, self.nbytes = owner, sight_of(tensor, base), tensor.nbytes

    def read(self) -> Tensor:
        """The view."""
        return see(self.owner.read(), *self.sight)

    def value(self) -> Value:
        """The same as a value, for a recipe that reads it."""
        value = Value("view")
        value.set_recipe(see, (self.owner, *self.sight), {})
        value.nbytes = self.nbytes
        return value
