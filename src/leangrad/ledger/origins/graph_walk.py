"""Where tensors come from: recipes read off the nodes of autograd.

Nodes give the structure, below autocast and below every composite function; ``handlers.py`` leaves on the nodes the few
constants that they forget. A walk starts at the node of a tensor, follows edges through ops that have a rule, and ends
in parameters, in values that are known already, or in the outputs of ops that are never computed twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol
from weakref import ref

import torch
from torch import Tensor

from leangrad import _torch
from leangrad._torch import passed_no_hook
from leangrad.ledger.origins.functions import NoRecipeError
from leangrad.ledger.origins.rule_builder import ONLY, Origin, origin_of, product_of
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


class UnsavedInput:
    """A tensor that an op read and its node forgot, because it needs no gradient.

    A small one is copied at once: buffers change below every version counter, by batch norm and by collectives.
    """

    __slots__ = ("copy", "ref", "version")
    noted: ClassVar[set[int]] = set()  # the ids of all operands since a region began

    def __init__(self, tensor: Tensor) -> None:
        self.noted.add(id(tensor))
        self.ref = ref(tensor)
        self.version = -1 if tensor.is_inference() else tensor._version
        small = self.version >= 0 and tensor.layout is torch.strided and tensor.nbytes <= COPIED_BYTES
        self.copy = _torch.copy_unseen(tensor.detach()) if small else None

    def value(self) -> Value:
        """The operand as an anchor, if it is alive and unchanged."""
        tensor = self.ref() if self.copy is None else self.copy
        if tensor is None or self.version < 0 or (self.copy is None and tensor._version != self.version):
            raise NoRecipeError("an input of it that needs no gradient is gone by then")
        value = Value("operand")
        value.keep(tensor)
        value.free = True
        return value


class WalkRegion(Protocol):
    """What a walk asks of its region."""

    sizes: bool  # whether new values are told their bytes, for the plan
    fence: int  # outputs of nodes made before this sequence number may have been changed unseen, and are not rebuilt
    anchors: list[weakref.ref[Value]]  # what recipes may read and autograd keeps as well
    watched_parameters: dict[int, list[weakref.ref[Anchor]]]  # what recipes read of the caller's and must not change
    rewritten: dict[int, int]  # memory that was changed unseen, and the number of the first node after that
    sharded: bool  # FSDP of the first kind: no recipe reads parameters
    shards: Shards | None  # what FSDP2 gathers: see [Note: recipes that read sharded parameters]
    max_products: int  # products that a recipe may run through in a row
    product_settings: tuple[Any, ...]  # under which they run, as the region began
    failed_allocations: int  # by then

    def watch(self, value: Value) -> None:
        """A recipe reads this tensor of the caller's: it must not change under the recipe."""


