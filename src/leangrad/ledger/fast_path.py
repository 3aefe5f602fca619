"""The short ways: what became of a saved tensor in the recorded step most likely becomes of it again.

The decision has to look into everything that a tensor may be. Along a course it is known what it was: each of these
looks whether it is that again, by the same conditions, and leaves it to the decision where one is not met.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, strided

from leangrad.ledger.decision import DEEPEST, Choice
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.node_metadata import NOTE, OPAQUE, VALUES
from leangrad.ledger.values.saved import Bare
from leangrad.ledger.values.saved_view import Seen
from leangrad.ledger.values.slot import Slot
from leangrad.ledger.values.value import Value

Way = Callable[[Choice, Tensor], Packed | Slot]

decide: Way = Choice.decide  # the long one


def keep(choice: Choice, tensor: Tensor) -> Packed:
    """It is kept, and no recipe reads it."""
    if tensor.is_leaf:
        return Bare(tensor if tensor.requires_grad else tensor.detach(), tensor._version)
    return Bare(tensor.detach(), tensor._version, type(tensor.grad_fn))


def shape(choice: Choice, tensor: Tensor) -> Packed | Slot:
    """Backward reads its shape alone, if the call that saves it makes the same node again."""
    return choice.decide(tensor) if choice.slots is None else choice.defer(tensor, expected=True)


def rebuild(choice: Choice, tensor: Tensor) -> Packed:
    """It is rebuilt, or seen in what is rebuilt."""
    base = tensor._base
    owner = tensor if base is None else base
    node: Any = owner.grad_fn
    learned = choice.learned
    if node is None or learned is None or type(owner) is not Tensor:
        return choice.decide(tensor)
    op, is_kept, recorded, fleeting = learned
    metadata = node.metadata
    if (
        is_kept
        or op != type(node).__name__
        or (metadata and (len(metadata) > 1 or NOTE not in metadata))  # nothing is known of it yet but its constants
        or node._sequence_nr() < choice.fence
        or owner.layout is not strided
        or owner.nbytes < choice.min_bytes
    ):
        return choice.decide(tensor)
    if base is not None:
        view: Any = tensor.grad_fn
        if (
            view is None
            or view._sequence_nr() < choice.fence
            or OPAQUE in view.metadata
            or type(tensor) is not Tensor
            or tensor.dtype is not base.dtype
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return choice.decide(tensor)
    value = choice.recipe(owner, node, metadata, DEEPEST, recorded)
    if fleeting:
        value.fleeting = True
    value.readers += 1
    metadata[VALUES[owner.output_nr]] = known = ref(value)
    choice.anchors.append(known)
    if base is None:
        return value
    seen = Seen(value, tensor, base)
    view.metadata[VALUES[tensor.output_nr]] = ref(seen)
    return seen


def anchor(choice: Choice, tensor: Tensor) -> Value | Seen | None:
    """The value of a tensor that autograd has kept by itself; None: no recipe can read it."""
    node: Any = tensor.grad_fn
    base = tensor._base
    if node is None or tensor.layout is not strided or (base is not None and base.grad_fn is None):
        return None
    if base is not None:
        return choice.seen(tensor, base, node)
    learned = choice.learned
    if learned is None or type(tensor) is not Tensor:
        return choice.value(tensor, node)
    op, is_kept, _, _ = learned
    metadata = node.metadata
    if (
        not is_kept
        or op != type(node).__name__
        or (metadata and (len(metadata) > 1 or NOTE not in metadata))
        or node._sequence_nr() < choice.fence
        or tensor.nbytes < choice.min_bytes
    ):
        return choice.value(tensor, node)
    value = Value(op)
    value.keep(tensor)
    metadata[VALUES[tensor.output_nr]] = known = ref(value)
    choice.anchors.append(known)
    return value
