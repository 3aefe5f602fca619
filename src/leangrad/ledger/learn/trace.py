"""The trace of a step: the torch function calls of the recorded step, and which of them need saved-tensor hooks.

[Note: hooks only where they are needed]
A saved-tensor hook costs the host more than many an op does, and most saved tensors are kept as they are: parameters,
statistics, anchors. The first step is recorded with hooks set all the time. It shows which calls save a tensor that is
rebuilt. Later steps set hooks around these calls only; all other tensors are saved by autograd itself, as in plain
PyTorch. If recipes read a tensor that autograd saved itself, they get it from the node that saved it.

A wrong trace does no harm: a tensor saved without a hook is kept, and a tensor saved with a hook gets a decision. If a
step makes another call than the recorded step did, it leaves the trace, and hooks are set around every call in the rest
of the step. Calls of functions that saved nothing, such as ``x.shape``, are not part of the trace. Neither are sizes:
batches may have any length. But a tensor that was kept because it was small must stay small, and a call that took no
part in backward must not begin to, as happens when frozen layers are trained later, or when a dropout that did nothing
in eval mode runs in training mode.

In a segment that a checkpoint recomputes no trace is followed: the checkpoint's hooks are set there, and an anchor
cannot be read from a node that has saved it through them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from leangrad import _torch
from leangrad.ledger.learn.early_end import Border
from leangrad.ledger.learn.gradients import Graph
from leangrad.ledger.learn.scratch import FUNCTIONS as CONVOLUTIONS
from leangrad.ledger.learn.scratch import Convolution, convolution_of
from leangrad.ledger.learn.unwatched import Handover
from leangrad.ledger.observe.call_args import NOTES_NEED, Handler
from leangrad.ledger.observe.checkpoint import mark_made, mark_outside
from leangrad.ledger.observe.function_mode import FunctionMode, ObservedRegion
from leangrad.ledger.observe.handlers import HANDLERS, handler_of
from leangrad.ledger.observe.hooks import NOT_SET, Hooks
from leangrad.ledger.observe.mutation import write_out
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.pending_save import packed_in

ALL = ANY_SIZE = sys.maxsize


class Call:
    """One call of a function that saves tensors."""

    __slots__ = (
        "anchors",
        "begins_checkpoint",
        "catches",
        "first",
        "function",
        "handler",
        "is_checked",
        "last",
        "quiet",
        "size",
    )

    def __init__(
        self,
        function: Any,
        first: int = 0,
        last: int = -1,
        anchors: tuple[tuple[int, str], ...] = (),
        catches: int = 0,
        size: int = ANY_SIZE,
        quiet: bool = False,
        begins_checkpoint: bool = False,
    ) -> None:
        self.function = function
        self.handler = HANDLERS.get(function)
        self.first = first  # number of tensors that were saved before the call
        # Number of the last saved tensor for which the call needs hooks: one that is rebuilt, or that the call's own
        # node does not hold. -1: there is none, and the call runs without hooks.
        self.last = last
        # The tensors that it saves after ``last`` and that recipes may read. For each: the number of the saved tensor,
        # a function that returns its unpack hook in a node, and the attribute of the node that returns the tensor.
        self.anchors = tuple((number, _torch.hook_of(name), "_saved_" + name) for number, name in anchors)
        self.catches = catches  # bytes of its output, if that was kept in place of a larger tensor; else 0
        self.size = size  # elements that its output may have while all of its small tensors stay below ``min_bytes``
        self.quiet = quiet  # whether it returned tensors, none of which takes part in backward
        self.is_checked = quiet or size != ANY_SIZE
        # Whether it was the first call in a checkpoint, or the first to read a reentrant one's output.
        self.begins_checkpoint = begins_checkpoint


class Trace(NamedTuple):
    """The calls of a step in order, and what is known about the functions that it called."""

    calls: Sequence[Call]
    saves: dict[Any, bool]  # by function, whether any of its calls saved a tensor or began a checkpoint
    quiet: frozenset[Any]  # functions that returned tensors, none of which takes part in backward
    passes: frozenset[Any]  # functions that saved nothing, have no handler and are not in ``quiet``
    is_whole: bool = True  # False: nothing is rebuilt after the last of ``calls``, and later calls are not followed
    border: Border | None = None  # where the function mode is removed: see [Note: the function mode ends early]
    handover: Handover | None = None  # where it is not set, either: see [Note: without the function mode]
    again: int = 0  # index of the first of ``calls`` after that


class TracedRegion(ObservedRegion, Protocol):
    """What TraceMode needs from its region."""

    saved_count: int  # number of tensors that were saved so far
    call: int  # number of the call that runs, while a step is recorded
    hooks: Hooks
    outer: Any  # the pack hook of the checkpoint that is active around the region; None: there is none
    drops: bool  # whether ``outer`` is that of a checkpoint's forward, which drops all saved tensors
    runs_again: bool  # whether ``outer`` is that of a checkpoint which recomputes its function in backward
    caught: Collection[int] | None  # numbers of the calls whose product is to be held; None: of any call

    def update_checkpoint_frame(self) -> None:
        """Find out, before a call runs, whether it runs inside a checkpoint."""

    def wrap_new_checkpoint(self) -> bool:
        """Whether the running call is the first in a checkpoint inside the region; wraps the checkpoint's function."""

    def wrap_new_reentrant(self, args: Any) -> bool:
        """Whether ``args`` has a tensor of a new reentrant checkpoint; wraps the checkpoint's function."""

    def anchor(self, tensor: Tensor, number: int) -> None:
        """Let recipes read ``tensor``, which autograd saved itself as saved tensor ``number``."""

    def report_difference(self, why: str) -> None:
        """Note that this step differs from the recorded one, because of ``why``."""


