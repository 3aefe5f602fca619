"""The search through all that a forward may call."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad import _torch
from leangrad.ledger.observe.proof import allowed, python_calls
from leangrad.ledger.observe.proof.expressions import Names
from leangrad.ledger.observe.proof.facts import DIFFERENT, MISSING
from leangrad.ledger.observe.proof.frame import Frame
from leangrad.ledger.observe.proof.lookups import INPLACE_AT, Lookups, tensors_in
from leangrad.ledger.observe.proof.source import tree_of
from leangrad.ledger.observe.proof.static_values import (
    DATA,
    GIVEN,
    NOTHING,
    Data,
    Group,
    Known,
    ListMethod,
    Method,
    NoKeywords,
    OfTensor,
    Row,
    Unproven,
    Value,
    as_data,
    join,
    key_of,
    known,
    merge,
)

__all__ = ["Search"]

DEEPEST = 60  # calls inside each other
MOST_CALLS = 50_000


class Search(Lookups):
    """A search through the functions that the forward of a model runs; `Unproven` is raised where it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[Any, Value] = {}
        self._kept: list[Any] = []  # what the keys of ``_results`` name by id
        self._depth = self._calls = 0
        self._statistics: dict[int, Tensor] = {}  # see [Note: running statistics]

    def run(self, module: nn.Module) -> None:
        """Follow a call of ``module`` with any data."""
        self.parts = {id(part) for part in module.modules()}
        self.note_constant(allowed.COPY, allowed.MEMORY_FORMAT, known(torch.contiguous_format))  # of torch's own copies
        self.check(module)
        if _torch.has_hooks_of_others(module) or "forward" in vars(module):
            raise Unproven("hooks of the model, or a forward of its own")
        if type(module) in allowed.MODULES or isinstance(module, allowed.CONTAINERS):
            self._call_module(module, [GIVEN], {})
        else:
            self._run(*self._given(module))
        if self._statistics.keys() & self._read.keys():
            raise Unproven("running statistics are read")

    def _given(self, module: nn.Module) -> tuple[FunctionType, Names]:
        """Return the forward of ``module``, and what its parameters stand for: any data."""
        function = self.method_of(module, "forward")
        code = function.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        given = merge([GIVEN, *(as_data(self.held(one)) for one in defaults)])
        names: Names = dict.fromkeys(code.co_varnames[1:count], given)
        names[code.co_varnames[0]] = known(module)
        for flag in (VARARGS, VARKEYWORDS):
            if code.co_flags & flag:
                names[code.co_varnames[count]] = GIVEN
                count += 1
        return function, names

    # ----------------------------------------------------------------------------------------------------------- calls

    def call(self, callee: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Return what a call of ``callee`` returns."""
        match callee:
            case Method(function, owner):
                return self._call_method(function, owner, args, kwargs)
            case OfTensor(name, holder):
                return self._call_of_tensor(name, holder, args, kwargs)
            case ListMethod(name, held) if not kwargs:
                if name == "pop":
                    return self.elements(held)
                held.add(self.elements(args[-1]) if name == "extend" else args[-1])
                return NOTHING
            case Known(values) if values:
                return join([self._call_one(one, args, kwargs) for one in values])
        raise Unproven(f"a call of {callee}")

    def _call_one(self, callee: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if isinstance(callee, nn.Module):
            return self._call_module(callee, args, kwargs)
        if any(callee is one for one in allowed.NEVER):
            return known(False)
        try:
            special = python_calls.SPECIAL.get(callee)
        except TypeError:
            raise Unproven(f"a call of {callee!r}") from None
        if special is not None:
            return special(self, args, kwargs)
        if id(callee) in allowed.FUNCTIONS:
            return self._call_allowed(callee, args, kwargs)
        if isinstance(callee, FunctionType):
            return self._call_function(callee, args, kwargs)
        raise Unproven(f"a call of {callee!r}")

    def _call_allowed(self, function: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if "out" in kwargs or "max_norm" in kwargs or len(args) > WRITES_AT.get(function, sys.maxsize):
            raise Unproven(f"{function.__name__} writes into an argument")
        if "memory_format" in kwargs and function in (Tensor.to, Tensor.float):
            raise Unproven(f"{function.__name__} with a memory format, which no node stores")
        if function in (torch.batch_norm, torch.instance_norm):
            raise Unproven(f"torch.{function.__name__}")
        if function in (F.batch_norm, F.instance_norm):
            statistics = [*args[1:3], *(kwargs.pop(name) for name in ("running_mean", "running_var") if name in kwargs)]
            for one in statistics:
                as_data(one)
                self._statistics.update((id(tensor), tensor) for tensor in tensors_in(one))
                if isinstance(one, Data):
                    raise Unproven("running statistics that are computed")
            bias = args[4] if len(args) > 4 else kwargs.get("bias", NOTHING)
            self.note_constant(allowed.BATCH_NORM, allowed.BIAS, bias if function is F.batch_norm else DATA)
            args = [*args[:1], *args[3:]]
        if function in allowed.EPS:
            node, place = allowed.EPS[function]
            eps = args[place] if len(args) > place else kwargs.get("eps", known(self._default_of(function)))
            self.note_constant(node, "eps", eps)
        self._note_copy(function, kwargs)
        look = self.look if function in allowed.FRESH else self.read
        found = merge(map(look, (*args, *kwargs.values())))
        changes = function.__name__.endswith("_") or self.truth(kwargs.get("inplace", known(False))) is not False
        if found.is_held and (changes or len(args) > INPLACE_AT.get(function, sys.maxsize)):
            raise Unproven(f"{function.__name__} may change what others hold")
        if function in allowed.FRESH:
            return DATA
        return Data(found.may_be_dtype or function in allowed.OF_DTYPES, found.is_held)

    def _own(self, module: nn.Module, name: str) -> Any:
        """Return an attribute of one of torch's own layers, which lies in its dictionary, and note it as a fact."""
        kind = type(module)
        self.facts.of_class(kind, name, getattr(kind, name, MISSING))
        if isinstance(getattr(kind, name, None), property) or name not in vars(module):
            raise Unproven(f"the {name} of a {kind.__name__}")
        self.facts.of_module(module, name, vars(module)[name])
        return vars(module)[name]

    def _default_of(self, norm: Any) -> Any:
        """Return the eps of a call of ``norm`` without one, and note as a fact what it is."""
        if not isinstance(norm, FunctionType):
            return allowed.DEFAULT_EPS[norm]
        self.facts.of_function(norm)
        return (norm.__defaults__ or (DIFFERENT,))[-1]

    def _note_copy(self, function: Any, kwargs: dict[str, Value]) -> None:
        """Note the memory format of a copy that ``function`` may make: see [Note: one constant]."""
        if function in allowed.OTHER_COPIES:
            self.note_constant(allowed.COPY, allowed.MEMORY_FORMAT, DATA)
        elif function in allowed.COPIES:
            form = kwargs.get("memory_format", known(allowed.COPIES[function]))
            self.note_constant(allowed.COPY, allowed.MEMORY_FORMAT, form)

    def _call_of_tensor(self, name: str, holder: Data, args: list[Value], kwargs: dict[str, Value]) -> Value:
        found = merge(map(self.read, (*args, *kwargs.values())))
        if "memory_format" in kwargs and name not in ("contiguous", "clone"):
            raise Unproven(f"{name} with a memory format, which no node stores")
        self._note_copy(getattr(Tensor, name, None), kwargs)
        if "out" in kwargs or (found.may_be_dtype and name in NO_DTYPE):
            raise Unproven(f"{name} with a dtype")
        if name.endswith("_") and holder.is_held:
            raise Unproven(f"{name} may change what others hold")
        if name in STORING and merge([holder, found]) != holder:
            raise Unproven(f"{name} stores what others hold")
        if name in allowed.FRESH_METHODS:
            return DATA
        return merge([holder, found])

    def _call_method(self, function: FunctionType, owner: Known, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return join([self._call_of_module(function, one, args, kwargs) for one in owner.values])

    def _call_of_module(
        self, function: FunctionType, module: nn.Module, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        if function not in CHILDREN:
            return self._call_function(function, [known(module), *args], kwargs)
        if args or kwargs:
            raise Unproven(f"{function.__name__} with arguments")
        if isinstance(module, allowed.CONTAINERS):
            self.check_container(module)
        values = self.children(module)
        return Group(values if CHILDREN[function] else Row((DATA, values)))

    def _call_module(self, module: nn.Module, args: list[Value], kwargs: dict[str, Value]) -> Value:
        self.check(module)
        if _torch.has_hooks_of_others(module) or "forward" in vars(module):
            raise Unproven(f"the hooks or the forward of a {type(module).__name__}")
        kind = type(module)
        if kind in allowed.MODULES:
            return self._call_layer(module, args, kwargs)
        if isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward:
            self.facts.of_class(kind, "forward", kind.forward)
            self.check_container(module)
            [value], none = args, kwargs
            if none:
                raise Unproven("keywords of a Sequential")
            for child in vars(module)["_modules"].values():
                if child is not None:
                    value = self._call_module(child, [value], {})
            return value
        return self._call_function(self.method_of(module, "forward"), [known(module), *args], kwargs)

    def _call_layer(self, module: nn.Module, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Return what a call of one of torch's own layers returns."""
        kind = type(module)
        usual: Any = allowed.MODULES[kind]
        self.facts.of_class(kind, "forward", usual)
        self.facts.of_function(usual)
        for name in usual.__code__.co_names:
            for holder in (usual.__globals__, vars(F)):
                if name in holder:
                    self.facts.of_mapping(holder, name, holder[name])
        if kind.forward is not usual:
            raise Unproven(f"the forward of a {kind.__name__}")
        found = merge(map(self.read, (*args, *kwargs.values())))
        if found.is_held and "inplace" in vars(module) and self._own(module, "inplace") is not False:
            raise Unproven(f"a {kind.__name__} changes what others hold")
        if kind is nn.Embedding and self._own(module, "max_norm") is not None:
            raise Unproven("an embedding that changes its weight")
        self._note_layer(module)
        return Data(is_held=found.is_held and kind not in allowed.FRESH_MODULES)

    def _note_layer(self, module: nn.Module) -> None:
        """Note the constants of the nodes that a layer makes, and running statistics: see [Note: one constant]."""
        kind = type(module)
        if isinstance(module, allowed.NORMS):
            tensors = [module.running_mean, module.running_var]
            self._statistics.update((id(one), one) for one in tensors if one is not None)
            bias = vars(module)["_parameters"].get("bias", MISSING)
            self.facts.of_tensor(module, "_parameters", "bias", bias)
            is_batch_norm = isinstance(module, allowed.BATCH_NORMS)
            self.note_constant(allowed.BATCH_NORM, allowed.BIAS, known(bias) if is_batch_norm else DATA)
        if kind in allowed.EPS_OF_LAYERS:
            node, function = allowed.EPS_OF_LAYERS[kind]
            eps = self._own(module, "eps")
            self.facts.of_constant(module, "eps", eps)
            self.facts.of_function(function)
            self.note_constant(node, "eps", known(eps))
        if kind is nn.GroupNorm:
            self._note_copy(F.group_norm, {})

    def _call_function(self, function: FunctionType, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return self._run(function, self._bind(function, args, kwargs))

    def _run(self, function: FunctionType, names: Names) -> Value:
        key = function, tuple((name, key_of(value)) for name, value in names.items())
        if key in self._results:
            return self._results[key]
        self._calls += 1
        tree = tree_of(function)
        if tree is None or self._depth >= DEEPEST or self._calls > MOST_CALLS:
            raise Unproven(f"the source of {function.__qualname__}")
        self.facts.of_function(function)
        self._kept.append((key, names))
        self._depth += 1
        try:
            found = Frame(self, function, names).run(tree)
        finally:
            self._depth -= 1
        self._results[key] = found
        return found

    def _bind(self, function: FunctionType, args: list[Value], kwargs: dict[str, Value]) -> Names:
        """Return what the parameters of ``function`` stand for."""
        code = function.__code__
        positional, count = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
        parameters = code.co_varnames[:count]
        defaults = dict(zip(parameters[:positional][::-1], (function.__defaults__ or ())[::-1], strict=False))
        defaults |= function.__kwdefaults__ or {}
        names: Names = {name: self.held(value) for name, value in defaults.items()}
        names |= dict(zip(parameters[:positional], args, strict=False))
        more, others = args[positional:], {name: v for name, v in kwargs.items() if name not in parameters}
        names |= {name: value for name, value in kwargs.items() if name in parameters}
        if code.co_flags & VARARGS:
            names[code.co_varnames[count]] = Row(tuple(more))
            count, more = count + 1, []
        if code.co_flags & VARKEYWORDS:
            names[code.co_varnames[count]] = NoKeywords()
        if more or others or code.co_posonlyargcount or not set(parameters) <= names.keys():
            raise Unproven(f"the arguments of {function.__qualname__}")
        return names


VARARGS, VARKEYWORDS = 0x04, 0x08
WRITES_AT = {F.embedding: 2, F.normalize: 4}  # from this place on their arguments may say what they write into
STORING = frozenset(("append", "extend", "insert", "setdefault", "update"))  # methods of lists and dictionaries
NO_DTYPE = STORING | {"view", "view_as"}
# Methods of modules that list their children; whether they list them without names.
CHILDREN: dict[Any, bool] = {
    nn.Module.children: True,
    nn.Module.named_children: False,
    nn.ModuleDict.values: True,
    nn.ModuleDict.items: False,
}
