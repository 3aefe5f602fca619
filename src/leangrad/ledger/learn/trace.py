"""The trace of a step: its calls, and which of them save a tensor that is not simply kept.

[Note: hooks only where they are needed]
A hook costs the host more than many an op, and most of what a model saves is kept as it is: parameters, statistics,
anchors. The first step is recorded with hooks on all the time. It shows which calls save something that is rebuilt;
later steps set the hooks around these calls alone, and everything else is saved by autograd itself, as plain PyTorch
would. A tensor that recipes read, but that is kept, is read off the node that saved it.

A trace may be wrong without harm: what is saved with no hook is simply kept, what is saved with one is looked into. A
call that is not the one of the recorded step ends the trace, and the rest of the step runs with hooks around every
call. Calls of functions that saved nothing, such as ``x.shape``, are no part of it. Nor are sizes: batches may be of
any length. Only what was kept for being small must stay small, and what was called without a gradient must not get one:
frozen layers that are trained later, a dropout that did nothing in eval mode.

In a segment that a checkpoint runs again there is no trace: the checkpoint's hooks are in force, and an anchor cannot
be read off a node that has saved it through them.
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
from leangrad.ledger.observe.call_args import Handler
from leangrad.ledger.observe.checkpoint import mark_made, mark_outside
from leangrad.ledger.observe.function_mode import FunctionMode, ObservedRegion
from leangrad.ledger.observe.handlers import HANDLERS, handler_of
from leangrad.ledger.observe.hooks import TAKEN_BACK, Hooks
from leangrad.ledger.observe.mutation import write_out
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.pending_save import packed_in

ALL = ANY_SIZE = sys.maxsize


class Call:
    """One call of a function that saves tensors."""

    __slots__ = ("anchors", "begins", "catches", "first", "function", "handler", "is_checked", "last", "quiet", "size")

    def __init__(
        self,
        function: Any,
        first: int = 0,
        last: int = -1,
        anchors: tuple[tuple[int, str], ...] = (),
        catches: int = 0,
        size: int = ANY_SIZE,
        quiet: bool = False,
        begins: bool = False,
    ) -> None:
        self.function = function
        self.handler = HANDLERS.get(function)
        self.first = first  # how many tensors were saved before it
        self.last = last  # the last tensor that it saves and that is rebuilt; -1: there is none
        # What it saves after that and recipes read: the number of each saved tensor, what tells its hook, and the
        # attribute of its node.
        self.anchors = tuple((number, _torch.hook_of(name), "_saved_" + name) for number, name in anchors)
        self.catches = catches  # the bytes of its output, if that was kept in the stead of a larger tensor
        self.size = size  # elements that its output may have before what was too small to look into is so no more
        self.quiet = quiet  # autograd had no part in it
        self.is_checked = quiet or size != ANY_SIZE
        self.begins = begins  # it was the first inside of a checkpoint, or the first to read what a reentrant one made


class Trace(NamedTuple):
    """The calls of a step in order, and what is known of the functions that it called."""

    calls: Sequence[Call]
    saves: dict[Any, bool]  # whether any call of a function saved anything
    quiet: frozenset[Any]  # those that gave tensors, and in none of whose calls autograd had a part
    passes: frozenset[Any]  # those that saved nothing, and of which nothing need be noted
    is_whole: bool = True  # else nothing is rebuilt after the last of the calls, and these are not followed
    border: Border | None = None  # where the override is taken away: see [Note: the override ends early]


class TracedRegion(ObservedRegion, Protocol):
    """What the calls of a step ask of its region."""

    packs: int  # tensors that were saved so far
    call: int  # the number of the call that runs, while a step is recorded
    hooks: Hooks
    outer: Any  # the hook of a checkpoint that is in force around the region
    drops: bool  # which drops all that is saved
    runs_again: bool  # or runs its function again
    caught: Collection[int] | None  # the calls of which a product is to be caught; None: any may be

    def looks_around(self) -> None:
        """A call is about to run, maybe inside of a checkpoint."""

    def finds_checkpoint(self) -> bool:
        """Whether a checkpoint has begun inside the region that was not seen yet."""

    def finds_reentrant(self, args: Any) -> bool:
        """Whether a tensor among ``args`` was made by a reentrant checkpoint that was not seen yet."""

    def anchor(self, tensor: Tensor, number: int) -> None:
        """Saved tensor ``number``, which autograd keeps by itself, may be read by recipes."""

    def differ(self, why: str) -> None:
        """This step is not like the one that was recorded, because of ``why``."""


class RecordedCall(NamedTuple):
    """A call of the recorded step, and the tensors that it saved: their names, where its own node has them."""

    function: Any
    handled: bool  # something may have to be noted of it
    size: int  # elements of its output
    nbytes: int
    graded: bool | None  # whether autograd had a part in it; None: it gave no tensor
    convolution: Convolution | None  # its backward, if it is one on a CPU
    first: int
    names: tuple[str | None, ...]
    begins: bool  # it was the first inside of a checkpoint, or the first to read what a reentrant one made


class TraceRecorder:
    """Runs the calls of a step and writes them down."""

    def __init__(self, book: TracedRegion, packed: Sequence[Packed]) -> None:
        self.calls: list[RecordedCall] = []
        self.numbers: list[int] = []  # of the first node that was made since each of them began
        self.graph = Graph(_torch.next_sequence_nr())
        self._book = book
        self._packed = packed

    def call(self, notes: FunctionMode, function: Any, handler: Handler | None, args: Any, kwargs: Any) -> Any:
        """Run one call and note what it saved."""
        first = self._book.packs
        self._book.call = len(self.calls)
        self.numbers.append(_torch.next_sequence_nr())
        self._book.looks_around()
        try:
            out = function(*args, **kwargs) if handler is None else handler(notes, function, args, kwargs)
        except BaseException:  # a checkpoint that runs its function again has all that it needs
            unnamed = (None,) * (self._book.packs - first)
            self.calls.append(RecordedCall(function, handler is not None, 0, 0, None, None, first, unnamed, False))
            raise
        count = self._book.packs - first
        names = _names(out, self._packed[first:]) if count else ()
        size = out.numel() if type(out) is Tensor else 0
        nbytes = out.nbytes if type(out) is Tensor and out.layout is torch.strided else 0
        convolution = convolution_of(out, args) if function in CONVOLUTIONS else None
        handled, graded = handler is not None, _is_graded(out, args)
        if graded:
            self.graph.add(out)
        # Not at a call such as ``x.shape``, or all of these would be part of the trace.
        begins = graded is True and self._book.finds_reentrant(args) | self._book.finds_checkpoint()
        self.calls.append(RecordedCall(function, handled, size, nbytes, graded, convolution, first, names, begins))
        return out


class TraceMode(FunctionMode):
    """The function override of one region: it records the calls of a step, follows a trace, or only takes notes.

    One class for all three: what dynamo has compiled of a model holds for modes of one class.
    """

    book: TracedRegion

    def __init__(self, book: TracedRegion, trace: Trace | None = None, recording: TraceRecorder | None = None) -> None:
        super().__init__(book)
        self._recording = recording
        self._trace = trace
        self._passes = trace.passes if trace is not None else frozenset()
        self._hooks = book.hooks
        self._rest = iter(trace.calls if trace is not None else ())
        self._end = _END if trace is None or trace.is_whole else _DONE
        self._expected = self._suspended = next(self._rest, self._end)
        self._mark = object()
        self.is_on_trace = trace is not None  # and the step has been like the recorded one so far
        self.has_ended = False  # and was taken away before the region has ended

    def leave_trace(self) -> None:
        """The step is another one: from now on hooks are set around every call that may save."""
        self.is_on_trace, self.book.catches = False, True
        self._expected = _END

    def end_early(self) -> None:
        """Take the override away, if nothing is rebuilt from here on and no mode of others lies over it."""
        if self._expected is _DONE and self.is_on_trace and not self.has_ended and _torch.is_innermost_mode(self):
            self.has_ended = True
            super().__exit__(None, None, None)

    def __exit__(self, *why: Any) -> None:
        """Take it away, unless it is gone."""
        if not self.has_ended:
            super().__exit__(*why)

    def suspend(self) -> None:
        """Let no call lead on along the trace, nor off it."""
        self._suspended, self._expected = self._expected, _END

    def resume(self) -> None:
        """Go on."""
        self._expected = self._suspended

    def end(self) -> None:
        """The region has ended."""
        self._expected = _END

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call, with hooks if it saves what is rebuilt."""
        if is_dynamo_compiling():  # a compiled part of the model: it traces this very function
            return func(*args, **(kwargs or {}))
        call = self._expected
        if call.function is not func or not is_grad_enabled():
            return func(*args) if not kwargs and func in self._passes else self._other(func, args, kwargs or {})
        self._expected = next(self._rest, self._end)
        handler = call.handler
        if not kwargs:
            kwargs = {}
        elif kwargs.get("out") is not None:
            handler = write_out
        book, hooks = self.book, self._hooks
        book.catches = call.catches
        if call.begins and not book.finds_reentrant(args) | book.finds_checkpoint():
            book.differ(f"no checkpoint begins at {_name(func)}, where one did before")
        if call.last >= 0 and hooks.set(call.last):
            book.packs = call.first
            try:
                out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
            finally:
                if hooks.last != TAKEN_BACK:
                    hooks.take_back()
        else:
            if call.last >= 0 and book.finds_checkpoint():
                book.differ(f"a checkpoint begins at {_name(func)}, where none did before")
            out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        if call.is_checked:
            self._check(call, out, args)
        if call.anchors:
            self._anchor(call, out)
        return out

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is not the next one of a trace."""
        if self.book.packing or is_compiling():  # the region has ended, or exports a part of the model
            return func(*args, **kwargs)
        if self._expected is _DONE:
            handler = handler_of(func, kwargs)
            return func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        book = self.book
        if not is_grad_enabled():  # inside of a reentrant checkpoint, which may follow another
            book.finds_reentrant(args)
        if book.drops:
            if is_grad_enabled():
                book.finds_reentrant(args)
                book.finds_checkpoint()
            return func(*args, **kwargs)
        handler = handler_of(func, kwargs)
        if is_grad_enabled():  # nothing is saved otherwise
            if book.runs_again:
                return self._again(func, handler, args, kwargs)
            if self._trace is not None:
                return self._pass(self._trace, func, handler, args, kwargs)
            if self._recording is not None:
                return self._recording.call(self, func, handler, args, kwargs)
            book.finds_reentrant(args)
            book.finds_checkpoint()
        return func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)

    def _again(self, func: Any, handler: Handler | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call in a segment that a checkpoint runs again."""
        book = self.book
        is_hooked = _torch.innermost_pack_hook() is book.outer  # and no checkpoint or hooks of the user's inside
        mark_outside(self._mark, (args, tuple(kwargs.values())))
        if is_hooked:
            self._hooks.set_all()
        try:
            if self._recording is not None:
                out = self._recording.call(self, func, handler, args, kwargs)
            else:
                book.catches = book.caught is None or book.call in book.caught
                book.call += 1
                out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        finally:
            if is_hooked:
                self._hooks.take_back_all()
        mark_made(self._mark, out)
        return out

    def _pass(
        self, trace: Trace, func: Any, handler: Handler | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call that is no part of the trace, unless it leads off it."""
        saves = trace.saves.get(func)
        if saves is False:
            out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
            if func in trace.quiet and self.is_on_trace and _is_graded(out, args):
                self.book.differ(f"{_name(func)} takes part in backward, which it did not before")
            return out
        if saves and self.is_on_trace:
            self.book.differ(f"{_name(func)} was called where {_name(self._expected.function)} was before")
        return self._look(func, handler, args, kwargs)

    def _anchor(self, call: Call, out: Any) -> None:
        """Let recipes read what the call saved with no hook, if it is as it was."""
        node = out.grad_fn if type(out) is Tensor else None
        for number, hook_of, name in call.anchors:
            try:
                # What others' hooks hand back may be another tensor, wherever these were set: around the call or in it.
                tensor = getattr(node, name) if hook_of(node) is None else None
            except (AttributeError, RuntimeError):
                continue  # not the node that it was; or it was changed in place, which plain PyTorch will say in time
            if isinstance(tensor, Tensor):
                self.book.anchor(tensor, number)

    def _check(self, call: Call, out: Any, args: Any) -> None:
        """What was too small to look into may be so no more; what needed no gradient may need one."""
        grown = call.size != ANY_SIZE and type(out) is Tensor and out.numel() > call.size
        if grown:
            self.book.differ(f"the output of {_name(call.function)} has grown to {list(out.shape)}")
        elif call.quiet and _is_graded(out, args):
            self.book.differ(f"{_name(call.function)} takes part in backward, which it did not before")

    def _look(self, func: Any, handler: Handler | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that was not recorded: it leads off the trace if it saves anything."""
        book = self.book
        before, hooked = book.packs, self._hooks.set(ALL)
        try:
            out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        finally:
            if hooked:
                self._hooks.take_back()
        begins = not hooked and _is_graded(out, args) is True and book.finds_checkpoint()
        if self.is_on_trace and (begins or book.packs != before):
            what = "is the first inside a checkpoint" if begins else "was called"
            book.differ(f"{_name(func)} {what}, which the recorded step did not do")
        return out


_END = Call(None)
_DONE = Call(None)  # nothing is rebuilt from here on: only changes of what recipes read are still watched


def _name(function: Any) -> str:
    """How a user would write a function that torch hands to an override."""
    return "no further call" if function is None else torch.overrides.resolve_name(function) or str(function)


def _is_graded(out: Any, args: tuple[Any, ...]) -> bool | None:
    """Whether autograd had a part in a call: it gave a tensor that needs a gradient and is no argument handed back."""
    if isinstance(out, Tensor):
        return out.requires_grad and not (args and out is args[0])
    if not isinstance(out, tuple | list):
        return None
    graded = [_is_graded(o, args) for o in out]
    return True if True in graded else False if False in graded else None


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(out: Any, saved: Sequence[Packed]) -> tuple[str | None, ...]:
    """The names under which the node of ``out`` holds the tensors that the call saved; None: another node holds it."""
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
