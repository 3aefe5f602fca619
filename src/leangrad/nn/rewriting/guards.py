"""What a forward read while it was traced, and whether it is still so."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

__all__ = ["CLASS", "KEYS", "MISSING", "MODULE", "TENSOR", "Global", "Guard", "is_plain", "submodule"]

PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.memory_format, type(None))
MODULE, TENSOR, MISSING, KEYS, CLASS = "<module>", "<tensor>", "<missing>", "<keys>", "<class>"


@dataclass(frozen=True)
class Guard:
    """An attribute that forward read: of the submodule `path`, with this value.

    value: the value, if it is plain; MODULE for a module; TENSOR for a parameter or a buffer; MISSING if there was no
        such attribute; the function, for a function or a method. For the name KEYS it is the names of a container's
        children, and for CLASS the class.
    """

    path: str
    name: str
    value: Any

    def holds(self, module: nn.Module) -> bool:
        """Whether the attribute still has this value."""
        owner = submodule(module, self.path) if self.path else module
        if owner is None:
            return False
        name, value = self.name, self.value
        if name == KEYS:
            return bool(tuple(owner._modules) == value)
        if name == CLASS:
            kind = type(owner)
            return getattr(kind, "_abn_recipe", (kind,))[0] is value
        if value == TENSOR:
            return owner._parameters.get(name) is not None or owner._buffers.get(name) is not None
        now = getattr(owner, name, MISSING)
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            return getattr(now, "__func__", now) is value
        if value == MODULE:
            return isinstance(now, nn.Module)
        return type(now) is type(value) and bool(now == value)


@dataclass(frozen=True)
class Global:
    """A function that forward, or a function that it calls, finds by a global name."""

    module: str
    name: str
    function: Any

    def namespace(self) -> dict[str, Any]:
        """Returns the dict that has the name."""
        return vars(importlib.import_module(self.module))

    def holds(self) -> bool:
        """Whether the name still has this function."""
        return self.namespace().get(self.name) is self.function


def is_plain(value: object) -> bool:
    """Whether a value cannot change, and compares by what it is.

    >>> is_plain((1, "a", None)), is_plain([1])
    (True, False)
    """
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Returns the descendant at `path`, None if there is none; `get_submodule` takes ten times as long."""
    found: nn.Module | None = module
    for part in path.split("."):
        found = None if found is None else found._modules.get(part)
    return found