class RecordedCall(NamedTuple):
    """A call of the recorded step, and the tensors that it saved."""

    function: Any
    handled: bool  # whether the function has a handler, which may have recorded something about the call
    size: int  # elements of its output; 0 if that is not a single tensor
    nbytes: int  # bytes of its output; 0 if that is not a single strided tensor
    graded: bool | None  # whether it returned a tensor that takes part in backward; None: it returned no tensor
    convolution: Convolution | None  # its backward, if it is a convolution on a CPU
    first: int  # number of tensors that were saved before the call
    names: tuple[str | None, ...]  # for each saved tensor, its name in the call's own node; None: another node has it
    begins_checkpoint: bool  # it was the first call in a checkpoint, or the first to read a reentrant one's output


class TraceRecorder:
    """Runs the calls of a step and records them.

    packed: ``Recorder.saved``, the list of what each saved tensor was packed as.
    """

    def __init__(self, region: TracedRegion, packed: Sequence[Packed]) -> None:
        self.calls: list[RecordedCall] = []
        self.numbers: list[int] = []  # for each call, the number of the first node made since the call began
        self.graph = Graph(_torch.next_sequence_nr())
        self._region = region
        self._packed = packed

    def call(self, mode: FunctionMode, function: Any, handler: Handler | None, args: Any, kwargs: Any) -> Any:
        """Run one call and record it with the tensors that it saved."""
        first = self._region.saved_count
        self._region.call = len(self.calls)
        if handler is not None and handler not in NOTES_NEED:
            self._region.needs_mode()
        self.numbers.append(_torch.next_sequence_nr())
        self._region.update_checkpoint_frame()
        try:
            out = function(*args, **kwargs) if handler is None else handler(mode, function, args, kwargs)
        except BaseException:  # such as that of a checkpoint, which stops its recomputation when it has every tensor
            unnamed = (None,) * (self._region.saved_count - first)
            self.calls.append(RecordedCall(function, handler is not None, 0, 0, None, None, first, unnamed, False))
            raise
        count = self._region.saved_count - first
        names = _names(out, self._packed[first:]) if count else ()
        size = out.numel() if type(out) is Tensor else 0
        nbytes = out.nbytes if type(out) is Tensor and out.layout is torch.strided else 0
        convolution = convolution_of(out, args) if function in CONVOLUTIONS else None
        handled, graded = handler is not None, _is_graded(out, args)
        if graded:
            self.graph.add(out)
        # Not set at a call such as ``x.shape``, or all calls of that function would be in the trace.
        begins = graded is True and self._region.wrap_new_reentrant(args) | self._region.wrap_new_checkpoint()
        if begins:
            self._region.needs_mode()
        self.calls.append(RecordedCall(function, handled, size, nbytes, graded, convolution, first, names, begins))
        return out


