"""What is kept in the stead of a larger tensor downstream.

Autograd saves what an op's backward reads. The least that must be kept may lie upstream of it, in a tensor that nobody
saves: the keys before they are repeated for grouped queries, the input of an activation that is written out. It must be
caught while it is alive: so the last products are held for a while.

[Note: kept in fewer bits] Under autocast a norm reads, and saves, its input in float32, though it be a sum in bfloat16
whose terms nobody keeps: a residual stream, a skip connection. A cast to more bits loses nothing. So the sum is made of
it again, in its own dtype, and kept; it is an anchor for all that is made of it. In backward the cast runs once more.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.origins.functions import FUNCTIONS
from leangrad.ledger.origins.rules import PRODUCTS, RULES
from leangrad.ledger.origins.rules.products import FOLLOWING, FOLLOWS
from leangrad.ledger.values.cast import NODE
from leangrad.ledger.values.node_metadata import LIVE, OPAQUE, VALUES, Node
from leangrad.ledger.values.pending_inputs import released
from leangrad.ledger.values.value import Value

RECENT = 4  # how many are held: query, key, value and one more
_HALVES = (torch.bfloat16, torch.float16)
# Of each dtype, those in half its bits or fewer that come back from it as they were.
NARROWER = {torch.float32: _HALVES, torch.float64: (*_HALVES, torch.float32)}


def narrow_bytes(value: Value, tensor: Tensor) -> int:
    """The bytes of what ``tensor`` was cast from, if the plan may keep that in its stead; else 0."""
    narrow = _narrow_dtype(tensor)
    if value.op != NODE or len(value.inputs) != 1 or narrow is None or not _is_known(value.inputs[0]):
        return 0
    return tensor.numel() * narrow.itemsize


def keep_narrow(value: Value, tensor: Tensor, cap: int) -> Value | None:
    """Keep what ``tensor`` was cast from in its stead: see [Note: kept in fewer bits]. None: it is no such cast.

    A view that was cast may have had other strides than ours, and an op without a rule may have given anything. So what
    was cast there is an anchor for ``value`` alone.
    """
    if value.op != NODE or len(value.inputs) != 1 or value.inputs[0].tensor is not None or value.tensor is not None:
        return None
    source, narrow = value.inputs[0], _narrow_dtype(tensor)
    if narrow is None:
        return None
    value.blocked = ()
    if _is_known(source):
        _keep(source, tensor, narrow)
        source.cap = cap
        value.settle_lineage()
        return source
    own = Value(source.op)
    own.max_products = source.max_products
    if source.function is not None:  # for the plan, which need not keep it
        own.set_recipe(source.function, source.args, source.kwargs)
    _keep(own, tensor, narrow)
    source.parents -= 1
    source.unread()
    assert value.function is not None
    value.set_recipe(value.function, tuple(own if a is source else a for a in value.args), value.kwargs)
    value.narrow_bytes = own.nbytes
    return own


def keep_source(tensor: Tensor, node: Node, fence: int) -> Value | None:
    """The plan keeps what ``tensor``, the output of ``node``, was cast from: its value, if it is not kept already.

    This step may differ from the recorded one. What was changed unseen since it was made is not what other recipes read
    (``fence``), and of a view or an op without a rule nobody knows the strides: there ``keep_narrow`` serves, when the
    recipe is known.
    """
    narrow = _narrow_dtype(tensor)
    if narrow is None or OPAQUE in node.metadata:
        return None
    below, nr = node.next_functions[0]
    kind = type(below).__name__
    is_known = kind not in FOLLOWING and (kind in RULES or kind in PRODUCTS or type(below) in FUNCTIONS)
    if not is_known or below._sequence_nr() < fence or OPAQUE in below.metadata:
        return None
    known = below.metadata.get(VALUES[nr])
    value = known() if known is not None else None
    if value is None:
        value = Value(kind)
        below.metadata[VALUES[nr]] = ref(value)
    elif type(value) is not Value or value.tensor is not None:
        return None
    _keep(value, tensor, narrow)
    value.forget_recipe()
    return value


def _keep(value: Value, tensor: Tensor, narrow: torch.dtype) -> None:
    value.keep(_torch.copy_unseen(tensor.detach(), narrow))
    value.before = value.tensor  # what becomes of the user's own tensor is not seen here


def _is_known(source: Value) -> bool:
    return source.function is not None and source.function not in FOLLOWS


def _narrow_dtype(tensor: Tensor) -> torch.dtype | None:
    """What ``tensor`` was cast from, if it has at least twice the bits of that and lost none."""
    node: Any = tensor.grad_fn
    if tensor.dtype not in NARROWER or type(node).__name__ != NODE or node.next_functions[0][0] is None:
        return None
    narrow: torch.dtype = _torch.output_facts(*node.next_functions[0]).dtype
    return narrow if narrow in NARROWER[tensor.dtype] else None


class ProductsRegion(Protocol):
    """What products ask of their region."""

    call: int  # the number of the call that runs, while a step is recorded
    catches: int  # along a trace, the bytes that the product had in the recorded step
    changing: Any  # the tensor that a function is changing in place right now
    max_products: int  # products that a recipe may run through in a row: then none need be held for it

    @property
    def is_on_trace(self) -> bool:
        """Whether the step has been like the recorded one so far."""

    @property
    def is_dropped(self) -> bool:
        """Whether a checkpoint drops what the call that runs saves: to hold its product would keep what it frees."""

    def watch(self, value: Value) -> None:
        """A recipe reads this tensor of the caller's: it must not change under the recipe."""


