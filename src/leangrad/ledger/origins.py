"""Where tensors come from: recipes read off the nodes of autograd.

Nodes give the structure, below autocast and below every composite function; ``notes.py`` leaves on the nodes the few
constants that they forget. A walk starts at the node of a tensor, follows edges through ops that have a rule, and ends
in parameters, in values that are known already, or in the outputs of ops that are never computed twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.cast import Cast
from leangrad.ledger.rules import RULES, Rule
from leangrad.ledger.seen import Seen
from leangrad.ledger.value import Bare, Value, fuses, is_there, leaf_value
from leangrad.ledger.waiting import wait

Node = Any  # torch.autograd.graph.Node, whose saved attributes differ from class to class

# What we write into a node's metadata. Weak references only, and plain constants: see [Note: what a value may hold].
VALUES = [("leangrad", i) for i in range(64)]
NOTE = "leangrad.note"  # constants that the node forgets: {name: constant or Operand}
# This op is never computed twice: (weak reference to its output, version, number of the call).
LIVE = "leangrad.live"
CAST = "leangrad.cast"  # what was saved of it went the short way: see ``cast.py``
OPAQUE = "leangrad.opaque"  # the output was changed behind autograd's back: it cannot be replayed

with torch.enable_grad():  # leangrad may be imported anywhere
    AccumulateGrad: Any = type((torch.ones((), requires_grad=True) * 1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
LISTED = ("*",)
NOTHING: dict[str, Any] = {}
UNSIGNED = (float, bool, str, type(None))  # constants that are what they are

COPIED_BYTES = 64 * 1024  # operands up to this size are copied
MAX_WALK = 64  # nodes between a tensor and its anchors; beyond that the tensor is kept


class NoRecipeError(Exception):
    """This tensor cannot be rebuilt; the argument says why."""


class Operand:
    """A tensor that an op read and its node forgot, because it needs no gradient.

    A small one is copied at once: buffers change below every version counter, by batch norm and by collectives.
    """

    __slots__ = ("copy", "ref", "version")
    noted: ClassVar[set[int]] = set()  # the ids of all operands since a region began

    def __init__(self, tensor: Tensor) -> None:
        self.noted.add(id(tensor))
        self.ref = weakref.ref(tensor)
        self.version = -1 if tensor.is_inference() else tensor._version
        small = self.version >= 0 and tensor.layout is torch.strided and tensor.nbytes <= COPIED_BYTES
        self.copy = tensor.detach().clone() if small else None

    def value(self) -> Value:
        """The operand as an anchor, if it is alive and unchanged."""
        tensor = self.ref() if self.copy is None else self.copy
        if tensor is None or self.version < 0 or (self.copy is None and tensor._version != self.version):
            raise NoRecipeError("an operand that needs no gradient is gone")
        value = Value("operand")
        value.keep(tensor)
        value.free = True
        return value


def key_of(nr: int) -> tuple[str, int]:
    """Where a node's metadata hold the value of its output ``nr``."""
    return VALUES[nr] if nr < 64 else ("leangrad", nr)


def enter(node: Node, nr: int, value: Value) -> None:
    """Let ``node`` know the value of its output ``nr``."""
    node.metadata[key_of(nr)] = weakref.ref(value)


def join(node: Node, nr: int, value: Value) -> None:
    """Let the values of outputs 0 and 1 of ``node`` know each other: rebuilding one gives the other as well."""
    ref = node.metadata.get(VALUES[1 - nr]) if nr < 2 else None
    other: Value | Seen | None = ref() if ref is not None else None
    if type(other) is Value:  # a view is rebuilt with its base
        value.kin, other.kin = weakref.ref(other), weakref.ref(value)


class Book(Protocol):
    """What a walk asks of its region."""

    sizes: bool  # whether new values are told their bytes, for the plan
    fence: int  # outputs of nodes made before this sequence number may have been changed unseen, and are not rebuilt
    anchors: list[weakref.ref[Value]]  # what recipes may read and autograd keeps as well
    rewritten: dict[int, int]  # memory that was changed unseen, and the number of the first node after that
    sharded: bool  # parameters are gathered for each module's forward and backward only: no recipe reads them

    def watch(self, value: Value) -> None:
        """A recipe reads this tensor of the caller's: it must not change under the recipe."""


