"""What lazy logits come from: the call that was put off, and who has written to what since.

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
    """The call that was put off: its arguments as they were, and its autocast."""

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
        """That of the module's call."""
        return torch.autocast(
            self.x.device.type, dtype=self.dtype if self.is_autocast else None, enabled=self.is_autocast
        )

    def _now(self) -> list[Any]:
        tensors = (self.x, self.weight, self.bias)
        return [None if t is None else (version(t), t.untyped_storage().nbytes()) for t in tensors]

    def check(self) -> None:
        """Raise an error if x, W or b has changed."""
        for name, before, now in zip(("input", "weight", "bias"), self._states, self._now(), strict=True):
            if before != now:
                raise changed(name)


class Memory:
    """What plain PyTorch would have in one memory: logits and their views. Tells who of them has been written to."""

    def __init__(self) -> None:
        self.probes: list[tuple[Any, Tensor, int]] = []

    def note(self, rows: object, values: Tensor) -> None:
        """Keep the version of these values in mind, but not them."""
        if not values.is_inference():
            probe = values.detach()  # has its version
            probe.data = values.new_empty(0)
            self.probes.append((weakref.ref(rows), probe, probe._version))

    def is_written(self, rows: object, by_others: bool) -> bool:
        """Whether the values of ``rows``, or those of others, were written to."""
        return any((by() is not rows) == by_others and probe._version != then for by, probe, then in self.probes)


def changed(name: str) -> ChangedError:
    """The error for an argument of the projection that is another by now."""
    return ChangedError(
        f"expected logits to be read before the {name} of their projection changes, as an optimizer's step changes it: "
        "their values were not computed until now. Take what you need of them before that, such as logits.argmax(-1) "
        "or logits.clone(), or use leangrad.lean(model, exact=True), or, in a compiled model, "
        'options={"leangrad.fused_loss": False}'
    )


def version(tensor: Tensor) -> int:
    """How often it was written to; inference tensors do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def stays(weight: Tensor) -> bool:
    """Whether a weight will still be there after the call; ZeRO-3 frees it, FSDP frees the flat one it is a part of."""
    is_whole = type(weight) is nn.Parameter and weight.untyped_storage().nbytes() == weight.nbytes
    return is_whole and not hasattr(weight, "ds_id")


def _watch_steps(*parameters: Tensor | None) -> None:
    """Let the steps of optimizers on these be seen."""
    global _watches_optimizers
    if not _watches_optimizers:
        _watches_optimizers = True
        register_optimizer_step_post_hook(_count_step)
    for parameter in parameters:
        if isinstance(parameter, nn.Parameter):
            _projected[parameter] = None


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Tell autograd that a step has changed the parameters of heads: fused kernels, and writes to `.data`, do not."""
    heads = list(_projected.keys())
    if heads:
        changed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        increment_version([one for one in heads if id(one) in changed])


_watches_optimizers = False
_projected = WeakTensorKeyDictionary()  # weights and biases from which lazy logits have been made
