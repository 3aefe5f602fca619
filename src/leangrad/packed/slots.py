"""`Slot`: one parameter's place in a range, and how a gradient arrives there.

[Note: when a gradient is new]
`.grad` itself is the only state. If it is None, nothing was written since `zero_grad`, and the new gradient overwrites
the slot. If it is the slot's view, the new gradient is added. Any other tensor was assigned by other code: autograd
adds to it as always, and the result is moved into the slot afterwards. No call marks the beginning or end of a step, so
retain_graph, a second micro-batch, a tied weight and a partial backward are all the same case.

[Note: threads]
On a CPU each thread that calls backward accumulates by itself. Autograd locks each add, but not the hook after it:
while the hook of one thread moves a gradient into its slot, another thread may add to the tensor it is moved from. So
while another thread is inside a backward, a gradient that autograd has accumulated stays where it is, and the next pass
moves it. A gradient that an op writes is added under the slot's lock. On CUDA one thread accumulates for all. One case
is not covered: a weight that its layer writes and a plain op adds to, in two threads of a CPU at the same moment.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from leangrad import _torch
from leangrad.errors import ChangedError, LeangradError

from . import ranges
from .streams import KNOWN, is_default, order, stream_of

#: The reason to report if a gradient must stay outside the buffer: see [Note: held gradients] in ranges.py.
HELD = "an earlier gradient is still held by somebody, beside others of its range"

#: `compute(out, add)` writes a gradient over `out`, or adds it there; if `out` is None it returns a new tensor.
Compute = Callable[[Tensor | None, bool], Tensor]


class Slot:
    """One parameter's place in a range. Callers pass the parameter where it is needed: a slot refers to it weakly."""

    def __init__(self, name: str, parameter: nn.Parameter, why_added: str) -> None:
        self.name = name
        self.shape = parameter.shape
        # The layout that autograd gives a gradient: that of the parameter if it is dense, else row by row.
        self.stride = torch.empty_like(parameter, device="meta").stride()
        self.numel = parameter.numel()
        self.offset = 0  # in elements, in the range
        self.is_zero = False  # whether the slot's memory is known to be zero
        self.is_active = True  # False after `PackedGradients.unpack`
        self.lock = threading.Lock()
        #: The weight in autocast's dtype, while a graph that needs it is alive; see [Note: autocast] in products.py.
        self.cast: TensorWeakRef | None = None
        self.counts: Counter[str] = Counter()  # for the report: how often a gradient arrived, by `how`
        self.how, self.why = "none", "no gradient has arrived"  # for the report, of the latest gradient
        self.why_added = why_added  # the reason to report if autograd adds the gradient
        self._parameter = TensorWeakRef(parameter)
        self._generation = -1  # of the buffer that the latest gradient was put into
        self._attached: TensorWeakRef | None = None  # the tensor that `attach` made the parameter's `.grad`
        self._pointer = 0  # its address
        self._home: torch.cuda.Stream | None = None  # on which autograd accumulates; known after the first gradient
        self._written_on: torch.cuda.Stream | None = None  # on which an op wrote the latest gradient
        # Of the gradient that arrives in this backward, until `arrived`: the reason to report, whether an op wrote it,
        # whether other code had replaced `.grad`.
        self._why_now: str | None = None
        self._was_written = False
        self._was_replaced = False
        self.range: ranges.Range

    def view(self) -> Tensor:
        """Returns the slot's part of the range's buffer, which is allocated if need be."""
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
            # The usual case, at a tenth of the cost. Other code may still have replaced `.data` of this tensor.
            same_form = grad.dtype == self.range.dtype and grad.stride() == self.stride
            return bool(same_form and grad.data_ptr() == self._pointer)
        flat = self.range.flat()
        if flat is None or grad.layout is not torch.strided or grad.device != flat.device:
            return False
        same_form = grad.shape == self.shape and grad.dtype == flat.dtype and grad.stride() == self.stride
        if self.numel == 0:  # an empty tensor has no address
            return same_form and _torch.same_storage(grad, flat)
        return same_form and grad.data_ptr() == flat.data_ptr() + self.offset * self.range.dtype.itemsize

    def stands(self) -> bool:
        """Whether the parameter's `.grad` lies in this slot now."""
        parameter = self._parameter()
        return parameter is not None and parameter.grad is not None and self.holds(parameter.grad)

    def is_free(self) -> bool:
        """Whether a new gradient may be put here, because no earlier one is held: see [Note: held gradients]."""
        if self._generation != self.range.generation:
            return True  # this slot has had no gradient in the current buffer
        self.range.leave()
        return not self.range.is_held()

    def attach(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Make `view` the parameter's `.grad`."""
        if view.dtype == parameter.dtype or ranges.HAS_GRAD_DTYPE:
            parameter.grad = view
        else:
            # Older torch allows only the parameter's dtype when `.grad` is assigned. But `.data` of the tensor that was
            # assigned may be replaced by one of another dtype, and autograd adds to that in place.
            stand_in = self.range.standing().as_strided(self.shape, self.stride, 0)
            parameter.grad = stand_in
            stand_in.data = view
            view = stand_in
        self._attached, self._pointer = TensorWeakRef(view), view.data_ptr()
        self._generation = self.range.generation

    def check(self, parameter: nn.Parameter) -> None:
        """Raise ChangedError if the shape, device or dtype of the parameter is not the one that was packed."""
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
        """Write a gradient here, by `compute(view, add)`; returns False if autograd has to accumulate it instead.

        how: the reason that the report gives for it.
        """
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
                if parameter.grad is not None:  # by autograd in another thread, during `compute`
                    self._why_now = ".grad had been set meanwhile"
                    return False
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
        if parameter.grad is None and not self.is_free():
            return HELD
        return None

    def arrived(self, parameter: nn.Parameter) -> None:
        """The post-accumulate hook: autograd calls it once per backward, when the parameter's gradient is complete."""
        self._home = stream_of(self.range.device)
        order(self._written_on, self._home)
        why_now, was_written, was_replaced = self._why_now, self._was_written, self._was_replaced
        self._why_now, self._was_written, self._was_replaced = None, False, False
        grad = parameter.grad
        if grad is None:
            return  # nothing arrived, or an earlier hook has consumed it
        if self.holds(grad):
            self.is_zero = False
            self._refuse_if_sent(unless=was_written)
            self._tell("written" if was_written else "added", why_now or self.why_added)
        elif why_outside := self._why_outside(grad):
            self._tell("plain", why_outside)
            return
        else:
            self.check(parameter)
            self._refuse_if_sent()
            if not self.move_in(parameter, grad):
                self._tell("added", "another thread is in a backward: the next pass over the buffer moves it there")
                return
            self._tell("copied" if was_replaced else "added", why_now or self.why_added)
        if self.range.watcher is not None:
            self.range.watcher.arrived(self)

    def _why_outside(self, grad: Tensor) -> str | None:
        """Returns why a gradient that lies elsewhere cannot be moved into the slot, or None if it can."""
        if grad.requires_grad:
            return "create_graph=True: it carries a graph"
        if grad.layout is not torch.strided:
            return f"its layout is {grad.layout}"
        return None if self.is_free() else HELD

    def move_in(self, parameter: nn.Parameter, grad: Tensor) -> bool:
        """Copy a gradient that lies elsewhere into the slot; its old memory is released at once.

        Returns False if another thread may be adding to it: then it stays where it is. See [Note: threads].
        """
        view, copied_version = self.view(), -1
        order(self.range.stream, stream_of(self.range.device), view)
        if _torch.same_storage(grad, view):  # a gradient of another slot: writing here would raise its version
            grad = grad.clone()
        while copied_version != _torch.version(grad):  # once more if another thread added to it meanwhile
            copied_version = _torch.version(grad)
            with torch.no_grad():
                view.copy_(grad)
            if self.range.device.type == "cpu" and _torch.backward_elsewhere():
                return False
        self.attach(parameter, view)
        self.is_zero = False
        return True

    def settle(self, parameter: nn.Parameter) -> None:
        """Make the slot equal to `.grad`, before a pass over the whole buffer: zeros if `.grad` is None."""
        grad = parameter.grad
        if grad is None:
            if self.is_zero or self.range.base() is None:
                return
            if not self.is_free():
                raise LeangradError(f"{self.name} has no gradient, but {HELD}; clone what you keep")
            if self.range.base() is not None:  # `is_free` may have dropped the buffer
                self.view().zero_()
                self.is_zero = True
        elif not self.holds(grad):
            if why_outside := self._why_outside(grad):
                raise LeangradError(
                    f"the gradient of {self.name} stands outside the buffer ({why_outside}); "
                    "detach, zero or clone it before a pass over the packed gradients"
                )
            self.check(parameter)
            if not self.move_in(parameter, grad):
                raise LeangradError(
                    f"another thread is in a backward and may be adding to the gradient of {self.name}; wait for it"
                )
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
    """The slots by parameter, referred to weakly. An attribute of the parameter would be saved and copied with it."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[TensorWeakRef, Slot]] = {}

    def __bool__(self) -> bool:
        """Whether there is any entry: a parameter was packed, and it was neither unpacked nor found dead."""
        return bool(self._entries)

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


def deliver(node: Any, index: int, parameter: Any, compute: Compute, how: str = "the op writes it") -> Tensor | None:
    """Give `parameter` its gradient inside the backward of an autograd Function; returns what backward must return.

    node: the `ctx` of backward.
    index: the position of the parameter among the Function's tensor arguments.
    compute: called as `compute(out, add)`; writes the gradient over `out`, or adds it to `out` if `add`, or returns it
        as a new tensor if `out` is None.
    how: the reason that the report gives if the gradient was written.
    """
    slot = SLOTS.get(parameter)
    if slot is None:
        return compute(None, False)
    reached = _torch.engine_reaches(node.next_functions[index][0])
    if reached is False or (reached and not parameter.requires_grad):  # autograd drops what a frozen parameter gets
        return None
    if reached and slot.write(parameter, compute, how):
        return None
    return compute(None, False)
