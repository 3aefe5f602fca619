"""The ways to train one model: plain, lean, lean with a budget, a checkpoint around each block."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from leangrad.frontier.repeated import checkpoint_each, describe_repeated, repeated_modules
from leangrad.lean import lean

__all__ = ["Way", "budget_way", "checkpoint_way", "lean_way", "no_checkpoint", "plain_way"]

_PLAIN_STEPS = 3  # caches fill; cuDNN and the like choose their kernels
_LEAN_STEPS = 5  # the first is recorded, a second one shows the peak, and the fused replays are built
_BUDGET_STEPS = 34  # a plan stands after about three dozen steps


@dataclass(frozen=True)
class Way:
    """One way to train: its name, what makes a copy of the model train so, and the steps until nothing changes more.

    - `prepare`: None if this model cannot be trained so; the note says why.
    - `budget`: the peak that it may take, in the bytes that the frontier counts.
    - `note`: what its row says.
    """

    name: str
    prepare: Callable[[nn.Module], object] | None
    warm_up_steps: int
    budget: int | None = None
    note: str = ""


def plain_way() -> Way:
    """The model as PyTorch trains it."""
    return Way("plain", lambda model: None, _PLAIN_STEPS)


def lean_way() -> Way:
    """The floor: `lean(model)`, with no budget."""
    return Way("lean", lean, _LEAN_STEPS, note="the floor")


def budget_way(budget: int, told: int, note: str = "") -> Way:
    """`lean(model, budget=told)`: `told` counts what else stands on the device, `budget` does not."""
    return Way("lean, budget", lambda model: lean(model, budget=told), _BUDGET_STEPS, budget, note)


def checkpoint_way(model: nn.Module) -> Way | None:
    """`torch.utils.checkpoint` by the model's own switch, or else around each of the repeated modules; None: neither.

    The switch is timm's: a DenseNet, whose layers read one list that grows, cannot be wrapped from outside.
    """
    if _has_switch(model):
        return Way("checkpoint", _switch_on, _PLAIN_STEPS, note="by the model's own set_grad_checkpointing()")
    found = repeated_modules(model)
    if not found:
        return None
    return Way("checkpoint", _checkpoint, _PLAIN_STEPS, note=f"around {describe_repeated(found)}")


def _has_switch(model: nn.Module) -> bool:
    """Whether the checkpoints of a model can be switched on; it is left as it is."""
    tensors: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return _switch_on(copy.deepcopy(model, tensors))  # which has these tensors in common with the model
    except Exception:  # what its switch raises says that it is none: an assertion where the base class alone has it
        return False


def _switch_on(model: nn.Module) -> bool:
    """Switch on the checkpoints of all parts of a model that have them; whether there are any."""
    switched: set[nn.Module] = set()
    has_switch = False
    for module in model.modules():
        switch = getattr(module, "set_grad_checkpointing", None)
        if callable(switch) and module not in switched:
            switch(True)
            switched.update(module.modules())  # the switch is for all that it holds
            has_switch = True
    return has_switch


def no_checkpoint() -> Way:
    """In the place of `checkpoint_way`, for a model that has none."""
    return Way("checkpoint", None, 0, note="found no repeated modules to put it around")


def _checkpoint(model: nn.Module) -> None:
    checkpoint_each(repeated_modules(model))