class Walk:
    """The walks of one region through the graph, from saved tensors to their anchors.

    steps           nodes that were visited since the last start
    operand_bytes   of the operands that were found since then
    early           outputs of products that were found since then, and that are kept although none has asked for them
    sizes           whether new values are told their bytes, for the plan
    max_products    products that a recipe may run through in a row
    """

    __slots__ = ("_book", "_leaves", "_made", "early", "max_products", "operand_bytes", "sizes", "steps")

    def __init__(self, book: WalkRegion) -> None:
        self._book = book
        self._leaves: dict[int, Value] = {}  # by id; a value holds its parameter, so the id stays that one's
        self.steps = self.operand_bytes = 0
        self.early: list[Value] = []
        self.sizes = book.sizes
        self.max_products = book.max_products
        self._made: list[Value] = []  # the values that this walk has made, where recipes run through products

    def origin(self, node: Node, nr: int) -> Origin | None:
        """What makes the value of output ``nr`` of ``node``; None: it is not computed twice."""
        origin = origin_of(node, nr)
        return product_of(node, nr) if origin is None and self.max_products else origin

    def start(self, node: Node, nr: int, metadata: dict[Any, Any], made: Tensor | None = None) -> Value:
        """A new walk: the origin of output ``nr`` of a node behind the fence; NoRecipeError where there is none.

        made: that output itself, where it is at hand.
        """
        self.steps = self.operand_bytes = 0
        self.early.clear()
        origin = self.origin(node, nr) if self.max_products else origin_of(node, nr)
        if origin is None or (metadata and LIVE in metadata):
            raise NoRecipeError(f"{type(node).__name__} is never computed twice")
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
        """The value that flows in along an edge from output ``nr`` of ``node``: known, a parameter, rebuilt, absent."""
        kind = type(node)
        if kind is AccumulateGrad:
            return self.leaf(node.variable)
        metadata = node.metadata
        if metadata:
            known = metadata.get(VALUES[nr])
            if known is not None and (value := known()) is not None:
                if type(value) is SavedView:
                    found = self._seen(value, node, nr)
                    if found is not None:
                        return found
                elif value.tensor is None:
                    if node._sequence_nr() >= self._book.fence:
                        if value.gathers:
                            self._check_gathered(value)
                        return value  # type: ignore[no-any-return]
                elif value.before is not None and node._sequence_nr() < self._book.fence:
                    raise NoRecipeError(f"the output of {value.op} was changed under no_grad or through .data")
                elif value.tensor._version == value.version:
                    if value.growth and not value.readers:
                        self.early.append(value)
                    return value  # type: ignore[no-any-return]
                else:
                    raise NoRecipeError(f"the output of {value.op} was changed in place")
        if node._sequence_nr() < self._book.fence:
            raise NoRecipeError(
                f"the output of {kind.__name__} was made before the lean region, or left torch by numpy() or data_ptr()"
            )
        origin = ONLY[kind] if nr == 0 and kind in ONLY else origin_of(node, nr)
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

    def settings(self, node: Node) -> tuple[Any, ...]:
        """The settings under which the product of ``node`` has run: those of the region."""
        book = self._book
        if _torch.product_settings() != book.product_settings:
            raise NoRecipeError("settings of torch by which products are computed have changed")
        if type(node).__name__ == CONVOLUTION and _torch.failed_allocations() != book.failed_allocations:
            raise NoRecipeError("there may have been too little memory for the workspace of a convolution")
        return book.product_settings

    def _product(self, node: Node, nr: int, metadata: dict[Any, Any]) -> Value:
        """The output of a product, with a recipe; absent where there is none."""
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
        """No recipe comes of the values from number ``first`` of those that this walk has made."""
        for value in self._made[first:]:
            for v in value.inputs:
                v.parents -= 1
        del self._made[first:]

    def count_step(self) -> None:
        """One node more was visited."""
        self.steps += 1
        if self.steps > MAX_WALK:
            raise NoRecipeError(f"more than {MAX_WALK} ops lie between it and the nearest kept tensors")

    def _seen(self, seen: SavedView, node: Node, nr: int) -> Value | None:
        """A view that was saved, as a value: recipes read it."""
        if node._sequence_nr() < self._book.fence:
            return None
        value = seen.value()
        if self.max_products:
            self._made.append(value)
        node.metadata[VALUES[nr]] = ref(value)
        return value

    def leaf(self, variable: Tensor) -> Value:
        """A parameter."""
        version = variable._version
        value = self._leaves.get(id(variable))
        if value is not None and value.tensor is variable and value.version == version:
            return value
        if type(variable) is not torch.nn.Parameter and type(variable) is not Tensor:
            raise NoRecipeError(f"a parameter of class {type(variable).__name__}")
        book = self._book
        value = None if book.shards is None else book.shards.leaf(variable)
        if value is None:
            if book.sharded or not is_there(variable):
                raise NoRecipeError("a sharded parameter, which is gone by the time a recipe runs")
            value = self._leaves[id(variable)] = leaf_value(variable, version)
        watched = book.watched_parameters.setdefault(id(variable), [])
        if not watched or watched[-1]() is not value:
            watched.append(ref(value))
        return value

    def _check_gathered(self, value: Value) -> None:
        """A recipe reads ``value``, whose own recipe reads sharded parameters in place."""
        if self._book.shards is None or not self._book.shards.are_at_work(value.gathers):
            raise NoRecipeError("a sharded parameter that is not gathered when it is read")

    def _sharded(self, tensor: Tensor) -> Value | None:
        """What recipes read of ``tensor``, if that lies in the memory of a sharded parameter."""
        if self._book.sharded:
            raise NoRecipeError("a tensor that may be a sharded parameter")
        return None if self._book.shards is None else self._book.shards.anchor(tensor)

    def listed(self, edges: Sequence[tuple[Node, int]], metadata: dict[Any, Any]) -> tuple[Any, ...]:
        """The operands of an op that takes a list of tensors."""
        noted = metadata.get(NOTE, NOTHING).get("tensors", NOTHING)
        return tuple(
            [
                self.input(*edge) if edge[0] is not None else self._noted(noted.get(i, NOTE), "tensors")
                for i, edge in enumerate(edges)
            ]
        )

    def noted(self, node: Node, name: str, metadata: dict[Any, Any]) -> Any:
        """A constant that ``node`` forgot, from the note that was left on it."""
        note = metadata.get(NOTE)
        if note is None or name not in note:
            if name in DEFAULTS:
                return DEFAULTS[name]
            raise NoRecipeError(f"{type(node).__name__} does not record its {name}")
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
        self._book.watch(value)
        return value

    def saved(self, node: Node, raw: Any, name: str, parameter: bool) -> Any:
        """A tensor that ``node`` saved, as an anchor; ``parameter``: it may be one."""
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
        """An input of ``node``, a Function written in Python: along its edge, or else as the tensor that it saved.

        edge: the number of the input among those that are tensors. place: where among its saved tensors it is.
        """
        source, nr = node.next_functions[edge]
        if source is not None:
            return self.input(source, nr)
        if place is None:
            raise NoRecipeError(f"an input of {type(node).__name__} needs no gradient and was not saved")
        return self.saved_in(node, place)

    def saved_in(self, node: Node, place: int, *, private: bool = False) -> Any:
        """A tensor that ``node``, a Function written in Python, saved in ``place``, as an anchor.

        private: the Function made it and nobody else sees it, so it cannot have changed.
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
        """The same for the statistics of a norm, by a shorter way: none is a parameter or a number.

        raw: the first of them. If that passed no hook, those that were saved after it passed none.
        """
        if self._book.rewritten or not passed_no_hook(raw):
            return tuple([self.saved(node, getattr(node, "_raw_saved_" + name), name, False) for name in names])
        tensors = [_unchanged(node, name) for name in names]
        return tuple([None if t is None else self._enter(t, t._version) for t in tensors])

    def _unhooked(self, node: Node, raw: Any, name: str, parameter: bool) -> Any:
        """A tensor that autograd saved itself: see [Note: hooks only where they are needed]."""
        tensor = _unchanged(node, name)
        if type(tensor) is tuple:  # of several tensors, and the one at hand
            tensor = packed_in(raw)
        if tensor is None or (not tensor.dim() and _torch.is_number(tensor)):
            return tensor
        if parameter and (sharded := self._sharded(tensor)) is not None:
            return sharded
        return self._anchor(node, tensor, tensor._version)

    def _anchor(self, node: Node, tensor: Tensor, version: int) -> Value:
        """What autograd saved as well. Plain PyTorch minds a change of it too, but for one that no version tells of."""
        rewritten = self._book.rewritten
        memory = tensor.untyped_storage().data_ptr() if rewritten and tensor.layout is torch.strided else 0
        if memory in rewritten and node._sequence_nr() < rewritten[memory]:
            raise NoRecipeError("an input of it was changed under no_grad or through .data")
        return self._enter(tensor, version)

    def _enter(self, tensor: Tensor, version: int) -> Value:
        value = leaf_value(tensor if tensor.is_leaf else tensor.detach(), version)
        self._book.anchors.append(ref(value))
        return value


def _unchanged(node: Node, name: str) -> Any:
    """What ``node`` itself has saved as ``name``."""
    try:
        return getattr(node, "_saved_" + name)
    except RuntimeError as error:
        raise NoRecipeError(f"{name} was changed in place") from error


# Constants that a composite op passes below every function override, where nobody can note them.
DEFAULTS: dict[str, Any] = {"memory_format": torch.contiguous_format}
