"""Static check whether a model's code may write into a tensor without moving its version counter.

Only the function mode sees such a write. If nothing is left to rebuild, the function mode may be removed before forward
has ended (``learn/early_end.py``), but only if no such write can follow. Recorded steps do not show that: a model may
rewrite a codebook once in a thousand steps. So this module searches the code that forward can reach for names:
``.data``, ``.numpy()``, ``data_ptr`` and the like.

The search follows the forward of each module, and its `training_step`; functions that are called by a global name,
imported on the way, or given as defaults; closures; and the values of attributes and hooks of a module, also inside
containers, objects and other modules. It meets the classes of the model's modules and of such objects, and classes that
are named on the way. Of each of these it follows every method that a searched function names, and those that Python
calls by itself. It does not follow code in the files of torch, of Python's standard library, of leangrad and of the
other packages in ``KNOWN``: that code does not write to parameters in this way in forward, except for a few functions,
which are among the names. If such a function is wrapped around another, as by ``@torch.no_grad()``, the other one is
searched.

The user's own code is held to more. If it computes the name of an attribute (``getattr(self, f"update_{mode}")``), uses
NumPy, or has a function under another name (``to_array = Tensor.numpy``), the answer is that it may write.

[Note: names that are not known] A method may belong to an object that the search never meets: one that is passed to
forward, or made by a library. So every attribute that the user's own code names has to belong to something that the
search has met, or to a common type: tensors, numbers, containers. If one does not, the answer is that the code may
write. (Installed libraries name many attributes and import many modules for objects and devices that their forward
never meets. Their code is searched for the names, but unknown attributes and imports in it do not count.)
"""

from __future__ import annotations

import builtins
import copy
import dis
import operator
import os
import sys
import typing
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor, nn

# Names that give access to the memory of a tensor past its version counter.
WAYS = "data numpy __array__ __dlpack__ to_dlpack from_dlpack from_numpy data_ptr storage untyped_storage set_"
WAYS += " _typed_storage __cuda_array_interface__"
UNSAFE_SPLITS = "unsafe_chunk unsafe_split unsafe_split_with_sizes"  # their parts share memory and are no views
OTHERS = "swap_tensors _unsafe_preserve_version_counter ctypes exec eval"
TORCHS = "vector_to_parameters _apply to_empty share_memory_ _set_data"  # functions of torch that write so themselves
NAMES = frozenset((*WAYS.split(), *UNSAFE_SPLITS.split(), *OTHERS.split(), *TORCHS.split()))
# Builtins by which the user's own code may reach any attribute, and functions that make such functions.
SETTERS = "setattr vars globals locals __dict__ __getattribute__ __import__ import_module compile"
BY_NAME = frozenset(SETTERS.split())
MAKERS = (operator.attrgetter, operator.methodcaller)
# Methods of a module that move or convert it, and so write its parameters.
MODULES = "to cuda cpu half float double bfloat16 type apply"
MOVES = frozenset(MODULES.split())
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")  # bytecode instructions that read an attribute
CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION", "CALL_FUNCTION_EX", "PRECALL", "KW_NAMES")
LOADS = ("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF")
BACK = 4  # instructions to look back from a method to the name of its module: ``self.blocks[0].half()``
KNOWN = frozenset(("torch", "leangrad", "sympy", "huggingface_hub", "builtins"))
LOSSES = "transformers.loss"  # the table of all its losses, which every model of it reaches; none writes what it reads
# Methods of modules that are not searched: they write only what they make, or run before forward does.
BEFORE = ("__init__", "__init_subclass__")
MOST = 5000  # searched functions; with more the answer is that the code may write
MOST_VALUES = 50_000  # the same limit for values of attributes and globals
CONTAINERS = (dict, OrderedDict, defaultdict)
SEQUENCES = (list, tuple, set, frozenset, deque)
FUNCTIONS = (FunctionType, MethodType, staticmethod, classmethod, partial)
PLAIN = (str, bytes, int, float, complex, bool, type(None), Tensor, torch.dtype, torch.device, torch.Size)
LEFT_ALONE = (*PLAIN, ModuleType, CodeType)
_EMPTY = CellType()  # a cell of a closure that has no value yet
# The common types of [Note: names that are not known].
COMMON: tuple[Any, ...] = (*PLAIN, *CONTAINERS, *SEQUENCES, nn.Module, nn.Parameter, slice, range, type, BaseException)
COMMON += (FunctionType, torch.Generator, torch.autograd.function.FunctionCtx, torch.finfo, torch.iinfo)


def may_write_unseen(module: nn.Module) -> bool:
    """Whether the forward of ``module`` may write into memory without moving a version counter."""
    try:
        return _Search(module).finds_a_way()
    except Exception:  # an attribute of the user's may raise anything when it is looked into
        return True


