"""How `lean` reaches a LightningModule, which Lightning trains by `training_step` and not by `forward`.

Lightning itself is not imported here: a LightningModule is known by the name of its base class.

[Note: training_step] With automatic optimization `training_step` computes the loss and returns it: that is the region.
An object in the module's own `__dict__` stands before the method of the class and opens the region around it. Forward
hooks stay where they are: `DistributedDataParallel` and its kin reach `training_step` through the module's `__call__`,
and a call inside a call opens no second region. With manual optimization `training_step` runs backward and the
optimizers, too. A region around all of that would give the right gradients, but it would learn one step where there
are several, and hold tensors of those that are over (in a small GAN that left a fifth of what is saved). There the
submodules that the step calls are lean, each by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["TrainingStep", "add_training_step", "has_training_step", "manual_parts", "remove_training_step"]

NAME = "training_step"


def has_training_step(module: nn.Module) -> bool:
    """Whether ``module`` is a LightningModule, of ``lightning`` or of ``pytorch_lightning``."""
    return any(
        kind.__name__ == "LightningModule" and kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        for kind in type(module).__mro__
    )


def manual_parts(module: nn.Module) -> list[nn.Module]:
    """The submodules of a LightningModule that optimizes manually, those in lists and dicts one by one; else none."""
    if not has_training_step(module) or getattr(module, "automatic_optimization", True):
        return []
    return [part for part in _called(module) if any(True for _ in part.parameters())]


def _called(module: nn.Module) -> list[nn.Module]:
    """The submodules that have a forward; lists and dicts have none, and stand for what is in them."""
    found: list[nn.Module] = []
    for child in module.children():
        found += _called(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


def add_training_step(module: nn.Module, around: Callable[..., Any]) -> None:
    """Run ``around(training_step, module, args, kwargs)`` wherever ``module.training_step(*args, **kwargs)`` is called.

    See [Note: training_step].
    """
    vars(module)[NAME] = TrainingStep(module, around, vars(module).get(NAME))


def remove_training_step(module: nn.Module) -> None:
    """Undo ``add_training_step``. What others have put around ours since then stays, and ours steps aside."""
    step = vars(module).get(NAME)
    if isinstance(step, TrainingStep):
        if step.inner is None:
            del vars(module)[NAME]
        else:
            vars(module)[NAME] = step.inner
    while step is not None:
        if isinstance(step, TrainingStep):
            step.around = None
        step = getattr(step, "__wrapped__", None)


class TrainingStep:
    """Stands before the `training_step` of one module, and is copied and pickled with it.

    Lightning asks a hook for its code and its arguments, and looks behind ``__wrapped__`` for them.
    """

    def __init__(self, module: nn.Module, around: Callable[..., Any] | None, inner: Callable[..., Any] | None) -> None:
        self.module, self.around = module, around
        self.inner = inner  # what stood there before; None: the method of the class

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.inner or getattr(type(self.module), NAME).__get__(self.module)

    @property
    def __code__(self) -> Any:
        return self.__wrapped__.__code__

    @property
    def __name__(self) -> str:
        return NAME

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The training step, in a region."""
        if self.around is None:
            return self._step(*args, **kwargs)
        return self.around(self._step, self.module, args, kwargs)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands behind this.

        The class's method is called as a function: Dynamo takes a bound one for ``module.training_step``, where this
        stands, and would call it without end after a graph break.
        """
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return getattr(type(self.module), NAME)(self.module, *args, **kwargs)
