"""`trace(module)`: the operations of a module's forward, and what it read on the way.

The trace is made by torch.fx, with the children of the module as leaves. torch.fx runs forward once and records what
is done with its tensors. Whatever else decides what forward does would be lost, so:

- arguments with a default have their default; the caller checks that they have it again.
- Every attribute of the module, or of a child, that forward reads is noted with its value, if that is a number, a
  string, or None. `Guard.holds` compares them again. A list, a dict or any other object could change unseen: the
  module is refused. `training` counts as True.
- An op on a real tensor (a constant, a counter, a random draw) is refused, and so is a call of a C function outside of
  torch and of Python's own types (time, NumPy, random numbers).
- `source_check` reads the source of each function that ran.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import inplace_methods
from torch.utils._python_dispatch import TorchDispatchMode

from leangrad.nn.rewriting.source_check import why_not_traceable

__all__ = ["IN_PLACE", "Guard", "Trace", "UntraceableError", "submodule", "trace"]

TORCH = os.path.dirname(torch.__file__) + os.sep
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.memory_format, type(None))
PLAIN_C = ("builtins", "math", "operator", "_operator", "itertools", "_functools", "torch")
ENTRIES = ("_run_forward", "_get_attribute")  # functions of this file that run code of the user's
MODULE, TENSOR, MISSING, KEYS = "<module>", "<tensor>", "<missing>", "<keys>"


class UntraceableError(Exception):
    """The reason why a forward cannot be replaced by its trace."""


@dataclass(frozen=True)
class Guard:
    """An attribute that forward read: of the submodule `path`, with this value.

    value: the value, if it is plain; MODULE for a module; TENSOR for a parameter or a buffer; MISSING if there was no
        such attribute. For a method it is the function, and for the name KEYS the names of a container's children.
    """

    path: str
    name: str
    value: Any

    def holds(self, module: nn.Module) -> bool:
        """Whether the attribute still has this value."""
        owner = submodule(module, self.path) if self.path else module
        if owner is None:
            return False
        if self.name == KEYS:
            return bool(tuple(owner._modules) == self.value)
        now = getattr(owner, self.name, MISSING)
        if isinstance(self.value, FunctionType):
            return getattr(now, "__func__", now) is self.value
        if self.value in (MODULE, TENSOR):
            return isinstance(now, nn.Module if self.value == MODULE else Tensor)
        return type(now) is type(self.value) and bool(now == self.value)


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Returns the descendant at `path`, None if there is none; `get_submodule` takes ten times as long."""
    found: nn.Module | None = module
    for part in path.split("."):
        found = None if found is None else found._modules.get(part)
    return found


@dataclass(frozen=True)
class Trace:
    """A recorded forward: `graph` takes the arguments `required`; all others had their defaults."""

    graph: fx.Graph
    required: tuple[str, ...]
    guards: tuple[Guard, ...]


def trace(module: nn.Module) -> Trace:
    """Record the forward of `module`; raises UntraceableError if it may do more than the record shows."""
    if "forward" in vars(module):
        raise UntraceableError("its parent's forward was replaced on the instance")
    forward = type(module).forward
    if not inspect.isfunction(forward):
        raise UntraceableError("its parent's forward is no function")
    if reason := why_not_traceable(forward.__code__, forward.__globals__):
        raise UntraceableError(reason)
    required = _required(forward)
    tracer = _Tracer(module, required)
    try:
        graph = tracer.trace(module)
    except UntraceableError:
        raise
    except Exception as error:  # the user's code may raise anything on what is no tensor
        reason = f"its forward cannot be traced ({type(error).__name__}: {error})"
        raise UntraceableError(reason) from error
    tracer.functions.check()
    return Trace(graph, required, tuple(tracer.reads.guards.values()))


