"""Notes what a forward reads of its module and of the children, while it is traced: `Reads`."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any

from torch import Tensor, fx, nn

from leangrad.nn.rewriting.frames import TORCH, UntraceableError, is_of_model
from leangrad.nn.rewriting.guards import CLASS, KEYS, MISSING, MODULE, TENSOR, Guard, is_plain

__all__ = ["QuietBase", "Reads"]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class QuietBase:
    """First base of a generated class: the `__init_subclass__` of its other bases does not run."""

    def __init_subclass__(cls, **named: Any) -> None:
        """Do nothing."""


class Reads:
    """Notes the attributes of a module and of its descendants that the model's code reads, while it is entered."""

    def __init__(self, module: nn.Module) -> None:
        self.guards: dict[tuple[str, str], Guard] = {}
        named = list(module.named_modules(remove_duplicate=False))
        self._paths = {m: path for path, m in reversed(named)}
        self._counts = Counter(id(m) for _, m in named)

    def __enter__(self) -> None:
        classes: dict[type, type] = {}
        self._changed: list[tuple[nn.Module, type]] = []
        try:
            for module in self._paths:
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

    def check_call(self, module: nn.Module) -> None:
        """Raise UntraceableError if a call of this child would not be recorded as what it is."""
        path = self._paths.get(module, "")
        if self._counts[id(module)] > 1:
            raise UntraceableError(f"its forward calls `{path}`, which has other names too")
        for kind in type(module).__mro__:
            if "__call__" in vars(kind) and not kind.__module__.startswith("torch."):
                raise UntraceableError(f"its forward calls `{path}`, whose class has a `__call__` of its own")

    def _watched(self, cls: Any) -> type:
        reads = self

        def _get_attribute(module: nn.Module, name: str) -> Any:
            caller = sys._getframe(1)
            if name == "__class__":
                if is_of_model(caller):
                    raise UntraceableError("its forward reads the class of a module")
                return cls
            return reads.note(cls, module, name, cls.__getattribute__(module, name), caller)

        def get_other(module: nn.Module, name: str) -> Any:
            caller = sys._getframe(1)
            try:
                value = cls.__getattr__(module, name)
            except AttributeError:
                reads.note(cls, module, name, MISSING, caller)
                raise
            return reads.note(cls, module, name, value, caller)

        def write(module: nn.Module, name: str, *value: object) -> None:
            raise UntraceableError(f"its forward writes to `.{name}`")

        def equal(module: nn.Module, other: object) -> bool:
            if module is not other and is_of_model(sys._getframe(1)):
                raise UntraceableError("its forward compares modules")
            return module is other

        body = {
            "__getattribute__": _get_attribute,
            "__getattr__": get_other,
            "__setattr__": write,
            "__delattr__": write,
            "__eq__": equal,
            "__hash__": object.__hash__,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        watched: type = type(cls)(cls.__name__, (QuietBase, cls), body)
        return watched

    def note(self, cls: type, module: nn.Module, name: str, value: Any, caller: FrameType) -> Any:
        """Note that `caller` reads `value`; returns what it gets."""
        path = self._paths.get(module, "")
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)) and name in ("_size", "_keys"):
            raise UntraceableError(f"its forward depends on the length or the keys of `{path}`")
        if not is_of_model(caller):
            if name == "_modules" and isinstance(module, CONTAINERS):
                self._guard(path, KEYS, tuple(value))
            return value
        if name == "training":
            value = True
        if isinstance(value, nn.Module) and value not in self._paths:
            raise UntraceableError(f"its forward reads `.{name}`, a module that is no child")
        if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType)):
            return self._note_function(cls, module, path, name, value)
        if isinstance(value, fx.Proxy):
            tensors = {**vars(module)["_parameters"], **vars(module)["_buffers"]}
            if name in tensors:  # else a property has computed it; what that read is noted
                self._guard(path, name, TENSOR)
            return value
        static = inspect.getattr_static(cls, name, None)
        if isinstance(static, property) and not _file_of(static.fget).startswith(TORCH):
            return value
        if isinstance(value, Tensor) or not (is_plain(value) or isinstance(value, nn.Module)):
            raise UntraceableError(f"its forward reads `.{name}`, a {type(value).__name__}, which may change")
        self._guard(path, name, MODULE if isinstance(value, nn.Module) else value)
        return value

    def _note_function(self, cls: type, module: nn.Module, path: str, name: str, value: Any) -> Any:
        if isinstance(value, MethodType) and value.__self__ is not module:
            raise UntraceableError(f"its forward reads `.{name}`, a method of another object, which may change")
        function = getattr(value, "__func__", value) if isinstance(value, MethodType) else value
        if isinstance(value, MethodType) and _file_of(function).startswith(TORCH):
            if not isinstance(module, CONTAINERS):
                raise UntraceableError(f"its forward calls `.{name}` of a module")
            return value
        self._guard(path, name, function)
        if path:
            self._guard(path, CLASS, cls)
        return value

    def _guard(self, path: str, name: str, value: Any) -> None:
        self.guards.setdefault((path, name), Guard(path, name, value))


def _file_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else str(code.co_filename)
