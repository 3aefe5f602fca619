"""Heads: the projections to a vocabulary in a model, and the replacement of their forward to return `LazyLogits`.

A head is an `nn.Linear` with many more outputs than inputs (`is_vocabulary`) whose role occurs once in the model. The
projections in a transformer's blocks occur many times: under the same name, with the same shape, in modules of the same
class. If the values of a module's lazy logits were read for a gradient twice (`TRIALS`), and no loss was computed from
them, then the module is no head after all, and returns ordinary tensors from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from leangrad import _torch
from leangrad.functional import autocast_enabled, runs_plain
from leangrad.ledger.learn.entries import Entry
from leangrad.loss.lazy import ops  # noqa: F401  (registers what stays lazy)
from leangrad.loss.lazy.logits import project
from leangrad.loss.lazy.source import stays
from leangrad.loss.logit_ops import fit_dtypes, is_large, is_vocabulary
from leangrad.sizes import size_text
from leangrad.switch import disabled

__all__ = ["Head", "describe", "heads_of", "make_eager", "make_lazy", "note_sharding"]

TRIALS = 2  # reads of values, with no loss computed, after which a head returns ordinary tensors
_STATE = "_leangrad_head"


def heads_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the heads of a model by their names.

    >>> list(heads_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1000))))
    ['1']
    """
    found = {name: one for name, one in model.named_modules() if type(one).forward is nn.Linear.forward}
    roles = {name: _role(model, name, one) for name, one in found.items()}
    counts = Counter(roles.values())
    return {
        name: one
        for name, one in found.items()
        if is_vocabulary(one.out_features, one.in_features) and counts[roles[name]] == 1
    }


def _role(model: nn.Module, name: str, linear: nn.Linear) -> tuple[Any, ...]:
    """Return the class of a module's parent, its name in that parent, and its numbers of inputs and outputs."""
    parent, _, own = name.rpartition(".")
    return type(model.get_submodule(parent)), own, linear.in_features, linear.out_features


class Head:
    """How the logits of one head were used so far: for losses, or by reads of their values."""

    def __init__(self) -> None:
        self.losses = self.readings = 0
        self.is_sharded = False  # True: its weight is gathered for each call and then freed

    def asked(self, for_loss: bool) -> None:
        """Count one use of the logits.

        for_loss: whether a loss was computed from them, else their values were read; both only for a gradient.
        """
        self.losses += for_loss
        self.readings += not for_loss

    @property
    def why_eager(self) -> str:
        """Why the head returns ordinary tensors; empty if it returns lazy logits."""
        if self.is_sharded:
            return "its weight is freed after the call"
        if self.readings >= TRIALS and not self.losses:
            return "its values are read, and not by a loss"
        return ""


def make_lazy(model: nn.Module) -> None:
    """Replace the forward of every head of a model by one that returns `LazyLogits`."""
    for head in heads_of(model).values():
        before = head.__dict__.get("forward")
        if before is None or _is_packed(before):  # else other code replaced forward by more than a projection
            head.__dict__[_STATE] = Head(), before
            head.forward = MethodType(_forward, head)  # type: ignore[method-assign]


def _is_packed(forward: Any) -> bool:
    """Whether ``forward`` is the one that `pack_gradients` set on a module: it computes the same projection."""
    return isinstance(forward, MethodType) and forward.__func__.__module__ == "leangrad.packed.modules"


def note_sharding(model: nn.Module) -> None:
    """Mark the heads of a sharded model, whose weights may be freed before the loss is computed.

    Called before the model runs. A marked head returns ordinary tensors.
    """
    if _torch.is_sharded(model):
        for module in model.modules():
            if _STATE in module.__dict__:
                module.__dict__[_STATE][0].is_sharded = True


def describe(model: nn.Module, entries: Sequence[Entry]) -> str:
    """Return lines for a summary: how the logits of a lazy model were used, or what lazy logits would save.

    entries: those of a recorded step.
    """
    lazy = {name: one.__dict__[_STATE][0] for name, one in model.named_modules() if _STATE in one.__dict__}
    if lazy:
        found = {name: head.why_eager for name, head in lazy.items() if head.losses or head.is_sharded}
        return "\n".join(
            f"exact=False: the logits of {name} are {f'computed, for {why}' if why else 'not kept'}"
            for name, why in found.items()
        )
    heads = heads_of(model)
    nbytes = max((entry.nbytes for entry in entries if _are_logits(entry, heads)), default=0)
    if not nbytes:
        return ""
    return f"leangrad.lean(model, exact=False) would make no logits, {size_text(nbytes)} here, and round otherwise"


def _are_logits(entry: Entry, heads: dict[str, nn.Linear]) -> bool:
    """Whether ``entry`` is what a loss saves: logits that were cast, or their log-probabilities."""
    if entry.outcome not in ("kept", "rebuilt") or entry.is_extra or "." in entry.module:
        return False
    has_their_size = any(not entry.nbytes % head.out_features for head in heads.values())
    return entry.op in ("LogSoftmaxBackward0", "ToCopyBackward0") and has_their_size


def make_eager(model: nn.Module) -> None:
    """Undo `make_lazy`."""
    for module in model.modules():
        if _STATE in module.__dict__:
            _, before = module.__dict__.pop(_STATE)
            if getattr(module.__dict__.get("forward"), "__func__", None) in (_forward, type(module).forward):
                del module.__dict__["forward"]  # else other code has replaced forward since
                if before is not None:
                    module.forward = before


def _forward(self: Any, input: Tensor) -> Tensor:
    head, before = self.__dict__.get(_STATE, (None, None))
    is_eager = head is None or head.why_eager or disabled() or runs_plain(input, self.weight, self.bias)
    if is_eager or not _can_wait(self, input):
        return type(self).forward(self, input) if before is None else before(input)  # type: ignore[no-any-return]
    return project(input, self.weight, self.bias, head.asked)


# A bound method is pickled by its name. With this name a saved module is loaded with the forward of its class.
_forward.__name__ = "forward"


def _can_wait(module: nn.Linear, x: Tensor) -> bool:
    """Whether the call may be deferred: large logits, valid arguments, no hooks, and a weight that stays allocated."""
    if x.layout is not torch.strided or x.is_nested:
        return False
    count = x.numel() // max(1, x.shape[-1]) * module.out_features if x.dim() else 0
    tensors = [t for t in (x, module.weight, module.bias) if t is not None]
    return (
        x.dim() >= 2
        and is_large(count * x.element_size())
        and x.shape[-1] == module.in_features
        and x.is_floating_point()
        and len({t.device for t in tensors}) == 1
        and fit_dtypes([t.dtype for t in tensors], is_autocast=autocast_enabled(x.device.type))
        and not any(t.is_inference() for t in tensors)  # they have no version counter: a change would not be seen
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and not _torch.transforms_active()
        and not _torch.forward_mode_active()
        and stays(module.weight)
    )
