"""Whether the code of a model names a way to write into a tensor past its version, which only the override sees.

Where nothing is left to rebuild the override may be taken away (``learn/early_end.py``), if no such write can follow.
Nobody can tell that from the steps that were seen: a codebook may be written anew once in a thousand. So the code that
forward can reach is looked through for names: ``.data``, ``.numpy()``, ``data_ptr`` and their kin. Followed are the
forward of each module, functions that are called by their global name, closures, and what stands in attributes and
hooks of a module. Of a class, that of a part of the model or one that is named on the way, every method that some
function on the way names is followed, and what Python calls by itself. Code of torch, of Python's own library and of
leangrad is known: it writes no parameters that way in forward.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

WAYS = "data numpy __array__ __dlpack__ to_dlpack from_dlpack from_numpy data_ptr storage untyped_storage set_"
OTHERS = "swap_tensors _unsafe_preserve_version_counter ctypes exec eval"
NAMES = frozenset((*WAYS.split(), *OTHERS.split()))
KNOWN = frozenset(("torch", "leangrad", "sympy", "huggingface_hub", "builtins"))
LOSSES = "transformers.loss"  # a table of all its losses, which every model reaches: none writes what it reads
BEFORE = ("__init__", "__init_subclass__")  # of a module: what they write is made there, or nothing has run yet
MOST = 5000  # functions, above which nobody knows


def may_write_unseen(module: nn.Module) -> bool:
    """Whether the forward of ``module`` may write into memory in a way that moves no version."""
    return _Search(module).finds_a_way()


class _Search:
    """Through the functions that the forward of a model can reach."""

    def __init__(self, model: nn.Module) -> None:
        parts = list(model.modules())
        self._stack: list[Any] = [entry for part in parts for entry in _entries(part)]
        self._names: set[str] = set()  # that were met in functions
        self._kinds: set[type] = set()
        self._methods: dict[str, list[Any]] = {}  # of these kinds, by name: a call says no more
        for part in parts:
            for one in (part, *vars(part).values()):
                self._add(type(one))

    def finds_a_way(self) -> bool:
        seen: set[FunctionType] = set()
        while self._stack:
            found = self._stack.pop()
            if isinstance(found, type):
                self._add(found)
                continue
            for function in _functions_in(found):
                if function in seen or _is_known(function):
                    continue
                seen.add(function)
                names = set(_names_in(function.__code__))
                if names & NAMES or len(seen) > MOST:
                    return True
                for name in names - self._names:
                    self._stack += self._methods.get(name, ())
                self._names |= names
                self._stack += _reached(function, names)
        return False

    def _add(self, kind: type) -> None:
        """Some of its methods may be called: those that a function names, and those that Python calls by itself."""
        for base in kind.__mro__:
            if base in self._kinds or _is_known(base):
                continue
            self._kinds.add(base)
            for name, method in vars(base).items():
                if name in BEFORE and issubclass(base, nn.Module):
                    continue
                self._methods.setdefault(name, []).append(method)
                if name in self._names or (not isinstance(method, type) and _is_called_unnamed(base, name)):
                    self._stack.append(method)


def _is_called_unnamed(kind: type, name: str) -> bool:
    """Whether a method may be called by code that is not searched: by Python, or by a known class that it overrides.

    Of a module torch calls forward alone; of an autograd Function, say, ``setup_context`` too.
    """
    if name == "forward" or (name.startswith("__") and name.endswith("__")):
        return True
    return not issubclass(kind, nn.Module) and any(name in vars(base) for base in kind.__mro__ if _is_known(base))


def _entries(module: nn.Module) -> Iterator[Any]:
    """What a call of a module runs: its forward, its hooks, and functions among its attributes."""
    yield type(module).__call__
    yield module.forward
    yield type(module).__getattr__
    for value in vars(module).values():
        yield from _callables(value)


def _callables(value: Any) -> Iterator[Any]:
    """What may be called of a global or an attribute: itself, or what stands in a container, hooks among them.

    Not of a container with a class of its own: to look into one may import a library, or compute what it holds.
    """
    if type(value) in (dict, OrderedDict):
        # A copy: another thread may be registering a hook.
        yield from (one for one in list(value.values()) if not isinstance(one, Tensor | nn.Module))
    elif type(value) in (list, tuple, set):
        yield from (one for one in value if not isinstance(one, Tensor | nn.Module))
    elif callable(value) and not isinstance(value, nn.Module):
        yield value


def _functions_in(found: Any) -> Iterable[FunctionType]:
    """The Python functions that run if ``found`` is called."""
    if isinstance(found, FunctionType):
        return (found,)
    if isinstance(found, MethodType | staticmethod | classmethod):
        return _functions_in(found.__func__)
    if isinstance(found, property):
        return [f for part in (found.fget, found.fset) for f in _functions_in(part)]
    if not callable(found) or isinstance(found, nn.Module | Tensor | BuiltinFunctionType):
        return ()
    if isinstance(found, partial):
        return [f for one in (found.func, *found.args) for f in _functions_in(one)]
    called = [vars(kind).get("__call__") for kind in type(found).__mro__]
    inner = getattr(found, "__dict__", {}).get("__wrapped__")  # of what decorates a function
    return [f for one in (inner, *called) if isinstance(one, FunctionType | MethodType) for f in _functions_in(one)]


def _reached(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """What ``function`` may call by a global name, or has around it."""
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            if not _is_known(value):
                yield from (found for other in names if (found := vars(value).get(other)) is not None)
        else:
            yield from _callables(value)
    for cell in function.__closure__ or ():
        try:
            yield from _callables(cell.cell_contents)
        except ValueError:  # it is empty
            continue
    yield getattr(function, "__wrapped__", None)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant in NAMES:  # getattr(x, "data")
            yield constant


def _is_known(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    if not isinstance(name, str):
        return False
    package = name.partition(".")[0]
    return package in KNOWN or name.startswith(LOSSES) or _is_pythons_own(package)


@cache
def _is_pythons_own(package: str) -> bool:
    """Whether it is part of Python's library, and not a file of that name that somebody else wrote."""
    if package not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is None or os.path.dirname(os.__file__) in (
        os.path.dirname(file),
        os.path.dirname(os.path.dirname(file)),
    )
