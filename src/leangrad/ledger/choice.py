"""The decision, for every tensor that autograd wants to keep: keep it, share it, or store a recipe."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.cast import NODE, Anchor, Cast, Packed
from leangrad.ledger.functions import NoRecipeError
from leangrad.ledger.nodes import CAST, OPAQUE, VALUES, AccumulateGrad, enter, join
from leangrad.ledger.origins import Walk
from leangrad.ledger.products import Products
from leangrad.ledger.saved import Bare
from leangrad.ledger.seen import Seen
from leangrad.ledger.value import Value
from leangrad.ledger.waiting import wait

if TYPE_CHECKING:
    from leangrad.ledger.record import Recorder

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
DEEPEST = 32  # joins that a recipe may run through: each takes some frames of Python's stack


class Decision(NamedTuple):
    """What was learned of one saved tensor."""

    op: str
    keeps: bool  # it is simply kept
    nbytes: int
    fleeting: bool = False  # recipes that read it do not hold it for its readers: see [Note: made again]


class Choice:
    """The half of a ``Region`` that decides."""

    min_bytes: int
    cap: int
    fence: int
    sharded: bool
    decisions: Sequence[Decision] | None
    decided: int  # how many of them were used
    watched_parameters: dict[int, list[weakref.ref[Anchor]]]
    watched_memory: dict[int, list[weakref.ref[Anchor]]]
    anchors: list[weakref.ref[Value]]
    waiting: list[weakref.ref[Value]]
    products: Products
    walk: Walk
    recorder: Recorder | None

    def differ(self) -> None:
        """This step is not like the one that was recorded: what was learned serves it no more."""
        raise NotImplementedError

    def decide(self, tensor: Tensor) -> Packed:
        """Autograd wants to keep ``tensor``: look into all that it may be.

        Half of what a model saves are parameters, views of parameters, and statistics that need no gradient. They are
        kept as they are, with their version and no value around them.
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
        if type(owner).__name__ == NODE and self.recorder is None:
            short = self._cast(tensor, tensor if base is None else base, owner)
            if short is not None:
                return short
        if base is not None:
            seen = self.seen(tensor, base, node)
            (seen.owner if isinstance(seen, Seen) else seen).readers += 1
            return seen
        value = self.value(tensor, node)
        value.readers += 1
        return value

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

    def value(self, tensor: Tensor, node: Any) -> Value:
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

    def seen(self, tensor: Tensor, base: Tensor, node: Any) -> Value | Seen:
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
            found = Seen(self.value(base, owner), tensor, base)
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
            if self.decisions is not None:
                n = self.decided
                if n >= len(self.decisions) or self.decisions[n][:2] != (NODE, False):
                    return None
                self.decided = n + 1
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
        if self.recorder is not None:
            self.recorder.shared(value, value.nbytes)

    def _choose(self, tensor: Tensor, node: Any, metadata: dict[Any, Any], waiting: Value | None = None) -> Value:
        """Keep ``tensor`` or store a recipe; ``waiting``: its value, if a recipe downstream has asked for it before."""
        cap, recorded, fleeting = self.cap, 0, False
        decisions = self.decisions
        if decisions is not None:
            n = self.decided
            self.decided = n + 1
            if n >= len(decisions) or type(node).__name__ != decisions[n].op:
                self.differ()
            elif decisions[n].keeps:  # the plan says so
                value = waiting or Value(decisions[n].op)
                value.keep(tensor)
                return value
            else:
                cap, recorded, fleeting = DEEPEST, decisions[n].nbytes, decisions[n].fleeting
        value = self.recipe(tensor, node, metadata, cap, recorded, waiting)
        if fleeting:
            value.fleeting = True
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
                walk = self.walk
                value = walk.start(node, tensor.output_nr, metadata, tensor)
                if walk.early and not self.products.serve(walk.early, nbytes, recorded):
                    value.unread()
                    del value
                    value = walk.start(node, tensor.output_nr, metadata, tensor)
                if walk.operand_bytes >= nbytes:
                    raise NoRecipeError("its recipe would hold as many bytes of operands")
            else:
                value = waiting
            if value.function is None:
                raise NoRecipeError(f"{value.op} is never computed twice")
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
        if self.recorder is not None:
            self.recorder.decided(value, type(node).__name__, why)
            self.recorder.on_accelerator |= tensor.is_cuda
        return value

    def _keep_all_the_same(self, value: Value, tensor: Tensor, cap: int) -> str:
        """A recipe was found that is too deep, or waits for what is not kept: say why ``tensor`` is kept, if it is."""
        if value.depth > cap:
            value.keep(tensor)
            if self.recorder is None:
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
        raw = getattr(node, "_raw_saved_" + name, None)  # the last node of a tensor subclass is that of an alias
        value = None if raw is None else _torch.packed(raw)
        if type(value) is not Value or value.tensor is None or node._sequence_nr() < self.fence:
            return
        try:
            origin = self.walk.start(node, nr, node.metadata)
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
