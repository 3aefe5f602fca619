"""The hooks that autograd calls, and where they are set; ``saved.py`` has what hands a tensor back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from leangrad import _torch
from leangrad._torch import graph_task, saved_tensor_hooks_active
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.pending_save import PendingSave

TAKEN_BACK = -1


class Hooks:
    """The saved-tensor hooks of one region: set for all of it, or call by call up to a known saved tensor."""

    def __init__(self, pack: Callable[[Tensor], Packed | PendingSave], unpack: Callable[[Any], Tensor]) -> None:
        # Set them until they are taken back; whatever was set inside has been taken back by then by whoever set it.
        self.set_all, self.take_back_all = _torch.saved_tensor_hooks(pack, unpack)
        self.last = TAKEN_BACK  # the saved tensor after which they are taken back

    def set(self, last: int) -> bool:
        """Set them, up to saved tensor ``last``; False where others have set theirs or no hooks may be set."""
        if saved_tensor_hooks_active():
            return False
        try:
            self.set_all()
        except RuntimeError:  # inside a transform of torch.func
            return False
        self.last = last
        return True

    def reach_last(self) -> None:
        """Autograd has called for the last tensor: the next one is saved as plain PyTorch does.

        A backward that runs inside a call has its own copy of what is set; there they stay until the call ends.
        """
        if graph_task() < 0:
            self.last = TAKEN_BACK
            self.take_back_all()

    def take_back(self) -> None:
        """The call has ended before autograd came to the last tensor."""
        self.last = TAKEN_BACK
        self.take_back_all()
