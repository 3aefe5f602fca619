"""A saved view: its geometry over a base. The base is kept or rebuilt once for all its saved views."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, as_strided

from leangrad.ledger.values.saved import PackedTensor
from leangrad.ledger.values.value import Value

Geometry = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, and storage offset relative to the base


def geometry_of(tensor: Tensor, base: Tensor) -> Geometry:
    """Returns the geometry of ``tensor``, a view of ``base``."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset() - base.storage_offset())


def view_of(base: Tensor, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """Returns the view of ``base`` with this geometry; ``offset`` is relative to the offset of ``base``."""
    if offset:
        return as_strided(base, shape, stride, base.storage_offset() + offset)
    return as_strided(base, shape, stride)  # without an offset the call costs a third less


class SavedPart(PackedTensor):
    """A saved DTensor whose local part is a tensor of the autograd graph; that part is kept or rebuilt."""

    __slots__ = ("__weakref__", "_shape", "_wrap", "nbytes", "owner")
    tensor = None  # always: the tensor is held by ``owner``

    def __init__(self, owner: Value, local: Tensor, wrap: Callable[[Tensor], Tensor]) -> None:
        """``owner``: the value of the tensor that ``local`` is a view of; ``wrap``: makes a DTensor of ``local``."""
        self.owner, self.nbytes = owner, local.nbytes
        self._shape, self._wrap = local.shape, wrap

    def read(self) -> Tensor:
        """Returns the DTensor."""
        return self._wrap(self.owner.read().view(self._shape))


class SavedView(PackedTensor):
    """A saved view of a tensor that is kept or rebuilt."""

    __slots__ = ("__weakref__", "geometry", "nbytes", "owner")
    tensor = None  # always: the tensor is held by ``owner``

    def __init__(self, owner: Value, tensor: Tensor, base: Tensor) -> None:
        """``owner``: the value of ``base``; ``tensor``: the view of ``base`` that autograd saved."""
        self.owner, self.geometry, self.nbytes = owner, geometry_of(tensor, base), tensor.nbytes

    def read(self) -> Tensor:
        """Returns the view."""
        return view_of(self.owner.read(), *self.geometry)

    def value(self) -> Value:
        """Returns a `Value` of the view, for a recipe that reads it."""
        value = Value("view")
        value.set_recipe(view_of, (self.owner, *self.geometry), {})
        value.nbytes = self.nbytes
        return value