class Uses(typing.NamedTuple):
    """The names that a piece of code uses."""

    all: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[str]
    moves: frozenset[str]  # what a method of ``MOVES`` is called on: ``blocks`` in ``self.blocks.half()``
    computes_names: bool  # whether it reads an attribute by a name that is not written in the code


class _Search:
    """A search through the functions that the forward of a model can reach."""

    def __init__(self, model: nn.Module) -> None:
        parts = list(model.modules())
        self._stack: list[Any] = []
        self._names: set[str] = set()  # names that the searched functions use
        self._attributes: set[str] = set()  # names of attributes that the user's own functions read
        self._belong: set[str] = set(_common_names())  # names of attributes of everything that was met
        self._kinds: set[type] = set()  # classes that were met
        # Methods of these classes, by name: a call does not say which class it means.
        self._methods: dict[str, list[Any]] = {}
        self._values: dict[Any, Any] = {}  # values that were looked into, by id
        self._children = {name for part in parts for name, _ in part.named_children()} | {"self"}
        for part in parts:
            self._look(part)

    def _add_module(self, part: nn.Module) -> None:
        """Add a module that was met, of the model or not: it may be called, and so may what its attributes hold."""
        self._stack += _entries(part)
        self._add(type(part))
        self._belong.update(vars(part))
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for name, one in (*tensors, *part.named_children()):
            self._belong.add(name)
            self._add(type(one))
        for value in vars(part).values():
            self._look(value)

    def finds_a_way(self) -> bool:
        seen: set[FunctionType] = set()
        wrappers: set[FunctionType] = set()  # of known packages: only what they are wrapped around is searched
        while self._stack:
            found = self._stack.pop()
            if isinstance(found, type):
                self._add(found)
                continue
            if not isinstance(found, FunctionType | MethodType | staticmethod | classmethod | property):
                self._look(found)
            for function in _functions_in(found):
                if function in seen or function in wrappers:
                    continue
                if _is_known(function):
                    wrappers.add(function)
                    self._stack += _wrapped_in(function)
                    continue
                seen.add(function)
                uses, is_users = _uses_of(function.__code__), not _is_installed(function.__code__)
                if uses.all & NAMES or len(seen) > MOST:
                    return True
                if is_users and (uses.moves & self._children or _is_opaque(function, uses)):
                    return True
                for name in uses.all - self._names:
                    self._stack += self._methods.get(name, ())
                self._names |= uses.all
                if is_users:
                    self._attributes |= uses.attributes
                if not self._reach(function, uses) or len(self._values) > MOST_VALUES:
                    return True
        return not self._attributes <= self._belong

    def _add(self, kind: type) -> None:
        """Add a class that was met: its methods may be called.

        Those that a searched function names are searched, and those that Python calls by itself.
        """
        for base in kind.__mro__:
            if base in self._kinds:
                continue
            self._kinds.add(base)
            self._belong.update(vars(base))
            if isinstance(hints := vars(base).get("__annotations__"), dict):  # such as the fields of a dataclass
                self._belong.update(hints)
            for name, method in vars(base).items():
                if _is_known(base) and (not isinstance(method, FunctionType) or _is_known(method)):
                    continue  # but not a method that a user has added to a class of torch's
                if name in BEFORE and issubclass(base, nn.Module):
                    continue
                self._methods.setdefault(name, []).append(method)
                if name in self._names or (not isinstance(method, type) and _is_called_unnamed(base, name)):
                    self._stack.append(method)

    def _look(self, value: Any) -> None:
        """Look into the value of a global or an attribute: it may be called, and so may its methods and its contents.

        The contents of a container with a class of its own are read as Python's own container holds them: the class may
        import a library for them, or compute them.
        """
        if isinstance(value, LEFT_ALONE) or id(value) in self._values:
            return
        self._values[id(value)] = value
        if isinstance(value, nn.Module):
            self._add_module(value)
            return
        if isinstance(value, type):
            self._stack.append(value)
            return
        for one in _contents(value):
            self._look(one)
        if type(value) not in (*CONTAINERS, *SEQUENCES):
            if isinstance(value, MethodType):
                self._look(value.__self__)
            if callable(value):
                self._stack.append(value)
            self._add(type(value))
            if type(value) is SimpleNamespace or type(value).__module__ == "functools" or not _is_known(type(value)):
                inside = getattr(value, "__dict__", {})
                self._belong.update(inside)
                for one in list(inside.values()):
                    self._look(one)

    def _reach(self, function: FunctionType, uses: Uses) -> bool:
        """Look into the globals, imports, closure and defaults of ``function``; ``uses``: the names that it uses.

        Returns False if the user's own code imports a module that is not loaded, whose code is therefore not known.
        """
        for name in uses.all:
            self._follow(function.__globals__.get(name), uses)
        package = function.__globals__.get("__package__") or ""
        for name in () if _is_installed(function.__code__) else uses.imports:
            found = [sys.modules[n] for n in (name, name.partition(".")[0], f"{package}.{name}") if n in sys.modules]
            if not found:
                return False
            for module in found:
                self._follow(module, uses)
        for cell in function.__closure__ or ():
            try:
                self._follow(cell.cell_contents, uses)
            except ValueError:  # it is empty
                continue
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._look(value)
        self._look(getattr(function, "__wrapped__", None))
        return True

    def _follow(self, value: Any, uses: Uses) -> None:
        """Look into the value of a global; of a module, into those of its names that are in ``uses``."""
        if not isinstance(value, ModuleType):
            self._look(value)
            return
        for name in uses.all & vars(value).keys():
            self._belong.add(name)
            found = vars(value)[name]
            if isinstance(found, ModuleType) and found is not value and (id(found), id(uses)) not in self._values:
                self._values[id(found), id(uses)] = found, uses
                self._follow(found, uses)
            elif not _is_known(value):
                self._look(found)


