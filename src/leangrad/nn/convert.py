"""`convert_abn(model)`: makes one layer of a batch norm and the addition and activation after it, in any model.

[Note: rewriting forward] In an `nn.Sequential` a norm and its activation are found among the children; in forward code,
by tracing that one module with torch.fx, with its children as leaves (``rewriting/trace.py``). A forward in which
anything matters that a trace does not show is left as it is. All modules stay the same objects with the same children;
norms, and modules with a rewritten forward, get a subclass of their class. Nothing else that calls them notices it
(``abn/converted.py``), and a rewritten forward runs the original one where the trace does not hold
(``rewriting/classes.py``).
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from leangrad._torch import has_hooks, has_own_forward
from leangrad.ledger.observe.unseen_writes import may_write_unseen
from leangrad.nn.abn import ABN
from leangrad.nn.abn.converted import IDENTITY, Act, convert_norm, fused_state, is_convertible
from leangrad.nn.abn.pool import RebuiltMaxPool2d
from leangrad.nn.rewriting.activations import act_of_node, bare_act_of
from leangrad.nn.rewriting.classes import FusedCall, PairsInSequence, RewrittenForward, change_class
from leangrad.nn.rewriting.frames import UntraceableError
from leangrad.nn.rewriting.norm_act import convert_norm_act, norm_act_of
from leangrad.nn.rewriting.stand_ins import IN_PLACE
from leangrad.nn.rewriting.trace import trace
from leangrad.switch import NAME, disabled

__all__ = ["Conversion", "Conversions", "convert_abn"]

log = logging.getLogger(__name__)

ADDITIONS = (operator.add, IN_PLACE["iadd"], torch.add, "add", "add_")
IN_PLACE_ADDITIONS = (IN_PLACE["iadd"], "add_")
# Modules whose output is a new tensor, of which no other module or view knows.
MAKES_NEW = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
)  # fmt: skip
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
        names = [name for name, module in model.named_modules() if is_convertible(module)]
        left = Conversions(Conversion(name, None, reason=f"{NAME} is set") for name in names)
        model.abn_conversions = left  # type: ignore[assignment]
        return model
    was_converted = any(isinstance(module, ABN) for module in model.modules())
    found: dict[str, Conversion] = {}
    times = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False) if is_convertible(m))
    for name, module in list(model.named_modules()):
        prefix = f"{name}." if name else ""
        if _is_sequence(module):
            results = _convert_sequential(module, times)
        elif isinstance(module, NORMS):
            results = _convert_norm_act(module)
        elif type(module) not in (nn.ModuleList, nn.ModuleDict) and next(_norms(module), None) is not None:
            results = _convert_forward(module, times)
        else:
            continue
        found.update({key: replace(c, name=key) for c in results if (key := prefix + c.name if c.name else name)})
    for name, module in model.named_modules():
        if is_convertible(module) and name not in found:
            found[name] = Conversion(name, None, reason="no module was found whose forward calls it")
    if any(c.activation is not None for c in found.values()):
        for module in model.modules():
            if type(module) is nn.MaxPool2d:
                module.__class__ = RebuiltMaxPool2d
        change_class(model, rebuilds="region" if may_write_unseen(model) else "recipes")
    conversions = Conversions(found.values())
    model.abn_conversions = conversions  # type: ignore[assignment]
    if conversions or not was_converted:
        conversions.report(model)
    return model


def _is_sequence(module: nn.Module) -> bool:
    """Whether a module calls its children one after the other, as `nn.Sequential` does."""
    kind: Any = type(module)
    is_own = getattr(kind, "forward", None) is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__
    return is_own and "forward" not in vars(module)


def _norms(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the batch norms that this module's own forward may call: children, and those in module lists and dicts."""
    for name, child in module.named_children():
        if is_convertible(child):
            yield name, child
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            for inner, norm in _norms(child):
                yield f"{name}.{inner}", norm


def _why_not(norm: nn.Module, times: Counter[int]) -> str:
    if times[id(norm)] > 1:
        return "it is used under more than one name"
    if has_hooks(norm):
        return "it has hooks"
    if has_own_forward(norm):
        return "its forward was replaced"
    return _taken(norm)


def _taken(norm: nn.Module) -> str:
    """Returns that a norm has an attribute whose name a converted one needs; an empty string if it has none."""
    taken = vars(norm).keys() & fused_state(IDENTITY).keys()
    return f"it has an attribute `{min(taken)}`" if taken else ""


# ---- Sequential -----------------------------------------------------------------------------------------------------


def _convert_sequential(module: nn.Module, times: Counter[int]) -> list[Conversion]:
    # Not `named_children()`, which leaves out a module that stands here a second time.
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    results = []
    for (name, norm), (_, after) in zip(children, [*children, ("", None)][1:], strict=True):
        if not is_convertible(norm):
            continue
        if reason := _why_not(norm, times):
            results.append(Conversion(name, None, reason=reason))
            continue
        act = bare_act_of(after) or IDENTITY
        convert_norm(norm, act)
        results.append(Conversion(name, str(act)))
    if any(c.activation not in (None, str(IDENTITY)) for c in results):
        change_class(module, rewrite=PairsInSequence())
    return results


