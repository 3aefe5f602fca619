"""The saved-tensor hooks of a region: when they are set and popped. ``values/saved.py`` has the unpack hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from leangrad import _torch
from leangrad._torch import graph_task, saved_tensor_hooks_active
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.pending_save import PendingSave

NOT_SET = -1  # ``Hooks.last`` while the hooks are not set up to a known saved tensor


class Hooks:
    """The saved-tensor hooks of one region: set for all of it, or call by call up to a known saved tensor."""

    def __init__(self, pack: Callable[[Tensor], Packed | PendingSave], unpack: Callable[[Any], Tensor]) -> None:
        # ``set_all`` sets the hooks, ``unset_all`` pops the innermost pair: hooks that other code has set
        # in between must have been popped by that code.
        self.set_all, self.unset_all = _torch.saved_tensor_hooks(pack, unpack)
        self.last = NOT_SET  # number of the saved tensor at which the hooks are popped

    def set(self, last: int) -> bool:
        """Set the hooks up to saved tensor ``last``; returns whether they were set.

        They are not set if other hooks are in force or torch allows none.
        """
        if saved_tensor_hooks_active():
            return False
        try:
            self.set_all()
        except RuntimeError:  # inside a transform of torch.func
            return False
        self.last = last
        return True

    def reach_last(self) -> None:
        """Pop the hooks when autograd saves tensor ``last``: it saves the next tensors as in plain PyTorch.

        A backward pass that runs inside the call has its own copy of the hooks that are set; there this does nothing,
        and the hooks stay until the call ends.
        """
        if graph_task() < 0:
            self.last = NOT_SET
            self.unset_all()

    def unset(self) -> None:
        """Pop the hooks after a call that has ended before autograd saved tensor ``last``."""
        self.last = NOT_SET
        self.unset_all()
