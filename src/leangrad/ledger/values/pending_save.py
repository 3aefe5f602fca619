"""What autograd holds for a tensor that was saved in a call, until it is decided what becomes of the tensor.

[Note: decided when the call has ended]
A pack hook is given a tensor, and not told which node saves it, or as what. One tensor may be saved twice in a call,
and autocast or a composite function may have made another one of the argument. So during a call that may make a listed
node, the hook hands autograd an empty ``PendingSave`` for each tensor. When the call has ended its nodes are there,
each slot is found again under the name of the node that holds it, and only then is it decided what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, final

from torch import Tensor

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.ledger.values import shape_only
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.node_metadata import AccumulateGrad
from leangrad.ledger.values.saved import Bare


@final
class PendingSave:
    """What autograd holds for a tensor that was saved in a call; ``packed`` is decided when the call has ended."""

    __slots__ = ("expected", "number", "packed", "tensor", "version")

    def __init__(self, tensor: Tensor, number: int, expected: bool = False) -> None:
        self.tensor: Tensor | None = tensor
        self.number = number  # of the saved tensor in its step
        self.expected = expected  # a stand-in served in the recorded step
        self.version = tensor._version
        self.packed: Packed | None = None

    def unpack(self) -> Tensor:
        """Autograd wants its tensor back."""
        if self.packed is None:
            raise LeangradError("a saved tensor was asked for inside the call that saved it; this is a bug in leangrad")
        return self.packed.unpack()

    def keep(self) -> None:
        """Keep the tensor as it was when it was saved."""
        assert self.tensor is not None
        self.packed, self.tensor = Bare(self.tensor.detach(), self.version), None


def packed_in(raw: Any) -> Any:
    """What became of the saved tensor ``raw`` of a node; the tensor itself if it passed no hook.

    A slot that is not decided yet stands for itself: no recipe can read it.
    """
    found = _torch.packed(raw)
    return found.packed or found if type(found) is PendingSave else found


class ShapeOnlyReader(NamedTuple):
    """The node that reads a saved tensor for its shape alone, and how much of the shape."""

    node: Any
    kind: str


def claims(out: Any, first: int) -> dict[int, ShapeOnlyReader]:
    """By the id of its slot: each saved tensor that is on the list, of all nodes that the call of ``out`` has made.

    first: the number of the first node that the call could make.
    """
    found: dict[int, ShapeOnlyReader] = {}
    for node in _nodes(out, first):
        for name, kind in shape_only.SHAPE_ONLY.get(type(node).__name__, {}).items():
            raw = getattr(node, "_raw_saved_" + name, None)
            slot = None if raw is None else _torch.packed(raw)
            if type(slot) is PendingSave:
                found[id(slot)] = ShapeOnlyReader(node, kind)
    return found


def _nodes(out: Any, first: int) -> Iterator[Any]:
    outputs = out if isinstance(out, tuple | list) else (out,)
    stack = [t.grad_fn for t in outputs if isinstance(t, Tensor)]
    seen: set[Any] = set()
    while stack:
        node: Any = stack.pop()
        # A leaf has the highest number of all.
        if node is None or node in seen or type(node) is AccumulateGrad or node._sequence_nr() < first:
            continue
        seen.add(node)
        yield node
        stack.extend(before for before, _ in node.next_functions)
