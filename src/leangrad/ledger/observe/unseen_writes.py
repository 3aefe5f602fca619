"""Whether the code of a model names a way to write into a tensor past its version, which only the override sees.

Where nothing is left to rebuild the override may be taken away (``learn/early_end.py``), if no such write can follow.
Nobody can tell that from the steps that were seen: a codebook may be written anew once in a thousand. So the code that
forward can reach is looked through for names: ``.data``, ``.numpy()``, ``data_ptr`` and their kin. Followed are methods
of a module's class, functions and classes that are called by their global name, closures, and what stands in attributes
and hooks of the module. Code of torch and of leangrad itself is known: it writes no parameters that way in forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

WAYS = "data numpy __array__ __dlpack__ to_dlpack from_dlpack from_numpy data_ptr storage untyped_storage set_"
OTHERS = "swap_tensors _unsafe_preserve_version_counter ctypes exec eval"
NAMES = frozenset((*WAYS.split(), *OTHERS.split()))
KNOWN = frozenset(("torch", "leangrad", "builtins", "typing", "collections", "functools", "math", "warnings"))
MOST = 2000  # functions, above which nobody knows


def may_write_unseen(module: nn.Module) -> bool:
    """Whether the forward of ``module`` may write into memory in a way that moves no version."""
    stack: list[tuple[Any, Any]] = []  # what may be called, and the class whose method it is
    for one in module.modules():
        stack += [(callable_, type(one)) for callable_ in _entries(one)]
    seen: set[Any] = set()
    while stack:
        found, owner = stack.pop()
        for function in _functions_in(found):
            if (function, owner) in seen or _is_known(function):
                continue
            seen.add((function, owner))
            names = set(_names_in(function.__code__))
            if names & NAMES or len(seen) > MOST:
                return True
            stack += _reached(function, owner, names)
    return False


def _entries(module: nn.Module) -> Iterator[Any]:
    """What a call of a module runs: its forward, its hooks, and functions among its attributes."""
    yield type(module).__call__
    yield module.forward
    yield type(module).__getattr__
    for value in vars(module).values():
        if isinstance(value, dict):  # hooks among them
            yield from value.values()
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
    if isinstance(found, type):
        if _is_known(found) or issubclass(found, nn.Module):  # the modules of a model are looked at one by one
            return ()
        return [f for value in vars(found).values() if not isinstance(value, type) for f in _functions_in(value)]
    if isinstance(found, nn.Module | ModuleType | BuiltinFunctionType) or found is None:
        return ()
    inner = [getattr(found, name, None) for name in ("func", "__wrapped__")]  # of a partial, of a decorated function
    called = inspect.getattr_static(type(found), "__call__", None)
    return [f for one in (*inner, called) if isinstance(one, FunctionType | MethodType) for f in _functions_in(one)]


def _reached(function: FunctionType, owner: Any, names: set[str]) -> Iterator[tuple[Any, Any]]:
    """What ``function``, a method of ``owner`` maybe, may call."""
    for name in names:
        for base in getattr(owner, "__mro__", ()):  # all of them: there may be a call of super()
            method = vars(base).get(name)
            if isinstance(method, FunctionType | staticmethod | classmethod | property):
                yield method, owner
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            if not _is_known(value):
                yield from ((getattr(value, other), None) for other in names if hasattr(value, other))
        elif callable(value):
            yield value, None
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents, owner
        except ValueError:  # it is empty
            continue
    yield getattr(function, "__wrapped__", None), owner


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant in NAMES:  # getattr(x, "data")
            yield constant


def _is_known(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] in KNOWN
