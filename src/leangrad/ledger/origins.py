"""Where tensors come from: recipes read off the nodes of autograd.

Nodes give the structure, below autocast and below every composite function; ``notes.py`` leaves on the nodes the few
constants that they forget. A walk starts at the node of a tensor, follows edges through ops that have a rule, and ends
in parameters, in values that are known already, or in the outputs of ops that are never computed twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.rules import RULES, Rule
from leangrad.ledger.value import Bare, Value, is_there, leaf_value, wait

Node = Any  # torch.autograd.graph.Node, whose saved attributes differ from class to class

# What we write into a node's metadata. Weak references only, and plain constants: see [Note: what a value may hold].
VALUES = [("leangrad", i) for i in range(64)]
NOTE = "leangrad.note"  # constants that the node forgets: {name: constant or Operand}
# This op is never computed twice: (weak reference to its output, version), or None where outputs are not held.
LIVE = "leangrad.live"
OPAQUE = "leangrad.opaque"  # the output was changed behind autograd's back: it cannot be replayed

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


def known(node: Node, nr: int) -> Value | None:
    """The value of output ``nr`` of ``node``, if there is one already."""
    ref = node.metadata.get(key_of(nr))
    return ref() if ref is not None else None


def enter(node: Node, nr: int, value: Value) -> None:
    """Let ``node`` know the value of its output ``nr``."""
    node.metadata[key_of(nr)] = weakref.ref(value)


class Walk:
    """One walk through the graph, from a saved tensor to its anchors.

    fence     outputs of nodes made before this sequence number may have been changed unseen, and are not rebuilt
    watch     told of every tensor of the caller's that a recipe reads: it must not change under the recipe
    sharded   parameters are gathered for each module's forward and backward only: no recipe reads them
    """

    __slots__ = ("fence", "operand_bytes", "sharded", "steps", "watch")

    def __init__(self, fence: int, watch: Callable[[Value], None], sharded: bool = False) -> None:
        self.fence = fence
        self.watch = watch
        self.sharded = sharded
        self.steps = 0
        self.operand_bytes = 0

    def origin(self, node: Node, nr: int) -> Value:
        """A new value for output ``nr`` of ``node`` with a recipe; NoRecipeError where there is none."""
        rule = rule_for(node, nr)
        metadata = node.metadata
        if rule is None or LIVE in metadata:
            raise NoRecipeError(f"{type(node).__name__} is never computed twice")
        if OPAQUE in metadata or node._sequence_nr() < self.fence:
            raise NoRecipeError(f"the output of {type(node).__name__} was changed behind autograd's back")
        self.steps += 1
        if self.steps > MAX_WALK:
            raise NoRecipeError(f"more than {MAX_WALK} ops between the tensor and its anchors")
        value = Value(rule.node)
        if rule.twins:
            variable = getattr(node.next_functions[0][0], "variable", None)
            if variable is not None:
                return self._cast(rule, value, node, variable)
        args, kwargs = self._arguments(rule, node, nr)
        if rule.twins:
            if not _torch.same_device(node):
                raise NoRecipeError("a copy from another device")
            twin = _twin(args, value)
            if twin is not None:
                return twin
        value.set_recipe(rule.function, args, kwargs)
        if len(rule.operands) > 1:
            value.dtype = _torch.output_fact(node, "dtype")
        return value

    def input(self, edge: tuple[Node, int]) -> Value:
        """The value that flows in along an edge: known, a parameter, rebuilt, or absent."""
        node, nr = edge
        value = known(node, nr)
        if value is not None:
            if value.tensor is not None:
                if value.tensor._version == value.version:
                    return value
                raise NoRecipeError(f"the output of {value.op} was changed in place")
            if node._sequence_nr() >= self.fence:
                return value
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._leaf(variable)
        if node._sequence_nr() < self.fence:
            raise NoRecipeError(f"the output of {type(node).__name__} may have been changed unseen")
        if LIVE in node.metadata or rule_for(node, nr) is None:
            value = Value(type(node).__name__)
            value.live = node.metadata.get(LIVE)
        else:
            value = self.origin(node, nr)
        if value.blocked:
            wait(value)
        enter(node, nr, value)
        return value

    def _cast(self, rule: Rule, value: Value, node: Node, variable: Tensor) -> Value:
        """A parameter in autocast's dtype: half of the recipes of a model that trains under it, so made by hand."""
        dtype, device = _torch.output_kind(node)
        if variable.device != device:
            raise NoRecipeError("a copy from another device")
        leaf = self._leaf(variable)
        leaf.parents = 1
        value.function, value.args, value.inputs, value.order = rule.function, (leaf, dtype), (leaf,), (0,)
        return value

    def _leaf(self, variable: Tensor) -> Value:
        if type(variable) is not torch.nn.Parameter and type(variable) is not Tensor:
            raise NoRecipeError(f"a parameter of class {type(variable).__name__}")
        if self.sharded or not is_there(variable):
            raise NoRecipeError("a sharded parameter, which is gone by the time a recipe runs")
        value = leaf_value(variable, variable._version)
        self.watch(value)
        return value

    def _arguments(self, rule: Rule, node: Node, nr: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        edges = node.next_functions
        args: list[Any] = []
        if rule.operands == ("*",):
            noted = node.metadata.get(NOTE, {}).get("tensors", {})
            args.append(
                tuple(
                    self.input(e) if e[0] is not None else self._noted(noted.get(i, NOTE), "tensors")
                    for i, e in enumerate(edges)
                )
            )
        else:
            for i, name in enumerate(rule.operands):
                edge = edges[i]
                args.append(self.input(edge) if edge[0] is not None else self._constant(node, name))
        args.extend(self._constant(node, name) for name in rule.constants)
        if rule.numbered:
            args.append(nr)
        return tuple(args), {key: self._constant(node, name) for key, name in rule.keywords}

    def _constant(self, node: Node, name: str) -> Any:
        kind, attribute = _KINDS.get((type(node), name)) or _kind_of(node, name)
        if kind == "fact":
            return _torch.output_fact(node, attribute)
        if kind == "tensor":
            return self._saved(getattr(node, attribute), name)
        if kind == "constant":
            return signed(getattr(node, attribute))
        if kind == "statistic":
            packed = _torch.packed(getattr(node, attribute))
            return leaf_value(packed.tensor, packed.version) if type(packed) is Bare else packed
        noted = node.metadata.get(NOTE)
        if noted is None or attribute not in noted:
            if attribute in DEFAULTS:
                return DEFAULTS[attribute]
            raise NoRecipeError(f"{type(node).__name__} does not remember its {attribute}")
        return self._noted(noted[attribute], attribute)

    def _noted(self, constant: Any, name: str) -> Any:
        if constant is NOTE:
            raise NoRecipeError(f"an operand of {name} was not noted")
        if type(constant) is not Operand:
            return constant
        value = constant.value()
        self.operand_bytes += value.nbytes
        self.watch(value)
        return value

    def _saved(self, raw: Any, name: str) -> Any:
        if type(raw) is tuple:
            return tuple(None if r is None else self._saved(r, name) for r in raw)
        packed = _torch.packed(raw)
        if type(packed) is Value or packed is None:
            return packed
        if type(packed) is Bare and self.sharded:
            raise NoRecipeError("a tensor that may be a sharded parameter")
        if type(packed) is Bare:
            # Autograd saved it as well, so plain PyTorch minds a change too: it need not be watched.
            return leaf_value(packed.tensor, packed.version)
        if isinstance(packed, Tensor) and packed.dim() == 0 and _torch.passed_no_hook(raw):
            return packed  # a Python scalar that autograd wrapped: it passes no hook
        raise NoRecipeError(f"{name} was packed by other hooks")


# Constants that a composite op passes below every function override, where nobody can note them.
DEFAULTS: dict[str, Any] = {"memory_format": torch.contiguous_format}

_KINDS: dict[tuple[type, str], tuple[str, str]] = {}  # where nodes of a type have a constant: see ``_kind_of``
_BY_TYPE: dict[type, tuple[Rule, ...]] = {}


def _kind_of(node: Node, name: str) -> tuple[str, str]:
    """Where this type of node has a constant: a fact of its output, a note, a statistic, a saved tensor, or itself."""
    if name[0] == "@":
        found = "fact", name[1:]
    elif name[0] == "?":
        found = "note", name[1:]
    elif name[0] == "~":
        found = "statistic", "_raw_saved_" + name[1:]
    elif hasattr(type(node), "_raw_saved_" + name):
        found = "tensor", "_raw_saved_" + name
    elif hasattr(type(node), "_saved_" + name):
        found = "constant", "_saved_" + name
    else:
        found = "note", name
    _KINDS[type(node), name] = found
    return found


def rule_for(node: Node, nr: int) -> Rule | None:
    """The rule that rebuilds output ``nr`` of ``node``."""
    kind = type(node)
    rules = _BY_TYPE.get(kind)
    if rules is None:
        rules = _BY_TYPE[kind] = tuple(RULES.get(kind.__name__, ()))
    for rule in rules:
        if (rule.output is None or rule.numbered or rule.output == nr) and (rule.when is None or rule.when(node)):
            return rule
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
