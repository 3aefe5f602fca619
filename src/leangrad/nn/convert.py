"""`convert_abn(model)`: replaces a batch norm and the addition and activation after it by one layer, in any model.

[Note: rewriting forward] In an `nn.Sequential` a norm and its activation are found among the children; in forward code,
by tracing that one module with torch.fx, with its children as leaves. Tracing runs the code once and records only
operations on tensors, so a forward in which anything else matters (the training flag, types, context managers, random
choices, writes to `self`) is left as it is. The module stays the same object with the same children; its class becomes
a subclass with the rewritten forward.
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from leangrad._torch import graph_task, has_hooks
from leangrad.nn.abn import ABN, InPlaceABNSync
from leangrad.nn.abn.pool import RebuiltMaxPool2d
from leangrad.nn.abn.recipe import rebuilding
from leangrad.nn.abn.rule import DETERMINISTIC
from leangrad.nn.traceable import why_not_traceable
from leangrad.switch import NAME, disabled

__all__ = ["Conversion", "Conversions", "convert_abn"]

log = logging.getLogger(__name__)

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")


@dataclass(frozen=True)
class Conversion:
    """The result for one batch norm: `activation` is None if it was not converted, and `reason` says why."""

    name: str
    activation: str | None
    residual: bool = False
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome()}"

    def outcome(self) -> str:
        """Returns what the norm was converted to, or why it was not."""
        if self.activation is None:
            return f"not converted, {self.reason}"
        return f"norm{' + residual' if self.residual else ''} + {self.activation}"


class Conversions(tuple[Conversion, ...]):
    """The result for each batch norm of a model; `str` makes a table of it."""

    def converted(self) -> int:
        """Returns how many batch norms were converted."""
        return sum(c.activation is not None for c in self)

    def __str__(self) -> str:
        width = max((len(c.name) for c in self), default=0)
        lines = [f"convert_abn converted {self.converted()} of {len(self)} batch norms"]
        return "\n".join([*lines, *(f"  {c.name:<{width}}  {c.outcome()}" for c in self)])

    def report(self, model: nn.Module) -> None:
        """Warn if no batch norm was converted; else write a line to the log, of level WARNING if some were not.

        A line of level WARNING goes to stderr unless the program has set up logging otherwise; one of INFO, which is
        written if all were converted, does not.
        """
        left = [c for c in self if c.activation is None]
        reasons = "; ".join(f"{c.name}: {c.reason}" for c in left[:3]) + ("; ..." if len(left) > 3 else "")
        see = "print(model.abn_conversions) shows all"
        if not self:
            what = f"found no batch norm in this {type(model).__name__}"
            warnings.warn(f"convert_abn {what}: nothing was converted, and no memory is saved", stacklevel=3)
        elif not self.converted():
            what = f"converted none of the {len(self)} batch norms of this {type(model).__name__}"
            warnings.warn(f"convert_abn {what}, and no memory is saved ({reasons}). {see}", stacklevel=3)
        elif left:
            log.warning(
                "convert_abn left %d of %d batch norms as they were (%s). %s", len(left), len(self), reasons, see
            )
        else:
            log.info("convert_abn converted %d batch norms. %s", len(self), see)


@dataclass(frozen=True)
class Act:
    """An activation, in the form of the arguments of `ABN`."""

    activation: str | Callable[[torch.Tensor], torch.Tensor]
    param: float = 0.01

    def __str__(self) -> str:
        return self.activation if isinstance(self.activation, str) else type(self.activation).__name__


def convert_abn(model: nn.Module) -> nn.Module:
    """Replace each batch norm of `model` and the activation after it by one layer that keeps one map; return `model`.

    Equals the model as it was: same class (a subclass of it), same parameters, same `state_dict` names, same outputs
    within rounding. It converts `nn.Sequential(..., BatchNorm, activation, ...)`, and `relu(bn(x))` and
    `relu(bn(x) + y)` in forward code, also if one activation module is used in many places. Print
    `model.abn_conversions` to see which norms were converted, and why others were not. If no norm can be converted,
    this gives a warning; if only some can, a line in the log. With `LEANGRAD_DISABLE=1` nothing is converted.

    Keeps for backward, per convolution + norm + activation: one map, the convolution's output. In backward, the input
    of the next op is rebuilt from that, in one elementwise pass; max pooling also finds its maxima again. This happens
    if the model is called as a whole and no other saved-tensor hooks are in force; a part that is called alone keeps
    its activations too. In a lean model, or inside `saving()`, the ledger rebuilds the same tensors, with the same
    bits.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> model = convert_abn(model)
    >>> print(model.abn_conversions)
    convert_abn converted 1 of 1 batch norms
      1  norm + relu
    >>> model(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 4, 4, 4])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_abn() expects an nn.Module with batch norms in it, got {type(model).__name__}")
    if disabled():
        log.warning("convert_abn converted nothing, because %s is set", NAME)
        names = [name for name, module in model.named_modules() if type(module) in NORMS]
        left = Conversions(Conversion(name, None, reason=f"{NAME} is set") for name in names)
        model.abn_conversions = left  # type: ignore[assignment]
        return model
    was_converted = any(isinstance(module, ABN) for module in model.modules())
    found: dict[str, Conversion] = {}
    times = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False) if type(m) in NORMS)
    for name, module in list(model.named_modules()):
        prefix = f"{name}." if name else ""
        if type(module).forward is nn.Sequential.forward:
            results = _convert_sequential(module, times)
        elif type(module) not in NORMS and next(_norms(module), None) is not None:
            results = _convert_forward(module, times)
        else:
            continue
        found.update({prefix + c.name: replace(c, name=prefix + c.name) for c in results})
    for name, module in model.named_modules():
        if type(module) in NORMS and name not in found:
            found[name] = Conversion(name, None, reason="no module was found whose forward calls it")
    if any(c.activation is not None for c in found.values()):
        for module in model.modules():
            if type(module) is nn.MaxPool2d:
                module.__class__ = RebuiltMaxPool2d
        _change_class(model, outermost=True)
    conversions = Conversions(found.values())
    model.abn_conversions = conversions  # type: ignore[assignment]
    if conversions or not was_converted:
        conversions.report(model)
    return model