class RecentProducts:
    """The last products of a region."""

    def __init__(self, book: ProductsRegion, caught: set[int] | None) -> None:
        """``caught``: where a step that is recorded notes the calls of which a product was kept."""
        self._book, self._caught = book, caught
        self._recent: deque[Tensor | Value] = deque(maxlen=RECENT)

    def hold(self, made: Tensor) -> None:
        """Hold ``made``, which a product has just given.

        Along a trace it is known that a recipe will want it, so it is kept at once, and none has to wait for it. If
        none does after all, it is let go with the next few products.
        """
        book = self._book
        if book.is_dropped or book.max_products:
            return
        node: Any = made.grad_fn
        held: Tensor | Value
        if book.is_on_trace:
            held = Value(type(node).__name__)
            held.keep(made)
            held.growth = held.nbytes / book.catches
            book.watch(held)
            node.metadata[VALUES[made.output_nr]] = ref(held)
            tensor: Any = held.tensor
        else:
            held = tensor = made.detach()
        node.metadata[LIVE] = (ref(tensor), made._version, book.call)
        self._recent.append(held)

    def serve(self, early: list[Value], nbytes: int, recorded: int) -> bool:
        """Whether what was kept at once serves a recipe for a tensor of ``nbytes``, and so is kept for good.

        In the recorded step the tensor had ``recorded`` bytes, and to keep the products in its stead paid. It still
        does if the tensor has grown as much as they have, or outweighs them. Otherwise they are only held for a while,
        as in that step, and caught if that pays.
        """
        if nbytes < recorded * max(v.growth for v in early) and nbytes < sum(v.nbytes for v in set(early)):
            for i, held in enumerate(self._recent):
                if type(held) is Value and held in early and held.tensor is not None:
                    self._recent[i] = held.tensor
            return False
        for v in early:
            v.growth = 0.0
        return True

    def catch(self, value: Value) -> bool:
        """Keep the absent values under ``value`` in its stead, if they are still there and smaller."""
        tensors = [b.catchable() for b in value.blocked]
        if any(t is None or self._is_changing(t) for t in tensors):
            return False
        cost = sum(t.nbytes for t in tensors if t is not None)
        gain = value.nbytes
        if cost >= gain:
            gain += released(value.blocked)
            if cost >= gain:
                return False
        for b, t in zip(value.blocked, tensors, strict=True):
            assert t is not None
            assert b.live is not None
            b.keep(t)
            self._book.watch(b)
            if self._caught is not None:
                self._caught.add(b.live[2])
        value.blocked = ()
        value.settle_lineage()
        return True

    def let_go(self) -> None:
        """Nothing will be caught any more."""
        self._recent.clear()

    def _is_changing(self, tensor: Tensor) -> bool:
        changing = self._book.changing
        if not isinstance(changing, Tensor) or changing.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() == changing.untyped_storage().data_ptr()
