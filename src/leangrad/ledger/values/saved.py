"""What stands for a tensor that autograd saved, and gives it back."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, is_grad_enabled

from leangrad._torch import autocast_may_be_on, autocast_off
from leangrad.errors import ChangedError

AUTOCAST_DEVICES = ("cuda", "cpu") if torch.backends.cuda.is_built() else ("cpu",)

unpack: Callable[[Any], Tensor] = methodcaller("unpack")  # the hook: autograd wants its tensor back


class PackedTensor:
    """A tensor that has to be read: rebuilt, or looked into before it is handed out."""

    __slots__ = ()

    def read(self) -> Tensor:
        """The tensor, without gradients and autocast."""
        raise NotImplementedError

    def unpack(self) -> Tensor:
        """Autograd wants its tensor back."""
        if is_grad_enabled() or autocast_may_be_on():
            return self._read_aside()
        return self.read()

    def _read_aside(self) -> Tensor:
        """A replay runs without gradients and without autocast, also where backward was called with them."""
        with torch.no_grad(), autocast_off(*AUTOCAST_DEVICES):
            return self.read()


@final
class Bare(NamedTuple):
    """A tensor that is kept as it is, with the version it must still be at: no value around it."""

    tensor: Tensor
    version: int
    node: type = type(None)  # of the op that made it

    def unpack(self) -> Tensor:
        """Autograd wants its tensor back."""
        tensor = self.tensor
        if tensor._version != self.version:
            what = "a parameter or input" if self.node is type(None) else f"the output of {self.node.__name__}"
            raise ChangedError(changed(what, tensor, self.version))
        return tensor


def changed(what: str, tensor: Tensor, version: int) -> str:
    """The message for a tensor that was changed in place after it was kept."""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, "
        f"{tensor.dtype} {list(tensor.shape)}, is at version {tensor._version}; expected version {version}. To mend "
        "it, run backward before the change, use the out-of-place form of the op that made it, or change a clone."
    )