def _norms(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the batch norms that this module's own forward may call: children, and those in module lists and dicts."""
    for name, child in module.named_children():
        if type(child) in NORMS:
            yield name, child
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            for inner, norm in _norms(child):
                yield f"{name}.{inner}", norm


def _why_not(norm: nn.Module, times: Counter[int]) -> str:
    if times[id(norm)] > 1:
        return "it is used under more than one name"
    if has_hooks(norm):
        return "it has hooks"
    return ""


def _replacement(norm: Any, act: Act) -> ABN:
    """Returns a layer that shares the parameters and buffers of `norm`."""
    named: dict[str, Any] = {"activation": act.activation, "activation_param": act.param, "device": "meta"}
    arguments = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    new: ABN
    if type(norm) is nn.SyncBatchNorm:
        new = InPlaceABNSync(*arguments, **named, invert=False, group=norm.process_group)
    else:
        new = ABN(*arguments, **named)
    new.weight, new.bias = norm.weight, norm.bias
    new.running_mean, new.running_var = norm.running_mean, norm.running_var
    new.num_batches_tracked = norm.num_batches_tracked
    return new.train(norm.training)


# ---- Sequential -----------------------------------------------------------------------------------------------------


def _convert_sequential(module: nn.Module, times: Counter[int]) -> list[Conversion]:
    # Not `named_children()`, which leaves out a module that stands here a second time.
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    results = []
    for (name, norm), (next_name, after) in zip(children, [*children[1:], ("", None)], strict=True):
        if type(norm) not in NORMS:
            continue
        if reason := _why_not(norm, times):
            results.append(Conversion(name, None, reason=reason))
            continue
        act = _act_of_module(after) if after is not None and not has_hooks(after) else None
        setattr(module, name, _replacement(norm, act or Act("identity")))
        if act is not None:
            setattr(module, next_name, nn.Identity())
        results.append(Conversion(name, str(act or "identity")))
    return results


# ---- forward code ---------------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _convert_forward(module: nn.Module, times: Counter[int]) -> list[Conversion]:
    """Convert the norms that the forward code of `module` calls; see [Note: rewriting forward]."""
    names = [name for name, _ in _norms(module)]
    reason = why_not_traceable(module)
    if not reason:
        try:
            graph = _Tracer().trace(module)
        except Exception as error:  # the user's code may raise anything on a proxy; then it is left as it is
            reason = f"its forward cannot be traced ({type(error).__name__}: {error})"
    if reason:
        return [Conversion(name, None, reason=reason) for name in names]
    results = [_convert_call(module, graph, name, times) for name in names]
    if any(c.activation is not None for c in results):
        graph.lint()
        code = graph.python_code("self")
        _change_class(module, source=code.src, names=code.globals)
    return results


def _convert_call(module: nn.Module, graph: fx.Graph, name: str, times: Counter[int]) -> Conversion:
    """Fuse the only call of a norm with the addition and activation that follow."""
    norm = module.get_submodule(name)
    calls = [n for n in graph.nodes if n.op == "call_module" and n.target == name]
    reason = _why_not(norm, times)
    if not reason and len(calls) != 1:
        reason = f"its parent's forward calls it {len(calls)} times"
    if not reason and (len(calls[0].args) != 1 or calls[0].kwargs):
        reason = "it is called with keywords"
    if reason:
        return Conversion(name, None, reason=reason)
    call = calls[0]
    last, addition, act = call, _addition_after(call), None
    if (following := _only_user(call)) is not None:
        act = _act_of_node(module, following, call)
    if act is not None:
        last = following
    elif addition is not None and (following := _only_user(addition)) is not None:
        act = _act_of_node(module, following, addition)
        last = following if act is not None else call
    residual = addition if last is not call and addition is not None and last is not _only_user(call) else None
    module.set_submodule(name, _replacement(norm, act or Act("identity")))
    if last is not call:
        _fuse(graph, call, residual, last)
    return Conversion(name, str(act or "identity"), residual is not None)


def _fuse(graph: fx.Graph, call: fx.Node, addition: fx.Node | None, last: fx.Node) -> None:
    """Replace norm, addition and activation by one call, at the place of `last`, the last of them."""
    others = () if addition is None else tuple(a for a in addition.args if a is not call)
    with graph.inserting_before(last):
        fused = graph.call_module(str(call.target), (*call.args, *others))
    last.replace_all_uses_with(fused)
    for node in (last, addition, call):
        if node is not None:
            graph.erase_node(node)


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _addition_after(call: fx.Node) -> fx.Node | None:
    """Returns the node of `norm(x) + y`, where `call` is `norm(x)`; None if it cannot move down to the activation."""
    add = _only_user(call)
    if add is None or add.target not in ADDITIONS or add.kwargs or len(add.args) != 2:
        return None
    writes_to_first = add.target in (operator.iadd, "add_")
    other = add.args[1] if add.args[0] is call else add.args[0]
    if not isinstance(other, fx.Node) or other is call or (writes_to_first and add.args[0] is not call):
        return None
    # The norm moves down to the activation, so no other op may use its input: it could change it in between.
    source = call.args[0]
    return add if isinstance(source, fx.Node) and len(source.users) == 1 else None


# ---- activations ----------------------------------------------------------------------------------------------------

FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", F.relu_: "relu", torch.relu: "relu", torch.relu_: "relu", "relu": "relu", "relu_": "relu",
    F.leaky_relu: "leaky_relu", F.leaky_relu_: "leaky_relu", F.elu: "elu", F.elu_: "elu",
    F.silu: "silu", F.gelu: "gelu",
}  # fmt: skip
# The one argument of each function beside its input that ABN supports (and gelu's `approximate`), and its default.
OPTION = {"leaky_relu": ("negative_slope", 0.01), "elu": ("alpha", 1.0)}


