"""Saved for its shape alone: tensors of which backward reads only the sizes, or sizes and strides, are not kept.

[Note: which saved tensors are read for their shape alone]
Autograd saves a whole tensor wherever a derivative formula names it, even if the formula asks only for its sizes:
``gather`` needs its input to know how large a gradient to fill with zeros. ``SHAPE_ONLY`` lists these, by the type of
the node and the name under which the node saves the tensor. The entries were read off torch's ``derivatives.yaml``.
That no value is read, and that gradients have plain's bits and strides, is tested for each of them, with stand-ins of
different values. A formula may change with a release: for one that is newer than ``NEWEST`` the list is empty.

SIZES    Backward reads sizes, dtype and device. The stand-in is one element, expanded.
LAYOUT   Backward reads strides too, mostly as the memory format of the gradient that it makes: ``zeros_like(self)``,
         ``self.suggest_memory_format()``. The stand-in is uninitialised, of the same sizes and strides, and lives for
         the one node. A tensor that another reader keeps anyway is handed out itself: a stand-in would only add to it.
INDEXED  As LAYOUT, for a max pooling that saves its indices as well. Where the indices are rebuilt their recipe needs
         the input, so the input itself is handed out. ``Choice.is_shape_only`` decides.

Formulas for the second derivative read no more of these tensors: they ask for ``zeros_like(self)``, for which autograd
saves sizes and dtype by itself, and for the indices.

[Note: decided when the call has ended]
A pack hook is given a tensor, and not told which node saves it, or as what. One tensor may be saved twice in a call,
and autocast or a composite function may have made another one of the argument. So during a call that may make a listed
node, the hook hands autograd an empty ``Slot`` for each tensor. When the call has ended its nodes are there, each slot
is found again under the name of the node that holds it, and only then is it decided what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.ledger.nodes import AccumulateGrad
from leangrad.ledger.saved import Bare

if TYPE_CHECKING:
    from leangrad.ledger.calls import Handler
    from leangrad.ledger.cast import Packed
    from leangrad.ledger.notes import Notes

SIZES, LAYOUT, INDEXED = "sizes", "layout", "indexed"

NEWEST = (2, 13)  # the release of torch whose formulas were read last; run tests/test_ledger_shape_only.py to raise it

ENTRIES: dict[str, dict[str, str]] = {
    "GatherBackward0": {"self": SIZES},
    "TakeBackward0": {"self": LAYOUT},
    "MaskedSelectBackward0": {"self": LAYOUT},
    "PutBackward0": {"source": SIZES},
    "IndexAddBackward0": {"source": SIZES},
    "IndexCopyBackward0": {"source": SIZES},
    "CummaxBackward0": {"self": SIZES},
    "CumminBackward0": {"self": SIZES},
    "ComplexBackward0": {"real": SIZES, "imag": SIZES},  # not read at all
    "FftR2CBackward0": {"self": SIZES},
    "MaxPool2DWithIndicesBackward0": {"self": INDEXED},
    "MaxPool3DWithIndicesBackward0": {"self": INDEXED},
    "AdaptiveMaxPool2DBackward0": {"self": INDEXED},
    "AdaptiveMaxPool3DBackward0": {"self": INDEXED},
    "FractionalMaxPool2DBackward0": {"self": LAYOUT},  # its indices have no rule
    "FractionalMaxPool3DBackward0": {"self": LAYOUT},
    **{f"{kind}Pool{d}DBackward0": {"self": LAYOUT} for kind in ("Avg", "AdaptiveAvg") for d in "23"},
    **{f"{kind}Pad{d}DBackward0": {"self": LAYOUT} for kind in ("Reflection", "Replication") for d in "123"},
}


def entries_for(release: str) -> dict[str, dict[str, str]]:
    """The list for a release of torch.

    >>> entries_for("2.13.0+cpu")["GatherBackward0"], entries_for("3.0.0")
    ({'self': 'sizes'}, {})
    """
    major, minor = release.split(".")[:2]
    return ENTRIES if (int(major), int(minor)) <= NEWEST else {}


SHAPE_ONLY = entries_for(torch.__version__)


class ShapeOnly(NamedTuple):
    """A saved tensor of which backward reads the shape: what the stand-in is made from."""

    sizes: torch.Size
    strides: tuple[int, ...] | None  # None: backward reads sizes only
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return self.sizes.numel() * self.dtype.itemsize

    @property
    def stand_in_bytes(self) -> int:
        """What backward takes for the stand-in at its reader."""
        return 0 if self.strides is None else self.nbytes

    def unpack(self) -> Tensor:
        """Autograd wants its tensor back: a stand-in, whose values nobody reads."""
        return stand_in(self.sizes, self.strides, self.dtype, self.device)


def stand_in(sizes: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape with whatever values; without ``strides``, all its elements are one."""
    if strides is None:
        return torch.empty((), dtype=dtype, device=device).expand(sizes)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


@final
class Slot:
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
    return found.packed or found if type(found) is Slot else found


class Claim(NamedTuple):
    """The node that reads a saved tensor for its shape alone, and how much of the shape."""

    node: Any
    kind: str


def claims(out: Any, first: int) -> dict[int, Claim]:
    """By the id of its slot: each saved tensor that is on the list, of all nodes that the call of ``out`` has made.

    first: the number of the first node that the call could make.
    """
    found: dict[int, Claim] = {}
    for node in _nodes(out, first):
        for name, kind in SHAPE_ONLY.get(type(node).__name__, {}).items():
            raw = getattr(node, "_raw_saved_" + name, None)
            slot = None if raw is None else _torch.packed(raw)
            if type(slot) is Slot:
                found[id(slot)] = Claim(node, kind)
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


def deferring(handler: Handler | None = None, *, inplace: bool = False) -> Handler:
    """A handler of a function that may make a node of ``SHAPE_ONLY``: see [Note: decided when the call has ended].

    handler: what else has to be done around the call.
    inplace: the function changes its first argument. One that is a view is left alone: its node is that of its base.
    """

    def run(notes: Notes, func: Any, *args: Any, **kwargs: Any) -> Any:
        book = notes.book
        if book.slots is not None or (inplace and args and args[0]._is_view()):
            return func(*args, **kwargs)
        first = _torch.next_sequence_nr()
        slots: list[Slot] = []
        book.slots = slots
        try:
            out = func(*args, **kwargs)
        except BaseException:
            for slot in slots:
                slot.keep()
            raise
        finally:
            book.slots = None
        if slots:
            book.resolve(slots, claims(out, first))
        return out

    def handle(notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if handler is None:
            return run(notes, func, *args, **kwargs)
        return handler(notes, partial(run, notes, func), args, kwargs)

    return handle
