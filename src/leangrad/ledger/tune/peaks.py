"""What steps took, and what the next one is foreseen to take.

[Note: peaks] On a GPU the allocator's counters are read when a step begins. They are never reset, so the peak of a step
is known if it is the highest so far; what it took beyond what was foreseen is added to all that is foreseen later. They
are read too when forward ends and when backward comes to the model. What a step takes until then, the casts that
autocast keeps, the last layers of forward, and after it a loss outside of the model, stands beside what is kept and not
beside what backward makes again. (A value that is being made in forward stands there whether it is kept or not.) They
are read again when backward has ended, and when the optimizers have made their steps after that: the first one, and
what else has parameters of this model. What comes later, until the next step begins, is a validation or another model
at work, and none of this step's. What optimizers take is the same for all plans; the first step makes their state
besides. Steps by which plans are compared are listened to as well, which tells of those below the highest so far too:
[Note: below the allocator's peak]. A step in which kernels were compared takes more than those after it, and nothing is
learned of it. On a CPU nobody counts but `leangrad.measure`: where that runs a step, its figure is taken, at any time;
before that the plan is what is foreseen, with a margin.
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
from leangrad.ledger.tune.history import AFTER, END, READ, SAVE, TURN, History, Parts
from leangrad.ledger.tune.meter import Meter
from leangrad.ledger.values.value import Comparisons
from leangrad.policy.peak import Outcome
from leangrad.sizes import size_text
from leangrad.trees import tensors_in

__all__ = ["MARGIN", "Peaks", "first_graded"]

MARGIN = 0.05  # of what is foreseen, where nothing was measured
QUIET = 1 << 20  # bytes that may be allocated between forward and backward where nothing else runs
ROOM = 0.95  # of a device's memory that a step may take which is above the budget


class Moment(NamedTuple):
    """The beginning of a step, which is the end of the one before it."""

    time: Any
    counters: _torch.Counters | None  # of a GPU
    meter: Meter | None  # of a CPU
    highest: int | None = None  # the allocator's peak when the backward pass before it ended, where that was read
    stepped: int | None = None  # the same when the last of its optimizers had made its step after that
    end: _torch.Counters | None = None  # when the forward pass before it ended
    turn: _torch.Counters | None = None  # when that backward pass came to the model
    parts: Parts | None = None  # the peaks of the step before it, where it was listened to
    comparisons: int = 0  # of kernels, so far
    is_end: bool = False  # and no beginning: the next step is of another course


class Peaks:
    """The readings of one ledger's steps.

    - `moments`: when the steps of this course began.
    - `peak`, `took`: of the last step, where that was measured, with and without what stood before it.
    - `extra`: what a step took beyond what was foreseen, where that was measured; `extra_before`: the same, where the
      step was recorded anew; `in_forward`: until forward ended.
    - `beside_kept`: what it took beside what it kept, from then on until backward began.
    - `after`: the peak of what comes after backward, with all that stands; 0: not known.
    - `has_compared`: kernels were compared in the last step, which therefore took more than later ones will.
    - `outside`: of what the region handed out. A loss that is computed outside keeps about as many bytes.
    - `is_settled`: no step is timed any more.
    - `saves`, `reads`: of the last step, what was held at most from one saved tensor, or one that backward asked for,
      until the next.
    """

    def __init__(self) -> None:
        self.on_gpu = False
        self.outside = 0
        self._has_warned = False  # of what is reserved
        self._is_reset = False  # the user resets the allocator's peak between steps
        self._sees_backward = False  # its end
        self._after_backward: int | None = None  # the allocator's peak, of this step
        self._after_optimizer: int | None = None  # the same when the last of its optimizers has made its step
        self._module: Callable[[], nn.Module | None] = _no_module
        self._at_end: _torch.Counters | None = None  # when forward ended
        self._at_turn: _torch.Counters | None = None  # when backward came to the model
        self._history: History | None = None  # of a step that is listened to
        self._parts: Parts | None = None  # and its peaks, when its backward has ended
        self._outputs = 0  # that backward may begin at, of this step
        self._may_follow = False  # another backward pass, since the last one kept the graph
        self._can_listen = False  # a step was
        self.restart()

    def restart(self) -> None:
        """A step differs from the recorded one."""
        if self._history is not None:
            self._stop_listening(None, None, is_whole=False)
        self.moments: list[Moment] = []
        self.is_settled = False
        self.is_recorded = False  # a step was, from which a course began
        self.peak: int | None = None
        self.saves: tuple[int, ...] = ()
        self.reads: tuple[int, ...] = ()
        self.took = self.after = 0
        self.has_compared = False
        self.extra: int | None = None
        self.extra_before: int | None = None
        self.in_forward: int | None = None
        self.beside_kept: int | None = None

    # -------------------------------------------------------------------------------------------------------- readings

    def begin(self, module: nn.Module | None, *, on_gpu: bool) -> None:
        """A step of ``module`` begins."""
        self.on_gpu = on_gpu
        self._module = _no_module if module is None else weakref.ref(module)
        now = self._now()
        if now.counters is not None and (now.highest or 0) > now.counters.highest:
            self._is_reset = True
        self.moments.append(now)
        if self.is_settled or not self.is_recorded:
            del self.moments[:-3]

    def end_step(self) -> None:
        """Another step begins, which is not of this course."""
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
        turn, self._at_turn = self._at_turn, None
        if self._history is not None:
            self._stop_listening(end, turn, is_whole=highest is not None)
        parts, self._parts = self._parts, None
        return Moment(time, counters, meter, highest, stepped, end, turn, parts, Comparisons.count, is_end)

    def listen(self) -> None:
        """A step has just begun, and what it takes is asked for."""
        counters = self.moments[-1].counters if self.moments else None
        if counters is not None and self._history is None:
            is_another_open = History.is_one_open()  # then it says nothing of later steps
            self._history = History.begin(counters.allocated)
            self._can_listen = self._history is not None or (is_another_open and self._can_listen)
            self._outputs = 0

    def marks(self) -> SavedMarks | None:
        """What marks the saved tensors of the step that has just begun, if it is listened to."""
        meter = self.moments[-1].meter if self.moments else None
        if meter is not None and meter.listens:
            return SavedMarks(meter.saves, meter.reads)
        return None if self._history is None else SavedMarks(partial(History.mark, SAVE), partial(History.mark, READ))

    def _stop_listening(
        self, at_end: _torch.Counters | None, at_turn: _torch.Counters | None, *, is_whole: bool
    ) -> None:
        """``is_whole``: the backward of the step has ended; if it failed, or nobody ran it, the next may tell more."""
        history, self._history = self._history, None
        assert history is not None
        self._parts = history.stop(at_end, at_turn)
        if is_whole:
            self._can_listen = self._parts is not None

    def sees_output(self, output: object) -> None:
        """Forward handed this out: note the peak when backward has come to it, and when it has ended.

        Several outputs may have a backward pass each: the first to come begins it, and the last ends it.
        """
        meter = self.moments[-1].meter if self.moments else None
        if self.on_gpu or (meter is not None and meter.listens):
            made = list(_graded(output))
            if made and meter is not None:
                meter.hands_out()
            elif made:
                self._at_end = _counters()
                self._outputs += len(made)
                self._mark(END)
            for one in made:
                one.register_hook(self._at_backward if meter is None else lambda _: meter.turns_back())
            if not made and self._history is not None and torch.is_grad_enabled():  # no backward: forward has failed
                self._stop_listening(None, None, is_whole=False)

    def _at_backward(self, _: Tensor) -> None:
        if self._at_turn is None:
            self._at_turn = _counters()
            self._mark(TURN)
        self._may_follow = _torch.graph_is_kept()
        _torch.after_backward(self._read_after_backward)

    def _read_after_backward(self) -> None:
        counters = _counters()
        if counters is not None:
            self._sees_backward = True
            self._after_backward = counters.highest
            _wait_for_optimizer(self)
        self._mark(AFTER)
        if self._history is not None and self._outputs == 1 and not self._may_follow:  # nor for another output
            self._stop_listening(self._at_end, self._at_turn, is_whole=True)

    def read_after_optimizer(self, optimizer: Optimizer) -> None:
        """``optimizer`` has made its step, the first after backward or another one."""
        counters = _counters()
        if counters is not None and (self._after_optimizer is None or self._trains(optimizer)):
            self._after_optimizer = counters.highest

    def _trains(self, optimizer: Optimizer) -> bool:
        """Whether parameters of this model are the optimizer's."""
        module = self._module()
        ours = set() if module is None else {id(parameter) for parameter in module.parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def _mark(self, moment: int) -> None:
        if self._history is not None:
            self._history.mark(moment)

    def standing(self) -> int:
        """What stands before a step: parameters, optimizer state, a batch."""
        counters = self.moments[-1].counters
        return 0 if counters is None else counters.allocated

    def highest(self) -> int:
        """The allocator's peak so far."""
        counters = self.moments[-1].counters
        return 0 if counters is None else counters.highest

    def reserved(self) -> int | None:
        """What the allocator has reserved; None: nobody counts."""
        counters = self.moments[-1].counters
        return None if counters is None else counters.reserved

    def sees(self, limit: int) -> bool:
        """Whether a step that takes more than the limit is seen to."""
        return self._is_reset or self._can_listen or self.highest() <= limit

    def has_room(self, peak: float) -> bool:
        """Whether the machine has so much memory, whatever the budget is."""
        if self.on_gpu:
            return peak <= ROOM * torch.cuda.mem_get_info()[1]
        try:
            return peak <= ROOM * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        except (AttributeError, OSError, ValueError):  # not a Unix
            return True

    # -------------------------------------------------------------------------------------------- what a step has taken

    def compare(self, outcome: Outcome) -> int:
        """Compare what the last step took with what was foreseen of it; returns what stood before it."""
        self.peak, self.saves, self.reads, self.has_compared = None, (), (), False
        last = [(a, b) for a, b in pairwise(self.moments[-3:]) if not a.is_end][-1:]
        if not last:
            return 0
        before, now = last[0]
        self.has_compared = before.comparisons != now.comparisons
        known = self.extra, self.in_forward, self.beside_kept
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
            self.extra, self.in_forward, self.beside_kept = known
        return 0 if before.counters is None else before.counters.allocated

    def _read_counters(self, before: _torch.Counters, now: Moment, at_next: _torch.Counters, outcome: Outcome) -> None:
        if now.highest is not None:
            in_backward = now.highest
        elif self._sees_backward:  # but not this one's, so that nobody can tell whose peak it is
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
            self.extra = self.took - outcome.peak_bytes
            if now.end is None or now.turn is None:
                return
            if now.end.highest > before.highest:
                self.in_forward = now.end.highest - before.allocated - outcome.forward_bytes
            if now.turn.highest > before.highest:
                # Where nothing seems to have run between forward and backward, nothing stood there but what stands now.
                is_quiet = now.turn.highest == now.end.highest and now.turn.allocated - now.end.allocated < QUIET
                highest = now.turn.allocated if is_quiet else now.turn.highest
                self.beside_kept = highest - before.allocated - outcome.kept_bytes
                if now.turn.highest >= in_backward:  # how high it stood later nobody knows, but what it began with
                    hidden = now.turn.allocated - before.allocated - outcome.kept_bytes - self.outside
                    self.extra = min(self.extra, int(max(0, hidden) + MARGIN * outcome.peak_bytes))

    def _read_meter(self, meter: Meter, peak_bytes: int, outcome: Outcome) -> None:
        self.peak = self.took = peak_bytes
        self.extra = peak_bytes - outcome.peak_bytes
        if (
            meter.forward_bytes is None
            or meter.start_bytes is None
            or meter.later_bytes is None
            or meter.after_bytes is None
        ):
            return
        between = meter.save_bytes, meter.read_bytes
        self._read_parts(Parts(meter.forward_bytes, meter.start_bytes, meter.later_bytes, *between), outcome)
        if self.is_recorded:  # else it is the recorded step, in which the optimizer may make its state
            self.after = meter.after_bytes

    def _read_parts(self, parts: Parts, outcome: Outcome) -> None:
        self.took, self.saves, self.reads = parts.highest, parts.saves, parts.reads
        self.in_forward = parts.forward - outcome.forward_bytes
        self.beside_kept = parts.start - outcome.kept_bytes
        self.extra = max(parts.later - outcome.peak_bytes, min(0, self.took - outcome.peak_bytes))

    def _warn_of_retries(self, before: _torch.Counters, now: _torch.Counters) -> None:
        """What is reserved may not fit the device where what is allocated does: the allocator's blocks have gaps."""
        if now.retries > before.retries and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a step of at most {size_text(now.highest)} was too much for the GPU as torch's allocator divides it "
                f"({size_text(now.reserved)} are reserved): it gave back what it had cached and tried again, which "
                "takes time. Set PYTORCH_ALLOC_CONF=expandable_segments:True, or give a smaller budget.",
                stacklevel=2,
            )

    # ----------------------------------------------------------------------------------------------- what one will take

    def foreseen(self, outcome: Outcome, more: int = 0) -> float:
        """The peak of the next step, if its saved tensors and gradients take what ``outcome`` says, and ``more``."""
        guess = int(self.outside + MARGIN * (outcome.peak_bytes + more))
        later = self.extra if self.extra is not None else guess
        return max(self.standing() + more + max(outcome.peak_bytes + later, self.until_backward(outcome)), self.after)

    def until_backward(self, outcome: Outcome) -> int:
        """The same, before backward comes to the model; 0: nothing was measured."""
        forward = 0 if self.in_forward is None else outcome.forward_bytes + self.in_forward
        return max(forward, 0 if self.beside_kept is None else outcome.kept_bytes + self.beside_kept)


_waiting: weakref.WeakSet[Peaks] = weakref.WeakSet()  # whose backward has ended, and no other step begun since
_hook: Any = None


def _wait_for_optimizer(peaks: Peaks) -> None:
    """Tell these when an optimizer has made a step."""
    global _hook
    _waiting.add(peaks)
    _hook = _hook or register_optimizer_step_post_hook(_after_optimizer)


def _after_optimizer(optimizer: Optimizer, *_: Any) -> None:
    for peaks in list(_waiting):
        peaks.read_after_optimizer(optimizer)


def _no_module() -> None:
    """Of a region that is no module's."""


def first_graded(output: object) -> Tensor | None:
    """The first tensor that backward may begin at, of what a forward handed out."""
    return next(_graded(output), None)


def _graded(output: object) -> Iterator[Tensor]:
    return (t for t in tensors_in(output) if t.grad_fn is not None and type(t) is Tensor)


def _counters() -> _torch.Counters | None:
    return _torch.cuda_counters()
