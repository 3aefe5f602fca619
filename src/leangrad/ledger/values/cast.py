"""`Cast`: a parameter in autocast's dtype, cast again whenever it is read.

Half of what a model rebuilds under autocast are such casts. A `Cast` needs no walk and no `Value`: the parameter, its
version and the dtype are enough. It saves memory, not time. A `Value` that several saved tensors share is cached from
its first reader to its last, so a weight that is used many times would be held in autocast's dtype through most of
backward, as plain PyTorch holds it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leangrad import _torch
from leangrad.ledger.values.node_metadata import AccumulateGrad
from leangrad.ledger.values.saved import Bare, PackedTensor
from leangrad.ledger.values.saved_view import SavedPart, SavedView, geometry_of, view_of
from leangrad.ledger.values.shape_only import ShapeOnly
from leangrad.ledger.values.value import Value, leaf_value

NODE = "ToCopyBackward0"
cast = Tensor.type  # the same as ``parameter.to(dtype)``; torch parses this form in half the time


def may_be_of_another_thread(node: Any, *, in_backward: bool) -> bool:
    """Whether ``node`` casts a parameter and may have been made by another thread.

    Autocast's cache is shared by all threads: on a GPU, a segment that a checkpoint runs again finds in it the casts
    that forward made, and the parameter may have changed since. ``trusted_from`` does not reveal that, because each
    thread numbers its own nodes. A sequence number that this thread has not reached yet belongs to another thread; in a
    backward pass on a GPU, any number may.

    in_backward: a checkpoint runs its segment again, in a backward pass on a GPU.
    """
    if type(node.next_functions[0][0]) is not AccumulateGrad:
        return False
    return in_backward or node._sequence_nr() >= _torch.next_sequence_nr()


class Cast(PackedTensor):
    """``parameter.to(dtype)``, or a view of it, computed again whenever it is read."""

    __slots__ = ("__weakref__", "dtype", "geometry", "tensor", "version")

    def __init__(self, parameter: Tensor, tensor: Tensor, owner: Tensor) -> None:
        """``owner``: the cast of ``parameter``; ``tensor``: the saved tensor, ``owner`` itself or a view of it."""
        self.tensor, self.version = parameter, parameter._version
        self.dtype = tensor.dtype
        self.geometry = None if tensor is owner else geometry_of(tensor, owner)

    def read(self) -> Tensor:
        """Returns the cast, or the view of it."""
        parameter = self.tensor
        if parameter._version != self.version or not parameter.untyped_storage().nbytes():
            leaf_value(parameter, self.version).read()  # raises an error, unless the parameter is just empty
        made = cast(parameter, self.dtype)
        if made is parameter:  # it had that dtype already
            made = parameter.detach().clone()
        return made if self.geometry is None else view_of(made, *self.geometry)

    def value(self) -> Value:
        """Returns a `Value` of the cast, for a recipe that reads it."""
        value = Value(NODE)
        value.set_recipe(self.read, (), {})
        return value


Anchor = Value | Cast  # holds a tensor that recipes read
Packed = Value | Bare | Cast | SavedView | SavedPart | ShapeOnly  # what a pack hook returns once it is decided
