"""The deferred call behind lazy logits, and the detection of in-place changes since then.

See [Note: changes] and [Note: in place] in `logits`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from leangrad.errors import ChangedError
from leangrad.functional import autocast_enabled

__all__ = ["Memory", "Source", "changed", "stays", "version"]


class Source:
    """The deferred call of a projection: its arguments with their versions, and its autocast state.

    asked: called with True when a loss is computed from the logits, and with False when their values are read, each
    time for a gradient.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, asked: Callable[[bool], None]) -> None:
        _watch_steps(weight, bias)
        self.x, self.weight, self.bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
        self.needs = tuple(t is not None and t.requires_grad for t in (x, weight, bias))
        self.asked = asked
        self.shape = (*x.shape[:-1], len(weight))
        self.is_autocast = autocast_enabled(x.device.type)
        self.dtype = torch.get_autocast_dtype(x.device.type) if self.is_autocast else x.dtype
        self._states = self._now()

    def autocast(self) -> torch.autocast:
        """Return a context with the autocast state of the deferred call."""
        return torch.autocast(
            self.x.device.type, dtype=self.dtype if self.is_autocast else None, enabled=self.is_autocast
        )

    def _now(self) -> list[Any]:
        tensors = (self.x, self.weight, self.bias)
        return [None if t is None else (version(t), t.untyped_storage().nbytes()) for t in tensors]

    def check(self) -> None:
        """Raise `ChangedError` if x, W or b was changed or freed since the call."""
        for name, before, now in zip(("input", "weight", "bias"), self._states, self._now(), strict=True):
            if before != now:
                raise changed(name)


class Memory:
    """Logits and their views that share one memory in plain PyTorch; knows which of their values were written to.

    probes: for each that has values: a weak reference to its ``_Rows``, a tensor without memory that shares the version
    counter of the values, and the version when the values were computed.
    """

    def __init__(self) -> None:
        self.probes: list[tuple[Any, Tensor, int]] = []

    def note(self, rows: object, values: Tensor) -> None:
        """Remember the version of ``values``, the values of ``rows``, without keeping them alive."""
        if not values.is_inference():
            probe = values.detach()  # shares the version counter of ``values``
            probe.data = values.new_empty(0)
            self.probes.append((weakref.ref(rows), probe, probe._version))

    def is_written(self, rows: object, by_others: bool) -> bool:
        """Whether the values of ``rows`` were written to; with ``by_others``, those of other logits in this memory."""
        return any((by() is not rows) == by_others and probe._version != then for by, probe, then in self.probes)


def changed(name: str) -> ChangedError:
    """Return the error for an argument of the projection, ``name``, that has changed since the call."""
    return ChangedError(
        f"expected logits to be read before the {name} of their projection changes, as an optimizer's step changes it: "
        "their values were not computed until now. Take what you need of them before that, such as logits.argmax(-1) "
        "or logits.clone(), or use leangrad.lean(model, exact=True), or, in a compiled model, "
        'options={"leangrad.fused_loss": False}'
    )


def version(tensor: Tensor) -> int:
    """Return the version of ``tensor``; 0 for an inference tensor, which has no version counter."""
    return 0 if tensor.is_inference() else tensor._version


def stays(weight: Tensor) -> bool:
    """Whether a weight stays allocated after the call: a parameter with a storage of its own, not one of ZeRO-3.

    ZeRO-3 frees the weight after the call; FSDP1 frees the flat parameter whose storage the weight is a part of.
    """
    is_whole = type(weight) is nn.Parameter and weight.untyped_storage().nbytes() == weight.nbytes
    return is_whole and not hasattr(weight, "ds_id")


def _watch_steps(*parameters: Tensor | None) -> None:
    """Register ``parameters``, so that every optimizer step that changes them increases their versions."""
    global _watches_optimizers
    if not _watches_optimizers:
        _watches_optimizers = True
        register_optimizer_step_post_hook(_count_step)
    for parameter in parameters:
        if isinstance(parameter, nn.Parameter):
            _projected[parameter] = None


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Increment the versions of the heads' parameters that ``optimizer`` has changed.

    Fused optimizer kernels and writes to `.data` change them without incrementing the version.
    """
    heads = list(_projected.keys())
    if heads:
        changed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        increment_version([one for one in heads if id(one) in changed])


_watches_optimizers = False
_projected = WeakTensorKeyDictionary()  # keys: weights and biases of which lazy logits were made
