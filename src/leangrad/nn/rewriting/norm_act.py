"""Batch norms of other classes whose forward applies an activation too, such as timm's `BatchNormAct2d`: `norm_act_of`.

They are found by a trace of their forward, not by their names: it has to be one `F.batch_norm` with the module's own
parameters and statistics, as in `nn.BatchNorm2d` in training mode, and after it nothing but an activation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from leangrad._torch import has_hooks, runs_only_its_forward
from leangrad.nn.abn.converted import IDENTITY, Act, act_of, fused_state
from leangrad.nn.abn.layers import ABN
from leangrad.nn.rewriting.activations import act_of_node
from leangrad.nn.rewriting.frames import UntraceableError
from leangrad.nn.rewriting.guards import Global, Guard, submodule
from leangrad.nn.rewriting.trace import trace

__all__ = ["NormAct", "convert_norm_act", "norm_act_of"]

TENSORS = ("running_mean", "running_var", "weight", "bias")
# Names of what a check of the input's dimensions consists of, as `torch._assert(x.dim() == 4, "...")`.
CHECKS = ("_assert", "getattr", "eq", "ne", "ge", "dim", "size")


@dataclass(frozen=True)
class NormAct:
    """The forward of a batch norm that applies the activation `act` too.

    act_path: the child that computes `act`; None if there is none. skipped: children that return their input.
    """

    guards: tuple[Guard, ...]
    globals: tuple[Global, ...]
    act_path: str | None
    act: Act
    skipped: tuple[str, ...]
    mixins = (ABN,)

    def forward_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward."""

        def forward(module: Any, /, *args: Any, **named: Any) -> Any:
            if len(args) != 1 or named or not isinstance(args[0], Tensor) or not self.holds(module):
                return original(module, *args, **named)
            try:
                module._check_input_dim(args[0])
            except ValueError:
                return original(module, *args)
            if args[0].shape[1] != module.num_features:
                return original(module, *args)
            return ABN.forward(module, args[0])

        return forward

    def holds(self, module: nn.Module) -> bool:
        """Whether everything that the module's forward read is as it was."""
        if not all(guard.holds(module) for guard in self.guards):
            return False
        if not all(one.holds() for one in self.globals):
            return False
        for path in self.skipped:
            child = submodule(module, path)
            if type(child) is not nn.Identity or not runs_only_its_forward(child):
                return False
        if self.act_path is None:
            return True
        after = submodule(module, self.act_path)
        return after is not None and act_of(after) == self.act and runs_only_its_forward(after)


def norm_act_of(norm: nn.Module) -> NormAct:
    """Returns what the forward of a batch norm computes; raises UntraceableError if it is not just norm and activation.

    >>> class NormRelu(nn.BatchNorm1d):
    ...     def forward(self, x):
    ...         self.num_batches_tracked.add_(1)
    ...         statistics, scales = (self.running_mean, self.running_var), (self.weight, self.bias)
    ...         return F.relu(F.batch_norm(x, *statistics, *scales, True, self.momentum, self.eps))
    >>> norm_act_of(NormRelu(3)).act
    Act(kind='relu', values=())
    """
    traced = trace(norm)
    nodes = [node for node in traced.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    nodes = [n for n in nodes if n.op == "call_module" or getattr(n.target, "__name__", n.target) not in CHECKS]
    if norm.num_batches_tracked is not None and nodes and _counts(nodes[0]):
        nodes = nodes[1:]
    elif norm.num_batches_tracked is not None:
        raise UntraceableError("its forward does not count batches as batch norm does")
    if not nodes or len(traced.required) != 1 or not _is_batch_norm(norm, nodes[0]):
        raise UntraceableError("its forward does not begin with the batch norm of its own parameters")
    last, act, act_path, skipped = nodes[0], IDENTITY, None, []
    for node in nodes[1:]:
        child = submodule(norm, str(node.target)) if node.op == "call_module" else None
        found = act_of_node(norm, node, last)
        if found is not None and act == IDENTITY:
            act, act_path = found, None if child is None else str(node.target)
        elif type(child) is nn.Identity and node.args == (last,) and not has_hooks(child):
            skipped.append(str(node.target))
        else:
            raise UntraceableError("its forward has other operations than a batch norm and its activation")
        last = node
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    if output.args != (last,):
        raise UntraceableError("its forward returns something else than its activation")
    # Whether or not the forward reads them: `ABN` does.
    own = {name: Guard("", name, getattr(norm, name)) for name in ("momentum", "eps", "track_running_stats")}
    own["training"] = Guard("", "training", True)
    guards = {(guard.path, guard.name): guard for guard in (*traced.guards, *own.values())}
    return NormAct(tuple(guards.values()), traced.globals, act_path, act, tuple(skipped))


def convert_norm_act(norm: nn.Module, found: NormAct) -> None:
    """Give a norm what `ABN.forward` reads."""
    vars(norm).update(fused_state(found.act))


def _counts(node: fx.Node) -> bool:
    """Whether a node is `self.num_batches_tracked.add_(1)`."""
    counter = node.args[0] if node.args else None
    own = isinstance(counter, fx.Node) and (counter.op, counter.target) == ("get_attr", "num_batches_tracked")
    return own and (node.op, node.target) == ("call_method", "add_") and node.args[1:] == (1,) and not node.kwargs


def _is_batch_norm(norm: Any, node: fx.Node) -> bool:
    """Whether a node is the batch norm that `nn.BatchNorm2d` computes in training mode."""
    if node.target is not F.batch_norm or norm.momentum is None:
        return False
    if norm.track_running_stats != (norm.running_mean is not None):
        return False
    given = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    values = given.arguments
    for name in TENSORS:
        value, tensor = values[name], getattr(norm, name)
        if tensor is not None:
            value = value.target if isinstance(value, fx.Node) and value.op == "get_attr" else ""
        if value != (None if tensor is None else name):
            return False
    own = (values["training"], values["momentum"], values["eps"]) == (True, norm.momentum, norm.eps)
    return own and isinstance(values["input"], fx.Node) and values["input"].op == "placeholder"