def _act_of_module(module: nn.Module) -> Act | None:
    match module:
        case nn.LeakyReLU():
            return Act("leaky_relu", module.negative_slope)
        case nn.ELU():
            return Act("elu", module.alpha)
        case nn.ReLU() if type(module) is nn.ReLU:
            return Act("relu")
        case nn.SiLU():
            return Act("silu")
        case nn.GELU():
            return Act("gelu_tanh" if module.approximate == "tanh" else "gelu")
        case _ if type(module) in DETERMINISTIC:
            return Act(module)
    return None


def _act_of_node(module: nn.Module, node: fx.Node, source: fx.Node) -> Act | None:
    """Returns the activation that `node` applies to `source`; None if it applies none that ABN supports."""
    if not node.args or node.args[0] is not source:
        return None
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        return _act_of_module(child) if len(node.args) == 1 and not has_hooks(child) else None
    name = FUNCTIONS.get(node.target)
    options = {k: v for k, v in node.kwargs.items() if k != "inplace"}
    if name is None or len(node.args) > 2 or any(isinstance(v, fx.Node) for v in options.values()):
        return None
    option, default = OPTION.get(name, ("", 0.01))
    param = options.pop(option, default)
    if len(node.args) == 2:
        if not option or isinstance(node.args[1], fx.Node):
            return None
        param = node.args[1]
    if name == "gelu" and options.pop("approximate", "none") == "tanh":
        name = "gelu_tanh"
    return None if options else Act(name, float(str(param)))


# ---- classes --------------------------------------------------------------------------------------------------------


@functools.cache
def _class_of(base: type[nn.Module], source: str | None, names: _Names, outermost: bool) -> type[nn.Module]:
    """Returns a subclass of `base` with the forward of `source`; None: with its own.

    outermost: forward runs inside `rebuilding()`. A rewritten forward that is not the outermost does so only if it runs
        in a backward pass.
    """
    scope = names.scope()
    if source is not None:
        exec(source, scope)
    inner = scope["forward"] if source is not None else base.forward
    forward = inner
    if outermost:

        @functools.wraps(inner)
        def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
            with rebuilding(self):
                return inner(self, *args, **named)

    elif source is not None:

        @functools.wraps(inner)
        def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or graph_task() < 0:
                return inner(self, *args, **named)
            with rebuilding():  # a reentrant checkpoint runs a part of the model again in backward
                return inner(self, *args, **named)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _new, (base, source, names, outermost), self.__getstate__()

    body: dict[str, Any] = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    body |= {"__qualname__": base.__qualname__, "_abn_recipe": (base, source, names, outermost)}
    return type(base.__name__, (base,), body)


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


def _change_class(
    module: nn.Module, *, source: str | None = None, names: dict[str, Any] | None = None, outermost: bool = False
) -> None:
    base: Any
    base, old_source, old_names, _ = getattr(type(module), "_abn_recipe", (type(module), None, _Names(), False))
    if source is not None:
        old_source, old_names = source, _Names(source, names)
    module.__class__ = _class_of(base, old_source, old_names, outermost)
