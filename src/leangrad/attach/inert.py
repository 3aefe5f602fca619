"""Warns if a lean module is trained without its forward.

`lean(module)` opens its region in `forward`, and in the `training_step` of a LightningModule. Some code trains a module
through other methods, which call its submodules. Then no region opens and no memory is saved, which without this
warning the user would not notice.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from leangrad.ledger.observe.active_region import regions_entered
from leangrad.switch import disabled

__all__ = ["Watch"]


class Watch:
    """Warns once if a parameter of a module gets a gradient before the module's forward has run.

    Each parameter has a hook from `lean` until the first forward with gradients or the first gradient, whichever is
    sooner. If any region was opened meanwhile, the step was partly lean, and there is no warning.
    """

    def __init__(self, module: nn.Module) -> None:
        self.forward_ran = False  # set by a traced forward, which cannot call `end`
        self._name = type(module).__name__
        self._regions = regions_entered()
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._arrived)
            for parameter in module.parameters()
            if parameter.requires_grad and type(parameter) is nn.Parameter  # not sharded, not lazy
        ]

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _arrived(self, parameter: Tensor) -> None:
        if not self._handles:  # another thread of this backward pass was first
            return
        self.end()
        if self.forward_ran or disabled() or regions_entered() != self._regions:
            return
        warnings.warn(
            f"this {self._name} got gradients, but its forward has not run since leangrad.lean(), which makes only "
            "forward lean: the step was plain and no memory was saved. Put `with ledger:`, of one `ledger = "
            "leangrad.saving()` for the whole training, around what computes the loss; or call leangrad.lean on the "
            "submodules that the step calls.",
            stacklevel=2,
        )