@cache
def _common_names() -> frozenset[str]:
    return frozenset(name for kind in COMMON for name in dir(kind)) | set(dir(builtins))


def _is_called_unnamed(kind: type, name: str) -> bool:
    """Whether code that is not searched may call a method: Python itself, or a known class whose method it overrides.

    Of a module torch calls only ``forward``; of other classes more, such as ``setup_context`` of an autograd Function.
    """
    if name == "forward" or (name.startswith("__") and name.endswith("__")):
        return True
    return not issubclass(kind, nn.Module) and any(name in vars(base) for base in kind.__mro__ if _is_known(base))


def _entries(module: nn.Module) -> Iterator[Any]:
    """Yield what a call of a module runs. Its hooks are not among these: they are found in its attributes."""
    yield type(module).__call__
    yield module.forward
    yield type(module).__getattr__
    yield getattr(type(module), "training_step", None)


def _functions_in(found: Any) -> Iterable[FunctionType]:
    """Return the Python functions that run if ``found`` is called."""
    if isinstance(found, FunctionType):
        return (found,)
    if isinstance(found, MethodType | staticmethod | classmethod):
        return _functions_in(found.__func__)
    if isinstance(found, property):
        return [f for part in (found.fget, found.fset, found.fdel) for f in _functions_in(part)]
    if isinstance(found, nn.Module | Tensor | BuiltinFunctionType | type):
        return ()
    if isinstance(found, partial):
        return [f for one in (found.func, *found.args, *found.keywords.values()) for f in _functions_in(one)]
    called = [vars(kind).get("__call__") for kind in type(found).__mro__]
    inside = getattr(found, "__dict__", {}).values()  # of a decorator object, or a `functools.partialmethod`
    return [f for one in (*inside, *called) if isinstance(one, FunctionType | MethodType) for f in _functions_in(one)]


def _wrapped_in(function: FunctionType) -> Iterator[Any]:
    """Yield the functions that ``function`` is wrapped around: those in its closure, also in a container there."""
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    for value in (getattr(function, "__wrapped__", None), *held):
        yield from (one for one in (value, *_contents(value)) if isinstance(one, FUNCTIONS))


def _contents(value: Any) -> list[Any]:
    """Return what a container holds; of one with a class of an installed library, nothing.

    A copy: another thread may be registering a hook.
    """
    if type(value) not in (*CONTAINERS, *SEQUENCES) and _is_installed_file(_file_of(type(value))):
        return []
    if isinstance(value, dict):
        return [*dict.values(value)]
    if isinstance(value, MappingProxyType):
        return [*value.values()]
    kinds: tuple[Any, ...] = SEQUENCES
    return next(([*kind.__iter__(value)] for kind in kinds if isinstance(value, kind)), [])


def _is_opaque(function: FunctionType, uses: Uses) -> bool:
    """Whether a function of the user's own may reach what it does not name; ``uses``: the names that it uses."""
    if uses.computes_names or uses.all & BY_NAME:
        return True
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    named = [function.__globals__[name] for name in uses.all & function.__globals__.keys()]
    imported = [sys.modules.get(name.partition(".")[0]) for name in uses.imports]
    return any(_is_a_way(value, uses) for value in (*cells, *given, *named, *imported))


def _is_a_way(value: Any, uses: Uses) -> bool:
    """Whether a value in the user's own code is NumPy, or a function of `NAMES` or of `copy` under another name."""
    if isinstance(value, ModuleType):
        return value.__name__ == "numpy" or (value is copy and "copy" in uses.all)
    module = getattr(value, "__module__", None) or ""
    is_numpys = isinstance(module, str) and module.partition(".")[0] == "numpy"
    name = getattr(value, "__name__", None)
    is_other_name = isinstance(name, str) and name in NAMES and callable(value)
    return value is copy.copy or isinstance(value, MAKERS) or is_numpys or is_other_name


