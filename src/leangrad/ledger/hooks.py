"""The hooks that autograd calls, and where they are set; ``saved.py`` has what hands a tensor back."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from leangrad import _torch
from leangrad.ledger.cast import Packed
from leangrad.ledger.saved import unpack as unpack

TAKEN_BACK = -1


class Hooks:
    """The saved-tensor hooks of one region: set for all of it, or call by call up to a known saved tensor."""

    def __init__(self, pack: Callable[[Tensor], Packed], unpack: Callable[[Packed], Tensor]) -> None:
        self._hooks = saved_tensors_hooks(pack, unpack)
        self.last = TAKEN_BACK  # the saved tensor after which they are taken back

    def set_all(self) -> None:
        """Set them until ``take_back_all``."""
        self._hooks.__enter__()

    def take_back_all(self) -> None:
        """Whatever was set inside has been taken back by whoever set it."""
        self._hooks.__exit__()

    def set(self, last: int) -> bool:
        """Set them, up to saved tensor ``last``; False where others have set theirs or no hooks may be set."""
        if _torch.saved_tensor_hooks_active():
            return False
        try:
            self._hooks.__enter__()
        except RuntimeError:  # inside a transform of torch.func
            return False
        self.last = last
        return True

    def reach_last(self) -> None:
        """Autograd has called for the last tensor: the next one is saved as plain PyTorch does.

        A backward that runs inside a call has its own copy of what is set; there they stay until the call ends.
        """
        if _torch.graph_task() < 0:
            self.take_back()

    def take_back(self) -> None:
        """If that has not been done."""
        if self.last != TAKEN_BACK:
            self.last = TAKEN_BACK
            self._hooks.__exit__()
