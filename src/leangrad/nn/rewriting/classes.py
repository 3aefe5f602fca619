"""Classes of modules whose forward was rewritten: a subclass of the module's own, by `change_class`.

The module stays the same object with the same children. The rewritten forward runs if everything that was read when it
was made is as it was, and the module's own forward if not: with other arguments, a changed flag, hooks on a norm, a
replaced activation. Both mean the same, because a converted norm that is called by other code is a plain batch norm.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from leangrad._torch import graph_task, has_global_hooks, runs_only_its_forward
from leangrad.nn.abn.converted import Act, ConvertedNorm
from leangrad.nn.abn.recipe import rebuilding
from leangrad.nn.rewriting.guards import MODULE, Global, Guard, submodule
from leangrad.nn.rewriting.norm_act import NormAct
from leangrad.nn.rewriting.reads import QuietBase
from leangrad.nn.rewriting.trace import Trace
from leangrad.switch import disabled

__all__ = ["FusedCall", "PairsInSequence", "RewrittenForward", "change_class"]


@dataclass(frozen=True)
class FusedCall:
    """A norm and the activation after it, as paths from the module; `act_path` is None for a function.

    maker: the path and the class of the module that made the norm's input, if the norm runs later than in the original.
    """

    norm: str
    act_path: str | None
    act: Act
    maker: tuple[str, type[nn.Module]] | None = None

    def holds(self, module: nn.Module) -> bool:
        """Whether norm and activation are still those that were fused."""
        norm = submodule(module, self.norm)
        if not isinstance(norm, ConvertedNorm):
            return False
        if self.maker is not None:
            made_by = submodule(module, self.maker[0])
            if type(made_by) is not self.maker[1] or not runs_only_its_forward(made_by):
                return False
        if self.act_path is None:
            return norm.fused_act == self.act and runs_only_its_forward(norm)
        after = submodule(module, self.act_path)
        return after is not None and norm.fuses_with(after)


@dataclass(frozen=True)
class PairsInSequence:
    """The forward of an `nn.Sequential`: a converted norm and its activation are one call, if they still follow it."""

    def forward_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward."""

        def forward(self: nn.Sequential, input: Any) -> Any:
            children = [child for child in self._modules.values() if child is not None]
            i = 0
            while i < len(children):
                child = children[i]
                if isinstance(child, ConvertedNorm) and i + 1 < len(children) and child.fuses_with(children[i + 1]):
                    input = child(input, is_fused=True)
                    i += 1
                else:
                    input = child(input)
                i += 1
            return input

        return forward


@dataclass(frozen=True)
class RewrittenForward:
    """The forward of a module as generated code, and what has to be as it was when the code was made."""

    source: str
    names: _Names
    required: tuple[str, ...]
    guards: tuple[Guard, ...]
    globals: tuple[Global, ...]
    calls: tuple[FusedCall, ...]

    @staticmethod
    def of(trace: Trace, graph: fx.Graph, calls: tuple[FusedCall, ...]) -> RewrittenForward:
        """Returns the forward that runs `graph`, which was made from the graph of `trace`."""
        graph.lint()
        code = graph.python_code("self")
        return RewrittenForward(
            code.src, _Names(code.src, code.globals), trace.required, trace.guards, trace.globals, calls
        )

    def forward_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward."""
        scope = self.names.scope()
        exec(self.source, scope)
        generated = scope["forward"]
        signature = inspect.signature(original)
        count = len(self.required)
        fused = {name for call in self.calls for name in (call.norm, call.act_path)}  # `FusedCall.holds` finds these
        children = [g.name for g in self.guards if g.value == MODULE and not g.path and g.name not in fused]
        others = [g for g in self.guards if g.value != MODULE or g.path]
        functions = [(one.namespace(), one.name, one.function) for one in self.globals]

        def holds(module: nn.Module) -> bool:
            """Whether everything that forward read, and all that was fused, is as it was."""
            modules = module._modules
            for name in children:  # loops: a generator would take twice as long
                if modules.get(name) is None:
                    return False
            for namespace, name, function in functions:
                if namespace.get(name) is not function:
                    return False
            for guard in others:
                if not guard.holds(module):
                    return False
            return all(call.holds(module) for call in self.calls)

        @functools.wraps(original)
        def forward(module: nn.Module, /, *args: Any, **named: Any) -> Any:
            if not holds(module):
                return original(module, *args, **named)
            inputs = args if len(args) == count and not named else self.inputs(signature, module, args, named)
            if inputs is None or not all(isinstance(value, Tensor) for value in inputs):
                return original(module, *args, **named)
            return generated(module, *inputs)

        return forward

    def inputs(
        self, signature: inspect.Signature, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Returns the arguments that have no default; None if one of the others has not its default."""
        try:
            given = signature.bind(module, *args, **named).arguments
        except TypeError:
            return None  # the module's own forward raises
        for name, parameter in signature.parameters.items():
            if parameter.default is not parameter.empty and name in given and given[name] is not parameter.default:
                return None
        return tuple(given[name] for name in self.required)


