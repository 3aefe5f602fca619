"""Attributes, elements and truth of what the functions of a forward name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.ledger.observe.proof import allowed
from leangrad.ledger.observe.proof.facts import DIFFERENT, MISSING, NUMBERS, Facts, is_plain
from leangrad.ledger.observe.proof.static_values import (
    DATA,
    DTYPE,
    Data,
    Group,
    Known,
    List,
    ListMethod,
    Method,
    OfTensor,
    Parent,
    Row,
    Unproven,
    Value,
    as_data,
    freeze,
    join,
    known,
)

__all__ = ["INPLACE_AT", "STORES", "Lookups", "tensors_in"]


class Lookups:
    """What is known about objects, and the facts that it rests on."""

    def __init__(self) -> None:
        self.facts = Facts()
        self._read: dict[int, Tensor] = {}  # parameters and buffers that an op reads
        self._registered: set[int] = set()  # those that were met
        self.parts: set[int] = set()  # the modules of the model

    def call(self, callee: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Return what a call of ``callee`` returns."""
        raise NotImplementedError

    def note_global(self, mapping: Mapping[str, Any], name: str, value: Any) -> None:
        """Note that the global ``name`` of ``mapping`` is ``value``."""
        self.facts.of_mapping(mapping, name, value)

    def read(self, value: Value) -> Data:
        """Return ``value`` as data, for something that may hold it, or what is in it, from now on."""
        found = self.look(value)
        freeze(value)
        return found

    def look(self, value: Value) -> Data:
        """Return ``value`` as data, for something that does not hold it."""
        found = as_data(value)
        for one in tensors_in(value):
            if id(one) not in self._registered:
                raise Unproven("a tensor that is no parameter or buffer")
            self._read[id(one)] = one
        return found

    def takes_any(self, callee: Value) -> bool:
        """Whether a call of ``callee`` returns the same for any number of arguments."""
        if isinstance(callee, Known):
            return all(id(one) in allowed.FUNCTIONS and one not in CHECKED for one in callee.values)
        return isinstance(callee, OfTensor)

    def note_constant(self, node: str, name: str, constant: Value) -> None:
        """Note that a call makes nodes of type ``node`` with this constant ``name``: see [Note: one constant]."""
        self.facts.of_node(node, name, constant.values if isinstance(constant, Known) else (DIFFERENT,))

    def truth(self, value: Value) -> bool | None:
        """Whether ``value`` counts as true; None: it may or may not."""
        if not isinstance(value, Known):
            return None
        found = {self._truth(one) for one in value.values}
        return found.pop() if len(found) == 1 else None

    def _truth(self, value: Any) -> bool | None:
        if value is None or type(value) in (bool, str):
            return bool(value)
        if isinstance(value, FunctionType):
            return True
        if isinstance(value, nn.Module):
            if type(value) in allowed.CONTAINERS:
                return len(value) > 0  # type: ignore[arg-type]
            if hasattr(type(value), "__bool__") or hasattr(type(value), "__len__"):
                raise Unproven(f"the truth of a {type(value).__name__}")
            return True
        as_data(known(value))
        return None

    def is_equal(self, left: Value, right: Value) -> bool | None:
        """Whether the two are equal; None: they may or may not be."""
        if not isinstance(left, Known) or not isinstance(right, Known):
            return None
        found = {_are_equal(a, b) for a in left.values for b in right.values}
        return found.pop() if len(found) == 1 else None

    def elements(self, value: Value) -> Value:
        """Return what an iteration over ``value`` yields: any of its elements."""
        match value:
            case Data():
                return value
            case Row(values):
                return join(values) if values else DATA
            case Group(one):
                return one
            case List():
                return DATA if value.value is None else value.value
            case Known(values):
                return join([self._elements_of(one) for one in values])
        raise Unproven(f"an iteration over {value}")

    def _elements_of(self, value: Any) -> Value:
        if isinstance(value, allowed.CONTAINERS):
            self.check_container(value)
            return DATA if isinstance(value, nn.ModuleDict) else self.children(value)
        return self.look(known(value))

    def item(self, holder: Value, key: Value) -> Value:
        """Return ``holder[key]``."""
        self.look(key)
        number = key.values[0] if isinstance(key, Known) and len(key.values) == 1 else None
        match holder:
            case Data():
                return holder
            case Row(values) if type(number) is int and -len(values) <= number < len(values):
                return values[number]
            case Row() | Group() | List():
                found = self.elements(holder)
                if type(number) is slice:
                    return List(found) if isinstance(holder, List) else Group(found)
                return found
            case Known(values) if all(isinstance(one, nn.Module) for one in values):
                found = join([self._child(cast(nn.Module, one), number) for one in values])
                return Group(found) if type(number) is slice else found
        return self.read(holder)

    def _child(self, module: nn.Module, key: Any) -> Value:
        if not isinstance(module, allowed.CONTAINERS):
            raise Unproven(f"an item of a {type(module).__name__}")
        self.check_container(module)
        children = list(vars(module)["_modules"].values())
        if type(key) is int and not isinstance(module, nn.ModuleDict) and -len(children) <= key < len(children):
            return known(children[key])
        if type(key) is str and isinstance(module, nn.ModuleDict) and key in vars(module)["_modules"]:
            return known(vars(module)["_modules"][key])
        return self.children(module)

    def children(self, module: nn.Module) -> Value:
        """Return the children of ``module``: any of them."""
        found = tuple(vars(module)["_modules"].values())
        return Known(found) if found else DATA

    # ------------------------------------------------------------------------------------------------------ attributes

    def attribute(self, holder: Value, name: str) -> Value:
        """Return the attribute ``name`` of ``holder``."""
        match holder:
            case Known(values) if all(isinstance(one, nn.Module) for one in values):
                return join([self._of_module(one, name) for one in values])
            case Known(values) if len(values) == 1 and isinstance(values[0], ModuleType | type):
                return self._of_namespace(values[0], name)
            case Parent(kind, owner):
                return join([self._of_parent(one, kind, name) for one in owner.values])
        if isinstance(holder, List) and name in (*STORES, "pop"):
            return ListMethod(name, holder)
        found = self.read(holder)
        self.facts.of_class(Tensor, name, getattr(Tensor, name, MISSING))
        if name in allowed.METHODS:
            return OfTensor(name, DATA if _are_counts(holder) else found)
        if name in allowed.VIEWS:
            return found
        if name in allowed.ATTRIBUTES:
            return DATA
        if name in allowed.INERT:
            return DTYPE
        raise Unproven(f"the attribute {name}")

    def _of_namespace(self, holder: ModuleType | type, name: str) -> Value:
        """Return a name of a Python module, or of a class that holds names only, such as an Enum."""
        if isinstance(holder, ModuleType):
            if name in vars(holder):
                self.facts.of_mapping(vars(holder), name, vars(holder)[name])
                return known(vars(holder)[name])
        elif issubclass(holder, Enum) or holder is Tensor:
            found = getattr(holder, name, MISSING)
            if found is not MISSING:
                self.facts.of_class(holder, name, found)
                return known(found)
        raise Unproven(f"the name {name} of {holder}")

    def _of_module(self, module: nn.Module, name: str) -> Value:
        kind = type(module)
        self.check(module)
        raw = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)
        self.facts.of_class(kind, name, MISSING if raw is MISSING else getattr(kind, name))
        own = vars(module)
        if type(raw) is property:
            assert isinstance(raw.fget, FunctionType)
            return self.call(known(raw.fget), [known(module)], {})
        if name in own and (raw is MISSING or not hasattr(type(raw), "__set__")):
            value = own[name]
            if name in allowed.CONSTANTS and type(value) in (float, int):
                self.facts.of_constant(module, name, value)
                return known(value)
            self.facts.of_module(module, name, value)
            is_data = type(value) in NUMBERS or (type(value) in (list, dict) and is_plain(value))
            return DATA if is_data else self.held(value)
        if raw is not MISSING:
            self.facts.of_module(module, name)
            if isinstance(raw, FunctionType):
                return Method(raw, known(module))
            if isinstance(raw, staticmethod) and isinstance(raw.__func__, FunctionType):
                return known(raw.__func__)
            if hasattr(type(raw), "__get__"):
                raise Unproven(f"the attribute {name} of a {kind.__name__}")
            return self.held(raw)
        self.facts.of_module(module, name)
        if name in own["_modules"]:
            return known(own["_modules"][name])
        for registry in ("_parameters", "_buffers"):
            found = own[registry].get(name, MISSING)
            self.facts.of_tensor(module, registry, name, found)
            if found is not MISSING:
                self._registered.add(id(found))
                return known(found)
        raise Unproven(f"the attribute {name} of a {kind.__name__}")

    def held(self, value: Any) -> Value:
        """Return a value that a module holds."""
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            function = value.__func__
            return Method(function, known(value.__self__)) if isinstance(function, FunctionType) else known(value)
        if type(value) is tuple:
            return Row(tuple(map(self.held, value)))
        return known(value)

    def _of_parent(self, module: nn.Module, kind: type, name: str) -> Value:
        mro = type(module).__mro__
        for base in mro[mro.index(kind) + 1 :]:
            found = vars(base).get(name, MISSING)
            self.facts.of_mapping(vars(base), name, found)
            if found is not MISSING:
                if isinstance(found, FunctionType):
                    return Method(found, known(module))
                break
        raise Unproven(f"{name} of super()")

    def method_of(self, module: nn.Module, name: str) -> FunctionType:
        """Return the function of a method that is called on ``module``."""
        found = self._of_module(module, name)
        if not isinstance(found, Method) or found.owner != known(module):
            raise Unproven(f"the {name} of a {type(module).__name__}")
        return found.function

    def check(self, module: nn.Module) -> None:
        """Check that a module looks up its attributes, and runs, as torch's own do."""
        kind = type(module)
        if id(module) not in self.parts:
            raise Unproven(f"a {kind.__name__} that is no part of the model")
        if len(USUAL) < len(LOOKUPS.split()):
            raise Unproven("other code than torch's calls modules")
        for name, usual in USUAL.items():
            self.facts.of_class(kind, name, usual)
            if getattr(kind, name) is not usual:
                raise Unproven(f"the {name} of a {kind.__name__}")
        if any(callable(getattr(kind, name, None)) for name in vars(module)):
            raise Unproven(f"a method of a single {kind.__name__}")
        if not self.facts.of_tensors(module):
            raise Unproven(f"the parameters of a {kind.__name__}")

    def check_container(self, module: nn.Module) -> None:
        """Check that a container of modules lists its children as torch's own do."""
        self.check(module)
        base = next(base for base in allowed.CONTAINERS if isinstance(module, base))
        for name in ("__iter__", "__getitem__", "__len__", "children", "keys", "values", "items"):
            usual = getattr(base, name, None)
            if getattr(type(module), name, None) is not usual:
                raise Unproven(f"the {name} of a {type(module).__name__}")
            if usual is not None:
                self.facts.of_class(type(module), name, usual)


