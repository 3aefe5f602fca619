"""The measured peaks of steps, and the predicted peak of the next step.

[Note: peaks] On a GPU the allocator's counters are read when a step begins. They are never reset, so the peak of a step
is known only if it is the highest so far. What the step has used beyond its prediction is added to all later
predictions.

The counters are also read when forward ends and when backward reaches the model. What a step uses until then (the casts
that autocast keeps, the last layers of forward, and after forward a loss outside of the model) is alive together with
the kept tensors, but not together with those that backward rebuilds. (A value that is being made in forward uses memory
whether it is kept or not.)

The counters are read again when backward has ended, and after the optimizer steps that follow: the first one, and every
other one of an optimizer that has parameters of this model. What runs later, until the next step begins, is a
validation or another model and no part of this step. What optimizers use is the same for all plans; the first step
allocates their state besides.

The steps by which plans are compared are also measured by the allocation history, which shows lower peaks too, see
[Note: below the allocator's peak]. A step in which kernels were compared uses more than those after it, and nothing is
learned from it.

On a CPU only `leangrad.measure` counts memory. If it runs a step, at any time, its figure is used; before that the plan
relies on the prediction, with a margin.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from leangrad import _torch
from leangrad.ledger.learn.timing import SavedMarks, Stopwatch
from leangrad.ledger.tune.history import BACKWARD_END, BACKWARD_START, FORWARD_END, READ, SAVE, History, Parts
from leangrad.ledger.tune.meter import Meter
from leangrad.ledger.values.rebuild.replays import Comparisons
from leangrad.policy.peak import Outcome
from leangrad.sizes import size_text
from leangrad.trees import tensors_in

__all__ = ["MARGIN", "Peaks", "first_graded"]

MARGIN = 0.05  # share of the prediction that is added to it where nothing was measured
QUIET = 1 << 20  # bytes: if fewer are added between forward and backward, nothing else seems to have run there
ROOM = 0.95  # share of a device's memory that a step above the budget may use


class Moment(NamedTuple):
    """The readings at the beginning of a step, which is also the end of the step before it ("the last step")."""

    time: Any  # the `Stopwatch`'s; None: no step is timed any more
    counters: _torch.Counters | None  # the allocator's; None on a CPU
    meter: Meter | None  # of the step that begins; None on a GPU, or if no step begins
    highest: int | None = None  # the allocator's peak when the last step's backward ended; None: not read
    stepped: int | None = None  # the allocator's peak after the optimizer steps that followed; None: not read
    end: _torch.Counters | None = None  # the counters when the last step's forward ended; None: not read
    turn: _torch.Counters | None = None  # the counters when the last step's backward reached the model; None: not read
    parts: Parts | None = None  # the peaks of the last step by the allocation history; None: not measured
    comparisons: int = 0  # of fused kernels, so far in this process
    is_end: bool = False  # True: it only ends a step, and the next step belongs to another ledger


class Peaks:
    """The memory and time readings of one ledger's steps; all memory in bytes.

    - `moments`: the readings at the beginnings of the steps of this search.
    - `peak`: of the last step; None: not measured. `took`: its peak until backward ended, minus the memory allocated
      before the step; valid only if `peak` is not None.
    - `excess`: by how much the last measured step exceeded its predicted peak; None: none was measured.
    - `excess_before`: the `excess` from before a step was recorded anew.
    - `forward_excess`: the same as `excess`, for the forward pass alone.
    - `start_excess`: what a step used beside its kept tensors, from the end of forward until backward began; None: not
      measured.
    - `after`: the peak after backward, in the optimizer's step, with all memory allocated before; 0: not known.
    - `has_compared`: kernels were compared in the last step, which therefore used more than later steps will.
    - `outside`: the bytes of the region's outputs. A loss that is computed outside of it keeps about as many.
    - `is_settled`: no step is timed any more.
    - `saves`, `reads`: the peaks of the last step from tensor to tensor, as in `Parts`; empty: not measured.
    """

    def __init__(self) -> None:
        self.on_gpu = False
        self.outside = 0
        self._has_warned = False  # whether the user was warned that the allocator has reserved too much
        self._is_reset = False  # whether the user resets the allocator's peak between steps
        self._sees_backward = False  # whether the end of a backward pass was ever noticed
        self._after_backward: int | None = None  # the allocator's peak when this step's backward ended; None: not read
        self._after_optimizer: int | None = None  # the allocator's peak after this step's optimizers; None: not read
        self._module: Callable[[], nn.Module | None] = _no_module
        self._at_end: _torch.Counters | None = None  # the counters when this step's forward ended; None: not read
        self._at_backward_start: _torch.Counters | None = None  # when backward reached the model; None: not read
        self._history: History | None = None  # of the running step; None: it is not recorded
        self._parts: Parts | None = None  # the peaks from that history, once it was stopped
        self._outputs = 0  # number of this step's outputs from which backward may begin
        self._may_follow = False  # another backward pass may follow, since the last one kept the graph
        self._can_measure = False  # whether a step could be measured by the allocation history
        self.restart()

    def restart(self) -> None:
        """Drop what was measured, because a step differs from the recorded one."""
        if self._history is not None:
            self._stop_measuring(None, None, is_whole=False)
        self.moments: list[Moment] = []
        self.is_settled = False
        self.is_recorded = False  # whether a step was recorded and its search has begun
        self.peak: int | None = None
        self.saves: tuple[int, ...] = ()
        self.reads: tuple[int, ...] = ()
        self.took = self.after = 0
        self.has_compared = False
        self.excess: int | None = None
        self.excess_before: int | None = None
        self.forward_excess: int | None = None
        self.start_excess: int | None = None

    # -------------------------------------------------------------------------------------------------------- readings

    def begin(self, module: nn.Module | None, *, on_gpu: bool) -> None:
        """Take the readings at the beginning of a step of ``module``; None: the region is not that of a module."""
        self.on_gpu = on_gpu
        self._module = _no_module if module is None else weakref.ref(module)
        now = self._now()
        if now.counters is not None and (now.highest or 0) > now.counters.highest:
            self._is_reset = True
        self.moments.append(now)
        if self.is_settled or not self.is_recorded:
            del self.moments[:-3]

    def forget_readings(self) -> None:
        """Drop by how much steps exceeded their predictions, as that says nothing about later steps."""
        self.excess = self.excess_before = self.forward_excess = self.start_excess = None

    def end_step(self) -> None:
        """Take the readings at the end of a step: the next step belongs to another ledger."""
        if self.moments and not self.moments[-1].is_end:
            self.moments.append(self._now(is_end=True))

    def _now(self, *, is_end: bool = False) -> Moment:
        on_gpu = self.on_gpu
        counters = _counters() if on_gpu else None
        meter = None if on_gpu or is_end else Meter()
        time = None if self.is_settled else Stopwatch(on_gpu=on_gpu).now()
        _waiting.discard(self)
        highest, self._after_backward = self._after_backward, None
        stepped, self._after_optimizer = self._after_optimizer, None
        end, self._at_end = self._at_end, None
        turn, self._at_backward_start = self._at_backward_start, None
        if self._history is not None:
            self._stop_measuring(end, turn, is_whole=highest is not None)
        parts, self._parts = self._parts, None
        return Moment(time, counters, meter, highest, stepped, end, turn, parts, Comparisons.count, is_end)

    def measure_step(self) -> None:
        """On a GPU, begin to record the allocation history of the step that has just begun, if torch can."""
        counters = self.moments[-1].counters if self.moments else None
        if counters is not None and self._history is None:
            is_another_open = History.is_one_open()  # if so, a failure to begin says nothing about later steps
            self._history = History.begin(counters.allocated)
            self._can_measure = self._history is not None or (is_another_open and self._can_measure)
            self._outputs = 0

    def marks(self) -> SavedMarks | None:
        """The marks for saved tensors of the step that has just begun; None if its memory is not measured."""
        meter = self.moments[-1].meter if self.moments else None
        if meter is not None and meter.is_registered:
            return SavedMarks(meter.note_save, meter.note_read)
        return None if self._history is None else SavedMarks(partial(History.mark, SAVE), partial(History.mark, READ))

    def _stop_measuring(
        self, at_end: _torch.Counters | None, at_turn: _torch.Counters | None, *, is_whole: bool
    ) -> None:
        """End the allocation history and store its peaks in `_parts`.

        is_whole: the step's backward has ended. If it failed or never ran, `_can_measure` stays: the next step may be
            measurable.
        """
        history, self._history = self._history, None
        assert history is not None
        self._parts = history.stop(at_end, at_turn)
        if is_whole:
            self._can_measure = self._parts is not None

    def note_output(self, output: object) -> None:
        """Note that forward has returned ``output``, and have the counters read when backward begins there and ends.

        Several outputs may have a backward pass each: the first pass sets the beginning, and the last one the end.
        """
        meter = self.moments[-1].meter if self.moments else None
        if self.on_gpu or (meter is not None and meter.is_registered):
            made = list(_graded(output))
            if made and meter is not None:
                meter.note_forward_end()
            elif made:
                self._at_end = _counters()
                self._outputs += len(made)
                self._mark(FORWARD_END)
            for one in made:
                one.register_hook(self._at_backward if meter is None else lambda _: meter.note_backward_start())
            # Forward has failed, or its output needs no gradient: there will be no backward.
            if not made and self._history is not None and torch.is_grad_enabled():
                self._stop_measuring(None, None, is_whole=False)

    def _at_backward(self, _: Tensor) -> None:
        if self._at_backward_start is None:
            self._at_backward_start = _counters()
            self._mark(BACKWARD_START)
        self._may_follow = _torch.graph_is_kept()
        _torch.after_backward(self._read_after_backward)

    def _read_after_backward(self) -> None:
        counters = _counters()
        if counters is not None:
            self._sees_backward = True
            self._after_backward = counters.highest
            _wait_for_optimizer(self)
        self._mark(BACKWARD_END)
        # Stop only if no other backward pass can follow, of this output or of another one.
        if self._history is not None and self._outputs == 1 and not self._may_follow:
            self._stop_measuring(self._at_end, self._at_backward_start, is_whole=True)

    def read_after_optimizer(self, optimizer: Optimizer) -> None:
        """Read the allocator's peak after a step of ``optimizer``: the first one after backward, or of this model."""
        counters = _counters()
        if counters is not None and (self._after_optimizer is None or self._trains(optimizer)):
            self._after_optimizer = counters.highest

    def _trains(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has parameters of this model."""
        module = self._module()
        ours = set() if module is None else {id(parameter) for parameter in module.parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def _mark(self, moment: int) -> None:
        if self._history is not None:
            self._history.mark(moment)

    def standing(self) -> int:
        """The bytes allocated before the last step to begin: parameters, optimizer state, a batch; 0 on a CPU."""
        counters = self.moments[-1].counters
        return 0 if counters is None else counters.allocated

    def highest(self) -> int:
        """The allocator's peak so far, in bytes; 0 on a CPU."""
        counters = self.moments[-1].counters
        return 0 if counters is None else counters.highest

    def reserved(self) -> int | None:
        """The bytes that the allocator has reserved; None where there are no counters, as on a CPU."""
        counters = self.moments[-1].counters
        return None if counters is None else counters.reserved

    def can_see(self, limit: int) -> bool:
        """Whether the readings would show a step that exceeds ``limit`` bytes."""
        return self._is_reset or self._can_measure or self.highest() <= limit

    def has_room(self, peak: float) -> bool:
        """Whether the machine has room for a peak of ``peak`` bytes, whatever the budget is."""
        if self.on_gpu:
            return peak <= ROOM * torch.cuda.mem_get_info()[1]
        try:
            return peak <= ROOM * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        except (AttributeError, OSError, ValueError):  # not a Unix
            return True

    # --------------------------------------------------------------------------------------------------- measured steps

    def compare(self, outcome: Outcome) -> int:
        """Compare the measured peak of the last step with its prediction ``outcome``.

        Sets `peak`, `took` and what depends on them; returns the bytes that were allocated before that step.
        """
        self.peak, self.saves, self.reads, self.has_compared = None, (), (), False
        last = [(a, b) for a, b in pairwise(self.moments[-3:]) if not a.is_end][-1:]
        if not last:
            return 0
        before, now = last[0]
        self.has_compared = before.comparisons != now.comparisons
        known = self.excess, self.forward_excess, self.start_excess
        if before.counters is not None and now.counters is not None:
            self._warn_of_retries(before.counters, now.counters)
            self._read_counters(before.counters, now, now.counters, outcome)
            if now.parts is not None:
                self._read_parts(now.parts, outcome)
                self.peak = max(self.peak or 0, before.counters.allocated + self.took)
        elif before.meter is not None and before.meter.peak_bytes is not None:
            self._read_meter(before.meter, before.meter.peak_bytes, outcome)
        if self.has_compared:
            self.saves = self.reads = ()
            self.excess, self.forward_excess, self.start_excess = known
        return 0 if before.counters is None else before.counters.allocated

    def _read_counters(self, before: _torch.Counters, now: Moment, at_next: _torch.Counters, outcome: Outcome) -> None:
        if now.highest is not None:
            in_backward = now.highest
        elif self._sees_backward:  # the end of this step's backward was not seen: the peak may be another's
            return
        else:
            in_backward = at_next.highest
        highest = max(in_backward, now.stepped or 0)
        if highest <= before.highest:
            return
        self.peak, self.took = highest, in_backward - before.allocated
        if in_backward < highest:
            self.after = highest
        if in_backward > before.highest:
            self.excess = self.took - outcome.peak_bytes
            if now.end is None or now.turn is None:
                return
            if now.end.highest > before.highest:
                self.forward_excess = now.end.highest - before.allocated - outcome.forward_bytes
            if now.turn.highest > before.highest:
                # If nothing seems to have run between forward and backward, only what is allocated now was alive there.
                is_quiet = now.turn.highest == now.end.highest and now.turn.allocated - now.end.allocated < QUIET
                highest = now.turn.allocated if is_quiet else now.turn.highest
                self.start_excess = highest - before.allocated - outcome.kept_bytes
                if now.turn.highest >= in_backward:  # of what followed, only the memory at its beginning is known
                    hidden = now.turn.allocated - before.allocated - outcome.kept_bytes - self.outside
                    self.excess = min(self.excess, int(max(0, hidden) + MARGIN * outcome.peak_bytes))

    def _read_meter(self, meter: Meter, peak_bytes: int, outcome: Outcome) -> None:
        self.peak = self.took = peak_bytes
        self.excess = peak_bytes - outcome.peak_bytes
        if (
            meter.forward_bytes is None
            or meter.start_bytes is None
            or meter.later_bytes is None
            or meter.after_bytes is None
        ):
            return
        between = meter.save_bytes, meter.read_bytes
        self._read_parts(Parts(meter.forward_bytes, meter.start_bytes, meter.later_bytes, *between), outcome)
        if self.is_recorded:  # else this is the recorded step, in which the optimizer may allocate its state
            self.after = meter.after_bytes

    def _read_parts(self, parts: Parts, outcome: Outcome) -> None:
        self.took, self.saves, self.reads = parts.highest, parts.saves, parts.reads
        self.forward_excess = parts.forward - outcome.forward_bytes
        self.start_excess = parts.start - outcome.kept_bytes
        self.excess = max(parts.later - outcome.peak_bytes, min(0, self.took - outcome.peak_bytes))

    def _warn_of_retries(self, before: _torch.Counters, now: _torch.Counters) -> None:
        """Warn once if the allocator had to free its cache and try again.

        The reserved memory may not fit the device even if the allocated memory does, because of gaps between blocks.
        """
        if now.retries > before.retries and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a step of at most {size_text(now.highest)} was too much for the GPU as torch's allocator divides it "
                f"({size_text(now.reserved)} are reserved): it gave back what it had cached and tried again, which "
                "takes time. Set PYTORCH_ALLOC_CONF=expandable_segments:True, or give a smaller budget.",
                stacklevel=2,
            )

    # -------------------------------------------------------------------------------------- prediction of the next step

    def foreseen(self, outcome: Outcome, more: int = 0) -> float:
        """Predict the peak of the next step, in bytes, with all memory allocated before it.

        outcome: the simulated memory of the step's saved tensors and gradients.
        more: bytes that the step uses beside that.
        """
        guess = int(self.outside + MARGIN * (outcome.peak_bytes + more))
        later = self.excess if self.excess is not None else guess
        return max(self.standing() + more + max(outcome.peak_bytes + later, self.until_backward(outcome)), self.after)

    def until_backward(self, outcome: Outcome) -> int:
        """Predict the peak until backward reaches the model, without the memory allocated before the step.

        0 if nothing was measured.
        """
        forward = 0 if self.forward_excess is None else outcome.forward_bytes + self.forward_excess
        return max(forward, 0 if self.start_excess is None else outcome.kept_bytes + self.start_excess)


_waiting: weakref.WeakSet[Peaks] = weakref.WeakSet()  # backward has ended, and no other step has begun since
_hook: Any = None


def _wait_for_optimizer(peaks: Peaks) -> None:
    """Have ``peaks`` read the counters after each optimizer step until its next step begins."""
    global _hook
    _waiting.add(peaks)
    _hook = _hook or register_optimizer_step_post_hook(_after_optimizer)


def _after_optimizer(optimizer: Optimizer, *_: Any) -> None:
    for peaks in list(_waiting):
        peaks.read_after_optimizer(optimizer)


def _no_module() -> None:
    """Stands for the weak reference to the module if the region is not that of a module."""


def first_graded(output: object) -> Tensor | None:
    """The first tensor in a forward's ``output`` from which backward may begin; None if there is none."""
    return next(_graded(output), None)


def _graded(output: object) -> Iterator[Tensor]:
    return (t for t in tensors_in(output) if t.grad_fn is not None and type(t) is Tensor)


def _counters() -> _torch.Counters | None:
    return _torch.cuda_counters()