def _convert_norm_act(norm: nn.Module) -> list[Conversion]:
    """Convert a batch norm of another class, whose forward may apply an activation too."""
    if isinstance(norm, ABN) or is_convertible(norm):
        return []
    if reason := _taken(norm):
        return [Conversion("", None, reason=reason)]
    try:
        found = norm_act_of(norm)
    except UntraceableError as error:
        return [Conversion("", None, reason=str(error).replace("its parent's forward", "its forward"))]
    convert_norm_act(norm, found)
    change_class(norm, rewrite=found)
    return [Conversion("", str(found.act))]


# ---- forward code ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Match:
    """The nodes of `act(norm(x) + residual)`: `last` is the last of them."""

    call: fx.Node
    last: fx.Node
    act: Act
    act_path: str | None  # path of the activation, if it is a module
    addition: fx.Node | None = None
    maker: tuple[str, type[nn.Module]] | None = None  # of the norm's input, if the norm has to run later than before


def _convert_forward(module: nn.Module, times: Counter[int]) -> list[Conversion]:
    """Convert the norms that the forward code of `module` calls; see [Note: rewriting forward]."""
    names = [name for name, _ in _norms(module)]
    try:
        traced = trace(module)
    except UntraceableError as error:
        return [Conversion(name, None, reason=str(error)) for name in names]
    results, calls = [], []
    for name in names:
        norm = module.get_submodule(name)
        nodes = [n for n in traced.graph.nodes if n.op == "call_module" and n.target == name]
        if reason := _why_not(norm, times) or _why_not_call(nodes):
            results.append(Conversion(name, None, reason=reason))
            continue
        match = _match(module, nodes[0])
        act = IDENTITY if match is None else match.act
        convert_norm(norm, act)
        if match is not None:
            calls.append(FusedCall(name, match.act_path, act, match.maker))
            _fuse(traced.graph, match)
        results.append(Conversion(name, str(act), match is not None and match.addition is not None))
    if calls:
        change_class(module, rewrite=RewrittenForward.of(traced, traced.graph, tuple(calls)))
    return results


def _why_not_call(calls: list[fx.Node]) -> str:
    if len(calls) != 1:
        return f"its parent's forward calls it {len(calls)} times"
    if len(calls[0].args) != 1 or calls[0].kwargs:
        return "it is called with keywords"
    return ""


def _match(module: nn.Module, call: fx.Node) -> _Match | None:
    """Finds the activation after a norm, or after the addition that follows it; None if there is none to fuse."""
    addition = None
    following, source = _only_user(call), call
    if following is not None and (act := act_of_node(module, following, call)) is None:
        addition, source = following, following
        following = _only_user(addition) if _is_addition_to(call, addition) else None
        act = None if following is None else act_of_node(module, following, source)
    if following is None or act is None:
        return None
    path = str(following.target) if following.op == "call_module" else None
    match = _Match(call, following, act, path, addition)
    if call.next is (following if addition is None else addition) and (addition is None or addition.next is following):
        return match
    maker = _maker(module, match)
    return None if maker is None else replace(match, maker=maker)


def _fuse(graph: fx.Graph, match: _Match) -> None:
    """Replace norm, addition and activation by one call, at the place of the last of them."""
    args = match.call.args
    named: dict[str, Any] = {"is_fused": True}
    if match.addition is not None:
        args = (*args, *(a for a in match.addition.args if a is not match.call))
        named["adds_in_place"] = match.addition.target in IN_PLACE_ADDITIONS
    with graph.inserting_before(match.last):
        fused = graph.call_module(str(match.call.target), args, named)
    match.last.replace_all_uses_with(fused)
    for node in (match.last, match.addition, match.call):
        if node is not None:
            graph.erase_node(node)


def _maker(module: nn.Module, match: _Match) -> tuple[str, type[nn.Module]] | None:
    """Returns the path and the class of the module that made the norm's input; None if the norm may not run later.

    It runs at the place of `match.last`. Nothing may change its input in between: another module has made that, and
    nothing else uses it; nor read its statistics. Between the addition and `match.last` there may be nothing at all.
    """
    if match.addition is not None and match.addition.next is not match.last:
        return None
    source, own = match.call.args[0], f"{match.call.target}."
    if any(node.op == "get_attr" and str(node.target).startswith(own) for node in match.call.graph.nodes):
        return None
    if not isinstance(source, fx.Node) or len(source.users) != 1 or source.op != "call_module":
        return None
    maker = module.get_submodule(str(source.target))
    of_torch = isinstance(maker, MAKES_NEW) and type(maker).forward.__module__.startswith("torch.")
    return (str(source.target), type(maker)) if of_torch and not has_hooks(maker) else None


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _is_addition_to(call: fx.Node, add: fx.Node) -> bool:
    """Whether `add` is `norm(x) + y` for another tensor y, and writes to none but norm(x)."""
    if add.op not in ("call_function", "call_method") or add.target not in ADDITIONS:
        return False  # a child may be named `add`
    if add.kwargs or len(add.args) != 2:
        return False
    other = add.args[1] if add.args[0] is call else add.args[0]
    if not isinstance(other, fx.Node) or other is call:
        return False
    if any(_is_written_by(user, other) for user in other.users):
        return False  # backward would need the sum's other operand as it was
    return add.target not in IN_PLACE_ADDITIONS or add.args[0] is call


def _is_written_by(user: fx.Node, tensor: fx.Node) -> bool:
    """Whether a node is an in-place op on a tensor."""
    name = getattr(user.target, "__name__", str(user.target))
    writes = name.endswith("_") or user.target in IN_PLACE.values() or bool(user.kwargs.get("inplace"))
    return user.op in ("call_function", "call_method") and writes and user.args[:1] == (tensor,)
