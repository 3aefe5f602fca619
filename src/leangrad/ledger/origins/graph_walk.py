"""`Walk`: builds the recipe of a tensor from the nodes of autograd's graph.

Nodes give the structure, below autocast and below every composite function. The few constants that nodes do not record
are stored in their metadata by ``handlers.py``. A walk starts at the node of a tensor and follows edges through ops
that have a rule. It ends in parameters, in values that are known already, or in outputs of ops that are never computed
twice.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from leangrad import _torch
from leangrad._torch import passed_no_hook
from leangrad.ledger.origins.functions import FUNCTIONS, NoRecipeError
from leangrad.ledger.origins.rule_builder import ONLY, Origin, origin_of, product_of
from leangrad.ledger.origins.rules.products import FOLLOWING
from leangrad.ledger.origins.shards import COPIED_BYTES, Shards
from leangrad.ledger.values.cast import Anchor, Cast
from leangrad.ledger.values.node_metadata import LIVE, NOTE, VALUES, AccumulateGrad, Node
from leangrad.ledger.values.pending_inputs import wait
from leangrad.ledger.values.pending_save import packed_in
from leangrad.ledger.values.saved import Bare
from leangrad.ledger.values.saved_view import SavedView
from leangrad.ledger.values.value import Value, is_there, leaf_value

NOTHING: dict[str, Any] = {}
CONVOLUTION = "ConvolutionBackward0"
MAX_WALK = 64  # nodes between a tensor and its anchors; beyond that the tensor is kept


class Noted(threading.local):
    """The unsaved inputs that the region of this thread has recorded so far, by their ids."""

    def __init__(self) -> None:
        self.ids: set[int] = set()

    def are_any(self, *tensors: Tensor | None) -> bool:
        """Whether one of ``tensors`` is an unsaved input of the region."""
        return not self.ids.isdisjoint(map(id, tensors))


noted = Noted()


class UnsavedInput:
    """An input of an op that the op's node does not save, because it needs no gradient.

    A small one is copied at once: batch norm and collectives change buffers without changing their version counters.
    """

    __slots__ = ("copy", "ref", "version")

    def __init__(self, tensor: Tensor) -> None:
        noted.ids.add(id(tensor))
        self.ref = ref(tensor)
        self.version = -1 if tensor.is_inference() else tensor._version
        small = self.version >= 0 and tensor.layout is torch.strided and tensor.nbytes <= COPIED_BYTES
        self.copy = _torch.copy_unseen(tensor.detach()) if small else None

    def value(self) -> Value:
        """Returns an anchor that holds the tensor or its copy; raises NoRecipeError if it is gone or was changed."""
        tensor = self.ref() if self.copy is None else self.copy
        if tensor is None or self.version < 0 or (self.copy is None and tensor._version != self.version):
            raise NoRecipeError("an input of it that needs no gradient is gone by then")
        value = Value("operand")
        value.keep(tensor)
        value.free = True
        return value


class WalkRegion(Protocol):
    """What a `Walk` needs of its region."""

    sizes: bool  # True: ``nbytes`` of new values is set, for the plan
    trusted_from: (
        int  # outputs of nodes made before this sequence number may have been changed unseen, and are not rebuilt
    )
    anchors: list[weakref.ref[Value]]  # anchors whose tensors autograd keeps as well
    watched_parameters: dict[int, list[weakref.ref[Anchor]]]  # by the id of a parameter: anchors that read it
    # By address of memory that was changed unseen: the sequence number of the first node made after that.
    rewritten: dict[int, int]
    sharded: bool  # True: the model uses FSDP of the first kind, and no recipe reads parameters
    shards: Shards | None  # the parameters that FSDP2 gathers: see [Note: recipes that read sharded parameters]
    max_products: int  # products that a recipe may run one inside the other
    product_settings: tuple[Any, ...]  # settings of torch for products when the region began
    failed_allocations: int  # failed allocations on GPUs by the time the region began

    is_unwatched: bool  # the function mode is not set: see [Note: without the function mode]
    constants: Mapping[tuple[str, str], Any]  # by type of node and name: the one value in all calls of this forward

    def needs_mode(self, node: Any = None) -> None:
        """Note in a recorded step that a call needs the function mode: the running one, or that which made ``node``."""

    def was_unwatched(self, node: Node) -> bool:
        """Whether ``node`` was made without the function mode, so that it has no note."""

    def watch(self, value: Value) -> None:
        """Let ``value`` get a copy of its tensor before the caller changes that tensor in place."""


class Walk:
    """The walks of one region through the graph, from saved tensors to their anchors.

    steps           how many nodes were visited since the last `start`
    operand_bytes   bytes of the unsaved inputs that were found since then
    early           products found since then that are kept although no saved tensor or recipe has read them yet
    sizes           True: ``nbytes`` of new values is set, for the plan
    max_products    how many products a recipe may run one inside the other
    """

    __slots__ = ("_first", "_leaves", "_made", "_region", "early", "max_products", "operand_bytes", "sizes", "steps")

    def __init__(self, region: WalkRegion) -> None:
        self._region = region
        self._leaves: dict[int, Value] = {}  # by id of the parameter, which its value holds, so the id is not reused
        self.steps = self.operand_bytes = 0
        self._first: Node = None  # the node that the walk has started at
        self.early: list[Value] = []
        self.sizes = region.sizes
        self.max_products = region.max_products
        self._made: list[Value] = []  # values made since the last `start`, if ``max_products`` is not 0

    def origin(self, node: Node, nr: int) -> Origin | None:
        """Returns the function that makes the value of output ``nr`` of ``node``; None: it is not computed twice."""
        origin = origin_of(node, nr)
        return product_of(node, nr) if origin is None and self.max_products else origin

    def start(self, node: Node, nr: int, metadata: dict[Any, Any], made: Tensor | None = None) -> Value:
        """Begin a walk: returns a new value with the recipe of output ``nr`` of ``node``, or raises NoRecipeError.

        node: one that was made since ``trusted_from``.
        made: that output itself, if the caller has it.
        """
        self.steps = self.operand_bytes = 0
        self._first = node
        self.early.clear()
        kind = type(node)
        origin = ONLY[kind] if nr == 0 and kind in ONLY else self.origin(node, nr)
        if kind in FUNCTIONS:
            self._region.needs_mode(node)
        if self.sizes or self._region.is_unwatched:
            self._check_overlap(node)
        if origin is None or (metadata and LIVE in metadata):
            raise NoRecipeError(f"{kind.__name__} is never computed twice")
        if not self.max_products:
            return origin(self, node, nr, metadata, made if nr == 0 else None)
        try:
            return origin(self, node, nr, metadata, made if nr == 0 else None)
        except NoRecipeError:
            self._give_up(0)
            raise
        finally:
            self._made.clear()

    def input(self, node: Node, nr: int) -> Value:
        """Returns the value of output ``nr`` of ``node``, the source of an edge.

        It may be known already, be a parameter, get a recipe now, or be absent.
        """
        kind = type(node)
        if kind is AccumulateGrad:
            return self.leaf(node.variable)
        metadata = node.metadata
        if metadata:
            known = metadata.get(VALUES[nr])
            if known is not None and (value := known()) is not None:
                if type(value) is SavedView:
                    found = self._value_of_view(value, node, nr)
                    if found is not None:
                        return found
                elif value.tensor is None:
                    if node._sequence_nr() >= self._region.trusted_from:
                        if value.gathers:
                            self._check_gathered(value)
                        return value  # type: ignore[no-any-return]
                elif value.recipe_tensor is not None and node._sequence_nr() < self._region.trusted_from:
                    raise NoRecipeError(f"the output of {value.op} was changed under no_grad or through .data")
                elif value.tensor._version == value.version:
                    if value.growth and not value.readers:
                        self.early.append(value)
                    return value  # type: ignore[no-any-return]
                else:
                    raise NoRecipeError(f"the output of {value.op} was changed in place")
        if node._sequence_nr() < self._region.trusted_from:
            raise NoRecipeError(
                f"the output of {kind.__name__} was made before the lean region, or left torch by numpy() or data_ptr()"
            )
        origin = ONLY[kind] if nr == 0 and kind in ONLY else origin_of(node, nr)
        if kind in FUNCTIONS:
            self._region.needs_mode(node)
        if self.sizes or self._region.is_unwatched:
            self._check_overlap(node)
        if origin is None or (metadata and LIVE in metadata):
            if self.max_products:
                value = self._product(node, nr, metadata)
            else:
                value = Value(kind.__name__)
                value.live = metadata.get(LIVE)
        else:
            value = origin(self, node, nr, metadata)
            if value.blocked:
                wait(value)
            if self.max_products:
                self._made.append(value)
        metadata[VALUES[nr]] = ref(value)
        return value

    def _check_overlap(self, node: Node) -> None:
        """Raise NoRecipeError if ``node`` may have changed an operand that is a view of its first one, in place.

        The function mode sees that the two share memory. Without it only the graph shows that one is a view of the
        other, and not whether the op was in place.
        """
        edges = node.next_functions
        if len(edges) < 2 or edges[0][0] is None:
            return
        first = edges[0][0]
        for source, _ in edges[1:]:
            while source is not None and source is not first and type(source).__name__ in FOLLOWING:
                source = source.next_functions[0][0]
                if source is first:
                    self._region.needs_mode(node)
                    if self._region.was_unwatched(node):
                        raise NoRecipeError("an operand that may lie in the memory of another")

    def settings(self, node: Node) -> tuple[Any, ...]:
        """Returns the settings of torch under which the product of ``node`` ran: those when the region began.

        Raises NoRecipeError if they have changed since.
        """
        region = self._region
        if _torch.product_settings() != region.product_settings:
            raise NoRecipeError("settings of torch by which products are computed have changed")
        if type(node).__name__ == CONVOLUTION and _torch.failed_allocations() != region.failed_allocations:
            raise NoRecipeError("there may have been too little memory for the workspace of a convolution")
        return region.product_settings

    def _product(self, node: Node, nr: int, metadata: dict[Any, Any]) -> Value:
        """Returns the value of an op that only a rule of a product may replay; absent if there is no recipe."""
        origin, made = product_of(node, nr), len(self._made)
        if origin is not None:
            try:
                value = origin(self, node, nr, metadata)
                if value.blocked:
                    wait(value)
                self._made.append(value)
                return value
            except NoRecipeError:
                self._give_up(made)
        return Value(type(node).__name__)

    def _give_up(self, first: int) -> None:
        """Undo the values of this walk from index ``first`` on: no recipe reads their inputs any more."""
        for value in self._made[first:]:
            for v in value.inputs:
                v.recipe_reads -= 1
        del self._made[first:]

    def count_step(self) -> None:
        """Count one more node that was visited; raises NoRecipeError after ``MAX_WALK``."""
        self.steps += 1
        if self.steps > MAX_WALK:
            raise NoRecipeError(f"more than {MAX_WALK} ops lie between it and the nearest kept tensors")

    def _value_of_view(self, view: SavedView, node: Node, nr: int) -> Value | None:
        """Returns a `Value` for a saved view, for recipes to read; None: its node was made before ``trusted_from``."""
        if node._sequence_nr() < self._region.trusted_from:
            return None
        value = view.value()
        if self.max_products:
            self._made.append(value)
        node.metadata[VALUES[nr]] = ref(value)
        return value

    def leaf(self, variable: Tensor) -> Value:
        """Returns the value of a parameter, one for each version of it."""
        version = variable._version
        value = self._leaves.get(id(variable))
        if value is not None and value.tensor is variable and value.version == version:
            return value
        if type(variable) is not torch.nn.Parameter and type(variable) is not Tensor:
            raise NoRecipeError(f"a parameter of class {type(variable).__name__}")
        region = self._region
        value = None if region.shards is None else region.shards.leaf(variable)
        if value is None:
            if region.sharded or not is_there(variable):
                raise NoRecipeError("a sharded parameter, which is gone by the time a recipe runs")
            value = self._leaves[id(variable)] = leaf_value(variable, version)
        watched = region.watched_parameters.get(id(variable))
        if watched is None:
            region.watched_parameters[id(variable)] = [ref(value)]
        elif not watched or watched[-1]() is not value:
            watched.append(ref(value))
        return value

    def _check_gathered(self, value: Value) -> None:
        """Raise NoRecipeError unless the sharded parameters in the recipe of ``value`` are gathered in backward."""
        if self._region.shards is None or not self._region.shards.are_at_work(value.gathers):
            raise NoRecipeError("a sharded parameter that is not gathered when it is read")

    def _sharded(self, tensor: Tensor) -> Value | None:
        """Returns the value by which recipes read ``tensor`` if it is a detached sharded parameter; else None."""
        if self._region.sharded:
            raise NoRecipeError("a tensor that may be a sharded parameter")
        return None if self._region.shards is None else self._region.shards.anchor(tensor)

    def listed(self, node: Node, edges: Sequence[tuple[Node, int]], metadata: dict[Any, Any]) -> tuple[Any, ...]:
        """Returns the operands of ``node``, an op that takes a list of tensors; ``edges``: its edges."""
        noted = metadata.get(NOTE, NOTHING).get("tensors", NOTHING)
        if noted:
            self._region.needs_mode(node)
        return tuple(
            [
                self.input(*edge) if edge[0] is not None else self._noted(noted.get(i, NOTE), "tensors")
                for i, edge in enumerate(edges)
            ]
        )

    def noted(self, node: Node, name: str, metadata: dict[Any, Any]) -> Any:
        """Returns a constant that ``node`` does not record, from the note in its metadata."""
        note = metadata.get(NOTE)
        key = type(node).__name__, name
        is_fixed = key in self._region.constants
        if note is None or name not in note:
            if is_fixed and self._region.was_unwatched(node):
                return self._region.constants[key]
            # Without the function mode a copy may be the model's own, which has a note otherwise. The strides of the
            # tensor that the walk is for are known.
            if name in DEFAULTS and (node is self._first or not self._region.was_unwatched(node)):
                if node is not self._first and not (is_fixed and self._region.constants[key] == DEFAULTS[name]):
                    self._region.needs_mode(node)
                return DEFAULTS[name]
            raise NoRecipeError(f"{type(node).__name__} does not record its {name}")
        if not (is_fixed and note[name] == self._region.constants[key]):
            self._region.needs_mode(node)
        return self._noted(note[name], name)

    def _noted(self, constant: Any, name: str) -> Any:
        if constant is NOTE:
            raise NoRecipeError(f"an input of {name} was not seen")
        if type(constant) is not UnsavedInput:
            return constant
        value = constant.value()
        if constant.copy is None and value.tensor is not None and (found := self._sharded(value.tensor)) is not None:
            return found
        self.operand_bytes += value.nbytes
        self._region.watch(value)
        return value

    def saved(self, node: Node, raw: Any, name: str, parameter: bool) -> Any:
        """Returns a value for the tensor ``raw`` that ``node`` saved as ``name``.

        parameter: whether the tensor may be a parameter. Tuples of tensors give tuples of values.
        """
        if type(raw) is tuple:
            return tuple([None if r is None else self.saved(node, r, name, parameter) for r in raw])
        if passed_no_hook(raw):
            return self._unhooked(node, raw, name, parameter)
        found = packed_in(raw)
        if type(found) is Value or found is None:
            return found
        if type(found) is Cast or type(found) is SavedView:
            value = found.value()
            if self.max_products:
                self._made.append(value)
            return value
        if type(found) is not Bare:
            raise NoRecipeError(f"{name} is held by other saved-tensor hooks")
        if parameter and (sharded := self._sharded(found.tensor)) is not None:
            return sharded
        return self._anchor(node, found.tensor, found.version)

    def operand(self, node: Node, edge: int, place: int | None = None) -> Any:
        """Returns an input of ``node``, a Function written in Python: along its edge, or else from its saved tensors.

        edge: index of the input among those that are tensors.
        place: index of the input among the saved tensors of the node; None: it is not saved.
        """
        source, nr = node.next_functions[edge]
        if source is not None:
            return self.input(source, nr)
        if place is None:
            raise NoRecipeError(f"an input of {type(node).__name__} needs no gradient and was not saved")
        return self.saved_in(node, place)

    def saved_in(self, node: Node, place: int, *, private: bool = False) -> Any:
        """Returns a value for the tensor that ``node``, a Function written in Python, saved at index ``place``.

        private: the Function made the tensor and nothing else refers to it, so it cannot have changed.
        """
        raw = node._raw_saved_tensors[place]
        if not passed_no_hook(raw):
            return self.saved(node, raw, "tensors", not private)
        tensor = packed_in(raw)
        if tensor is None:
            return None
        if not private:
            raise NoRecipeError(f"whether an input of {type(node).__name__} has changed, it does not tell")
        return self._anchor(node, tensor, tensor._version)

    def statistics(self, node: Node, raw: Any, names: Sequence[str]) -> tuple[Any, ...]:
        """Returns what `saved` does for the statistics of a norm, in less time: none is a parameter or a number.

        raw: the first of the statistics. If it passed no hook, those that were saved after it passed none.
        """
        if self._region.rewritten or not passed_no_hook(raw):
            return tuple([self.saved(node, getattr(node, "_raw_saved_" + name), name, False) for name in names])
        tensors = [_unchanged(node, name) for name in names]
        return tuple([None if t is None else self._enter(t, t._version) for t in tensors])

    def _unhooked(self, node: Node, raw: Any, name: str, parameter: bool) -> Any:
        """Returns a value for a tensor that autograd saved with no hook: see [Note: hooks only where they are needed].

        A number that autograd wrapped in a tensor is returned itself.
        """
        tensor = _unchanged(node, name)
        if type(tensor) is tuple:  # the node saved several tensors as ``name``; ``raw`` is the one that is meant
            tensor = packed_in(raw)
        if tensor is None or (not tensor.dim() and _torch.is_number(tensor)):
            return tensor
        if parameter and (sharded := self._sharded(tensor)) is not None:
            return sharded
        return self._anchor(node, tensor, tensor._version)

    def _anchor(self, node: Node, tensor: Tensor, version: int) -> Value:
        """Returns an anchor for a tensor that autograd saved as well.

        Plain PyTorch raises an error too if the tensor is changed in place. Only a change without a new version has to
        be looked for here: it raises NoRecipeError.
        """
        rewritten = self._region.rewritten
        memory = tensor.untyped_storage().data_ptr() if rewritten and tensor.layout is torch.strided else 0
        if memory in rewritten and node._sequence_nr() < rewritten[memory]:
            raise NoRecipeError("an input of it was changed under no_grad or through .data")
        return self._enter(tensor, version)

    def _enter(self, tensor: Tensor, version: int) -> Value:
        value = leaf_value(tensor if tensor.is_leaf else tensor.detach(), version)
        self._region.anchors.append(ref(value))
        return value


def _unchanged(node: Node, name: str) -> Any:
    """Returns what ``node`` saved as ``name``; raises NoRecipeError if that was changed in place."""
    try:
        return getattr(node, "_saved_" + name)
    except RuntimeError as error:
        raise NoRecipeError(f"{name} was changed in place") from error


# Constants that a composite op passes in C++, below every function mode, so that no handler can record them.
DEFAULTS: dict[str, Any] = {"memory_format": torch.contiguous_format}
