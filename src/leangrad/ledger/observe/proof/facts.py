"""What a proof relies on: names and what they stood for. Each step compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

__all__ = ["DIFFERENT", "MISSING", "NUMBERS", "PLAIN", "Facts", "is_plain"]

MISSING, GONE, DIFFERENT = object(), object(), object()
NUMBERS = (int, float, complex)  # their values may change, unlike those of bool, str and None
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
COMPARED = (float, int, type(None), torch.memory_format)  # classes of the constants of nodes
OTHER = object()  # stands for any other value in `key_of`
EXACT = {Tensor, nn.Parameter, type(None)}  # the classes of tensors; others may run code of their own in each op


class _Function(NamedTuple):
    at: ref[FunctionType]
    code: CodeType
    defaults: Any
    keywords: dict[str, Any]  # the defaults of arguments that are passed by name only
    closure: list[Callable[[], Any]]

    def differs(self) -> bool:
        function = self.at()
        return (
            function is None
            or function.__code__ is not self.code
            or function.__defaults__ is not self.defaults
            or not _are_same(function.__kwdefaults__ or {}, self.keywords)
            or any(
                _content(cell) is not was() for cell, was in zip(function.__closure__ or (), self.closure, strict=True)
            )
        )


class Facts:
    """Names that a proof has looked up, with what was found; ``hold`` looks them up again.

    It keeps no module and no function alive. For a number only its class counts, unless it is the eps of a norm. Hooks,
    children and forwards of single instances are not among the facts: `ForwardCode` compares them.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[int, str]] = set()
        # Names in the dictionaries of modules: those that are not there, and those that are, with their values.
        self._of_modules: dict[int, tuple[ref[nn.Module], set[str], list[tuple[str, Any]]]] = {}
        self._functions_of: list[tuple[ref[nn.Module], str, Callable[[], Any]]] = []
        self._numbers: list[tuple[ref[nn.Module], str, type]] = []
        self._constants: list[tuple[ref[nn.Module], str, Any]] = []  # numbers whose values count, and None
        self._of_nodes: dict[tuple[str, str], Any] = {}  # ``DIFFERENT``: not known, or not one
        self._lists: list[tuple[ref[nn.Module], str, Any]] = []
        self._tensors: list[tuple[ref[nn.Module], str, str, type]] = []  # parameters and buffers, with their classes
        self._with_tensors: dict[int, ref[nn.Module]] = {}
        self._buffers: list[Any] = []  # the buffers of these modules, in order
        self._of_mappings: list[tuple[Mapping[str, Any], str, Callable[[], Any]]] = []
        self._of_classes: list[tuple[type, str, Any]] = []
        self._functions: list[_Function] = []

    def of_module(self, module: nn.Module, name: str, value: Any = MISSING) -> None:
        """Note that the dictionary of ``module`` has this value under ``name``, or nothing."""
        if not self._is_new(module, name):
            return
        if is_plain(value) and type(value) in (list, dict):
            self._lists.append((ref(module), name, key_of(value)))
        elif type(value) in NUMBERS:
            self._numbers.append((ref(module), name, type(value)))
        elif isinstance(value, nn.Module | FunctionType):
            self._functions_of.append((ref(module), name, ref(value)))
        else:
            _, absent, held = self._of_modules.setdefault(id(module), (ref(module), set(), []))
            if value is MISSING:
                absent.add(name)
            else:
                held.append((name, value))

    def of_constant(self, module: nn.Module, name: str, value: float | None) -> None:
        """Note that the dictionary of ``module`` has just this number, or None, under ``name``."""
        if self._is_new(module, f"{name}="):
            self._constants.append((ref(module), name, value))

    def of_node(self, node: str, name: str, values: Iterable[Any]) -> None:
        """Note that a call that makes nodes of type ``node`` has one of ``values`` as its constant ``name``."""
        for value in values:
            known = self._of_nodes.setdefault((node, name), value)
            if type(value) not in COMPARED or type(known) is not type(value) or known != value:
                self._of_nodes[node, name] = DIFFERENT

    @property
    def of_nodes(self) -> dict[tuple[str, str], Any]:
        """By type of node and name, the one value of a constant that no node stores: see [Note: one constant]."""
        return {key: value for key, value in self._of_nodes.items() if value is not DIFFERENT}

    def of_tensor(self, module: nn.Module, registry: str, name: str, value: Any) -> None:
        """Note that ``module`` has a parameter or buffer of this class under ``name``, or None, or nothing."""
        if self._is_new(module, f"{registry}.{name}"):
            self._tensors.append((ref(module), registry, name, type(value)))

    def of_mapping(self, mapping: Mapping[str, Any], name: str, value: Any = MISSING) -> None:
        """Note that ``mapping``, the names of a file or of a Python module, has this value under ``name``."""
        if self._is_new(mapping, name):
            self._of_mappings.append((mapping, name, _reference(value)))

    def of_class(self, kind: type, name: str, value: Any) -> None:
        """Note that ``getattr(kind, name)`` is ``value``."""
        if self._is_new(kind, name):
            self._of_classes.append((kind, name, value))

    def of_function(self, function: FunctionType) -> None:
        """Note the code of ``function``, its defaults and what its closure holds."""
        if self._is_new(function, ""):
            closure = [_reference(_content(cell)) for cell in function.__closure__ or ()]
            keywords = dict(function.__kwdefaults__ or {})
            self._functions.append(
                _Function(ref(function), function.__code__, function.__defaults__, keywords, closure)
            )

    def of_tensors(self, module: nn.Module) -> bool:
        """Note the parameters and buffers of ``module``; returns whether all are of torch's own classes."""
        own = vars(module)
        tensors = [*own["_parameters"].values(), *own["_buffers"].values()]
        if tensors and id(module) not in self._with_tensors:
            self._with_tensors[id(module)] = ref(module)
            self._buffers += own["_buffers"].values()
        return {type(one) for one in tensors} <= EXACT

    def hold(self) -> bool:
        """Whether every name still stands for what it stood for."""
        try:
            return self._hold()
        except (AttributeError, KeyError):  # a module has been freed, or is another
            return False

    def _hold(self) -> bool:
        for at, absent, held in self._of_modules.values():
            own = at().__dict__
            if not own.keys().isdisjoint(absent):
                return False
            for name, value in held:
                if own.get(name, MISSING) is not value:
                    return False
        for at, name, was in self._functions_of:
            if (value := was()) is None or at().__dict__.get(name) is not value:
                return False
        for at, name, kind in self._numbers:
            if type(at().__dict__.get(name)) is not kind:
                return False
        for at, name, constant in self._constants:
            value = at().__dict__.get(name, MISSING)
            if type(value) is not type(constant) or value != constant:
                return False
        for at, registry, name, kind in self._tensors:
            if type(at().__dict__[registry].get(name, MISSING)) is not kind:
                return False
        for at, name, was in self._lists:
            if key_of(at().__dict__.get(name)) != was:
                return False
        for kind, name, was in self._of_classes:
            if getattr(kind, name, MISSING) is not was:
                return False
        for mapping, name, was in self._of_mappings:
            if mapping.get(name, MISSING) is not was():
                return False
        return not any(one.differs() for one in self._functions) and self._have_tensors()

    def _have_tensors(self) -> bool:
        """Whether the modules have the same buffers, and parameters of torch's own class."""
        every = [at().__dict__ for at in self._with_tensors.values()]
        kinds = {type(one) for own in every for one in own["_parameters"].values()}
        buffers = [one for own in every for one in own["_buffers"].values()]
        return kinds <= EXACT and len(buffers) == len(self._buffers) and all(map(is_, buffers, self._buffers))

    def _is_new(self, holder: Any, name: str) -> bool:
        key = id(holder), name
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both have the same names for the same objects."""
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a number or a string, or a list, tuple or dictionary of such."""
    if type(value) is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return type(value) in PLAIN


def key_of(value: Any) -> Any:
    """Return something to compare with another ``value``; no code of the user's runs for that."""
    if type(value) is dict:
        return tuple((key_of(key), key_of(one)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value), tuple(map(key_of, value))
    return (type(value), value) if type(value) in PLAIN else OTHER


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return MISSING


def _reference(value: Any) -> Callable[[], Any]:
    """Return what gives ``value`` as long as it lives; modules and functions are not kept alive."""
    if not isinstance(value, nn.Module | FunctionType):
        return lambda: value
    at = ref(value)
    return lambda: GONE if (found := at()) is None else found
