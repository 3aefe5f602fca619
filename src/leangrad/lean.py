"""The front door: the same model, with the same gradients, in less memory.

    model = leangrad.lean(model)            # from now on every forward keeps only what backward cannot rebuild
    model = leangrad.plain(model)           # as it was

    with leangrad.saving() as ledger:       # the same for any region of code, the loss included
        loss = criterion(model(x), y)
    loss.backward()
    print(ledger.summary())

What happens inside the region: [`ledger/`](ledger/__init__.py). Autograd asks to keep a tensor; the ledger finds out how the
tensor was made, and keeps it, shares one that is kept already, or stores a recipe that rebuilds it bit for bit in backward.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from torch import nn

from leangrad.ledger import MIN_BYTES, Ledger

__all__ = ["is_lean", "lean", "ledger_of", "plain", "saving"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def lean(
    model: ModuleT, *, residual_depth: int | Literal["auto"] = "auto", min_bytes: int = MIN_BYTES
) -> ModuleT:
    """Make ``model`` keep only what backward cannot rebuild. Returns the same object.

    Equals ``model``: class, parameters, state_dict, hooks and gradients are the same, bit for bit. Only what autograd
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
    plain(model)
    model.__dict__["forward"] = LeanForward(model, Ledger(residual_depth=residual_depth, min_bytes=min_bytes))
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
    forward = model.__dict__.get("forward")
    if isinstance(forward, LeanForward):
        if forward.before is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = forward.before
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
    return isinstance(model.__dict__.get("forward"), LeanForward)


def ledger_of(model: nn.Module) -> Ledger:
    """The ledger of a lean model: what it kept, shared and rebuilt, and why.

    >>> import torch, leangrad
    >>> ledger = leangrad.ledger_of(leangrad.lean(torch.nn.Linear(2, 2)))
    """
    forward = model.__dict__.get("forward")
    if not isinstance(forward, LeanForward):
        raise ValueError(f"this {type(model).__name__} is not lean; call leangrad.lean(model) first")
    return forward.ledger


class LeanForward:
    """A module's forward inside its ledger.

    It is set on the instance, not through forward hooks, because only a ``with`` statement leaves the region on every way
    out of forward, KeyboardInterrupt included. It knows its module weakly, so the module still dies with its last reference.
    """

    def __init__(self, module: nn.Module, ledger: Ledger) -> None:
        self.ledger = ledger
        self.before: Callable[..., Any] | None = module.__dict__.get("forward")
        self._module = weakref.ref(module)
        self._describe(module)

    def _describe(self, module: nn.Module) -> None:
        # Trainers ask `inspect.signature(model.forward)` which columns of a data set the model takes.
        forward = self.before or type(module).forward.__get__(module)
        self.__name__, self.__doc__ = "forward", forward.__doc__
        self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        forward = self.before or type(module).forward.__get__(module)
        with self.ledger.region(module):
            return forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> LeanForward:
        copied = LeanForward.__new__(LeanForward)
        copied.__setstate__((memo[id(self._module())], self.ledger.fresh(), copy.deepcopy(self.before, memo)))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return LeanForward.__new__, (LeanForward,), (self._module(), self.ledger.fresh(), self.before)

    def __setstate__(self, state: tuple[nn.Module, Ledger, Callable[..., Any] | None]) -> None:
        module, self.ledger, self.before = state
        self._module = weakref.ref(module)
        self._describe(module)