def _required(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments without a default, except self."""
    names = []
    for p in list(inspect.signature(forward).parameters.values())[1:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise UntraceableError(f"its parent's forward takes `*{p.name}`")
        if p.default is p.empty:
            if p.kind is p.KEYWORD_ONLY:
                raise UntraceableError(f"its parent's forward needs the keyword `{p.name}`")
            names.append(p.name)
        elif not _is_plain(p.default):
            raise UntraceableError(f"the default of `{p.name}` may change")
    return tuple(names)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


# ---- torch.fx -------------------------------------------------------------------------------------------------------


class _Proxy(fx.Proxy):
    """fx's stand-in for a tensor, but `x += y` changes x; with fx's own it would be `x = x + y`."""


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    change = getattr(operator, name)

    def write(target: Any, other: Any) -> Any:
        return change(target, other)

    write.__name__ = write.__qualname__ = name
    return write


# Functions of this module, and not those of `operator`, which fx writes as statements: `x += y` with a number for x
# would give x, and all else that has the same number, a new value.
IN_PLACE = {name: _in_place(name) for name in inplace_methods if name != "setitem"}
globals().update(IN_PLACE)  # fx writes `leangrad.nn.rewriting.trace.iadd` into the code, and pickle looks there too


def _record_change(name: str) -> Callable[[Any, Any], Any]:
    def change(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", IN_PLACE[name], (self, other), {})

    return change


for _name in IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _record_change(_name))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, module: nn.Module, required: tuple[str, ...]) -> None:
        super().__init__()
        self.required = required
        self.reads, self.functions = _Reads(module), _Functions()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        def _run_forward(*args: Any) -> Any:
            with _NoTensors(), self.reads, self.functions:
                return root_fn(*args)

        return _run_forward, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self.required)]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            raise UntraceableError("its forward uses a tensor that is no parameter, buffer or argument")
        return super().create_arg(a)


class _NoTensors(TorchDispatchMode):
    """Refuses ops on real tensors: their results would be constants of the trace."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UntraceableError(f"its forward calls {func} on what is no argument")


# ---- what forward reads ---------------------------------------------------------------------------------------------


class _Reads:
    """Notes the attributes of a module and of its children that code outside of torch reads, while it is entered."""

    def __init__(self, module: nn.Module) -> None:
        self.guards: dict[tuple[str, str], Guard] = {}
        self._modules = dict(module.named_modules())
        self._paths = {m: path for path, m in self._modules.items()}

    def __enter__(self) -> None:
        classes: dict[type, type] = {}
        self._changed: list[tuple[nn.Module, type]] = []
        try:
            for module in self._modules.values():
                cls = type(module)
                watched = classes.get(cls) or classes.setdefault(cls, self._watched(cls))
                object.__setattr__(module, "__class__", watched)
                self._changed.append((module, cls))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for module, cls in self._changed:
            object.__setattr__(module, "__class__", cls)

    def _watched(self, cls: Any) -> type:
        reads = self

        def _get_attribute(module: nn.Module, name: str) -> Any:
            if name == "__class__":
                return cls
            return reads.note(module, name, cls.__getattribute__(module, name), sys._getframe(1))

        def get_other(module: nn.Module, name: str) -> Any:
            caller = sys._getframe(1)
            try:
                value = cls.__getattr__(module, name)
            except AttributeError:
                reads.note(module, name, MISSING, caller)
                raise
            return reads.note(module, name, value, caller)

        def write(module: nn.Module, name: str, value: object) -> None:
            raise UntraceableError(f"its forward writes to `.{name}`")

        body = {
            "__getattribute__": _get_attribute,
            "__getattr__": get_other,
            "__setattr__": write,
            "__delattr__": write,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        watched: type = type(cls)(cls.__name__, (cls,), body)
        return watched

    def note(self, module: nn.Module, name: str, value: Any, caller: FrameType) -> Any:
        """Note that `caller` reads `value`; returns what it gets."""
        path = self._paths.get(module, "")
        if caller.f_code.co_filename.startswith(TORCH):
            if name == "_modules" and isinstance(module, CONTAINERS):
                self.guards.setdefault((path, KEYS), Guard(path, KEYS, tuple(value)))
            return value
        if name == "training":
            value = True
        function = getattr(value, "__func__", value) if isinstance(value, MethodType) else value
        if isinstance(function, FunctionType):
            if function.__code__.co_filename.startswith(TORCH):
                if not isinstance(module, CONTAINERS):
                    raise UntraceableError(f"its forward calls `.{name}` of a module")
            else:
                self.guards.setdefault((path, name), Guard(path, name, function))
            return value
        if not (_is_plain(value) or isinstance(value, (nn.Module, Tensor, fx.Proxy))):
            raise UntraceableError(f"its forward reads `.{name}`, a {type(value).__name__}, which may change")
        kept = value if _is_plain(value) else MODULE if isinstance(value, nn.Module) else TENSOR
        self.guards.setdefault((path, name), Guard(path, name, kept))
        return value


class _Functions:
    """Notes the functions outside of torch that run in this thread while it is entered; `check` reads their source."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, dict[str, Any]] = {}
        self._reason = ""

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._note)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "c_call") or (file := frame.f_code.co_filename) == __file__:
            return
        if event == "call" and file.endswith(os.path.join("utils", "checkpoint.py")) and file.startswith(TORCH):
            self._reason = "its forward uses torch.utils.checkpoint"
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_name not in ENTRIES:
            if caller.f_code.co_filename.startswith((TORCH, __file__)):
                return  # called by torch, or by this file
            caller = caller.f_back
        if event == "call":
            self._codes.setdefault(frame.f_code, frame.f_globals)
        elif not _is_plain_c(arg):
            self._reason = self._reason or f"its forward calls {arg!r}"

    def check(self) -> None:
        """Raise UntraceableError if one of the functions may do more than a trace shows."""
        if self._reason:
            raise UntraceableError(self._reason)
        # Functions inside of others are read with these.
        nested = {inner for code in self._codes for inner in code.co_consts if isinstance(inner, CodeType)}
        for code, scope in self._codes.items():
            if code not in nested and (reason := why_not_traceable(code, scope)):
                raise UntraceableError(reason)


def _is_plain_c(function: Any) -> bool:
    """Whether a C function is one of torch, or of Python's types and operators."""
    owner = getattr(function, "__self__", None) or getattr(function, "__objclass__", None)
    if owner is None or inspect.ismodule(owner):
        module = getattr(owner, "__name__", None) or getattr(function, "__module__", None) or "builtins"
    else:
        module = (owner if isinstance(owner, type) else type(owner)).__module__
    return module.partition(".")[0] in PLAIN_C or module in PLAIN_C
