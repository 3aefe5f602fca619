"""Watches a training program step by step, measures some of its steps, and runs a few of them lean.

[Note: the steps of a profile] A step ends when an optimizer's `step` returns; with several optimizers, when that of the
first one returns. The first step is measured from the first call of a module on, so that the report also covers a
program that runs out of memory there. The third step is measured too: by then the optimizer's state and caches are
allocated. Then the modules that the program calls are made lean, and when they have learned their plan, one more step
is measured; after that they are plain again. Lean changes no bit of any result, so training goes on as it would have
without the profile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.lean import is_lean, lean, ledger_of, plain
from leangrad.ledger.summary import rows_of
from leangrad.loss.lazy.heads import heads_of
from leangrad.measure.instrument import Recording
from leangrad.profile.standing import standing_bytes
from leangrad.report import Report, StepRecord
from leangrad.switch import disabled
from leangrad.timeline.categories import ACTIVATIONS
from leangrad.timeline.event import Event, format_bytes

__all__ = ["Watcher"]

PLAIN_STEP = 3  # the number of the second measured step: the optimizer's state is allocated by then
LEARNING = 3  # lean steps before the measured one
LEAN_STEP = PLAIN_STEP + LEARNING + 1


class Watcher:
    """Measures training steps of the code between `start` and `stop`, and calls ``changed`` with each new report."""

    def __init__(
        self,
        title: str,
        made: str,
        changed: Callable[[Report], None],
        *,
        tries_lean: bool,
        is_lean: bool = False,
        is_private: bool = False,
    ) -> None:
        self._title, self._made, self._changed = title, made, changed
        self._tries_lean = tries_lean
        self._makes_lean = is_lean  # whether modules are made lean at their first call
        self._is_private = is_private
        self._process = os.getpid()
        self._records: list[StepRecord] = []
        self._notes: list[str] = []
        self._recording: Recording | None = None
        self._standing: dict[str, int] = {}
        self._device = "cpu"
        self._step = 1  # the number of the running step
        self._has_begun = False  # whether a module was called with gradients enabled
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._lean: list[nn.Module] = []  # the modules that this watcher has made lean
        self._ledger: tuple[dict[str, Any], ...] = ()
        self._ledger_totals = ""
        self._is_done = False
        self._undo = contextlib.ExitStack()

    # ------------------------------------------------------------------------------------------------- begin and end

    def start(self) -> None:
        """Begin to watch calls of modules and optimizer steps."""
        self._undo.enter_context(self._calls_are_seen())
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def stop(self, error: BaseException | None = None) -> Report:
        """Stop watching and return the report; ``error``: the exception that ended the program early, if any."""
        if self.is_here:
            if error is not None and not (isinstance(error, SystemExit) and not error.code):
                self._notes.append(f"The program ended in step {self._step} by {self._in_words(error)}.")
            if self._lean and not self._makes_lean and isinstance(error, LeangradError):
                self._notes.append("That step ran lean, as a trial. To run all steps plain: --no-lean, or lean=False.")
            self._end_recording()
            self._undo.close()
            self._make_plain()
            self._note_what_is_missing()
            self._is_done = True
        return self.report()

    @property
    def is_here(self) -> bool:
        """Whether this process is the watched one, and not a fork of it."""
        return os.getpid() == self._process

    def report(self) -> Report:
        """The report of what is known so far."""
        return Report(
            self._title,
            tuple(self._records),
            tuple(self._notes),
            self._ledger,
            self._ledger_totals,
            self._logits_bytes(),
            self._made,
        )

    # ------------------------------------------------------------------------------------------------- watched calls

    @contextlib.contextmanager
    def _calls_are_seen(self) -> Iterator[None]:
        """Watch the outermost call of a module on each thread.

        `nn.Module.__call__` is replaced for that; hooks would not do, because some code checks whether there are any.
        """
        call, inside = nn.Module.__call__, threading.local()

        def seen_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_done or getattr(inside, "a_call", False):
                return call(module, *args, **kwargs)
            began = torch.is_grad_enabled() and self.is_here and self._before_call(module)
            if began:  # the recording has just replaced `__call__` again: call its version
                return type(module).__call__(module, *args, **kwargs)
            inside.a_call = True
            try:
                return call(module, *args, **kwargs)
            finally:
                inside.a_call = False

        nn.Module.__call__ = seen_call  # type: ignore[method-assign]
        try:
            yield
        finally:
            if nn.Module.__call__ is seen_call:
                nn.Module.__call__ = call  # type: ignore[method-assign]

    def _before_call(self, module: nn.Module) -> bool:
        """Note a call of ``module`` from outside of any other; returns True if a recording has begun with it."""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return False
        root = module.module if isinstance(module, DistributedDataParallel) else module
        if root not in self._roots:
            self._roots.add(root)
            if self._makes_lean:
                self._make_lean([root])
        if self._has_begun:
            return False
        self._has_begun = True
        return self._begin_recording()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note a step of ``optimizer``; if it was the first optimizer to step, the training step ends here."""
        if self._is_done or not self.is_here or not self._has_begun:
            return
        self._optimizers.add(optimizer)
        leader = None if self._leader is None else self._leader()
        if leader is None:
            self._leader = weakref.ref(optimizer)
        elif leader is not optimizer:
            return
        self._end_recording()
        if self._step == PLAIN_STEP and self._tries_lean and not self._makes_lean:
            self._make_lean(list(self._roots))
        if self._step >= (LEAN_STEP if self._lean else PLAIN_STEP):
            self._make_plain()
            self._is_done = True
            self._changed(self.report())
        elif self._step in (1, PLAIN_STEP):
            self._changed(self.report())
        self._step += 1
        if not self._is_done and self._step in (PLAIN_STEP, LEAN_STEP):
            self._begin_recording()

    def _in_words(self, error: BaseException) -> str:
        text = "" if self._is_private else str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}{f': {text}' if text else ''}".rstrip(".")

    # ---------------------------------------------------------------------------------------------------- recordings

    def _begin_recording(self) -> bool:
        self._device = _device_of(self._roots)
        self._standing = standing_bytes(self._roots, self._optimizers, self._device)
        self._recording = Recording(lines=True)
        try:
            self._recording.start()
        except LeangradError as error:
            self._recording = None
            self._notes.append(f"Step {self._step} was not measured: {error}.")
            return False
        return True

    def _end_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            trace, freed = recording.stop()
        except Exception as error:  # an error of ours must not replace the program's own
            self._notes.append(f"Step {self._step} was not measured: {self._in_words(error)}.")
            return
        timeline, kept_bytes = trace.timeline(self._device, freed if self._device == "cpu" else ())
        if self._is_private:
            timeline = tuple(replace(event, line=os.path.basename(event.line)) for event in timeline)
        runs_lean = any(is_lean(root) for root in self._roots)
        name = f"step {self._step} (lean)" if runs_lean else f"step {self._step}"
        seconds = (trace.end_ns - trace.start_ns) / 1e9
        record = StepRecord(name, timeline, self._standing, kept_bytes, seconds, self._device, runs_lean)
        self._records.append(record)
        if runs_lean:
            self._read_ledgers()

    def _logits_bytes(self) -> int:
        """The bytes of the logits among the activations at the peak, with what the loss keeps of them; 0: none.

        Logits are what a projection to a vocabulary returns.
        """
        report = Report(self._title, tuple(self._records))
        heads = {name for root in self._roots for name in heads_of(root)}
        if report.chosen is None or not heads:
            return 0
        curve = report.chosen.curve
        made = [event.bytes for event in curve.timeline if event.phase == "forward" and _is_of(event, heads)]
        largest = max(made, default=0)  # size of the logits, which may be freed when the loss has read them
        alive = [event for event, what in curve.alive_at(curve.peak_index) if what == ACTIVATIONS]
        found = [event.bytes for event in alive if _is_of(event, heads) or _is_loss(event, largest)]
        return sum(found) if largest else 0

    # ---------------------------------------------------------------------------------------------------------- lean

    def _make_lean(self, roots: list[nn.Module]) -> None:
        if disabled():
            self._notes.append("LEANGRAD_DISABLE is set: no step ran lean.")
            return
        for root in roots:
            if is_lean(root):
                self._notes.append(f"{type(root).__name__} is lean already: these are the figures of a lean model.")
            elif _torch.is_compiled(root):
                self._notes.append(
                    f"{type(root).__name__} is compiled; what leangrad makes of it: "
                    'torch.compile(model, backend="leangrad").'
                )
            else:
                try:
                    lean(root)
                    self._lean.append(root)
                except (LeangradError, TypeError, ValueError) as error:
                    self._notes.append(f"{type(root).__name__} could not be made lean: {error}")

    def _make_plain(self) -> None:
        for root in self._lean:
            plain(root)
        self._lean.clear()

    def _read_ledgers(self) -> None:
        ledgers = [ledger_of(root) for root in self._roots if is_lean(root)]
        rows = [row for ledger in ledgers for row in rows_of(ledger.entries())]
        self._ledger = tuple(asdict(row) for row in sorted(rows, key=lambda row: -row.nbytes))
        bytes_of = [ledger.bytes_for_backward() for ledger in ledgers]
        plain_bytes, lean_bytes = sum(one for one, _ in bytes_of), sum(one for _, one in bytes_of)
        if plain_bytes:
            plain_text, lean_text = format_bytes(plain_bytes), format_bytes(lean_bytes)
            self._ledger_totals = f"Inside the model plain keeps {plain_text} for backward, lean {lean_text}."

    def _note_what_is_missing(self) -> None:
        if self._is_done:
            return
        if not self._has_begun:
            self._notes.append(
                "No module with parameters that need gradients was called: there was nothing to measure."
            )
        elif self._leader is None:
            self._notes.append("No optimizer has stepped: what is shown ends where the program did.")
        elif self._tries_lean and not self._makes_lean and self._step <= LEAN_STEP:
            self._notes.append(
                f"The program ended before its step {LEAN_STEP}, in which lean would have been measured."
            )


def _device_of(modules: Any) -> str:
    """The name of the first parameter's device, in the form that `measure` uses."""
    device = next((parameter.device for module in modules for parameter in module.parameters()), None)
    return f"cuda:{device.index or 0}" if device is not None and device.type == "cuda" else "cpu"


def _is_of(event: Event, heads: set[str]) -> bool:
    """Whether one of the modules ``heads`` made the block; they are given by their names below the outermost module."""
    return event.module.partition(".")[2] in heads


def _is_loss(event: Event, logits_bytes: int) -> bool:
    """Whether a block holds the logits once more: shifted, cast, or as the loss keeps them.

    It does if it was made outside of all inner modules and is at least 0.4 times as large as the logits.
    """
    return "." not in event.module and event.bytes >= 0.4 * logits_bytes
