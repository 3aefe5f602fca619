"""Where a packed gradient lives, and how one arrives there.

A `Slot` is one parameter's place, a `Range` is the flat buffer that holds the slots of neighbouring parameters.

[Note: who owns a range]
Nobody but the gradients in it. A range remembers its buffer by a weak reference; what keeps the buffer alive are the
`.grad` tensors, which are views of it. So `zero_grad(set_to_none=True)` frees a packed gradient as it frees a plain
one, and the first gradient that arrives afterwards allocates the range again. At every moment the ranges that stand
are those with a gradient in them: in backward, which fills them from the last to the first, one is partly filled.

[Note: when a gradient is new]
`.grad` itself is the only state. None: nothing has been written since `zero_grad`, the arrival overwrites. The slot's
view: something has, the arrival adds. Any other tensor: somebody has put it there; autograd adds to it as it always
does, and the result is moved into the slot afterwards. Nothing else has to be told that a step has begun or ended, so
retain_graph, a second micro-batch, a tied weight and a partial backward are all the same case.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from leangrad import _torch
from leangrad.errors import ChangedError, LeangradError

from .streams import KNOWN, is_default, order, stream_of

#: Gradients start at multiples of this, the coarsest alignment that a vectorised kernel asks for.
ALIGNMENT_BYTES = 256

#: Whether `.grad` may be told to have another dtype than its parameter (torch has had this since 2.10 or later).
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")

#: `compute(out, add)` writes a gradient over `out`, or adds it there; where `out` is None it returns a new tensor.
Compute = Callable[[Tensor | None, bool], Tensor]


class Watcher(Protocol):
    """Somebody who waits for the gradients of a range: the reduction over processes."""

    def arrived(self, slot: "Slot") -> None:
        """The gradient of `slot` is complete in this backward."""

    def has_sent(self, range_: "Range") -> bool:
        """Whether the range is already on its way, so that nothing may be added to it."""


class Range:
    """One flat buffer for the gradients of neighbouring parameters. See [Note: who owns a range]."""

    def __init__(self, device: torch.device, dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
        self.device, self.dtype, self.parameter_dtype = device, dtype, parameter_dtype
        self.slots: list[Slot] = []
        self.numel = 0
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

    def append(self, slot: "Slot") -> None:
        """Give `slot` the next aligned place."""
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
                self.forget_zeros()
            return base

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


class Slot:
    """One parameter's place in a range. The parameter itself is handed to every call: a slot keeps nothing alive."""

    def __init__(self, name: str, parameter: nn.Parameter, why_added: str) -> None:
        self.name = name
        self.shape = parameter.shape
        # The layout that autograd gives a gradient: the parameter's own where it is dense, else row by row.
        self.stride = torch.empty_like(parameter, device="meta").stride()
        self.numel = parameter.numel()
        self.offset = 0
        self.is_zero = False
        self.is_active = True
        self.lock = threading.Lock()
        #: The weight as autocast has it, while a graph that needs it is alive; see [Note: autocast] in products.py.
        self.cast: TensorWeakRef | None = None
        self.counts: Counter[str] = Counter()
        self.how, self.why = "none", "no gradient has arrived"
        self.why_added = why_added
        self._attached: TensorWeakRef | None = None
        self._pointer = 0
        self._home: torch.cuda.Stream | None = None  # where autograd accumulates; known after the first arrival
        self._written_on: torch.cuda.Stream | None = None
        self._why_now: str | None = None
        self._was_written = False
        self._was_replaced = False
        self.range: Range

    def view(self) -> Tensor:
        """The slot's part of the range's buffer, which is allocated if it does not stand."""
        base, dtype = self.range.standing(), self.range.dtype
        if base.dtype == dtype:
            return base.as_strided(self.shape, self.stride, self.offset)
        # A view in another dtype does not keep its base alive; a view whose `.data` is replaced by one still does.
        view = base.as_strided(self.shape, self.stride, 0)
        view.data = base.view(dtype).as_strided(self.shape, self.stride, self.offset)
        return view

    def holds(self, grad: Tensor) -> bool:
        """Whether `grad` is this slot's memory. Sound because the range's buffer is alive while it is compared."""
        if self._attached is not None and grad is self._attached():
            # The usual case, told at a tenth of the cost. `.data` of the very tensor may still have been replaced.
            same_form = grad.dtype == self.range.dtype and grad.stride() == self.stride
            return bool(same_form and grad.data_ptr() == self._pointer)
        flat = self.range.flat()
        if flat is None or grad.layout is not torch.strided or grad.device != flat.device:
            return False
        same_form = grad.shape == self.shape and grad.dtype == flat.dtype and grad.stride() == self.stride
        return same_form and (
            self.numel == 0 or grad.data_ptr() == flat.data_ptr() + self.offset * self.range.dtype.itemsize
        )

    def attach(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Make `view` the parameter's `.grad`."""
        if view.dtype == parameter.dtype or HAS_GRAD_DTYPE:
            parameter.grad = view
        else:
            # Older torch lets `.grad` have the parameter's dtype only when it is set. `.data` of a tensor that is
            # already set may be replaced by one of another dtype, and autograd adds into that in place.
            stand_in = self.range.standing().as_strided(self.shape, self.stride, 0)
            parameter.grad = stand_in
            stand_in.data = view
            view = stand_in
        self._attached, self._pointer = TensorWeakRef(view), view.data_ptr()

    def check(self, parameter: nn.Parameter) -> None:
        """Raise if the parameter is no longer what was packed."""
        range_ = self.range
        if parameter.shape != self.shape or parameter.device != range_.device:
            found = f"{tuple(parameter.shape)} on {parameter.device}"
            expected = f"{tuple(self.shape)} on {range_.device}"
        elif parameter.dtype != range_.parameter_dtype:
            found, expected = str(parameter.dtype), str(range_.parameter_dtype)
        else:
            return
        raise ChangedError(
            f"{self.name} was packed as {expected} and is now {found}; call repack() after such a change"
        )

    def write(self, parameter: nn.Parameter, compute: Compute, how: str) -> bool:
        """Let the op write its gradient here: `compute(view, add)`. False where autograd has to take it instead."""
        with self.lock:
            why_not = self._why_not_written(parameter)
            if why_not is not None:
                self._why_now = why_not
                return False
            self.check(parameter)
            self._refuse_if_sent()
            grad, stream = parameter.grad, stream_of(self.range.device)
            view = self.view() if grad is None else grad
            order(self.range.stream, stream, view)
            order(self._written_on, stream)
            compute(view, grad is not None)
            order(stream, self._home)
            self._written_on = stream
            if grad is None:
                self.attach(parameter, view)
            self._was_written, self._why_now, self.is_zero = True, how, False
            return True

    def _why_not_written(self, parameter: nn.Parameter) -> str | None:
        if not self.is_active:
            return "unpacked since the forward pass"
        if torch.is_grad_enabled():
            return "create_graph=True: the gradient carries a graph of its own"
        if self.range.device.type not in KNOWN:
            return f"nothing is known of the order of work on {self.range.device.type}"
        stream = stream_of(self.range.device)
        if stream is not None and self._home is None and not is_default(stream):
            return "the first backward on a side stream: where autograd accumulates is not known yet"
        if _torch.has_tensor_hooks(parameter):
            return "a tensor hook on the parameter has to see the gradient"
        if parameter.grad is not None and not self.holds(parameter.grad):
            self._was_replaced = True
            return ".grad had been replaced by another tensor"
        return None

    def arrived(self, parameter: nn.Parameter) -> None:
        """What autograd calls once per backward, when the parameter's gradient is complete."""
        self._home = stream_of(self.range.device)
        order(self._written_on, self._home)
        grad = parameter.grad
        if grad is None:
            return  # nothing arrived, or an earlier hook has used it up
        why_now, was_written, was_replaced = self._why_now, self._was_written, self._was_replaced
        self._why_now, self._was_written, self._was_replaced = None, False, False
        if self.holds(grad):
            self.is_zero = False
            self._refuse_if_sent(unless=was_written)
            self._tell("written" if was_written else "added", why_now or self.why_added)
        elif grad.requires_grad or grad.layout is not torch.strided:
            kind = "create_graph=True: it carries a graph" if grad.requires_grad else f"its layout is {grad.layout}"
            self._tell("plain", kind)
            return
        else:
            self.check(parameter)
            self._refuse_if_sent()
            self.move_in(parameter, grad)
            self._tell("copied" if was_replaced else "added", why_now or self.why_added)
        if self.range.watcher is not None:
            self.range.watcher.arrived(self)

    def move_in(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Copy a gradient that stands elsewhere into the slot; what it stood in is released at once."""
        view = self.view()
        order(self.range.stream, stream_of(self.range.device), view)
        with torch.no_grad():
            view.copy_(grad)
        self.attach(parameter, view)
        self.is_zero = False

    def settle(self, parameter: nn.Parameter) -> None:
        """Make the slot say what `.grad` says, before one pass over the whole buffer: zeros where it is None."""
        grad = parameter.grad
        if grad is None:
            if not self.is_zero and self.range.base() is not None:
                self.view().zero_()
                self.is_zero = True
        elif not self.holds(grad):
            if grad.requires_grad or grad.layout is not torch.strided:
                raise LeangradError(
                    f"the gradient of {self.name} stands outside the buffer ({self.why}); "
                    "detach or zero it before a pass over the packed gradients"
                )
            self.check(parameter)
            self.move_in(parameter, grad)
            self._tell("copied", ".grad had been replaced by another tensor")

    def _refuse_if_sent(self, unless: bool = False) -> None:
        watcher = self.range.watcher
        if not unless and watcher is not None and watcher.has_sent(self.range):
            raise LeangradError(
                f"a gradient of {self.name} arrived after its range had been sent to the other processes; "
                "run one backward inside reducing(), and the earlier ones before it"
            )

    def _tell(self, how: str, why: str) -> None:
        self.how, self.why = how, why
        self.counts[how] += 1


class _SlotTable:
    """Slots by parameter, weakly: an attribute on the parameter would travel into saved files and copies."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[TensorWeakRef, Slot]] = {}

    def get(self, parameter: object) -> Slot | None:
        entry = self._entries.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None

    def add(self, parameter: nn.Parameter, slot: Slot) -> None:
        self._entries[id(parameter)] = (TensorWeakRef(parameter), slot)

    def remove(self, parameter: nn.Parameter) -> None:
        self._entries.pop(id(parameter), None)

    def drop_dead(self) -> None:
        self._entries = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}


#: The slot of every packed parameter of this process.
SLOTS = _SlotTable()


def deliver(
    node: Any, index: int, parameter: nn.Parameter, compute: Compute, how: str = "the op writes it"
) -> Tensor | None:
    """Give `parameter` its gradient from inside an autograd Function's backward; return what backward has to return.

    `node` is the backward's `ctx`, `index` the parameter's place among the Function's tensor arguments, and
    `compute(out, add)` the gradient: into `out`, over it or on top of it, or as a new tensor where `out` is None.
    """
    slot = SLOTS.get(parameter)
    if slot is None:
        return compute(None, False)
    reached = _torch.engine_reaches(node.next_functions[index][0])
    if reached is False:
        return None
    if reached and slot.write(parameter, compute, how):
        return None
    return compute(None, False)