class Walk:
    """The walks of one region through the graph, from saved tensors to their anchors.

    steps           nodes that were visited since the last start
    operand_bytes   of the operands that were found since then
    """

    __slots__ = ("_book", "_leaves", "operand_bytes", "steps")

    def __init__(self, book: Book) -> None:
        self._book = book
        self._leaves: dict[int, Value] = {}  # by id; a value holds its parameter, so the id stays that one's
        self.steps = self.operand_bytes = 0

    def start(self, node: Node, nr: int) -> Value:
        """A new walk: the origin of output ``nr`` of ``node``; NoRecipeError where there is none."""
        self.steps = self.operand_bytes = 0
        form, metadata = form_of(node, nr), node.metadata
        if form is None or LIVE in metadata:
            raise NoRecipeError(f"{type(node).__name__} is never computed twice")
        if node._sequence_nr() < self._book.fence:
            raise NoRecipeError(f"the output of {type(node).__name__} was changed behind autograd's back")
        return self._origin(node, nr, form, metadata)

    def forget(self) -> None:
        """The region ends: let go of the parameters that recipes read."""
        self._leaves.clear()

    def _origin(self, node: Node, nr: int, form: Form, metadata: dict[Any, Any]) -> Value:
        """A new value for output ``nr`` of ``node`` with the recipe that ``form`` tells."""
        if OPAQUE in metadata:
            raise NoRecipeError(f"the output of {type(node).__name__} was changed behind autograd's back")
        self.steps += 1
        if self.steps > MAX_WALK:
            raise NoRecipeError(f"more than {MAX_WALK} ops between the tensor and its anchors")
        rule = form.rule
        value = Value(rule.node)
        if self._book.sizes:
            value.nbytes = _torch.output_nbytes(node, nr)
        edges = node.next_functions
        if rule.twins:
            before = edges[0][0]
            if type(before) is AccumulateGrad:
                return self._cast(rule, value, node, before.variable)
        args = self._arguments(form, node, edges, metadata)
        if rule.twins:
            if not _torch.same_device(node):
                raise NoRecipeError("a copy from another device")
            twin = _twin(args, value)
            if twin is not None:
                return twin
        keywords = NOTHING
        if form.keywords:
            keywords = {key: self._constant(node, constant, metadata) for key, constant in form.keywords}
        value.set_recipe(rule.function, args, keywords)
        if rule.numbered:
            value.part = nr
            join(node, nr, value)
        if len(rule.operands) > 1:
            value.dtype = _torch.output_fact(node, "dtype")
        return value

    def parameter(self, node: Node) -> Tensor | None:
        """The parameter that ``node`` casts, if it is one and the cast is not known as a value."""
        before = node.next_functions[0][0]
        if type(before) is not AccumulateGrad:
            return None
        metadata = node.metadata
        if VALUES[0] in metadata or OPAQUE in metadata or node._sequence_nr() < self._book.fence:
            return None
        parameter: Tensor = before.variable
        return parameter if type(parameter) is torch.nn.Parameter or type(parameter) is Tensor else None

    def input(self, edge: tuple[Node, int]) -> Value:
        """The value that flows in along an edge: known, a parameter, rebuilt, or absent."""
        node, nr = edge
        if type(node) is AccumulateGrad:
            return self._leaf(node.variable)
        metadata = node.metadata
        key = VALUES[nr] if nr < 64 else key_of(nr)
        ref = metadata.get(key)
        if ref is not None:
            value: Value | Seen | None = ref()
            if type(value) is Seen and node._sequence_nr() >= self._book.fence:
                value = value.value()
                metadata[key] = weakref.ref(value)
                return value
            if type(value) is Value:
                tensor = value.tensor
                if tensor is not None:
                    if value.before is not None and node._sequence_nr() < self._book.fence:
                        raise NoRecipeError(f"the output of {value.op} was changed behind autograd's back")
                    if tensor._version == value.version:
                        return value
                    raise NoRecipeError(f"the output of {value.op} was changed in place")
                if node._sequence_nr() >= self._book.fence:
                    return value
        if node._sequence_nr() < self._book.fence:
            raise NoRecipeError(f"the output of {type(node).__name__} may have been changed unseen")
        form = form_of(node, nr)
        if form is None or LIVE in metadata:
            value = Value(type(node).__name__)
            value.live = metadata.get(LIVE)
        else:
            value = self._origin(node, nr, form, metadata)
        if value.blocked:
            wait(value)
        metadata[key] = weakref.ref(value)
        return value

    def _cast(self, rule: Rule, value: Value, node: Node, variable: Tensor) -> Value:
        """A parameter in autocast's dtype: half of the recipes of a model that trains under it, so made by hand."""
        dtype, device = _torch.output_kind(node)
        if variable.device != device:
            raise NoRecipeError("a copy from another device")
        leaf = self._leaf(variable)
        leaf.parents += 1
        value.function, value.args, value.inputs, value.order = rule.function, (leaf, dtype), (leaf,), (0,)
        return value

    def _leaf(self, variable: Tensor) -> Value:
        value = self._leaves.get(id(variable))
        if value is not None and value.tensor is variable and value.version == variable._version:
            return value
        if type(variable) is not torch.nn.Parameter and type(variable) is not Tensor:
            raise NoRecipeError(f"a parameter of class {type(variable).__name__}")
        if self._book.sharded or not is_there(variable):
            raise NoRecipeError("a sharded parameter, which is gone by the time a recipe runs")
        value = self._leaves[id(variable)] = leaf_value(variable, variable._version)
        self._book.watch(value)
        return value

    def _arguments(
        self, form: Form, node: Node, edges: Sequence[tuple[Node, int]], metadata: dict[Any, Any]
    ) -> tuple[Any, ...]:
        if form.is_unary and edges[0][0] is not None:
            return (self.input(edges[0]),)
        args: list[Any] = []
        if form.rule.operands == LISTED:
            noted = metadata.get(NOTE, {}).get("tensors", {})
            args.append(
                tuple(
                    self.input(e) if e[0] is not None else self._noted(noted.get(i, NOTE), "tensors")
                    for i, e in enumerate(edges)
                )
            )
        else:
            for operand, edge in zip(form.operands, edges, strict=False):
                args.append(self.input(edge) if edge[0] is not None else self._constant(node, operand, metadata))
        for constant in form.constants:
            if constant[0] is STATISTIC and not fuses():
                break  # they come last
            args.append(self._constant(node, constant, metadata))
        return tuple(args)

    def _constant(self, node: Node, constant: Constant, metadata: dict[Any, Any]) -> Any:
        kind, attribute, name = constant
        if kind is OWN:
            found = getattr(node, attribute)
            return found if type(found) in UNSIGNED else signed(found)
        if kind is FACT:
            return _torch.output_fact(node, attribute)
        if kind is NOTED:
            noted = metadata.get(NOTE)
            if noted is None or attribute not in noted:
                if attribute in DEFAULTS:
                    return DEFAULTS[attribute]
                raise NoRecipeError(f"{type(node).__name__} does not remember its {attribute}")
            found = noted[attribute]
            return found if type(found) in UNSIGNED else self._noted(found, attribute)
        return self._saved(node, getattr(node, attribute), name, parameter=kind is SAVED)

    def _noted(self, constant: Any, name: str) -> Any:
        if constant is NOTE:
            raise NoRecipeError(f"an operand of {name} was not noted")
        if type(constant) is not Operand:
            return constant
        value = constant.value()
        self.operand_bytes += value.nbytes
        self._book.watch(value)
        return value

    def _saved(self, node: Node, raw: Any, name: str, *, parameter: bool) -> Any:
        """A tensor that ``node`` saved, as an anchor; ``parameter``: it may be one."""
        if type(raw) is tuple:
            return tuple(None if r is None else self._saved(node, r, name, parameter=parameter) for r in raw)
        if _torch.passed_no_hook(raw):
            return self._unhooked(node, raw, name, parameter=parameter)
        packed = _torch.packed(raw)
        if type(packed) is Value or packed is None:
            return packed
        if type(packed) is Cast or type(packed) is Seen:
            return packed.value()
        if type(packed) is not Bare:
            raise NoRecipeError(f"{name} was packed by other hooks")
        if parameter and self._book.sharded:
            raise NoRecipeError("a tensor that may be a sharded parameter")
        return self._anchor(node, packed.tensor, packed.version)

    def _unhooked(self, node: Node, raw: Any, name: str, *, parameter: bool) -> Any:
        """A tensor that autograd saved itself: see [Note: hooks only where they are needed]."""
        try:
            tensor = getattr(node, "_saved_" + name)
        except RuntimeError as error:
            raise NoRecipeError(f"{name} was changed in place") from error
        if type(tensor) is tuple:  # of several tensors, and the one at hand
            tensor = _torch.packed(raw)
        if tensor is None or (not tensor.dim() and _torch.is_number(tensor)):
            return tensor
        if parameter and self._book.sharded:
            raise NoRecipeError("a tensor that may be a sharded parameter")
        return self._anchor(node, tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def _anchor(self, node: Node, tensor: Tensor, version: int) -> Value:
        """What autograd saved as well. Plain PyTorch minds a change of it too, but for one that no version tells of."""
        rewritten = self._book.rewritten
        memory = tensor.untyped_storage().data_ptr() if rewritten and tensor.layout is torch.strided else 0
        if memory in rewritten and node._sequence_nr() < rewritten[memory]:
            raise NoRecipeError("an operand was changed behind autograd's back")
        value = leaf_value(tensor, version)
        self._book.anchors.append(weakref.ref(value))
        return value


# Constants that a composite op passes below every function override, where nobody can note them.
DEFAULTS: dict[str, Any] = {"memory_format": torch.contiguous_format}

# Where nodes have a constant: in a note, as a fact of their output, as a saved tensor or statistic, or as their own.
NOTED, FACT, SAVED, STATISTIC, READ, OWN = "noted", "fact", "saved", "statistic", "read", "own"
Constant = tuple[str, str, str]  # where, the attribute or the key there, the name


class Form:
    """A rule, and where the nodes of one type have its constants."""

    __slots__ = ("constants", "is_unary", "keywords", "operands", "rule")

    def __init__(self, rule: Rule, kind: type) -> None:
        self.rule = rule
        self.operands = [_place_of(kind, name) for name in rule.operands]
        self.constants = [_place_of(kind, name) for name in rule.constants]
        self.keywords = [(key, _place_of(kind, name)) for key, name in rule.keywords]
        self.is_unary = len(rule.operands) == 1 and rule.operands != LISTED and not rule.constants


def _place_of(kind: type, name: str) -> Constant:
    if name[0] in "@?":
        return {"@": FACT, "?": NOTED}[name[0]], name[1:], name
    if name[0] in "=~":
        return {"=": READ, "~": STATISTIC}[name[0]], "_raw_saved_" + name[1:], name[1:]
    if hasattr(kind, "_raw_saved_" + name):
        return SAVED, "_raw_saved_" + name, name
    if hasattr(kind, "_saved_" + name):
        return OWN, "_saved_" + name, name
    return NOTED, name, name


_FORMS: dict[type, tuple[Form, ...]] = {}


def form_of(node: Node, nr: int) -> Form | None:
    """The form that rebuilds output ``nr`` of ``node``."""
    kind = type(node)
    try:
        forms = _FORMS[kind]
    except KeyError:
        forms = _FORMS[kind] = tuple(Form(rule, kind) for rule in RULES.get(kind.__name__, ()))
    for form in forms:
        rule = form.rule
        if (rule.output == nr or rule.output is None or rule.numbered) and (rule.when is None or rule.when(node)):
            return form
    return None


def signed(constant: Any) -> Any:
    """Nodes hand out negative dimensions as unsigned numbers."""
    if type(constant) is int:
        return constant - (1 << 64) if constant >= (1 << 63) else constant
    if type(constant) in (tuple, list):
        return tuple(signed(c) for c in constant)
    return constant


def _twin(args: tuple[Any, ...], value: Value) -> Value | None:
    """The value that the same function already made of the same input; else ``value`` is entered as that one."""
    parent = args[0]
    if parent.children is None:
        parent.children = {}
    ref = parent.children.get(args[1:])
    twin = ref() if ref is not None else None
    if twin is None:
        parent.children[args[1:]] = weakref.ref(value)
    return twin
