"""One forward region: the decision, for every tensor that autograd wants to keep, while a model runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger import cast
from leangrad.ledger.cast import Anchor, Cast, Packed
from leangrad.ledger.course import Course, Following, Recording
from leangrad.ledger.hooks import Hooks, unpack
from leangrad.ledger.notes import Notes
from leangrad.ledger.opened import opened
from leangrad.ledger.origins import CAST, OPAQUE, VALUES, NoRecipeError, Operand, Walk, enter, join, key_of
from leangrad.ledger.record import Recorder
from leangrad.ledger.seen import Seen
from leangrad.ledger.value import Bare, Value
from leangrad.ledger.waiting import released, wait

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
DEEPEST = 32  # joins that a recipe may run through: each takes some frames of Python's stack

Decision = tuple[str, bool]  # op, and whether the tensor is simply kept


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
        self.catches = ledger.catches
        self._walk = Walk(self)
        self._recorder = recorder
        self._notes = Notes(self)
        self.hooks = Hooks(self.pack, unpack if recorder is None else recorder.unpack)
        self._following: Following | None = None
        if recorder is not None:
            recorder.recording = Recording(self, recorder.saved)
            self._notes.guide = recorder.recording.call
        elif ledger.course is not None and not _torch.saved_tensor_hooks_active():
            self._following = Following(self, ledger.course)
            self._notes.guide, self._notes.passes = self._following.call, ledger.course.passes
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
        self._held.clear()
        self._notes.__exit__(kind, error, trace)
        self._notes.recent.clear()
        self._walk.forget()
        if self._recorder is not None:
            self._recorder.stop()
        for ref in self.waiting:
            if (value := ref()) is not None:
                value.forget_recipe()

    # ---------------------------------------------------------------- pack

    def pack(self, tensor: Tensor) -> Packed:
        """Autograd wants to keep ``tensor``; what it gets is a value that can give it back."""
        n = self.packs
        self.packs = n + 1
        if n == self.hooks.last:
            self.hooks.reach_last()
        self.packing = True
        try:
            if n < self._planned and self._bare[n]:
                if tensor.is_leaf:
                    return Bare(tensor if tensor.requires_grad else tensor.detach(), tensor._version)
                return Bare(tensor.detach(), tensor._version, type(tensor.grad_fn))
            packed = self._pack(tensor)
        finally:
            self.packing = False
        if self._recorder is not None:
            self._recorder.packed(packed)
        return packed

    def _pack(self, tensor: Tensor) -> Packed:
        """Half of what a model saves are parameters, views of parameters, and statistics that need no gradient.

        They are kept as they are, with their version and no value around them.
        """
        if tensor.grad_fn is None:
            if tensor.requires_grad:
                return Bare(tensor, tensor._version)
            if tensor.layout is not torch.strided or tensor.nbytes < self.min_bytes:
                return Bare(tensor.detach(), tensor._version)
            value = self._kept(tensor, "input", free=True)  # it may turn out to be an op's second output, or its noise
            self.anchors.append(weakref.ref(value))
        else:
            base = tensor._base
            if tensor.layout is not torch.strided or (base is not None and base.grad_fn is None):
                return Bare(tensor.detach(), tensor._version)
            if self._recorder is None:
                owner = tensor if base is None else base
                if type(owner.grad_fn).__name__ == cast.NODE and (found := self._cast(tensor, owner)) is not None:
                    return found
            if base is not None:
                return self._view(tensor, base)
            value = self._value(tensor)
        value.readers += 1
        return value

    # ------------------------------------------- along a course: see [Note: hooks only where they are needed]

    def anchor(self, tensor: Tensor) -> None:
        """A tensor that autograd keeps may be read by recipes."""
        base = tensor._base
        has_node = tensor.grad_fn is not None and (base is None or base.grad_fn is not None)
        if has_node and tensor.layout is torch.strided:
            self._held.append(self._value(tensor) if base is None else self._seen(tensor, base))

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

    def _value(self, tensor: Tensor) -> Value:
        """The value of a tensor that has a node and is no view."""
        node: Any = tensor.grad_fn
        metadata = node.metadata
        nr = tensor.output_nr
        key = VALUES[nr] if nr < 64 else key_of(nr)
        ref = metadata.get(key)
        value: Value | Seen | None = ref() if ref is not None else None
        fresh = OPAQUE not in metadata and node._sequence_nr() >= self.fence
        if type(value) is Value:
            if value.tensor is not None:
                if value.version == tensor._version and (fresh or value.before is None):
                    self._share(value)
                    return value
            elif fresh and value.function is not None and not value.blocked:
                self._share(value)
                return value
            elif fresh and type(tensor) in PLAIN_TYPES:  # absent until now, or its recipe waits for what is absent
                self.anchors.append(weakref.ref(value))
                return self._choose(tensor, node, waiting=value)
        if not fresh or type(tensor) not in PLAIN_TYPES:
            return self._kept(tensor, type(node).__name__)
        if tensor.nbytes < self.min_bytes:
            value = self._kept(tensor, type(node).__name__, free=True)
        else:
            value = self._choose(tensor, node)
        metadata[key] = ref = weakref.ref(value)
        self.anchors.append(ref)
        return value

    def _view(self, tensor: Tensor, base: Tensor) -> Value | Seen:
        """What becomes of a view that autograd saves."""
        seen = self._seen(tensor, base)
        (seen.owner if isinstance(seen, Seen) else seen).readers += 1
        return seen

    def _seen(self, tensor: Tensor, base: Tensor) -> Value | Seen:
        """A view is its base, seen through a stride: kept or rebuilt once for all views."""
        node: Any = tensor.grad_fn
        metadata = node.metadata
        if OPAQUE in metadata or node._sequence_nr() < self.fence or type(tensor) not in PLAIN_TYPES:
            return self._kept(tensor, type(node).__name__)
        key = key_of(tensor.output_nr)
        found: Value | Seen
        if base.grad_fn is None or base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
            ref = metadata.get(key)
            known = ref() if ref is not None else None
            if type(known) is Value and known.tensor is None and known.function is not None and not known.blocked:
                self._share(known)
                return known
            found = self._kept(tensor, type(node).__name__, free=base.grad_fn is None)
            self.anchors.append(weakref.ref(found))
        else:
            found = Seen(self._value(base), tensor, base)
        metadata[key] = weakref.ref(found)
        return found

    def _cast(self, tensor: Tensor, owner: Tensor) -> Cast | None:
        """The short way for ``owner``, or a view of it, if it is the cast of a parameter and to be rebuilt."""
        node: Any = owner.grad_fn
        parameter = self._walk.parameter(node)
        nbytes = owner.nbytes
        if (
            parameter is None
            or self.sharded
            or nbytes < self.min_bytes
            or type(tensor) is not Tensor
            or tensor.dtype != owner.dtype
            or (tensor is not owner and (tensor.is_conj() or tensor.is_neg()))  # strides do not tell
            or parameter.device != owner.device
        ):
            return None
        if CAST not in node.metadata:
            if self._decisions is not None:
                n = self._decided
                if n >= len(self._decisions) or self._decisions[n] != (cast.NODE, False):
                    return None
                self._decided = n + 1
            node.metadata[CAST] = True
        made = Cast(parameter, tensor, owner)
        self.watched_parameters.setdefault(id(parameter), []).append(weakref.ref(made))
        return made

    def _kept(self, tensor: Tensor, op: str, *, free: bool = False) -> Value:
        value = Value(op)
        value.keep(tensor)
        value.free = free
        return value

    def _share(self, value: Value) -> None:
        if self._recorder is not None:
            self._recorder.shared(value, value.nbytes)

    def _choose(self, tensor: Tensor, node: Any, waiting: Value | None = None) -> Value:
        """Keep ``tensor`` or store a recipe; ``waiting``: its value, if a recipe downstream has asked for it before."""
        cap = self.cap
        nbytes = tensor.nbytes
        if self._decisions is not None:
            learned = self._learned(type(node).__name__)
            if learned:
                value = waiting or Value(type(node).__name__)
                value.keep(tensor)
                return value
            if learned is not None:
                cap = DEEPEST
        why = ""
        walk = self._walk
        try:
            value = waiting or walk.start(node, tensor.output_nr)
            if value.function is None:
                raise NoRecipeError(f"{value.op} is never computed twice")
            if waiting is None and walk.operand_bytes >= nbytes:
                raise NoRecipeError("its recipe would hold as many bytes of operands")
        except NoRecipeError as reason:
            value, why = waiting or Value(type(node).__name__), str(reason)
            value.keep(tensor)
        else:
            if value.layout is None and value.tensor is None:
                value.layout = (tensor.shape, tensor.stride())
                value.nbytes = nbytes
                value.cap = cap
                if value.depth > cap or value.blocked:
                    why = self._keep_all_the_same(value, tensor, cap)
        if self._recorder is not None:
            self._recorder.decided(value, type(node).__name__, why)
            self._recorder.on_accelerator |= tensor.is_cuda
        return value

    def _learned(self, op: str) -> bool | None:
        """Whether the plan says to simply keep this tensor; None, and an end to the plan, if this step is another."""
        decisions = self._decisions
        assert decisions is not None
        n = self._decided
        self._decided = n + 1
        if n < len(decisions) and op == decisions[n][0]:
            return decisions[n][1]
        self.differ()
        return None

    def _keep_all_the_same(self, value: Value, tensor: Tensor, cap: int) -> str:
        """A recipe was found that is too deep, or waits for what is not kept: say why ``tensor`` is kept, if it is."""
        if value.depth > cap:
            value.keep(tensor)
            if self._recorder is None:
                value.forget_recipe()
            return f"its recipe joins more than {cap} lineages in a row"
        if self._catch(value):
            return ""
        value.keep(tensor)
        wait(value)
        self.waiting.append(weakref.ref(value))
        return "it is made from " + ", ".join(b.op for b in value.blocked) + ", which is not kept"

    def _catch(self, value: Value) -> bool:
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
            self.watch(b)
            if self._recorder is not None:
                self._recorder.caught.add(b.live[2])
        value.blocked = ()
        value.settle_lineage()
        return True

    def _is_changing(self, tensor: Tensor) -> bool:
        changing = self.changing
        if not isinstance(changing, Tensor) or changing.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() == changing.untyped_storage().data_ptr()

    def settle(self, node: Any, nr: int, name: str) -> None:
        """Output ``nr`` of ``node``, kept as its saved ``name`` because it has no node of its own, gets its recipe."""
        value = _torch.packed(getattr(node, "_raw_saved_" + name))
        if type(value) is not Value or value.tensor is None:
            return
        try:
            origin = self._walk.start(node, nr)
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
