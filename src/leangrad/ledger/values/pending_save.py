"""`PendingSave`: what autograd holds for a saved tensor whose decision waits until the call that saved it has ended.

[Note: decided when the call has ended]
A pack hook receives a tensor, but neither the node that saves it nor the name under which the node saves it. The tensor
does not tell them either: a call may save one tensor twice, and autocast or a composite function may save another
tensor than the call's argument. So during a call that may make a node of ``SHAPE_ONLY``, the hook returns an empty
``PendingSave``, a slot, for each tensor. After the call its nodes exist; each slot is found there by the node that
holds it and the name under which it is held, and only then is it decided whether the tensor is kept, shared or rebuilt,
or whether its shape is enough.
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
    """A saved tensor that is not decided yet; ``packed`` is set when the call that saved it has ended."""

    __slots__ = ("expected", "number", "packed", "tensor", "version")

    def __init__(self, tensor: Tensor, number: int, expected: bool = False) -> None:
        self.tensor: Tensor | None = tensor  # None: it is decided
        self.number = number  # how many tensors the step had saved before this one
        self.expected = expected  # True: in the recorded step the shape of this tensor was enough
        self.version = tensor._version  # when it was saved
        self.packed: Packed | None = None  # what the decision made of it; None: it is not decided yet

    def unpack(self) -> Tensor:
        """Returns the tensor to autograd."""
        if self.packed is None:
            raise LeangradError("a saved tensor was asked for inside the call that saved it; this is a bug in leangrad")
        return self.packed.unpack()

    def keep(self) -> None:
        """Keep the tensor, and expect the version that it had when it was saved."""
        assert self.tensor is not None
        self.packed, self.tensor = Bare(self.tensor.detach(), self.version), None


def packed_in(raw: Any) -> Any:
    """Returns what the pack hook made of ``raw``, a ``_raw_saved_`` attribute of a node; without a hook, the tensor.

    For a `PendingSave` that is its ``packed``, or the `PendingSave` itself while it is not decided: no recipe can read
    that.
    """
    found = _torch.packed(raw)
    return found.packed or found if type(found) is PendingSave else found


class ShapeOnlyReader(NamedTuple):
    """A node that reads a saved tensor only for its shape."""

    node: Any
    kind: str  # what it reads: SIZES, LAYOUT or INDEXED, see ``shape_only.py``


def claims(out: Any, first: int) -> dict[int, ShapeOnlyReader]:
    """Returns the readers in ``SHAPE_ONLY`` of the pending tensors that one call saved, by the id of `PendingSave`.

    out: what the call returned; its nodes are found from there.
    first: the sequence number of the first node that the call could make.
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
        # AccumulateGrad has the highest of all sequence numbers.
        if node is None or node in seen or type(node) is AccumulateGrad or node._sequence_nr() < first:
            continue
        seen.add(node)
        yield node
        stack.extend(before for before, _ in node.next_functions)
