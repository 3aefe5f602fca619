"""Stand-ins for tensors while a forward is traced: torch.fx's proxies, made strict about what they cannot record."""

from __future__ import annotations

import ast
import inspect
import operator
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

from torch import Tensor, fx
from torch.fx.graph import inplace_methods

from leangrad.nn.rewriting.frames import UntraceableError, is_of_model

__all__ = ["IN_PLACE", "StandIn"]

TENSOR_NAMES = frozenset(dir(Tensor))


class _Strict:
    """What differs from fx's own stand-ins.

    `x += y` changes x; with fx's own it would be `x = x + y`. To hash one, or to write it into a string, raises: code
    that looks up `{torch.float16: ...}[x.dtype]`, or compares `str(x.device)`, would take a branch that it takes for no
    tensor. The message of an assertion may show it.
    """

    def __hash__(self) -> int:
        _refuse("hashes")
        return object.__hash__(self)

    def __repr__(self) -> str:
        _refuse("formats")
        return fx.Proxy.__repr__(self)  # type: ignore[arg-type]

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        _refuse("formats")
        return fx.Proxy.__repr__(self)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if type(self) is StandIn and name not in TENSOR_NAMES and is_of_model(sys._getframe(1)):
            raise UntraceableError(f"its forward reads `.{name}` of what may be no tensor")
        attribute = _AttributeStandIn(self, name)  # type: ignore[arg-type]
        if not callable(getattr(Tensor, name, None)):
            attribute.node  # noqa: B018  (fx would read it when it is first used: a shape may have changed by then)
        return attribute


class StandIn(_Strict, fx.Proxy):
    """Stands for a tensor."""


class _AttributeStandIn(_Strict, fx.proxy.Attribute):
    """Stands for an attribute of a tensor, or a method of it."""


def _refuse(what: str) -> None:
    frame = sys._getframe(2)
    if is_of_model(frame) and not any(first <= frame.f_lineno <= last for first, last in _assertions(frame.f_code)):
        raise UntraceableError(f"its forward {what} a property of a tensor in line {frame.f_lineno} of its file")


@cache
def _assertions(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Returns the first and the last line of each call of a function `...assert` in a function."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ()
    start = code.co_firstlineno - 1
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func).endswith("assert")]
    return tuple((start + node.lineno, start + (node.end_lineno or node.lineno)) for node in calls)


def _name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    change = getattr(operator, name)

    def write(target: Any, other: Any) -> Any:
        return change(target, other)

    write.__name__ = write.__qualname__ = name
    return write


# Functions of this module, and not those of `operator`, which fx writes as statements: `x += y` with a number for x
# would give x, and all else that has the same number, a new value.
IN_PLACE = {name: _in_place(name) for name in inplace_methods if name != "setitem"}
globals().update(IN_PLACE)  # fx writes `leangrad.nn.rewriting.stand_ins.iadd` into the code, and pickle looks there too


def _record_change(name: str) -> Callable[[Any, Any], Any]:
    def change(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", IN_PLACE[name], (self, other), {})

    return change


for _change in IN_PLACE:
    setattr(_Strict, f"__{_change}__", _record_change(_change))
