"""`Range`: a flat buffer that holds the gradients of neighbouring parameters.

[Note: who owns a range]
Only the gradients in a range own its buffer. The range refers to the buffer weakly; the `.grad` tensors, which are
views of it, keep it alive. So `zero_grad(set_to_none=True)` frees a packed gradient as it frees a plain one, and the
next gradient that arrives allocates the buffer again. At every moment the allocated ranges are those with a gradient in
them. Backward fills them from the last to the first, so that during backward one of them is partly filled.

[Note: held gradients]
A user may keep a gradient beyond `zero_grad`, to compare it with the next one, and must find it unchanged, as in plain
PyTorch. So if a buffer is still alive though no parameter's `.grad` lies in it, the range drops its reference to the
buffer, and the next gradient gets a new one. If other parameters' `.grad` still lie in it, the number of tensors on its
storage tells whether an earlier gradient is held, too. If so, the next gradient stays outside the buffer, and a pass
over the packed gradients raises.
"""

import threading
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from leangrad import _torch

from .streams import stream_of

#: Gradients start at multiples of this, the coarsest alignment that a vectorised kernel needs.
ALIGNMENT_BYTES = 256

#: Whether `.grad` may be given another dtype than its parameter (possible since torch 2.10 or later).
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")


class Watcher(Protocol):
    """Called for every gradient that arrives in a range; implemented by the reduction over processes."""

    def arrived(self, slot: Any) -> None:
        """Called when the gradient of `slot` is complete in this backward."""

    def has_sent(self, range_: "Range") -> bool:
        """Whether the range was already sent to the other processes, so that nothing may be added to it."""


class Range:
    """One flat buffer for the gradients of neighbouring parameters: see [Note: who owns a range]."""

    def __init__(self, device: torch.device, dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
        self.device, self.dtype, self.parameter_dtype = device, dtype, parameter_dtype
        self.slots: list[Any] = []  # of `Slot`, one for each parameter
        self.numel = 0
        self.generation = 0  # number of buffers that were allocated so far
        self.watcher: Watcher | None = None  # the reduction that is running; None without one
        self.stream: torch.cuda.Stream | None = None  # on which the buffer was allocated
        self._base: TensorWeakRef | None = None  # of the buffer
        self._lock = threading.Lock()
        self._pads: list[int] = []  # indices of the elements between the gradients
        self._pad_index: Tensor | None = None  # the same on the device; None until it is needed
        self._pads_are_zero = True

    @property
    def bytes(self) -> int:
        """The size of the buffer while it is allocated."""
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
        """Returns the tensor whose views the gradients are, or None while the buffer is not allocated."""
        return None if self._base is None else self._base()

    def flat(self) -> Tensor | None:
        """Returns the buffer as one vector, or None while it is not allocated.

        Its contents are arbitrary where a slot has no gradient.
        """
        base = self.base()
        return base if base is None or base.dtype == self.dtype else base.view(self.dtype)

    def standing(self) -> Tensor:
        """Returns the base, after allocating the buffer if need be. The caller must keep a reference to it."""
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
        """Drop the reference to the buffer if no `.grad` lies in it any more: see [Note: held gradients]."""
        with self._lock:
            if self.base() is not None and not any(slot.stands() for slot in self.slots):
                self._base = None

    def is_held(self) -> bool:
        """Whether a tensor that is no parameter's current `.grad` may refer to a part of the buffer."""
        base = self.base()
        return base is not None and _torch.storage_holders(base) != 1 + sum(slot.stands() for slot in self.slots)

    def clear_pads(self) -> None:
        """Zero the elements between the gradients, so that a pass over the buffer reads only the gradients."""
        flat = self.flat()
        if flat is not None and not self._pads_are_zero:
            if self._pad_index is None:
                self._pad_index = torch.tensor(self._pads, device=self.device)
            flat.index_fill_(0, self._pad_index, 0)
            self._pads_are_zero = True

    def forget_zeros(self) -> None:
        """Note that no part of the buffer is known to be zero any more."""
        self._pads_are_zero = not self._pads
        for slot in self.slots:
            slot.is_zero = False
