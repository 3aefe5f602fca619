"""The flat buffers that gradients live in.

[Note: who owns a range]
Nobody but the gradients in it. A range remembers its buffer by a weak reference; what keeps the buffer alive are the
`.grad` tensors, which are views of it. So `zero_grad(set_to_none=True)` frees a packed gradient as it frees a plain
one, and the first gradient that arrives afterwards allocates the range again. At every moment the ranges that stand
are those with a gradient in them: in backward, which fills them from the last to the first, one is partly filled.

[Note: held gradients]
Whoever keeps a gradient beyond `zero_grad`, to compare it with the next one, must find it unchanged, as in plain. So a
buffer in which no gradient of the model stands any more, and which is alive all the same, is left to its holder, and
the next gradient gets a new one. Where other gradients still stand in it, the count of tensors that see it tells
whether somebody holds an earlier one; then the next gradient stays outside the buffer, and a pass over it raises.
"""

import threading
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from leangrad import _torch

from .streams import stream_of

#: Gradients start at multiples of this, the coarsest alignment that a vectorised kernel asks for.
ALIGNMENT_BYTES = 256

#: Whether `.grad` may be told to have another dtype than its parameter (torch has had this since 2.10 or later).
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")


class Watcher(Protocol):
    """Somebody who waits for the gradients of a range: the reduction over processes."""

    def arrived(self, slot: Any) -> None:
        """The gradient of `slot` is complete in this backward."""

    def has_sent(self, range_: "Range") -> bool:
        """Whether the range is already on its way, so that nothing may be added to it."""


class Range:
    """One flat buffer for the gradients of neighbouring parameters. See [Note: who owns a range]."""

    def __init__(self, device: torch.device, dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
        self.device, self.dtype, self.parameter_dtype = device, dtype, parameter_dtype
        self.slots: list[Any] = []  # of `Slot`, one for each parameter
        self.numel = 0
        self.generation = 0  # how many buffers have stood
        self.watcher: Watcher | None = None
        self.stream: torch.cuda.Stream | None = None  # where the buffer was allocated
        self._base: TensorWeakRef | None = None
        self._lock = threading.Lock()
        self._pads: list[int] = []
        self._pad_index: Tensor | None = None
        self._pads_are_zero = True

    @property
    def bytes(self) -> int:
        """The size of the buffer while it stands."""
        return self.numel * self.dtype.itemsize

    def append(self, slot: Any) -> None:
        """Give a `Slot` the next aligned place."""
        step = ALIGNMENT_BYTES // self.dtype.itemsize
        slot.offset = self.numel
        end = slot.offset + slot.numel
        self.numel = -(-end // step) * step
        self._pads.extend(range(end, self.numel))
        self.slots.append(slot)

    def base(self) -> Tensor | None:
        """The tensor whose views the gradients are, or None while no gradient stands."""
        return None if self._base is None else self._base()

    def flat(self) -> Tensor | None:
        """The buffer as one vector, or None while no gradient stands. Slots without a gradient hold anything."""
        base = self.base()
        return base if base is None or base.dtype == self.dtype else base.view(self.dtype)

    def standing(self) -> Tensor:
        """The buffer's base, allocated now if no gradient stands. Whoever asks must keep it."""
        with self._lock:
            base = self.base()
            if base is None:
                # A stand-in (see `Slot.attach`) has to be a view of its base in the parameter's own dtype.
                dtype = self.dtype if HAS_GRAD_DTYPE else self.parameter_dtype
                base = torch.empty(self.bytes // dtype.itemsize, dtype=dtype, device=self.device)
                self._base, self.stream = TensorWeakRef(base), stream_of(self.device)
                self.generation += 1
                self.forget_zeros()
            return base

    def leave(self) -> None:
        """If no gradient stands in the buffer, leave it to whoever keeps it alive. See [Note: held gradients]."""
        with self._lock:
            if self.base() is not None and not any(slot.stands() for slot in self.slots):
                self._base = None

    def is_held(self) -> bool:
        """Whether somebody may hold a part of the buffer that is no gradient of the model now."""
        base = self.base()
        return base is not None and _torch.storage_holders(base) != 1 + sum(slot.stands() for slot in self.slots)

    def clear_pads(self) -> None:
        """Zero what lies between the gradients, so that one pass over the buffer sees the gradients only."""
        flat = self.flat()
        if flat is not None and not self._pads_are_zero:
            if self._pad_index is None:
                self._pad_index = torch.tensor(self._pads, device=self.device)
            flat.index_fill_(0, self._pad_index, 0)
            self._pads_are_zero = True

    def forget_zeros(self) -> None:
        """Take nothing in the buffer for zero any more."""
        self._pads_are_zero = not self._pads
        for slot in self.slots:
            slot.is_zero = False
