"""Whether the code of a model names a way to write into a tensor past its version, which only the override sees.

Where nothing is left to rebuild the override may be taken away (``learn/early_end.py``), if no such write can follow.
Nobody can tell that from the steps that were seen: a codebook may be written anew once in a thousand. So the code that
forward can reach is looked through for names: ``.data``, ``.numpy()``, ``data_ptr`` and their kin. Followed are the
forward of each module, methods of that name of any class in the model, functions and classes that are called by their
global name, closures, and what stands in attributes and hooks of a module. Code of torch and of leangrad itself is
known: it writes no parameters that way in forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

WAYS = "data numpy __array__ __dlpack__ to_dlpack from_dlpack from_numpy data_ptr storage untyped_storage set_"
OTHERS = "swap_tensors _unsafe_preserve_version_counter ctypes exec eval"
NAMES = frozenset((*WAYS.split(), *OTHERS.split()))
KNOWN = frozenset(("torch", "leangrad", "builtins", "typing", "collections", "functools", "math", "warnings"))
MOST = 5000  # functions, above which nobody knows


def may_write_unseen(module: nn.Module) -> bool:
    """Whether the forward of ``module`` may write into memory in a way that moves no version."""
    parts = list(module.modules())
    methods = _methods(parts)
    stack: list[Any] = [entry for part in parts for entry in _entries(part)]
    seen: set[FunctionType] = set()
    while stack:
        for function in _functions_in(stack.pop()):
            if function in seen or _is_known(function):
                continue
            seen.add(function)
            names = set(_names_in(function.__code__))
            if names & NAMES or len(seen) > MOST:
                return True
            for name in names:
                stack += methods.get(name, ())
            stack += _reached(function, names)
    return False


def _methods(parts: Iterable[nn.Module]) -> dict[str, list[Any]]:
    """Methods of the classes of modules, and of other objects that they have, by name: a call says no more."""
    kinds = {kind for part in parts for one in (part, *vars(part).values()) for kind in type(one).__mro__}
    found: dict[str, list[Any]] = {}
    for kind in kinds:
        if not _is_known(kind):
            for name, method in vars(kind).items():
                found.setdefault(name, []).append(method)
    return found


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
        yield from (one for one in value.values() if not isinstance(one, Tensor | nn.Module))
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
    if isinstance(found, type):
        if _is_known(found) or issubclass(found, nn.Module):  # the modules of a model are looked at one by one
            return ()
        return [f for value in vars(found).values() if not isinstance(value, type) for f in _functions_in(value)]
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
    return isinstance(name, str) and name.partition(".")[0] in KNOWN
