"""One forward region: the decision, for every tensor that autograd wants to keep, while a model runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.cast import NODE, Anchor, Cast, Packed
from leangrad.ledger.course import Course, Following, Recording
from leangrad.ledger.forms import NoRecipeError
from leangrad.ledger.hooks import Hooks
from leangrad.ledger.nodes import CAST, OPAQUE, VALUES, AccumulateGrad, enter, join
from leangrad.ledger.notes import Notes
from leangrad.ledger.opened import opened
from leangrad.ledger.origins import Operand, Walk
from leangrad.ledger.products import Products
from leangrad.ledger.record import Recorder
from leangrad.ledger.saved import Bare, unpack
from leangrad.ledger.seen import Seen
from leangrad.ledger.value import Value
from leangrad.ledger.waiting import wait

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
ENDED = -1
DEEPEST = 32  # joins that a recipe may run through: each takes some frames of Python's stack

Decision = tuple[str, bool, int]  # op, whether the tensor is simply kept, and its bytes


class Knowledge(Protocol):
    """What a region asks of its ledger: settings, and what earlier steps have shown."""

    min_bytes: int
    bare: Sequence[bool]
    course: Course | None
    sharded: bool

    @property
    def cap(self) -> int:
        """How deep a recipe may be where nothing was learned."""

    @property
    def decisions(self) -> Sequence[Decision] | None:
        """What was learned, for each decision of a step in order."""

    @property
    def catches(self) -> bool:
        """Whether outputs of products are held for a while, to be kept in the stead of a larger tensor."""

    def differs(self) -> None:
        """This step is not like the one that was learned from."""


class Region:
    """One forward region: the hooks and the function override while it runs, and what it decided."""

    # What it is when it has ended. A mode or hooks that were set inside it and are left after it keep ours in place for
    # so long: then every call passes, and every tensor is simply kept.
    packing = True
    packs = ENDED

    def __init__(self, ledger: Knowledge, recorder: Recorder | None) -> None:
        self.min_bytes = ledger.min_bytes
        self.cap = ledger.cap
        self.fence = 0
        self.packing = False
        self.changing: Any = None
        self.sizes = recorder is not None
        self.sharded = ledger.sharded  # parameters come and go between forward and backward: no recipe reads them
        self.watched_parameters: dict[int, list[weakref.ref[Anchor]]] = {}
        self.watched_memory: dict[int, list[weakref.ref[Anchor]]] = {}
        self.anchors: list[weakref.ref[Value]] = []  # what recipes may read and autograd keeps as well
        self.rewritten: dict[int, int] = {}  # memory that was changed unseen, and the first node after that
        self.waiting: list[weakref.ref[Value]] = []
        self._ledger = ledger
        self._decisions = ledger.decisions
        self._decided = 0
        self._bare = ledger.bare
        self._planned = len(self._bare)
        self.packs = self.call = 0
        self.catches: int = ledger.catches
        self._walk = Walk(self)
        self._recorder = recorder
        self._notes = Notes(self)
        self._following: Following | None = None
        course = ledger.course  # another thread may end it
        if recorder is None and course is not None and not _torch.saved_tensor_hooks_active():
            self.hooks = Hooks(self.pack_along, unpack)
            self._following = Following(self, course)
            self._notes.guide, self._notes.passes = self._following.call, course.passes
        elif recorder is not None:
            recorder.recording = Recording(self, recorder.saved)
            self._notes.guide = recorder.recording.call
            self.hooks = Hooks(self.pack, recorder.unpack)
        else:
            self.hooks = Hooks(self.pack, unpack)
        self.products = Products(self, recorder)
        self._held: list[Value | Seen] = []  # what recipes may read and nobody else holds as a value

    def __enter__(self) -> Region:
        Operand.noted.clear()
        self.fence = _torch.next_sequence_nr()  # what was made before, nobody watched
        self._notes.__enter__()
        if self._following is None:
            self.hooks.set_all()
        opened.region = self
        if self._recorder is not None:
            self._recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened.region = None
        if self._following is None:
            self.hooks.take_back_all()
        self._notes.__exit__(kind, error, trace)
        if self._recorder is not None:
            self._recorder.stop()
        for waiting in self.waiting:
            if (value := waiting()) is not None:
                value.forget_recipe()
        vars(self).clear()  # its parts know it: it dies here and now, with no help of Python's collector

    # ---------------------------------------------------------------- pack

    def pack(self, tensor: Tensor) -> Packed:
        """Autograd wants to keep ``tensor``; what it gets is a value that can give it back."""
        if self.packs == ENDED:
            return self.pack_along(tensor)
        self.packing = True
        try:
            packed = self.pack_along(tensor)
        finally:
            self.packing = False
        if self._recorder is not None:
            self._recorder.packed(packed)
        return packed

    def pack_along(self, tensor: Tensor) -> Packed:
        """The same along a course: hooks are set inside calls only, where torch itself has taken the override away."""
        n = self.packs
        if n != ENDED:
            self.packs = n + 1
            if n == self.hooks.last:
                self.hooks.reach_last()
        if n == ENDED or (n < self._planned and self._bare[n]):
            if tensor.is_leaf:
                return Bare(tensor if tensor.requires_grad else tensor.detach(), tensor._version)
            return Bare(tensor.detach(), tensor._version, type(tensor.grad_fn))
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> Packed:
        """Half of what a model saves are parameters, views of parameters, and statistics that need no gradient.

        They are kept as they are, with their version and no value around them.
        """
        node: Any = tensor.grad_fn
        if node is None:
            if tensor.requires_grad:
                return Bare(tensor, tensor._version)
            if tensor.layout is not torch.strided or tensor.nbytes < self.min_bytes:
                return Bare(tensor.detach(), tensor._version)
            value = self._kept(tensor, "input", free=True)  # it may turn out to be an op's second output, or its noise
            self.anchors.append(ref(value))
            value.readers += 1
            return value
        base = tensor._base
        owner: Any = node if base is None else base.grad_fn
        if owner is None or tensor.layout is not torch.strided:
            return Bare(tensor.detach(), tensor._version)
        if type(owner).__name__ == NODE and self._recorder is None:
            short = self._cast(tensor, tensor if base is None else base, owner)
            if short is not None:
                return short
        if base is not None:
            seen = self._seen(tensor, base, node)
            (seen.owner if isinstance(seen, Seen) else seen).readers += 1
            return seen
        value = self._value(tensor, node)
        value.readers += 1
        return value

    # ------------------------------------------- along a course: see [Note: hooks only where they are needed]

    def anchor(self, tensor: Tensor) -> None:
        """A tensor that autograd keeps may be read by recipes."""
        node: Any = tensor.grad_fn
        base = tensor._base
        if node is not None and (base is None or base.grad_fn is not None) and tensor.layout is torch.strided:
            self._held.append(self._value(tensor, node) if base is None else self._seen(tensor, base, node))

    @property
    def is_on_course(self) -> bool:
        """Whether the step has been like the recorded one so far."""
        return self._following is not None and not self._following.lost

    def differ(self) -> None:
        """This step is not like the one that was recorded: what was learned serves it no more."""
        self._decisions, self._planned = None, 0
        if self._following is not None:
            self._following.lose()
        self._ledger.differs()

    # ---------------------------------------------------------------- the decision

    def watch(self, value: Value) -> None:
        """``value`` is an anchor that plain PyTorch would not have kept: it must not change under its recipe.

        Parameters are known by themselves, which is quick and enough: what else shares their memory is looked up when
        it is made (``changes.aliased``).
        """
        assert value.tensor is not None
        if value.op == "leaf":
            self.watched_parameters.setdefault(id(value.tensor), []).append(weakref.ref(value))
        else:
            memory = value.tensor.untyped_storage().data_ptr()
            self.watched_memory.setdefault(memory, []).append(weakref.ref(value))

    def _value(self, tensor: Tensor, node: Any) -> Value:
        """The value of a tensor that has a node and is no view."""
        metadata = node.metadata
        key = VALUES[tensor.output_nr]
        fresh = node._sequence_nr() >= self.fence
        if metadata:
            fresh = fresh and OPAQUE not in metadata
            known = metadata.get(key)
            value: Value | Seen | None = known() if known is not None else None
            if type(value) is Value:
                if value.tensor is not None:
                    if value.version == tensor._version and (fresh or value.before is None):
                        self._share(value)
                        return value
                elif fresh and value.function is not None and not value.blocked:
                    self._share(value)
                    return value
                elif fresh and type(tensor) in PLAIN_TYPES:  # absent until now, or its recipe waits for what is absent
                    self.anchors.append(ref(value))
                    return self._choose(tensor, node, metadata, waiting=value)
        if not fresh or type(tensor) not in PLAIN_TYPES:
            return self._kept(tensor, type(node).__name__)
        if tensor.nbytes < self.min_bytes:
            value = self._kept(tensor, type(node).__name__, free=True)
        else:
            value = self._choose(tensor, node, metadata)
        metadata[key] = ref(value)
        self.anchors.append(metadata[key])
        return value

    def _seen(self, tensor: Tensor, base: Tensor, node: Any) -> Value | Seen:
        """A view that autograd saves is its base, seen through a stride: kept or rebuilt once for all views."""
        metadata = node.metadata
        if (metadata and OPAQUE in metadata) or node._sequence_nr() < self.fence or type(tensor) not in PLAIN_TYPES:
            return self._kept(tensor, type(node).__name__)
        key = VALUES[tensor.output_nr]
        found: Value | Seen
        owner: Any = base.grad_fn
        if owner is None or base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
            known = metadata.get(key)
            value = known() if known is not None else None
            if type(value) is Value and value.tensor is None and value.function is not None and not value.blocked:
                self._share(value)
                return value
            found = self._kept(tensor, type(node).__name__, free=owner is None)
            self.anchors.append(ref(found))
        else:
            found = Seen(self._value(base, owner), tensor, base)
        metadata[key] = ref(found)
        return found

    def _cast(self, tensor: Tensor, owner: Tensor, node: Any) -> Cast | None:
        """The short way for ``owner``, or a view of it, if it is the cast of a parameter and to be rebuilt."""
        before = node.next_functions[0][0]
        if type(before) is not AccumulateGrad or node._sequence_nr() < self.fence or self.sharded:
            return None
        metadata = node.metadata
        if metadata and (VALUES[0] in metadata or OPAQUE in metadata):
            return None
        parameter: Tensor = before.variable
        if (
            type(parameter) not in PLAIN_TYPES
            or type(tensor) is not Tensor
            or owner.nbytes < self.min_bytes
            or parameter.device != owner.device
            # Strides do not tell the rest.
            or (tensor is not owner and (tensor.dtype != owner.dtype or tensor.is_conj() or tensor.is_neg()))
        ):
            return None
        if CAST not in metadata:
            if self._decisions is not None:
                n = self._decided
                if n >= len(self._decisions) or self._decisions[n][:2] != (NODE, False):
                    return None
                self._decided = n + 1
            metadata[CAST] = True
        made = Cast(parameter, tensor, owner)
        self.watched_parameters.setdefault(id(parameter), []).append(ref(made))
        return made

    def _kept(self, tensor: Tensor, op: str, *, free: bool = False) -> Value:
        value = Value(op)
        value.keep(tensor)
        value.free = free
        return value

    def _share(self, value: Value) -> None:
        if self._recorder is not None:
            self._recorder.shared(value, value.nbytes)

    def _choose(self, tensor: Tensor, node: Any, metadata: dict[Any, Any], waiting: Value | None = None) -> Value:
        """Keep ``tensor`` or store a recipe; ``waiting``: its value, if a recipe downstream has asked for it before."""
        cap, recorded = self.cap, 0
        op = type(node).__name__
        decisions = self._decisions
        if decisions is not None:
            n = self._decided
            self._decided = n + 1
            if n >= len(decisions) or op != decisions[n][0]:
                self.differ()
            elif decisions[n][1]:  # the plan says to simply keep it
                value = waiting or Value(op)
                value.keep(tensor)
                return value
            else:
                cap, recorded = DEEPEST, decisions[n][2]
        nbytes = tensor.nbytes
        why = ""
        walk = self._walk
        try:
            value = waiting or walk.start(node, tensor.output_nr, metadata)
            if waiting is None and walk.early and not self.products.serve(walk.early, nbytes, recorded):
                value.unread()
                del value
                value = walk.start(node, tensor.output_nr, metadata)
            if value.function is None:
                raise NoRecipeError(f"{value.op} is never computed twice")
            if waiting is None and walk.operand_bytes >= nbytes:
                raise NoRecipeError("its recipe would hold as many bytes of operands")
        except NoRecipeError as reason:
            value, why = waiting or Value(op), str(reason)
            value.keep(tensor)
        else:
            if value.layout is None and value.tensor is None:
                value.layout = (tensor.shape, tensor.stride())
                value.nbytes = nbytes
                value.cap = cap
                if value.depth > cap or value.blocked:
                    why = self._keep_all_the_same(value, tensor, cap)
        if self._recorder is not None:
            self._recorder.decided(value, op, why)
            self._recorder.on_accelerator |= tensor.is_cuda
        return value

    def _keep_all_the_same(self, value: Value, tensor: Tensor, cap: int) -> str:
        """A recipe was found that is too deep, or waits for what is not kept: say why ``tensor`` is kept, if it is."""
        if value.depth > cap:
            value.keep(tensor)
            if self._recorder is None:
                value.forget_recipe()
            return f"its recipe joins more than {cap} lineages in a row"
        if self.products.catch(value):
            return ""
        value.keep(tensor)
        wait(value)
        self.waiting.append(weakref.ref(value))
        return "it is made from " + ", ".join(b.op for b in value.blocked) + ", which is not kept"

    def settle(self, node: Any, nr: int, name: str) -> None:
        """Output ``nr`` of ``node``, kept as its saved ``name`` because it has no node of its own, gets its recipe."""
        value = _torch.packed(getattr(node, "_raw_saved_" + name))
        if type(value) is not Value or value.tensor is None or node._sequence_nr() < self.fence:
            return
        try:
            origin = self._walk.start(node, nr, node.metadata)
        except NoRecipeError:
            return
        if origin.blocked or origin.depth > self.cap:
            return
        value.layout = (value.tensor.shape, value.tensor.stride())
        assert origin.function is not None
        value.op = origin.op
        value.set_recipe(origin.function, origin.args, origin.kwargs)
        value.tensor, value.part = None, origin.part
        enter(node, nr, value)
        join(node, nr, value)