class TraceMode(FunctionMode):
    """The function mode of one region: it records the calls of a step, follows a trace, or only runs the handlers.

    One class does all three, because code that dynamo has compiled is valid only for function modes of one class.
    """

    region: TracedRegion

    def __init__(
        self, region: TracedRegion, trace: Trace | None = None, recording: TraceRecorder | None = None
    ) -> None:
        super().__init__(region)
        self._recording = recording
        self._trace = trace
        self._passes = trace.passes if trace is not None else frozenset()
        self._hooks = region.hooks
        self._rest = iter(trace.calls if trace is not None else ())
        self._end = _NO_CALL if trace is None or trace.is_whole else _NO_REBUILDS
        self._expected = self._suspended = next(self._rest, self._end)
        self._mark = object()
        self.is_on_trace = trace is not None  # True while the step has made the same calls as the recorded one
        self.has_ended = False  # whether the mode was removed before the region has ended

    def leave_trace(self) -> None:
        """Stop following the trace: from now on, hooks are set around every call that may save a tensor."""
        self.is_on_trace, self.region.catches = False, True
        self._expected = _NO_CALL

    def end_early(self, *, is_idle: bool = True) -> None:
        """Remove the mode, if it is the innermost function mode and the step has followed the trace.

        is_idle: remove it only if nothing is rebuilt from here on.
        """
        may_end = self.is_on_trace and (self._expected is _NO_REBUILDS or not is_idle)
        if may_end and not self.has_ended and _torch.is_innermost_mode(self):
            self.has_ended = True
            super().__exit__(None, None, None)

    def begin_later(self) -> None:
        """Note that the mode is not set yet: the step begins without it."""
        self.has_ended = True

    def begin_again(self) -> None:
        """Set the mode after a stretch without it, and go on with the trace there."""
        assert self._trace is not None
        self._rest = iter(self._trace.calls[self._trace.again :])
        self._expected = self._suspended = next(self._rest, self._end)
        self.has_ended = False
        super().__enter__()

    def __exit__(self, *why: Any) -> None:
        """Remove the mode, unless it was removed early."""
        if not self.has_ended:
            super().__exit__(*why)

    def suspend(self) -> None:
        """Pause the trace: until ``resume`` no call matches it. None leaves it, as the region sets ``is_packing``."""
        self._suspended, self._expected = self._expected, _NO_CALL

    def resume(self) -> None:
        """Continue the trace where ``suspend`` paused it."""
        self._expected = self._suspended

    def end(self) -> None:
        """Stop matching calls with the trace; called when the region ends."""
        self._expected = _NO_CALL

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call; with hooks, if it saves a tensor that is rebuilt."""
        if is_dynamo_compiling():  # a part of the model is being compiled, and dynamo traces this function too
            return func(*args, **(kwargs or {}))
        call = self._expected
        if call.function is not func or not is_grad_enabled():
            return (
                func(*args) if not kwargs and func in self._passes else self._call_off_trace(func, args, kwargs or {})
            )
        self._expected = next(self._rest, self._end)
        handler = call.handler
        if not kwargs:
            kwargs = {}
        elif kwargs.get("out") is not None:
            handler = write_out
        region, hooks = self.region, self._hooks
        region.catches = call.catches
        if call.begins_checkpoint and not region.wrap_new_reentrant(args) | region.wrap_new_checkpoint():
            region.report_difference(f"no checkpoint begins at {_name(func)}, where one did before")
        if call.last >= 0 and hooks.set(call.last):
            region.saved_count = call.first
            try:
                out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
            finally:
                if hooks.last != NOT_SET:
                    hooks.unset()
        else:
            if call.last >= 0 and region.wrap_new_checkpoint():
                region.report_difference(f"a checkpoint begins at {_name(func)}, where none did before")
            out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        if call.is_checked:
            self._check(call, out, args)
        if call.anchors:
            self._anchor(call, out)
        return out

    def _call_off_trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is not the next one of a trace."""
        # The region is packing a tensor, suspended or ended, or torch exports a part of the model.
        if self.region.is_packing or is_compiling():
            return func(*args, **kwargs)
        if self._expected is _NO_REBUILDS:
            handler = handler_of(func, kwargs)
            return func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        region = self.region
        if not is_grad_enabled():  # such as inside a reentrant checkpoint, whose input may be the output of another
            region.wrap_new_reentrant(args)
        if region.drops:
            if is_grad_enabled():
                region.wrap_new_reentrant(args)
                region.wrap_new_checkpoint()
            return func(*args, **kwargs)
        handler = handler_of(func, kwargs)
        if is_grad_enabled():  # otherwise autograd saves nothing
            if region.runs_again:
                return self._call_run_again(func, handler, args, kwargs)
            if self._trace is not None:
                return self._call_beside_trace(self._trace, func, handler, args, kwargs)
            if self._recording is not None:
                return self._recording.call(self, func, handler, args, kwargs)
            region.wrap_new_reentrant(args)
            region.wrap_new_checkpoint()
        return func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)

    def _call_run_again(self, func: Any, handler: Handler | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call in a segment that a checkpoint recomputes in backward."""
        region = self.region
        is_hooked = _torch.innermost_pack_hook() is region.outer  # no other checkpoint or hooks were set inside
        mark_outside(self._mark, (args, tuple(kwargs.values())))
        if is_hooked:
            self._hooks.set_all()
        try:
            if self._recording is not None:
                out = self._recording.call(self, func, handler, args, kwargs)
            else:
                region.catches = region.caught is None or region.call in region.caught
                region.call += 1
                out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        finally:
            if is_hooked:
                self._hooks.unset_all()
        mark_made(self._mark, out)
        return out

    def _call_beside_trace(
        self, trace: Trace, func: Any, handler: Handler | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that is not the next one of ``trace``; leave the trace if it should not have come here."""
        saves = trace.saves.get(func)
        if saves is False:
            out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
            if func in trace.quiet and self.is_on_trace and _is_graded(out, args):
                self.region.report_difference(f"{_name(func)} takes part in backward, which it did not before")
            return out
        if saves and self.is_on_trace:
            self.region.report_difference(f"{_name(func)} was called where {_name(self._expected.function)} was before")
        return self._call_with_hooks(func, handler, args, kwargs)

    def _anchor(self, call: Call, out: Any) -> None:
        """Let recipes read the tensors that the call saved without a hook, if they are still unchanged."""
        node = out.grad_fn if type(out) is Tensor else None
        for number, hook_of, name in call.anchors:
            try:
                # Hooks of other code, set around the call or inside it, may return another tensor than was saved.
                tensor = getattr(node, name) if hook_of(node) is None else None
            except (AttributeError, RuntimeError):
                continue  # another kind of node; or the tensor was changed in place, which autograd reports in backward
            if isinstance(tensor, Tensor):
                self.region.anchor(tensor, number)

    def _check(self, call: Call, out: Any, args: Any) -> None:
        """Leave the trace if the output outgrew the size limit of ``call``, or now takes part in backward."""
        grown = call.size != ANY_SIZE and type(out) is Tensor and out.numel() > call.size
        if grown:
            self.region.report_difference(f"the output of {_name(call.function)} has grown to {list(out.shape)}")
        elif call.quiet and _is_graded(out, args):
            self.region.report_difference(f"{_name(call.function)} takes part in backward, which it did not before")

    def _call_with_hooks(
        self, func: Any, handler: Handler | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call with hooks; leave the trace if it saves a tensor or begins a checkpoint."""
        region = self.region
        before, hooked = region.saved_count, self._hooks.set(ALL)
        try:
            out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        finally:
            if hooked:
                self._hooks.unset()
        begins = not hooked and _is_graded(out, args) is True and region.wrap_new_checkpoint()
        if self.is_on_trace and (begins or region.saved_count != before):
            what = "is the first inside a checkpoint" if begins else "was called"
            region.report_difference(f"{_name(func)} {what}, which the recorded step did not do")
        return out


_NO_CALL = Call(None)  # expected after the last call of a whole trace, and while no trace is followed: matches no call
_NO_REBUILDS = Call(None)  # nothing is rebuilt from here on: the mode only runs handlers, to detect in-place changes


def _name(function: Any) -> str:
    """Return the name by which a user knows a function that torch passes to a function mode."""
    return "no further call" if function is None else torch.overrides.resolve_name(function) or str(function)


def _is_graded(out: Any, args: tuple[Any, ...]) -> bool | None:
    """Whether a call takes part in backward: ``out`` has a tensor that requires grad and is not the first argument.

    None if ``out`` has no tensor.
    """
    if isinstance(out, Tensor):
        return out.requires_grad and not (args and out is args[0])
    if not isinstance(out, tuple | list):
        return None
    graded = [_is_graded(o, args) for o in out]
    return True if True in graded else False if False in graded else None


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(out: Any, saved: Sequence[Packed]) -> tuple[str | None, ...]:
    """Return for each tensor in ``saved`` its name in the node of ``out``; None if another node holds it."""
    node = out.grad_fn if type(out) is Tensor else None
    kind = type(node)
    names = _NAMES.get(kind)
    if names is None:
        start = "_raw_saved_"
        names = _NAMES[kind] = tuple(n.removeprefix(start) for n in dir(kind) if n.startswith(start))
    held = []
    for name in names:
        raw = getattr(node, "_raw_saved_" + name)
        if raw is not None and type(raw) is not tuple:
            held.append((name, packed_in(raw)))
    found: list[str | None] = []
    for packed in saved:
        at = next((i for i, (_, p) in enumerate(held) if p is packed), None)
        found.append(held.pop(at)[0] if at is not None else None)
    return tuple(found)