def _must_be_original() -> bool:
    """Whether someone looks at the calls of modules: a compiler, a tracer, a global hook; or all shall be plain."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return torch.compiler.is_compiling() or disabled() or tracing or has_global_hooks()


Rewrite = PairsInSequence | RewrittenForward | NormAct | None
Rebuilds = Literal["recipes", "region"] | None


def change_class(module: nn.Module, *, rewrite: Rewrite = None, rebuilds: Rebuilds = None) -> None:
    """Give `module` the forward of `rewrite`; None leaves the one it has.

    rebuilds: forward runs inside `rebuilding()`, by recipes or in a region; None: it is a part of such a module.
    """
    base: Any
    base, old, _ = getattr(type(module), "_abn_recipe", (type(module), None, None))
    module.__class__ = _class_of(base, old if rewrite is None else rewrite, rebuilds)


@functools.cache
def _class_of(base: type[nn.Module], rewrite: Rewrite, rebuilds: Rebuilds) -> type[nn.Module]:
    original = base.forward
    inner = original if rewrite is None else rewrite.forward_of(original)

    @functools.wraps(original)
    def forward(self: nn.Module, /, *args: Any, **named: Any) -> Any:
        if base.forward is not original:  # it was replaced on the class since then
            return base.forward(self, *args, **named)
        if _must_be_original():
            return original(self, *args, **named)
        if rebuilds is not None:
            with rebuilding(self, in_region=rebuilds == "region"):
                return inner(self, *args, **named)
        if graph_task() < 0:
            return inner(self, *args, **named)
        with rebuilding():  # a reentrant checkpoint runs a part of the model again in backward
            return inner(self, *args, **named)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _new, (base, rewrite, rebuilds), self.__getstate__()

    body: dict[str, Any] = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__qualname__": base.__qualname__,
        "_abn_recipe": (base, rewrite, rebuilds),
    }
    return type(base.__name__, (QuietBase, base, *getattr(rewrite, "mixins", ())), body)


class _Names:
    """The globals that a generated forward uses, as an object that can be hashed, copied and pickled."""

    def __init__(self, source: str = "", names: dict[str, Any] | None = None) -> None:
        used = {n: v for n, v in (names or {}).items() if re.search(rf"\b{re.escape(n)}\b", source)}
        self.modules = tuple((n, v.__name__) for n, v in used.items() if isinstance(v, ModuleType))
        self.values = tuple((n, v) for n, v in used.items() if not isinstance(v, ModuleType))

    def scope(self) -> dict[str, Any]:
        return {**{n: importlib.import_module(m) for n, m in self.modules}, **dict(self.values)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Names) and (self.modules, self.values) == (other.modules, other.values)

    def __hash__(self) -> int:
        return hash(self.modules)


def _new(*recipe: Any) -> nn.Module:
    """Returns an empty instance, for copying and unpickling; `recipe`: the arguments of `_class_of`."""
    new = _class_of(*recipe)
    return new.__new__(new)
