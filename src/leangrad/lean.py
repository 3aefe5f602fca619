"""The front door: the same model, with the same gradients, in less memory.

    model = leangrad.lean(model)            # from now on every forward keeps only what backward cannot rebuild
    model = leangrad.plain(model)           # as it was

    with leangrad.saving() as ledger:       # the same for any region of code, the loss included
        loss = criterion(model(x), y)
    loss.backward()
    print(ledger.summary())

What happens inside the region is told in `ledger/`: autograd asks to keep a tensor; the ledger finds out how the tensor was
made, and keeps it, shares one that is kept already, or stores a recipe that rebuilds it bit for bit in backward.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, TypeVar

from torch import nn

from leangrad import _torch
from leangrad.ledger import MIN_BYTES, Ledger, Region

__all__ = ["is_lean", "lean", "ledger_of", "plain", "saving"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def lean(model: ModuleT, *, residual_depth: int | Literal["auto"] = "auto", min_bytes: int = MIN_BYTES) -> ModuleT:
    """Make ``model`` keep only what backward cannot rebuild. Returns the same object.

    Equals ``model``: class, parameters, state_dict, forward and gradients are the same, bit for bit. Only what autograd
    keeps between forward and backward is less.

    residual_depth: how many additions of a residual stream may be rebuilt in a row. ``"auto"`` chooses, from what the first
        step shows, the cut that makes the peak lowest.
    min_bytes: smaller tensors are kept without looking into them.

    A model that is lean already is given the new settings and starts to learn anew. Under ``torch.compile``, ``torch.func``,
    ``no_grad`` and inference mode the model runs plain.

    >>> import torch, leangrad
    >>> model = leangrad.lean(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()))
    >>> model(torch.ones(2, 8)).sum().backward()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"lean() expects an nn.Module, got {type(model).__name__}; for code that is no module use `with saving():`"
        )
    ledger = Ledger(residual_depth=residual_depth, min_bytes=min_bytes)
    plain(model)
    model.register_forward_pre_hook(Enter(ledger))
    model.register_forward_hook(Leave(ledger), prepend=True, always_call=True)
    return model


def plain(model: ModuleT) -> ModuleT:
    """Undo ``lean``. Returns the same object; a model that is not lean is left as it is.

    >>> import torch, leangrad
    >>> model = leangrad.lean(torch.nn.Linear(2, 2))
    >>> leangrad.is_lean(leangrad.plain(model))
    False
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plain() expects an nn.Module, got {type(model).__name__}")
    _torch.remove_forward_hooks(model, (Enter, Leave))
    return model


def saving(*, residual_depth: int | Literal["auto"] = "auto", min_bytes: int = MIN_BYTES) -> Ledger:
    """A region whose saved tensors go through a ledger: ``lean`` for any code, the loss included.

    Backward may run inside or after it. Keep the object and enter it again in the next step, and it will use what it learned.

    >>> import torch, leangrad
    >>> x = torch.ones(64, 64, requires_grad=True)
    >>> with leangrad.saving() as ledger:
    ...     loss = torch.nn.functional.gelu(x @ x).relu().sum()
    >>> loss.backward()
    """
    return Ledger(residual_depth=residual_depth, min_bytes=min_bytes)


def is_lean(model: nn.Module) -> bool:
    """Whether ``lean`` was called on this very module.

    >>> import torch, leangrad
    >>> leangrad.is_lean(torch.nn.Linear(2, 2))
    False
    """
    return any(isinstance(hook, Enter) for hook in _torch.forward_pre_hooks(model))


def ledger_of(model: nn.Module) -> Ledger:
    """The ledger of a lean model: what it kept, shared and rebuilt, and why.

    >>> import torch, leangrad
    >>> ledger = leangrad.ledger_of(leangrad.lean(torch.nn.Linear(2, 2)))
    """
    for hook in _torch.forward_pre_hooks(model):
        if isinstance(hook, Enter):
            return hook.ledger
    raise ValueError(f"this {type(model).__name__} is not lean; call leangrad.lean(model) first")


class Enter:
    """The forward pre-hook of a lean module: its region begins.

    Hooks are told which module really runs, so copies and replicas of a lean module are lean themselves. They are called on
    every way out of forward but one: KeyboardInterrupt and its kin leave the region open. An open region does no harm to
    numbers; the module's next call closes it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __call__(self, module: nn.Module, args: Any) -> None:
        if _torch.is_traced():
            return
        open_regions = _regions()
        if open_regions and open_regions[-1][0] is module and not _torch.runs_within_itself(module):
            _close(open_regions.pop()[1])
        region = self.ledger.region(module)
        if region is not None:
            region.__enter__()
        open_regions.append((module, region))


class Leave:
    """The forward hook of a lean module, called also after an exception: its region ends."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        open_regions = _regions()
        if open_regions and open_regions[-1][0] is module:
            _close(open_regions.pop()[1])


_local = threading.local()


def _regions() -> list[tuple[nn.Module, Region | None]]:
    """The lean modules that run now in this thread, each with the region it opened."""
    if not hasattr(_local, "regions"):
        _local.regions = []
    return _local.regions  # type: ignore[no-any-return]


def _close(region: Region | None) -> None:
    if region is not None:
        region.__exit__(None, None, None)