# How torch looks up the attributes of a module and calls it.
LOOKUPS = "__call__ __getattr__ __getattribute__ _call_impl"
USUAL = dict(zip(LOOKUPS.split(), allowed.found_in(nn.Module, LOOKUPS), strict=False))
STORES = ("append", "extend", "insert")
# Functions whose arguments at certain places count, and where ``inplace`` stands among them.
INPLACE_AT = {F.relu: 1, F.silu: 1, F.mish: 1, F.relu6: 1, F.selu: 1, F.hardswish: 1, F.hardsigmoid: 1, F.leaky_relu: 2}
INPLACE_AT |= {F.elu: 2, F.celu: 2, F.dropout: 3, F.alpha_dropout: 3, F.dropout1d: 3, F.dropout2d: 3, F.dropout3d: 3}
INPLACE_AT |= {F.threshold: 3, F.hardtanh: 3}
CHECKED = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm, F.embedding, *INPLACE_AT, *allowed.EPS)


def _are_counts(value: Value) -> bool:
    """Whether these are tensors of integers, which no recipe reads, such as the number of batches of a norm."""
    return isinstance(value, Known) and all(isinstance(one, Tensor) and one.dtype == torch.long for one in value.values)


def _are_equal(a: Any, b: Any) -> bool | None:
    fixed = (str, bool, type(None))
    if type(a) in fixed and type(b) in fixed:
        return bool(a == b)
    if isinstance(a, Enum) and type(a) is type(b) and type(a).__eq__ is object.__eq__:
        return a is b
    return None


def tensors_in(value: Value) -> Iterable[Tensor]:
    """Return the tensors that are known to be, or to be in, ``value``."""
    match value:
        case Known(values):
            return [tensor for one in values for tensor in _in_object(one)]
        case Row(values):
            return [tensor for one in values for tensor in tensors_in(one)]
        case Group(one):
            return tensors_in(one)
        case List():
            return () if value.value is None else tensors_in(value.value)
    return ()


def _in_object(value: Any) -> Iterable[Tensor]:
    if type(value) is tuple:
        return [tensor for one in value for tensor in _in_object(one)]
    return (value,) if isinstance(value, Tensor) else ()
