"""The ways to train one model: plain, lean, lean with a budget, a checkpoint around each block."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from leangrad.frontier.repeated import checkpoint_each, describe_repeated, repeated_modules
from leangrad.lean import lean

__all__ = ["Way", "budget_way", "checkpoint_way", "lean_way", "no_checkpoint", "plain_way"]

_PLAIN_STEPS = 3  # caches fill, and libraries such as cuDNN choose their kernels
_LEAN_STEPS = 5  # the first step is recorded, a second one shows the peak, and the fused replays are built
_BUDGET_STEPS = 34  # a plan is final after about three dozen steps


@dataclass(frozen=True)
class Way:
    """One way to train a model.

    - `prepare`: changes a copy of the model in place so that it trains this way; None if this model cannot be trained
      this way, and the note says why.
    - `warm_up_steps`: how many steps to run before steps no longer change.
    - `budget`: the peak that a step may use, counted as in [Note: what a peak counts]; None without a budget.
    - `note`: a remark for its row; may be empty.
    """

    name: str
    prepare: Callable[[nn.Module], object] | None
    warm_up_steps: int
    budget: int | None = None
    note: str = ""


def plain_way() -> Way:
    """Return the way that leaves the model as it is."""
    return Way("plain", lambda model: None, _PLAIN_STEPS)


def lean_way() -> Way:
    """Return the way `lean(model)` without a budget: the floor."""
    return Way("lean", lean, _LEAN_STEPS, note="the floor")


def budget_way(budget: int, told: int, note: str = "") -> Way:
    """Return the way `lean(model, budget=told)`.

    budget: the peak that a step may use, without other memory on the device.
    told: the same budget with the other memory on the device; see [Note: what a peak counts].
    """
    return Way("lean, budget", lambda model: lean(model, budget=told), _BUDGET_STEPS, budget, note)


def checkpoint_way(model: nn.Module) -> Way | None:
    """Return the way that uses `torch.utils.checkpoint`; None if the model has no place for it.

    The checkpoints are switched on by the model's own `set_grad_checkpointing`, as in timm, or else put around each of
    the repeated modules. A DenseNet needs its own switch: its layers read a list that grows, and wrapping them from
    outside does not work.
    """
    if _has_switch(model):
        return Way("checkpoint", _switch_on, _PLAIN_STEPS, note="by the model's own set_grad_checkpointing()")
    found = repeated_modules(model)
    if not found:
        return None
    return Way("checkpoint", _checkpoint, _PLAIN_STEPS, note=f"around {describe_repeated(found)}")


def _has_switch(model: nn.Module) -> bool:
    """Whether the model has its own switch for checkpoints; tried on a copy, the model does not change."""
    tensors: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return _switch_on(copy.deepcopy(model, tensors))  # the copy shares the model's tensors
    except Exception:  # not a working switch: one inherited from the base class only may raise an AssertionError
        return False


def _switch_on(model: nn.Module) -> bool:
    """Switch on the checkpoints of all modules that have a switch; return whether there are any."""
    switched: set[nn.Module] = set()
    has_switch = False
    for module in model.modules():
        switch = getattr(module, "set_grad_checkpointing", None)
        if callable(switch) and module not in switched:
            switch(True)
            switched.update(module.modules())  # the switch of a module applies to its submodules
            has_switch = True
    return has_switch


def no_checkpoint() -> Way:
    """Return the way that stands for `checkpoint_way` if the model has no place for checkpoints; it trains nothing."""
    return Way("checkpoint", None, 0, note="found no repeated modules to put it around")


def _checkpoint(model: nn.Module) -> None:
    checkpoint_each(repeated_modules(model))
