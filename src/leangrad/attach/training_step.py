"""Makes the `training_step` of a LightningModule lean, because Lightning trains through it and not through `forward`.

Lightning is not imported here: a LightningModule is recognized by the name of its base class.

[Note: training_step] With automatic optimization `training_step` computes the loss and returns it, so it is the region.
An object in the module's own `__dict__` shadows the method of the class and opens the region around it. The forward
hooks stay as well: `DistributedDataParallel` and similar wrappers reach `training_step` through the module's
`__call__`, and a call inside a call opens no second region. With manual optimization `training_step` also runs backward
and the optimizers. A region around all of that would give the right gradients, but it would record several steps as
one, and hold tensors of steps that are over (in a small GAN only a fifth of the saving was left). There the submodules
that `training_step` calls are made lean, each on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["TrainingStep", "add_training_step", "has_training_step", "manual_parts", "remove_training_step"]

NAME = "training_step"


def has_training_step(module: nn.Module) -> bool:
    """Whether ``module`` is a LightningModule of ``lightning`` or ``pytorch_lightning``."""
    return any(
        kind.__name__ == "LightningModule" and kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        for kind in type(module).__mro__
    )


def manual_parts(module: nn.Module) -> list[nn.Module]:
    """Return the submodules with parameters of a LightningModule that optimizes manually; else an empty list.

    Those in module lists and dicts are returned one by one.
    """
    if not has_training_step(module) or getattr(module, "automatic_optimization", True):
        return []
    return [part for part in _called(module) if any(True for _ in part.parameters())]


def _called(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that have a forward, with the contents of module lists and dicts in place of these."""
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
    """Undo ``add_training_step``. If others have wrapped our object since then, theirs stays and ours does nothing."""
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
    """Shadows the `training_step` of one module, and is copied and pickled with the module.

    Lightning reads the code and the signature of a hook; it finds the signature through ``__wrapped__``.
    """

    def __init__(self, module: nn.Module, around: Callable[..., Any] | None, inner: Callable[..., Any] | None) -> None:
        self.module, self.around = module, around
        self.inner = inner  # from the module's ``__dict__``; None: the method of the class

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
        """Run the training step in a region."""
        if self.around is None:
            return self._step(*args, **kwargs)
        return self.around(self._step, self.module, args, kwargs)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the training step that this object shadows.

        The method of the class is called as a function: Dynamo takes a bound method for ``module.training_step``, which
        is this object, and after a graph break it would call it in an endless loop.
        """
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return getattr(type(self.module), NAME)(self.module, *args, **kwargs)