def _is_installed(code: CodeType) -> bool:
    """Whether ``code`` is that of an installed library."""
    return _is_installed_file(code.co_filename)


def _is_installed_file(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep))


def _file_of(kind: type) -> str:
    """Return the file of the module that defines a class; empty: it has none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _asked_of(steps: list[tuple[str, Any]]) -> str | None:
    """Return the name of the object whose attribute the next instruction reads; None if it is not known.

    It is ``x`` in ``self.x.half()`` and in ``self.x[0].half()``.

    steps: the instructions before that one, as name of the instruction and argument.
    """
    is_indexed = False
    for opname, name in reversed(steps):
        if "SUBSCR" in opname or opname == "BINARY_OP":
            is_indexed = True
        elif opname in ATTRIBUTES or (opname.startswith("LOAD_FAST") and not is_indexed):
            return str(name)
        elif "CALL" in opname:
            return None
    return None


@cache
def _uses_of(code: CodeType) -> Uses:
    names, attributes, imports, moves = set(code.co_names), set[str](), set[str](), set[str]()
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    for opname, name in steps:
        if opname in ATTRIBUTES:
            attributes.add(name)
        elif opname == "IMPORT_NAME":
            imports.add(name)
    attributes -= {name for opname, name in steps if opname == "STORE_ATTR"}  # it is set, so no method
    computes_names = _computes_names(steps)
    for at, (_, name) in enumerate(steps):
        if name in MOVES:
            moves.add(_asked_of(steps[max(0, at - BACK) : at]) or "")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _uses_of(constant)
            names |= inner.all
            attributes |= inner.attributes
            imports |= inner.imports
            moves |= inner.moves
            computes_names |= inner.computes_names
        elif isinstance(constant, str) and constant in NAMES:  # getattr(x, "data")
            names.add(constant)
    if not _is_installed(code):  # for name in ("data", "grad")
        names.update(NAMES.intersection(_strings_in_tuples(steps)))
    return Uses(frozenset(names), frozenset(attributes), frozenset(imports), frozenset(moves), computes_names)


def _strings_in_tuples(steps: list[tuple[str, Any]]) -> Iterator[str]:
    """Yield the strings in the constant tuples of a code, but for the names of keywords in a call."""
    for (opname, constant), (after, _) in zip(steps, (*steps[1:], ("", None)), strict=True):
        if opname == "LOAD_CONST" and after != "CALL_KW" and isinstance(constant, tuple | frozenset):
            yield from (one for one in constant if isinstance(one, str))


def _computes_names(steps: list[tuple[str, Any]]) -> bool:
    """Whether ``getattr`` is used other than in a call with a name that is a constant."""
    for at, (_, name) in enumerate(steps):
        if name != "getattr":
            continue
        end = next((n for n in range(at + 1, len(steps)) if steps[n][0] in CALLS), len(steps))
        before = steps[at + 1 : end]
        if before and before[-1][0] in LOADS and len(before) > 2 and isinstance(before[-2][1], str):
            before = before[:-1] if before[-2][0] == "LOAD_CONST" else before  # its default
        if not before or before[-1][0] != "LOAD_CONST" or not isinstance(before[-1][1], str):
            return True
    return False


def _is_known(thing: Any) -> bool:
    """Whether a module, class or function is that of a package that is not searched; a function by its file."""
    if isinstance(thing, FunctionType):
        return _is_known_file(thing.__code__.co_filename)
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    if not isinstance(name, str):
        return False
    package = name.partition(".")[0]
    return package in KNOWN or name.startswith(LOSSES) or _is_pythons_own(package)


@cache
def _is_known_file(file: str) -> bool:
    if file.startswith("<frozen "):
        return True
    folders = [*(path for name in KNOWN if (path := _folder_of(name))), os.path.dirname(os.__file__)]
    losses = os.path.join(_folder_of(LOSSES.partition(".")[0]) or os.sep, *LOSSES.split(".")[1:])
    inside = os.path.abspath(file)
    if {"site-packages", "dist-packages"} & set(os.path.relpath(inside, os.path.dirname(os.__file__)).split(os.sep)):
        folders = folders[:-1]
    return any(inside.startswith(folder + os.sep) for folder in (*folders, losses))


def _folder_of(package: str) -> str | None:
    file = getattr(sys.modules.get(package), "__file__", None)
    return None if file is None else os.path.dirname(os.path.abspath(file))


@cache
def _is_pythons_own(package: str) -> bool:
    """Whether ``package`` is part of Python's standard library, and not another file of that name."""
    if package not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is None or os.path.dirname(os.__file__) in (
        os.path.dirname(file),
        os.path.dirname(os.path.dirname(file)),
    )
