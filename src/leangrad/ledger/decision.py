"""The decision, for every tensor that autograd wants to keep: keep it, share it, or store a recipe."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.observe.rng import Draw
from leangrad.ledger.origins.functions import NoRecipeError
from leangrad.ledger.origins.graph_walk import Walk, WalkRegion
from leangrad.ledger.origins.upstream_anchors import RecentProducts, keep_narrow, keep_source, narrow_bytes
from leangrad.ledger.values.cast import NODE, Cast, Packed, may_be_of_another_thread
from leangrad.ledger.values.node_metadata import CAST, LIVE, OPAQUE, VALUES, AccumulateGrad, enter, join
from leangrad.ledger.values.pending_inputs import wait
from leangrad.ledger.values.pending_save import PendingSave, ShapeOnlyReader, packed_in
from leangrad.ledger.values.saved import Bare
from leangrad.ledger.values.saved_view import SavedPart, SavedView
from leangrad.ledger.values.shape_only import INDEXED, SIZES, ShapeOnly
from leangrad.ledger.values.value import UNBOUNDED, Value
from leangrad.ledger.values.waypoints import FAR, LONGEST_RECIPE, mark_waypoint

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
NOT_GATHERED = "it is made from a sharded parameter that is not gathered when it is read"
TO_LOCAL = "_ToTorchTensorBackward"  # the local part of a DTensor: to autograd a view of a tensor out of the graph
DEEPEST = 32  # joins that a recipe may run through: each takes some frames of Python's stack


class Decision(NamedTuple):
    """What was learned of one saved tensor."""

    op: str
    keeps: bool  # it is simply kept
    nbytes: int
    fleeting: bool = False  # recipes that read it do not hold it for its readers: see [Note: made again]
    is_narrow: bool = False  # what it was cast from is kept: see [Note: kept in fewer bits]


class SavedKind(Enum):
    """What became of one saved tensor of the recorded step."""

    UNKNOWN = auto()  # no step was recorded, or it saved fewer tensors
    BARE = auto()  # kept, and no recipe read it: it needs no value
    SHAPE_ONLY = auto()  # a stand-in served
    DECIDED = auto()  # any other


# [Note: decisions by saved tensor] What was learned is looked up by the number of the saved tensor, not by how many
# decisions were made before it. In the recorded step a walk gives every tensor on its way a value, and a tensor that
# has one already needs no decision of its own: ``silu(x)``, saved after ``silu(x).mean()`` was. Where the plan keeps
# the mean, later steps do not walk from there, and ``silu(x)`` is decided for the first time.


class StepListener(Protocol):
    """What is told of a step that is recorded; ``recorder.py`` writes it down."""

    def packed(self, packed: Packed) -> None:
        """This became of the next saved tensor."""

    def decided(self, value: Value, op: str, why: str, number: int) -> None:
        """A saved tensor is kept or rebuilt as ``value``, because of ``why``; ``number``: of the node that made it."""

    def kept_after_all(self, value: Value, why: str) -> None:
        """A value that was to be rebuilt is kept, because of ``why``."""

    def shared(self, value: Value, nbytes: int) -> None:
        """A saved tensor is a value that was decided before."""

    def shape_only(self, op: str, nbytes: int, number: int) -> None:
        """A saved tensor is read for its shape alone."""


class DecidingRegion(WalkRegion, Protocol):
    """What decisions ask of their region."""

    min_bytes: int
    cap: int  # how deep a recipe may be where nothing was learned
    decisions: Sequence[Decision | None] | None  # see [Note: decisions by saved tensor]
    packs: int  # tensors that were saved so far, the one that is being decided included
    waiting: list[weakref.ref[Value]]
    runs_again: bool  # in a segment that a checkpoint runs again
    draw: Draw | None  # of the call that runs: see [Note: attention that draws]
    # Of the tensors saved in the call that runs, if they are decided when it has ended.
    slots: list[PendingSave] | None

    def differ(self, why: str) -> None:
        """This step is not like the one that was recorded, because of ``why``: what was learned serves it no more."""


class Decider:
    """The decisions of one region."""

    __slots__ = ("_book", "_products", "_recorder", "_walk")

    def __init__(self, book: DecidingRegion, products: RecentProducts, recorder: StepListener | None) -> None:
        self._book, self._products, self._recorder = book, products, recorder
        self._walk = Walk(book)

    @property
    def learned(self) -> Decision | None:
        """What was learned of the tensor that is being decided."""
        decisions, n = self._book.decisions, self._book.packs - 1
        return decisions[n] if decisions is not None and n < len(decisions) else None

    def decide(self, tensor: Tensor) -> Packed:
        """Autograd wants to keep ``tensor``: look into all that it may be.

        Half of what a model saves are parameters, views of parameters, and statistics that need no gradient. They are
        kept as they are, with their version and no value around them.
        """
        node: Any = tensor.grad_fn
        if node is None:
            if tensor.requires_grad:
                return Bare(tensor, tensor._version)
            if tensor.layout is not torch.strided or tensor.nbytes < self._book.min_bytes:
                return Bare(tensor.detach(), tensor._version)
            shards = self._book.shards
            if shards is not None and shards.of(tensor) is not None:  # a frozen parameter
                return Bare(tensor.detach(), tensor._version)
            value = self._kept(tensor, "input", free=True)  # it may turn out to be an op's second output, or its noise
            self._book.anchors.append(ref(value))
            value.readers += 1
            return value
        if type(tensor) not in PLAIN_TYPES and (part := self._part(tensor)) is not None:
            return part
        base = tensor._base
        owner: Any = node if base is None else base.grad_fn
        if type(owner).__name__ == NODE and _is_strided(tensor):
            if may_be_of_another_thread(owner, in_backward=self._book.runs_again and tensor.is_cuda):
                owner.metadata[OPAQUE] = True
            short = None if self._recorder is not None else self._cast(tensor, tensor if base is None else base, owner)
            if short is not None:
                return short
        found = self.find(tensor)
        if found is None:
            return Bare(tensor.detach(), tensor._version)
        value = found.owner if isinstance(found, SavedView) else found
        value.readers += 1
        return found

    def _part(self, tensor: Tensor) -> SavedPart | None:
        """A DTensor that is made of a tensor of the graph is kept or rebuilt with that one.

        Not in a segment that a checkpoint runs again, where a token of its shape would stand for it.
        """
        part = None if self._book.runs_again else _torch.part_of(tensor)
        if part is None or part.node._sequence_nr() < self._book.fence or type(part.node) is AccumulateGrad:
            return None
        value = self.value(part.whole, part.node)
        value.readers += 1
        return SavedPart(value, part.local, part.wrap)

    def find(self, tensor: Tensor) -> Value | SavedView | None:
        """The value of ``tensor``, or that of its base and the view; None: no recipe can read it."""
        node, base = tensor.grad_fn, tensor._base
        if node is None or not _is_strided(tensor):
            return None
        if base is None or type(node).__name__ == TO_LOCAL:
            return self.value(tensor, node)
        return None if base.grad_fn is None else self.seen(tensor, base, node)

    def value(self, tensor: Tensor, node: Any) -> Value:
        """The value of a tensor that has a node and is no view."""
        metadata = node.metadata
        key = VALUES[tensor.output_nr]
        fresh = node._sequence_nr() >= self._book.fence
        if metadata:
            fresh = fresh and OPAQUE not in metadata
            known = metadata.get(key)
            value: Value | SavedView | None = known() if known is not None else None
            if type(value) is Value:
                if value.tensor is not None:
                    if fresh and value.is_copied and type(tensor) in PLAIN_TYPES:  # here is the tensor itself
                        value.before = None
                        value.keep(tensor)
                        self._book.anchors.append(ref(value))
                    if value.version == tensor._version and (fresh or value.before is None):
                        self._share(value)
                        return value
                elif fresh and value.function is not None and not value.blocked:
                    if value.layout is None and self._book.max_products:  # a product may read it
                        value.layout = (tensor.shape, tensor.stride())
                        mark_waypoint(value, FAR)
                    is_out_of_reach = self._is_out_of_reach(value)
                    if (self._has_room(node) or is_out_of_reach) and type(tensor) in PLAIN_TYPES:
                        value.keep(tensor)
                        self._book.anchors.append(ref(value))
                        if is_out_of_reach and self._recorder is not None:
                            self._recorder.kept_after_all(value, NOT_GATHERED)
                    self._share(value)
                    return value
                elif fresh and type(tensor) in PLAIN_TYPES:  # absent until now, or its recipe waits for what is absent
                    self._book.anchors.append(ref(value))
                    return self._choose(tensor, node, metadata, waiting=value)
        if type(tensor) not in PLAIN_TYPES:
            return self._kept_whole(tensor, node)
        if not fresh:  # it cannot be rebuilt, but it is kept now as it is, and others may be rebuilt from it
            value = self._kept(tensor, type(node).__name__)
        elif tensor.nbytes < self._book.min_bytes:
            value = self._kept(tensor, type(node).__name__, free=True)
        else:
            value = self._choose(tensor, node, metadata)
        metadata[key] = ref(value)
        self._book.anchors.append(metadata[key])
        return value

    def seen(self, tensor: Tensor, base: Tensor, node: Any) -> Value | SavedView:
        """A view that autograd saves is its base, seen through a stride: kept or rebuilt once for all views."""
        metadata = node.metadata
        if type(tensor) not in PLAIN_TYPES:
            return self._kept_whole(tensor, node)
        if (metadata and OPAQUE in metadata) or node._sequence_nr() < self._book.fence:
            return self._kept(tensor, type(node).__name__)
        key = VALUES[tensor.output_nr]
        found: Value | SavedView
        owner: Any = base.grad_fn
        if owner is None or base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
            known = metadata.get(key)
            value = known() if known is not None else None
            if (
                type(value) is Value
                and value.tensor is None
                and value.function is not None
                and not value.blocked
                and not self._is_out_of_reach(value)
            ):
                self._share(value)
                return value
            found = self._kept(tensor, type(node).__name__, free=owner is None)
            self._book.anchors.append(ref(found))
        else:
            found = SavedView(self.value(base, owner), tensor, base)
        metadata[key] = ref(found)
        return found

    def _cast(self, tensor: Tensor, owner: Tensor, node: Any) -> Cast | None:
        """The short way for ``owner``, or a view of it, if it is the cast of a parameter and to be rebuilt."""
        before = node.next_functions[0][0]
        if type(before) is not AccumulateGrad or node._sequence_nr() < self._book.fence or self._book.sharded:
            return None
        metadata = node.metadata
        if metadata and (VALUES[0] in metadata or OPAQUE in metadata):
            return None
        parameter: Tensor = before.variable
        shards = self._book.shards
        if (
            type(parameter) not in PLAIN_TYPES
            or type(tensor) is not Tensor
            or (shards is not None and parameter in shards)
            or owner.nbytes < self._book.min_bytes
            or parameter.device != owner.device
            # Strides do not tell the rest.
            or (tensor is not owner and (tensor.dtype != owner.dtype or tensor.is_conj() or tensor.is_neg()))
        ):
            return None
        if CAST not in metadata:
            if self._book.decisions is not None:
                learned = self.learned
                if learned is None or learned[:2] != (NODE, False):
                    return None
            metadata[CAST] = True
        made = Cast(parameter, tensor, owner)
        self._book.watched_parameters.setdefault(id(parameter), []).append(ref(made))
        return made

    def _kept(self, tensor: Tensor, op: str, *, free: bool = False) -> Value:
        value = Value(op)
        value.keep(tensor)
        value.free = free
        return value

    def _kept_whole(self, tensor: Tensor, node: Any) -> Value:
        """A tensor of another class is kept as it is, and the summary says so."""
        value = self._kept(tensor, type(node).__name__)
        if parts := _torch.wrapped_tensors(tensor):
            value.nbytes = sum(part.nbytes for part in parts)
        if self._recorder is not None and value.nbytes >= self._book.min_bytes:
            why = f"leangrad has no rules for tensors of class {type(tensor).__name__}"
            self._recorder.decided(value, type(node).__name__, why, node._sequence_nr())
        return value

    def _has_room(self, node: Any) -> bool:
        """Whether the plan keeps what a recipe of an earlier tensor has run through."""
        learned = self.learned if self._book.decisions is not None else None
        return learned is not None and learned.keeps and learned.op == type(node).__name__

    def _is_out_of_reach(self, value: Value) -> bool:
        """Whether parameters that the recipe of ``value`` reads are not gathered where it is saved now."""
        shards = self._book.shards
        return bool(value.gathers) and (shards is None or not shards.are_at_work(value.gathers))

    def _share(self, value: Value) -> None:
        if self._recorder is not None:
            self._recorder.shared(value, value.nbytes)

    def _choose(self, tensor: Tensor, node: Any, metadata: dict[Any, Any], waiting: Value | None = None) -> Value:
        """Keep ``tensor`` or store a recipe; ``waiting``: its value, if a recipe downstream has asked for it before."""
        cap, recorded, fleeting, is_narrow, source = self._book.cap, 0, False, False, None
        if self._book.decisions is not None:
            learned = self.learned
            if learned is None or type(node).__name__ != learned.op:
                expected = "no tensor to decide on" if learned is None else f"an output of {learned.op}"
                self._book.differ(f"an output of {type(node).__name__} was saved where {expected} was before")
            elif learned.keeps:  # the plan says so
                value = waiting or Value(learned.op)
                value.keep(tensor)
                return value
            else:
                cap = UNBOUNDED if self._book.max_products else DEEPEST
                recorded, fleeting, is_narrow = learned.nbytes, learned.fleeting, learned.is_narrow
                source = keep_source(tensor, node, self._book.fence) if is_narrow else None
        value = self.recipe(tensor, node, metadata, cap, recorded, waiting)
        if is_narrow and source is None and (own := keep_narrow(value, tensor, cap)) is not None:  # of a view
            own.forget_recipe()
        del source  # the recipe holds it
        if fleeting:
            value.fleeting = True
        mark_waypoint(value, FAR)
        return value

    def recipe(
        self,
        tensor: Tensor,
        node: Any,
        metadata: dict[Any, Any],
        cap: int,
        recorded: int,
        waiting: Value | None = None,
    ) -> Value:
        """The value of ``tensor``, with a recipe or kept; ``recorded``: the bytes that it had when it was learned."""
        nbytes = tensor.nbytes
        why = ""
        try:
            if waiting is None:
                walk, draw = self._walk, self._book.draw
                if draw is not None and draw.note(node):
                    self._book.draw = None
                value = walk.start(node, tensor.output_nr, metadata, tensor)
                if walk.early and not self._products.serve(walk.early, nbytes, recorded):
                    value.unread()
                    del value
                    value = walk.start(node, tensor.output_nr, metadata, tensor)
                if walk.operand_bytes >= nbytes:
                    if self._book.max_products:
                        value.unread()
                    raise NoRecipeError("rebuilding it would take as many bytes of other inputs")
            else:
                value = waiting
            if value.function is None:
                raise NoRecipeError(f"{value.op} is never computed twice")
            if value.gathers and self._is_out_of_reach(value):
                raise NoRecipeError(NOT_GATHERED)
        except NoRecipeError as reason:
            value, why = waiting or Value(type(node).__name__), str(reason)
            value.keep(tensor)
        else:
            if value.layout is None and value.tensor is None:
                value.layout = (tensor.shape, tensor.stride())
                value.nbytes = nbytes
                value.cap = cap
                if self._recorder is not None and value.op == NODE:
                    value.narrow_bytes = narrow_bytes(value, tensor)
                if value.depth > cap or value.length > LONGEST_RECIPE or value.blocked or value.products:
                    why = self._keep_all_the_same(value, tensor, cap)
        if self._recorder is not None:
            self._recorder.decided(value, type(node).__name__, why, node._sequence_nr())
        return value

    def _is_too_long(self, value: Value, cap: int) -> bool:
        return value.depth > cap or value.length > LONGEST_RECIPE or value.products > self._book.max_products

    def _keep_all_the_same(self, value: Value, tensor: Tensor, cap: int) -> str:
        """A recipe was found that may be too long, or waits for what is not kept: say why ``tensor`` is kept, if so."""
        if self._is_too_long(value, cap):
            limit = f"{cap} residual sums" if value.depth > cap else f"{LONGEST_RECIPE} ops"
            if value.products > self._book.max_products:
                limit = f"{self._book.max_products} products"
            source = keep_narrow(value, tensor, cap)
            if source is None:
                value.keep(tensor)
            if self._recorder is None:
                (source or value).forget_recipe()
            elif source is not None:
                self._book.waiting.append(weakref.ref(source))  # it forgets it when the step was recorded
            return "" if source is not None else f"it lies more than {limit} after the last kept tensor"
        if not value.blocked or self._products.catch(value):
            return ""
        source = keep_narrow(value, tensor, cap)
        if source is not None:
            self._book.waiting.append(weakref.ref(source))  # as it does already
            return ""
        value.keep(tensor)
        wait(value)
        self._book.waiting.append(weakref.ref(value))
        return "it is made from the output of " + ", ".join(b.op for b in value.blocked) + ", which nothing keeps"

    # ---------------------------------------------------------------- see [Note: decided when the call has ended]

    def defer(self, tensor: Tensor, *, expected: bool = False) -> PendingSave:
        """Autograd wants to keep ``tensor`` in a call that may make a node of ``SHAPE_ONLY``: decide later.

        expected: a stand-in served in the recorded step.
        """
        assert self._book.slots is not None
        slot = PendingSave(tensor, self._book.packs - 1, expected)
        self._book.slots.append(slot)
        return slot

    def resolve(self, slots: Sequence[PendingSave], claimed: Mapping[int, ShapeOnlyReader]) -> None:
        """The call has ended: decide what becomes of the tensors that it saved.

        claimed: of the slots whose tensors are on the list, by their id, who reads them.
        """
        saved = self._book.packs
        with torch.no_grad():  # as in a hook
            for slot in slots:
                tensor, claim = slot.tensor, claimed.get(id(slot))
                self._book.packs = slot.number + 1
                assert tensor is not None
                if claim is not None and self.is_shape_only(tensor, claim, expected=slot.expected):
                    strides = None if claim.kind == SIZES else tensor.stride()
                    slot.packed = ShapeOnly(tensor.shape, strides, tensor.dtype, tensor.device)
                    if self._recorder is not None:
                        node: Any = tensor.grad_fn
                        self._recorder.shape_only(type(node).__name__, tensor.nbytes, node._sequence_nr())
                elif tensor._version != slot.version:  # the call itself has changed it
                    slot.keep()
                else:
                    slot.packed = self.decide(tensor)
                slot.tensor = None
                if self._recorder is not None:
                    assert slot.packed is not None
                    self._recorder.packed(slot.packed)
        self._book.packs = saved

    def is_shape_only(self, tensor: Tensor, claim: ShapeOnlyReader, *, expected: bool = False) -> bool:
        """Whether a stand-in serves a reader that reads only the shape of ``tensor``, and takes less memory.

        expected: it did in the recorded step.
        """
        if (
            type(tensor) not in PLAIN_TYPES
            or tensor.is_leaf
            or tensor.layout is not torch.strided
            or tensor.nbytes < self._book.min_bytes
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        if claim.kind != SIZES:
            span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            if span > tensor.numel():  # it lies in more memory than its own, which the stand-in would take too
                return False
        return expected or self._stand_in_pays(tensor, claim)

    def _stand_in_pays(self, tensor: Tensor, claim: ShapeOnlyReader) -> bool:
        """Whether less is kept if ``tensor`` is not kept for the node of ``claim``.

        What the op gives could be rebuilt from ``tensor``, were that kept. So if the op gives more bytes, as a padding
        does, ``tensor`` must be known to be at hand all the same: kept or rebuilt for another reader, or a product
        that can be caught. A max pooling also gives indices, which could be rebuilt too.

        The stand-in for a layout takes as much as the tensor while its node runs. So a tensor that is kept for an
        earlier op is handed out itself: backward comes to that op later, so this reader does not prolong its life.
        """
        base = tensor._base
        owner = tensor if base is None or base.grad_fn is None else base
        node: Any = owner.grad_fn
        known = node.metadata.get(VALUES[owner.output_nr])
        value = known() if known is not None else None
        is_caught = LIVE in node.metadata
        gives = _torch.output_nbytes(claim.node, 0)
        if gives > tensor.nbytes and value is None and not is_caught:
            return False
        if claim.kind == SIZES:
            return True
        if type(value) is Value and value.tensor is not None and value.readers:
            return False
        if claim.kind != INDEXED:
            return True
        indices = gives // tensor.itemsize * torch.int64.itemsize
        return (is_caught or self._walk.origin(node, owner.output_nr) is None) and gives + indices < tensor.nbytes

    # ---------------------------------------------------------------- second outputs

    def settle(self, node: Any, nr: int, name: str) -> None:
        """Output ``nr`` of ``node``, kept as its saved ``name`` because it has no node of its own, gets its recipe."""
        raw = getattr(node, "_raw_saved_" + name, None)  # the last node of a tensor subclass is that of an alias
        value = None if raw is None else packed_in(raw)
        if type(value) is not Value or value.tensor is None or node._sequence_nr() < self._book.fence:
            return
        try:
            origin = self._walk.start(node, nr, node.metadata)
        except NoRecipeError:
            return
        if origin.blocked or origin.gathers or self._is_too_long(origin, self._book.cap):
            if self._book.max_products:
                origin.unread()
            return
        value.layout = (value.tensor.shape, value.tensor.stride())
        assert origin.function is not None
        value.op = origin.op
        value.set_recipe(origin.function, origin.args, origin.kwargs)
        if self._book.max_products:
            origin.unread()
        value.tensor, value.part = None, origin.part
        enter(node, nr, value)
        join(node, nr, value)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
