"""A parameter in autocast's dtype, made anew whenever it is read: half of what a model rebuilds under autocast.

It needs no walk and no value: a parameter, its version and a dtype say all. It saves memory, not time: a value that
several saved tensors share is held from its first reader to its last, and a weight that is called again and again
would be held in autocast's dtype through most of backward, as plain PyTorch holds it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leangrad import _torch
from leangrad.ledger.values.node_metadata import AccumulateGrad
from leangrad.ledger.values.saved import Bare, PackedTensor
from leangrad.ledger.values.saved_view import SavedPart, SavedView, see, sight_of
from leangrad.ledger.values.shape_only import ShapeOnly
from leangrad.ledger.values.value import Value, leaf_value

NODE = "ToCopyBackward0"
cast = Tensor.type  # ``parameter.to(dtype)`` in the form that torch parses in half the time


def may_be_of_another_thread(node: Any, *, in_backward: bool) -> bool:
    """Whether this node of a cast is a parameter's, and autocast may have handed out what another thread has made.

    Autocast's cache is everybody's: on a GPU a segment that a checkpoint runs again finds the casts of forward in it.
    The parameter may have changed since. The fence does not tell: each thread numbers its own nodes. A number that this
    thread has not come to is another's; in a backward on a GPU any may be.
    """
    if type(node.next_functions[0][0]) is not AccumulateGrad:
        return False
    return in_backward or node._sequence_nr() >= _torch.next_sequence_nr()


class Cast(PackedTensor):
    """``parameter.to(dtype)``, or a view of it, made anew whenever it is read."""

    __slots__ = ("__weakref__", "dtype", "sight", "tensor", "version")

    def __init__(self, parameter: Tensor, tensor: Tensor, owner: Tensor) -> None:
        """``tensor`` is ``owner``, the cast of ``parameter``, or a view of it."""
        self.tensor, self.version = parameter, parameter._version
        self.dtype = tensor.dtype
        self.sight = None if tensor is owner else sight_of(tensor, owner)

    def read(self) -> Tensor:
        """The tensor."""
        parameter = self.tensor
        if parameter._version != self.version or not parameter.untyped_storage().nbytes():
            leaf_value(parameter, self.version).read()  # which says what is wrong, if it is not just empty
        made = cast(parameter, self.dtype)
        if made is parameter:  # it had that dtype already
            made = parameter.detach().clone()
        return made if self.sight is None else see(made, *self.sight)

    def value(self) -> Value:
        """The same as a value, for a recipe that reads it."""
        value = Value(NODE)
        value.set_recipe(self.read, (), {})
        return value


Anchor = Value | Cast  # what holds a tensor that recipes read
Packed = Value | Bare | Cast | SavedView | SavedPart | ShapeOnly  # what becomes of a saved tensor
