"""Smaller tensors upstream that are kept instead of a saved one: recent products, and tensors in fewer bits.

Autograd saves what an op's backward reads. The fewest bytes to keep may lie upstream, in a tensor that is not saved:
the keys before they are repeated for grouped queries, the input of an activation that is written out. Such a tensor can
be kept only while it is alive, so the last products are held for a while.

[Note: kept in fewer bits] Under autocast a norm reads and saves its input in float32, even where that was cast from a
sum in bfloat16 whose terms are not kept: a residual stream, a skip connection. A cast to more bits loses nothing. So
the ledger casts the saved tensor back to bfloat16 and keeps that copy of the sum; it is an anchor for all that is made
from the sum. In backward the cast to float32 runs once more.

Where products may be computed twice, the plan also keeps products in bfloat16 that were cast, such as logits. The model
often holds these itself until its forward ends, because it returns them. So no copy is made of a product that is still
alive and unchanged: `note_half` has noted a weak reference to it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.engine.ownership import fills_storage
from leangrad.ledger.origins.functions import FUNCTIONS
from leangrad.ledger.origins.rules import PRODUCTS, RULES
from leangrad.ledger.origins.rules.products import FOLLOWING, FOLLOWS
from leangrad.ledger.values.cast import NODE
from leangrad.ledger.values.node_metadata import HALF, LIVE, OPAQUE, VALUES, Node
from leangrad.ledger.values.pending_inputs import released
from leangrad.ledger.values.value import Value

RECENT = 4  # how many products are held: query, key, value and one more
_HALVES = (torch.bfloat16, torch.float16)
# For each dtype: those with at most half its bits that can be cast to it and back without loss.
NARROWER = {torch.float32: _HALVES, torch.float64: (*_HALVES, torch.float32)}


class NarrowRegion(Protocol):
    """What keeping a tensor in fewer bits needs of its region."""

    trusted_from: int  # the number of the first node whose output recipes may read
    changing: Any  # the tensor, or list of tensors, that a function is changing in place right now; else None

    @property
    def is_dropped(self) -> bool:
        """Whether a checkpoint drops what the running call saves: to hold its product would keep what it frees."""

    def watch(self, value: Value) -> None:
        """Let ``value`` get a copy of its tensor before the caller changes that tensor in place."""


def narrow_bytes(value: Value, tensor: Tensor, *, is_alone: bool = False) -> int:
    """Returns the bytes of the tensor that ``tensor`` was cast from, if the plan may keep that one instead; else 0.

    value: that of ``tensor``.
    is_alone: nothing else reads the tensor that it was cast from, so that one may be a view or have no recipe.
    """
    narrow = _narrow_dtype(tensor)
    if value.op != NODE or len(value.inputs) != 1 or narrow is None:
        return 0
    if not is_alone and not _is_known(value.inputs[0]):
        return 0
    return tensor.numel() * narrow.itemsize


def note_half(made: object) -> None:
    """Note ``made``, which a product has just returned: see [Note: kept in fewer bits]."""
    node: Any = made.grad_fn if type(made) is Tensor and made.dtype in _HALVES else None
    if type(made) is Tensor and node is not None:
        node.metadata[HALF] = ref(made), made._version


def keep_narrow(value: Value, tensor: Tensor, cap: int, region: NarrowRegion) -> Value | None:
    """Keep the tensor that ``tensor`` was cast from, instead of ``tensor``: see [Note: kept in fewer bits].

    Returns the value that is kept; None: ``tensor`` is no such cast.

    Where the tensor that was cast is a view, or the output of an op without a rule, its strides are not known, and our
    copy may have others. So the copy is then an anchor for ``value`` alone, in a value of its own.

    cap: the ``cap`` of the value that is kept.
    """
    if value.op != NODE or len(value.inputs) != 1 or value.inputs[0].tensor is not None or value.tensor is not None:
        return None
    source, narrow = value.inputs[0], _narrow_dtype(tensor)
    if narrow is None:
        return None
    value.blocked = ()
    if _is_known(source):
        _keep(source, tensor, narrow, region)
        source.cap = cap
        value.settle_lineage()
        return source
    own = Value(source.op)
    own.max_products = source.max_products
    if source.function is not None:  # a recipe for the plan, which may decide not to keep it
        own.set_recipe(source.function, source.args, source.kwargs)
    _keep(own, tensor, narrow, region)
    source.recipe_reads -= 1
    source.release_inputs()
    assert value.function is not None
    value.set_recipe(value.function, tuple(own if a is source else a for a in value.args), value.kwargs)
    value.narrow_bytes = own.nbytes
    return own


def keep_source(tensor: Tensor, node: Node, region: NarrowRegion) -> Value | None:
    """Keep the tensor that ``tensor``, the output of ``node``, was cast from, as the plan says.

    Returns the value that is kept now; None: it cannot be kept in this way, or it is kept already.

    This step may differ from the recorded one, so two cases are refused. A tensor made by a node before
    ``region.trusted_from`` may have been changed unseen, and other recipes read it as it was. The strides of a view, or
    of the output of an op without a rule, are not known; `keep_narrow` keeps these when the recipe of ``tensor`` is
    known.
    """
    narrow = _narrow_dtype(tensor)
    if narrow is None or OPAQUE in node.metadata:
        return None
    below, nr = node.next_functions[0]
    kind = type(below).__name__
    is_known = kind not in FOLLOWING and (kind in RULES or kind in PRODUCTS or type(below) in FUNCTIONS)
    if not is_known or below._sequence_nr() < region.trusted_from or OPAQUE in below.metadata:
        return None
    known = below.metadata.get(VALUES[nr])
    value = known() if known is not None else None
    if value is None:
        value = Value(kind)
        below.metadata[VALUES[nr]] = ref(value)
    elif type(value) is not Value or value.tensor is not None:
        return None
    _keep(value, tensor, narrow, region)
    value.forget_recipe()
    return value


def _keep(value: Value, tensor: Tensor, narrow: torch.dtype, region: NarrowRegion) -> None:
    product = _half_of(tensor, narrow, region)
    if product is not None:
        value.keep(product)
        region.watch(value)
        return
    value.keep(_torch.copy_unseen(tensor.detach(), narrow))
    value.recipe_tensor = value.tensor  # recipes read this copy, whatever happens to the user's own tensor


def _half_of(tensor: Tensor, narrow: torch.dtype, region: NarrowRegion) -> Tensor | None:
    """Returns the product that ``tensor`` was cast from, if that is alive, unchanged and all of its memory.

    None while a function changes any tensor in place: it saves its operands first, and may then change the product.
    """
    if region.changing is not None:
        return None
    node: Any = tensor.grad_fn
    below, nr = node.next_functions[0]
    known = below.metadata.get(HALF)
    product = None if known is None or region.is_dropped or below._sequence_nr() < region.trusted_from else known[0]()
    if product is None or product._version != known[1] or product.output_nr != nr or product.grad_fn is not below:
        return None
    is_whole = product.dtype is narrow and product.shape == tensor.shape and fills_storage(product)
    return product if is_whole else None


def _is_known(source: Value) -> bool:
    return source.function is not None and source.function not in FOLLOWS


def _narrow_dtype(tensor: Tensor) -> torch.dtype | None:
    """Returns the dtype that ``tensor`` was cast from if it is in ``NARROWER``, else None."""
    node: Any = tensor.grad_fn
    if tensor.dtype not in NARROWER or type(node).__name__ != NODE or node.next_functions[0][0] is None:
        return None
    narrow: torch.dtype = _torch.output_facts(*node.next_functions[0]).dtype
    return narrow if narrow in NARROWER[tensor.dtype] else None


class ProductsRegion(NarrowRegion, Protocol):
    """What `RecentProducts` needs of its region."""

    call: int  # the number of the call that runs, while a step is recorded
    catches: int  # along a trace: the bytes that the product of this call had in the recorded step
    max_products: int  # products that a recipe may run one inside the other; if any, none need be held

    @property
    def is_on_trace(self) -> bool:
        """Whether the step has been like the recorded one so far."""


class RecentProducts:
    """The latest products of a region, held so that they may be kept instead of a larger tensor."""

    def __init__(self, region: ProductsRegion, caught: dict[int, list[ref[Value]]] | None) -> None:
        """``caught``: for the products that are kept, by the numbers of their calls; None: no step is recorded."""
        self._region, self._caught = region, caught
        self._recent: deque[Tensor | Value] = deque(maxlen=RECENT)

    def hold(self, made: Tensor) -> None:
        """Hold ``made``, which a product has just returned.

        Along a trace it is known that a recipe will read it, so it is kept at once and the recipe need not wait for it.
        If no recipe does, it is dropped when a few more products have been held.
        """
        region = self._region
        if region.is_dropped or region.max_products:
            return
        node: Any = made.grad_fn
        held: Tensor | Value
        if region.is_on_trace:
            held = Value(type(node).__name__)
            held.keep(made)
            held.growth = held.nbytes / region.catches
            region.watch(held)
            node.metadata[VALUES[made.output_nr]] = ref(held)
            tensor: Any = held.tensor
        else:
            held = tensor = made.detach()
        node.metadata[LIVE] = (ref(tensor), made._version, region.call)
        self._recent.append(held)

    def serve(self, early: list[Value], nbytes: int, recorded: int) -> bool:
        """Whether it pays to keep the products ``early`` for good, instead of a tensor of ``nbytes``.

        In the recorded step the tensor had ``recorded`` bytes, and it paid to keep the products instead. It still does
        if the tensor has grown as much as they have, or if it is at least as large as they are together. Otherwise the
        products are only held, as in the recorded step, and `catch` keeps them if that pays.

        early: products that were kept by `hold` and that a recipe has read first now.
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
        """Keep the absent values in the recipe of ``value``, instead of ``value``, if that pays; whether it does.

        It pays if their tensors are still alive and unchanged, and together smaller than ``value`` and the kept tensors
        that can be dropped for them.
        """
        tensors = [b.catchable() for b in value.blocked]
        if any(t is None or _is_changed_by(self._region.changing, t) for t in tensors):
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
            self._region.watch(b)
            if self._caught is not None:
                self._caught.setdefault(b.live[2], []).append(ref(b))
        value.blocked = ()
        value.settle_lineage()
        return True

    def let_go(self) -> None:
        """Drop all held products."""
        self._recent.clear()


def _is_changed_by(changing: Any, tensor: Tensor) -> bool:
    """Whether the tensor or the tensors ``changing``, which a function is changing in place, may lie in ``tensor``."""
    if isinstance(changing, list | tuple):
        return any(_is_changed_by(one, tensor) for one in changing)
    if not isinstance(changing, Tensor) or changing.layout is not torch.strided:
        return False
    return tensor.untyped_storage().data_ptr() == changing.untyped_storage().data_ptr()
