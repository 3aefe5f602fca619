"""What autograd holds in place of a saved tensor, and the unpack hook that gives the tensor back."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, is_grad_enabled

from leangrad._torch import autocast_may_be_on, autocast_off
from leangrad.errors import ChangedError

AUTOCAST_DEVICES = ("cuda", "cpu") if torch.backends.cuda.is_built() else ("cpu",)

unpack: Callable[[Any], Tensor] = methodcaller("unpack")  # the unpack hook


class PackedTensor:
    """Base class of what a pack hook returns if unpacking has to rebuild the tensor, or to check it first."""

    __slots__ = ()

    def read(self) -> Tensor:
        """Returns the tensor. It is called with grad mode and autocast off."""
        raise NotImplementedError

    def unpack(self) -> Tensor:
        """Returns the tensor to autograd, from `read` with grad mode and autocast off."""
        if is_grad_enabled() or autocast_may_be_on():
            return self._read_aside()
        return self.read()

    def _read_aside(self) -> Tensor:
        """Switch grad mode and autocast off for the replay: backward may have been called with them on."""
        with torch.no_grad(), autocast_off(*AUTOCAST_DEVICES):
            return self.read()


@final
class Bare(NamedTuple):
    """A kept tensor with the version that it must still have when it is read, and no `Value` around it."""

    tensor: Tensor
    version: int
    node: type = type(None)  # type of the autograd node that made it; NoneType: a parameter, an input, or not noted

    def unpack(self) -> Tensor:
        """Returns the tensor to autograd; raises ChangedError if it was changed in place."""
        tensor = self.tensor
        if tensor._version != self.version:
            what = "a parameter or input" if self.node is type(None) else f"the output of {self.node.__name__}"
            raise changed_error(what, tensor, self.version)
        return tensor


class Changes:
    """Counts how often backward found that a tensor it needs was changed in place."""

    count: ClassVar[int] = 0


def changed_error(what: str, tensor: Tensor, version: int) -> ChangedError:
    """Returns the error to raise for a tensor that was changed in place after it was kept, and counts it.

    what: describes the tensor.
    version: the version that it had when it was kept.
    """
    Changes.count += 1
    return ChangedError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, "
        f"{tensor.dtype} {list(tensor.shape)}, is at version {tensor._version}; expected version {version}. To mend "
        "it, run backward before the change, use the out-of-place form of the op that made it, or change a clone."
    )
