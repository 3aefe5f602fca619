"""Decides, for every tensor that autograd saves, whether to keep it, share it, or store a recipe."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.observe.rng import Draw
from leangrad.ledger.origins.functions import NoRecipeError
from leangrad.ledger.origins.graph_walk import Walk, WalkRegion
from leangrad.ledger.origins.upstream_anchors import (
    NarrowRegion,
    RecentProducts,
    keep_narrow,
    keep_source,
    narrow_bytes,
)
from leangrad.ledger.values.cast import NODE, Cast, Packed, may_be_of_another_thread
from leangrad.ledger.values.node_metadata import CAST, OPAQUE, VALUES, AccumulateGrad, enter, join
from leangrad.ledger.values.pending_inputs import wait
from leangrad.ledger.values.pending_save import PendingSave, packed_in
from leangrad.ledger.values.rebuild.waypoints import FAR, LONGEST_RECIPE, mark_waypoint
from leangrad.ledger.values.saved import Bare
from leangrad.ledger.values.saved_view import SavedPart, SavedView
from leangrad.ledger.values.value import UNBOUNDED, Value

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
NOT_GATHERED = "it is made from a sharded parameter that is not gathered when it is read"
TO_LOCAL = "_ToTorchTensorBackward"  # the local part of a DTensor: to autograd, a view of a tensor outside the graph
DEEPEST = 32  # the most joins that a recipe may run through: each uses some frames of Python's stack


class Decision(NamedTuple):
    """What the plan says about one saved tensor."""

    op: str  # the type of the node that made it
    keeps: bool  # whether it is kept
    nbytes: int
    fleeting: bool = False  # once rebuilt for a recipe, it is not held for its readers: see [Note: made again]
    is_narrow: bool = False  # the narrower tensor it was cast from is kept: see [Note: kept in fewer bits]


class SavedKind(Enum):
    """What happens to one saved tensor, according to the recorded step and the plan."""

    UNKNOWN = auto()  # no step was recorded, or it saved fewer tensors
    BARE = auto()  # kept, and no recipe reads it: it needs no Value
    SHAPE_ONLY = auto()  # a stand-in of its shape replaces it
    DECIDED = auto()  # anything else


# [Note: decisions by saved tensor] A planned decision is looked up by the number of the saved tensor, not by how many
# decisions were made before it. In the recorded step a walk gives a value to every tensor on its way, and a tensor that
# has a value needs no decision of its own when it is saved: ``silu(x)``, saved after ``silu(x).mean()``. If the plan
# keeps the mean, later steps do not walk from there, and ``silu(x)`` needs a decision of its own.


class StepListener(Protocol):
    """What the Decider reports to the Recorder while a step is recorded."""

    def packed(self, packed: Packed) -> None:
        """The next saved tensor was packed as ``packed``."""

    def decided(self, value: Value, op: str, why: str, number: int) -> None:
        """A saved tensor is kept as ``value`` because of ``why``, or rebuilt; ``number``: of the node that made it."""

    def kept_after_all(self, value: Value, why: str) -> None:
        """``value``, which was going to be rebuilt, is kept because of ``why``."""

    def shared(self, value: Value, nbytes: int) -> None:
        """A saved tensor shares ``value`` with one that was saved before."""

    def shape_only(self, op: str, nbytes: int, number: int) -> None:
        """Backward reads only the shape of a saved tensor; ``number``: of the node that made it."""


class DecidingRegion(WalkRegion, NarrowRegion, Protocol):
    """What the Decider needs from its Region."""

    min_bytes: int
    cap: int  # the most joins that a recipe may run through without a plan
    decisions: Sequence[Decision | None] | None  # see [Note: decisions by saved tensor]
    saved_count: int  # tensors saved so far, including the one that is being decided on
    waiting: list[weakref.ref[Value]]  # kept values that drop their recipe when the region ends
    runs_again: bool  # True in a segment that a checkpoint runs again
    saves_cast_logits: (
        bool  # the running call saves logits that were cast, and nothing else reads what they were cast from
    )
    draw: Draw | None  # of the running call: see [Note: attention that draws]
    # One for each tensor saved in the running call; None if tensors are decided on at once.
    slots: list[PendingSave] | None

    is_unwatched: bool  # the function mode is not set: see [Note: without the function mode]

    def report_difference(self, why: str) -> None:
        """Stop using the plan, because this step differs from the recorded one; ``why``: the reason."""


class Decider:
    """Decides about the saved tensors of one region."""

    __slots__ = ("_products", "_recorder", "_region", "walk")

    def __init__(self, region: DecidingRegion, products: RecentProducts, recorder: StepListener | None) -> None:
        self._region, self._products, self._recorder = region, products, recorder
        self.walk = Walk(region)

    @property
    def learned(self) -> Decision | None:
        """The plan's decision about the tensor that is being decided on; None: there is none."""
        decisions, n = self._region.decisions, self._region.saved_count - 1
        return decisions[n] if decisions is not None and n < len(decisions) else None

    def decide(self, tensor: Tensor) -> Packed:
        """Return what autograd holds in place of ``tensor``.

        Half of what a model saves are parameters, views of parameters, and statistics that need no gradient. They are
        kept as they are, with their version and without a Value.
        """
        node: Any = tensor.grad_fn
        if node is None:
            if tensor.requires_grad:
                return Bare(tensor, tensor._version)
            if tensor.layout is not torch.strided or tensor.nbytes < self._region.min_bytes:
                return Bare(tensor.detach(), tensor._version)
            shards = self._region.shards
            if shards is not None and shards.of(tensor) is not None:  # a frozen parameter
                return Bare(tensor.detach(), tensor._version)
            value = self._kept(tensor, "input", free=True)  # it may be an op's second output, or its noise
            self._region.anchors.append(ref(value))
            value.readers += 1
            return value
        if type(tensor) not in PLAIN_TYPES and (part := self._part(tensor)) is not None:
            return part
        found: Value | SavedView | None = None
        if _is_strided(tensor):
            base = tensor._base
            owner: Any = node if base is None else base.grad_fn
            if type(owner).__name__ == NODE:
                if may_be_of_another_thread(owner, in_backward=self._region.runs_again and tensor.is_cuda):
                    owner.metadata[OPAQUE] = True
                if self._recorder is None:
                    short = self._cast(tensor, tensor if base is None else base, owner)
                    if short is not None:
                        return short
            found = self._found(tensor, node, base, owner)
        if found is None:
            return Bare(tensor.detach(), tensor._version, type(node))
        value = found.owner if isinstance(found, SavedView) else found
        value.readers += 1
        return found

    def _part(self, tensor: Tensor) -> SavedPart | None:
        """Return a SavedPart for a DTensor made from a tensor of the graph: it is kept or rebuilt with that tensor.

        None for others, and in a segment that a checkpoint runs again, where a placeholder replaces the DTensor.
        """
        part = None if self._region.runs_again else _torch.part_of(tensor)
        if part is None or part.node._sequence_nr() < self._region.trusted_from or type(part.node) is AccumulateGrad:
            return None
        value = self.value(part.whole, part.node)
        value.readers += 1
        return SavedPart(value, part.local, part.wrap)

    def find(self, tensor: Tensor) -> Value | SavedView | None:
        """Return the value of ``tensor``, or a view of its base's value; None: no recipe can read it."""
        node, base = tensor.grad_fn, tensor._base
        if node is None or not _is_strided(tensor):
            return None
        return self._found(tensor, node, base, node if base is None else base.grad_fn)

    def _found(self, tensor: Tensor, node: Any, base: Tensor | None, owner: Any) -> Value | SavedView | None:
        """`find`, for a tensor made by ``node``, and a view of ``base``, which was made by ``owner``."""
        if base is None or type(node).__name__ == TO_LOCAL:
            return self.value(tensor, node)
        return None if owner is None else self._value_of_view(tensor, base, node, owner)

    def value(self, tensor: Tensor, node: Any) -> Value:
        """Return the value of a tensor that has a node and is not a view; if it has none, decide about it."""
        metadata = node.metadata
        key = VALUES[tensor.output_nr]
        fresh = node._sequence_nr() >= self._region.trusted_from
        if metadata:
            fresh = fresh and OPAQUE not in metadata
            known = metadata.get(key)
            value: Value | SavedView | None = known() if known is not None else None
            if type(value) is Value:
                if value.tensor is not None:
                    if fresh and value.is_copied and type(tensor) in PLAIN_TYPES:  # replaces our copy
                        value.recipe_tensor = None
                        value.keep(tensor)
                        self._region.anchors.append(ref(value))
                    if value.version == tensor._version and (fresh or value.recipe_tensor is None):
                        self._share(value)
                        return value
                elif fresh and value.function is not None and not value.blocked:
                    if value.layout is None and self._region.max_products:  # a product may read it
                        value.layout = (tensor.shape, tensor.stride())
                        mark_waypoint(value, FAR)
                    is_out_of_reach = self._is_out_of_reach(value)
                    if (self._plan_keeps(node) or is_out_of_reach) and type(tensor) in PLAIN_TYPES:
                        value.keep(tensor)
                        self._region.anchors.append(ref(value))
                        if self._recorder is None:
                            value.forget_recipe()
                        elif is_out_of_reach:
                            self._recorder.kept_after_all(value, NOT_GATHERED)
                    self._share(value)
                    return value
                elif fresh and type(tensor) in PLAIN_TYPES:  # absent until now, or its recipe waits for an absent value
                    self._region.anchors.append(ref(value))
                    return self._choose(tensor, node, metadata, waiting=value)
        if type(tensor) not in PLAIN_TYPES:
            return self._kept_whole(tensor, node)
        if not fresh:  # it cannot be rebuilt; it is kept as it is now, and others may be rebuilt from it
            value = self._kept(tensor, type(node).__name__)
        elif tensor.nbytes < self._region.min_bytes:
            value = self._kept(tensor, type(node).__name__, free=True)
        else:
            value = self._choose(tensor, node, metadata)
        metadata[key] = ref(value)
        self._region.anchors.append(metadata[key])
        return value

    def _value_of_view(self, tensor: Tensor, base: Tensor, node: Any, owner: Any) -> Value | SavedView:
        """Return a SavedView of the value of ``base``, which is kept or rebuilt once for all its views.

        Returns a value for the view alone if its node is not trusted, or if strides cannot express it over ``base``.
        """
        metadata = node.metadata
        if type(tensor) not in PLAIN_TYPES:
            return self._kept_whole(tensor, node)
        if (metadata and OPAQUE in metadata) or node._sequence_nr() < self._region.trusted_from:
            return self._kept(tensor, type(node).__name__)
        key = VALUES[tensor.output_nr]
        found: Value | SavedView
        if base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
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
            found = self._kept(tensor, type(node).__name__)
            self._region.anchors.append(ref(found))
        else:
            found = SavedView(self.value(base, owner), tensor, base)
        metadata[key] = ref(found)
        return found

    def _cast(self, tensor: Tensor, owner: Tensor, node: Any) -> Cast | None:
        """Return a Cast for ``tensor`` if ``owner`` is the cast of a parameter and is to be rebuilt; else None.

        tensor: ``owner`` itself, or a view of it. A Cast needs neither a walk nor a Value.
        """
        before = node.next_functions[0][0]
        if (
            type(before) is not AccumulateGrad
            or node._sequence_nr() < self._region.trusted_from
            or self._region.sharded
        ):
            return None
        metadata = node.metadata
        if metadata and (VALUES[0] in metadata or OPAQUE in metadata):
            return None
        parameter: Tensor = before.variable
        shards = self._region.shards
        if (
            type(parameter) not in PLAIN_TYPES
            or type(tensor) is not Tensor
            or (shards is not None and parameter in shards)
            or owner.nbytes < self._region.min_bytes
            or parameter.device != owner.device
            # A Cast stores only the geometry of a view.
            or (tensor is not owner and (tensor.dtype != owner.dtype or tensor.is_conj() or tensor.is_neg()))
        ):
            return None
        if CAST not in metadata:
            if self._region.decisions is not None:
                learned = self.learned
                if learned is None or learned[:2] != (NODE, False):
                    return None
            metadata[CAST] = True
        made = Cast(parameter, tensor, owner)
        self._region.watched_parameters.setdefault(id(parameter), []).append(ref(made))
        return made

    def _kept(self, tensor: Tensor, op: str, *, free: bool = False) -> Value:
        value = Value(op)
        value.keep(tensor)
        value.free = free
        return value

    def _kept_whole(self, tensor: Tensor, node: Any) -> Value:
        """Keep a tensor of another class as it is, and report that for the summary."""
        value = self._kept(tensor, type(node).__name__)
        if parts := _torch.wrapped_tensors(tensor):
            value.nbytes = sum(part.nbytes for part in parts)
        if self._recorder is not None and value.nbytes >= self._region.min_bytes:
            why = f"leangrad has no rules for tensors of class {type(tensor).__name__}"
            self._recorder.decided(value, type(node).__name__, why, node._sequence_nr())
        return value

    def _plan_keeps(self, node: Any) -> bool:
        """Whether the plan keeps the output of ``node``, although the recipe of an earlier tensor runs through it."""
        learned = self.learned if self._region.decisions is not None else None
        return learned is not None and learned.keeps and learned.op == type(node).__name__

    def _is_out_of_reach(self, value: Value) -> bool:
        """Whether the recipe of ``value`` reads sharded parameters that are not gathered where it is saved now."""
        shards = self._region.shards
        return bool(value.gathers) and (shards is None or not shards.are_at_work(value.gathers))

    def _share(self, value: Value) -> None:
        if self._recorder is not None:
            self._recorder.shared(value, value.nbytes)

    def _choose(self, tensor: Tensor, node: Any, metadata: dict[Any, Any], waiting: Value | None = None) -> Value:
        """Keep ``tensor`` or store a recipe; ``waiting``: its value, if a recipe downstream reads it already."""
        cap, recorded, fleeting, is_narrow, source = self._region.cap, 0, False, False, None
        if self._region.decisions is not None:
            learned = self.learned
            if learned is None or type(node).__name__ != learned.op:
                expected = "no tensor to decide on" if learned is None else f"an output of {learned.op}"
                self._region.report_difference(
                    f"an output of {type(node).__name__} was saved where {expected} was before"
                )
                if self._region.is_unwatched:  # without the plan, recipes may need what only the function mode sees
                    return self._kept(tensor, type(node).__name__)
            elif learned.keeps:  # as planned
                value = waiting or Value(learned.op)
                value.keep(tensor)
                value.forget_recipe()
                return value
            else:
                cap = UNBOUNDED if self._region.max_products else DEEPEST
                recorded, fleeting, is_narrow = learned.nbytes, learned.fleeting, learned.is_narrow
                source = keep_source(tensor, node, self._region) if is_narrow else None
        value = self.recipe(tensor, node, metadata, cap, recorded, waiting)
        if self._region.is_unwatched and value.tensor is not None and not value.blocked:  # it waits for nothing
            self._region.report_difference(f"an output of {type(node).__name__} could be rebuilt before")
        if is_narrow and source is None:  # a cast view
            own = keep_narrow(value, tensor, cap, self._region)
            if own is not None:
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
        """Return the value of ``tensor``: with a recipe if one is found that is short enough, else kept.

        cap: the most joins that the recipe may run through.
        recorded: the bytes that the tensor had in the recorded step; 0 without a plan.
        waiting: its value, if a recipe downstream reads it already.
        """
        nbytes = tensor.nbytes
        why = ""
        try:
            if waiting is None:
                walk, draw = self.walk, self._region.draw
                if draw is not None and draw.note(node):
                    self._region.draw = None
                value = walk.start(node, tensor.output_nr, metadata, tensor)
                if walk.early and not self._products.serve(walk.early, nbytes, recorded):
                    value.release_inputs()
                    del value
                    value = walk.start(node, tensor.output_nr, metadata, tensor)
                if walk.operand_bytes >= nbytes:
                    value.release_inputs()
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
                    value.narrow_bytes = narrow_bytes(value, tensor, is_alone=self._region.saves_cast_logits)
                if value.depth > cap or value.length > LONGEST_RECIPE or value.blocked or value.products:
                    why = self._keep_unless_usable(value, tensor, cap)
        if self._recorder is not None:
            self._recorder.decided(value, type(node).__name__, why, node._sequence_nr())
        return value

    def _is_too_long(self, value: Value, cap: int) -> bool:
        return value.depth > cap or value.length > LONGEST_RECIPE or value.products > self._region.max_products

    def _keep_unless_usable(self, value: Value, tensor: Tensor, cap: int) -> str:
        """Keep ``tensor`` if its recipe is too long, or waits for absent values that cannot be kept in its place.

        Returns the reason; an empty string if ``tensor`` is rebuilt after all.
        """
        if self._is_too_long(value, cap):
            limit = f"{cap} residual sums" if value.depth > cap else f"{LONGEST_RECIPE} ops"
            if value.products > self._region.max_products:
                limit = f"{self._region.max_products} products"
            source = keep_narrow(value, tensor, cap, self._region)
            if source is None:
                value.keep(tensor)
            if self._recorder is None:
                (source or value).forget_recipe()
            elif source is not None:
                self._region.waiting.append(weakref.ref(source))  # drops its recipe when the region ends
            return "" if source is not None else f"it lies more than {limit} after the last kept tensor"
        if not value.blocked or self._products.catch(value):
            return ""
        source = keep_narrow(value, tensor, cap, self._region)
        if source is not None:
            self._region.waiting.append(weakref.ref(source))  # its recipe waits already
            return ""
        value.keep(tensor)
        wait(value)
        self._region.waiting.append(weakref.ref(value))
        return "it is made from the output of " + ", ".join(b.op for b in value.blocked) + ", which nothing keeps"

    # ---------------------------------------------------------------- second outputs

    def attach_recipe(self, node: Any, nr: int, name: str) -> None:
        """Give output ``nr`` of ``node`` its recipe: it was kept as the saved ``name``, having no node of its own."""
        raw = getattr(node, "_raw_saved_" + name, None)  # None: the last node of a tensor subclass is an alias
        value = None if raw is None else packed_in(raw)
        if type(value) is not Value or value.tensor is None or node._sequence_nr() < self._region.trusted_from:
            return
        try:
            origin = self.walk.start(node, nr, node.metadata)
        except NoRecipeError:
            return
        if origin.blocked or origin.gathers or self._is_too_long(origin, self._region.cap):
            origin.release_inputs()
            return
        value.layout = (value.tensor.shape, value.tensor.stride())
        assert origin.function is not None
        value.op = origin.op
        value.set_recipe(origin.function, origin.args, origin.kwargs)
        origin.release_inputs()
        value.tensor, value.part = None, origin.part
        enter(node, nr, value)
        join(node, nr, value)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
