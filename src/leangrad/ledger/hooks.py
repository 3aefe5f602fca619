"""The hooks that autograd calls: where they are set, and how a tensor is handed back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled

from leangrad import _torch
from leangrad._torch import autocast_may_be_on, graph_task, saved_tensor_hooks_active
from leangrad.errors import ChangedError
from leangrad.ledger.cast import Cast, Packed
from leangrad.ledger.seen import Seen
from leangrad.ledger.value import Bare, Value, changed

AUTOCAST_DEVICES = ("cuda", "cpu") if torch.backends.cuda.is_built() else ("cpu",)

TAKEN_BACK = -1


class Hooks:
    """The saved-tensor hooks of one region: set for all of it, or call by call up to a known saved tensor."""

    def __init__(self, pack: Callable[[Tensor], Packed], unpack: Callable[[Packed], Tensor]) -> None:
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


def unpack(packed: Packed) -> Tensor:
    """Autograd wants its tensor back."""
    if type(packed) is Bare:
        bare = packed.tensor
        if bare._version != packed.version:
            raise ChangedError(changed(packed.what(), bare, packed.version))
        return bare
    tensor = packed.tensor
    if tensor is not None and type(packed) is Value and tensor._version == packed.version:
        return tensor
    if is_grad_enabled() or autocast_may_be_on():
        return _read_aside(packed)
    return packed.read()


def _read_aside(packed: Value | Cast | Seen) -> Tensor:
    """A replay runs without gradients and without autocast, also where backward was called with them."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return packed.read()
