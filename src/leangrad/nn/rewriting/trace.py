"""`trace(module)`: the operations of a module's forward, and what it read on the way.

The trace is made by torch.fx, with the children of the module as leaves. torch.fx runs forward once and records what
is done with its tensors. Whatever else decides what forward does would be lost, so:

- arguments with a default have their default; the caller checks that they have it again.
- Every attribute of the module, or of a child, that forward reads is noted with its value, if that is a number, a
  string, None, or a function (``reads``, ``guards``). A list, a dict or any other object could change unseen: the
  module is refused. `training` counts as True.
- Each function is looked at before it runs (``functions``), and its source is read (``source_check``). Functions that
  torch calls back are refused, and C functions outside of torch and of Python's own types (time, NumPy).
- An op on a real tensor (a constant, a counter, a random draw) is refused.
- A stand-in for a tensor raises where code makes a constant of it (``stand_ins``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from leangrad.nn.rewriting.frames import UntraceableError
from leangrad.nn.rewriting.functions import Functions
from leangrad.nn.rewriting.guards import Global, Guard, is_plain
from leangrad.nn.rewriting.reads import Reads
from leangrad.nn.rewriting.source_check import why_not_traceable
from leangrad.nn.rewriting.stand_ins import StandIn

__all__ = ["Trace", "trace"]


@dataclass(frozen=True)
class Trace:
    """A recorded forward: `graph` takes the arguments `required`; all others had their defaults."""

    graph: fx.Graph
    required: tuple[str, ...]
    guards: tuple[Guard, ...]
    globals: tuple[Global, ...]


def trace(module: nn.Module) -> Trace:
    """Record the forward of `module`; raises UntraceableError if it may do more than the record shows."""
    if "forward" in vars(module):
        raise UntraceableError("its parent's forward was replaced on the instance")
    forward = getattr(type(module), "forward", None)
    if not inspect.isfunction(forward):
        raise UntraceableError("its parent's forward is no function")
    code, scope = forward.__code__, forward.__globals__
    if reason := why_not_traceable(code, scope, is_forward=True):
        raise UntraceableError(reason)
    tracer = _Tracer(module, _required(forward))
    tracer.functions.note(code, scope)
    try:
        graph = tracer.trace(module)
    except UntraceableError:
        raise
    except Exception as error:  # the user's code may raise anything on what is no tensor
        reason = f"its forward cannot be traced ({type(error).__name__}: {error})"
        raise UntraceableError(reason) from error
    guards, functions = tracer.reads.guards.values(), tracer.functions.globals.values()
    return Trace(graph, tracer.required, tuple(guards), tuple(functions))


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
        elif not is_plain(p.default):
            raise UntraceableError(f"the default of `{p.name}` may change")
    return tuple(names)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, module: nn.Module, required: tuple[str, ...]) -> None:
        super().__init__()
        self.required = required
        self.reads, self.functions = Reads(module), Functions()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        self.reads.check_call(m)
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return StandIn(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        def _run_forward(*args: Any) -> Any:
            with _NoTensors(), self.reads, self.functions:
                result = root_fn(*args)
            _check_result(result)
            return result

        return _run_forward, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self.required)]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            raise UntraceableError("its forward uses a tensor that is no parameter, buffer or argument")
        return super().create_arg(a)


def _check_result(value: Any) -> None:
    """Raise UntraceableError if the generated code would return an object of another class."""
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    if type(value) in (tuple, list) or is_named:
        for one in value:
            _check_result(one)
    elif type(value) is dict:
        for one in value.values():
            _check_result(one)
    elif not (isinstance(value, fx.Proxy) or is_plain(value)):
        raise UntraceableError(f"its forward returns a {type(value).__name__}")


class _NoTensors(TorchDispatchMode):
    """Refuses ops on real tensors: their results would be constants of the trace."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UntraceableError(f"its forward calls {func} on what is no argument")
