"""Keeps tensors that cost the host much to rebuild and save little memory, if the GPU waits for the host.

[Note: the host is the limit]
A rebuild costs the host 40 to 150 microseconds, however many bytes it saves. That goes unnoticed if the GPU has enough
to do; a model of many small kernels becomes slower. And some of the rebuilt tensors matter little to the peak: they are
small, or backward reads and frees them before it reaches the layers whose tensors are large.

So a model without a budget or a bound on the time is measured once its plan is made: in a few steps the host waits for
the GPU when forward has been issued, in a few others when backward has been issued, and the time of the wait is noted.
If it is next to nothing after forward or after backward, the GPU waits for the host. (One of the two suffices: the last
kernels of backward are those of the first layers, the largest of a convolutional net, and keep the GPU busy at the end
of a step for most of which it had nothing to do.)

Then every rebuild of one step is timed, and later steps keep the tensors that cost the host the most per byte, as long
as the predicted peak is no more than a small share above the lowest. The memory of the timed step, and of the next one,
is measured by torch's allocation history. If the peak of the second step is higher by more than that share (a chain
that runs as one kernel uses less than is predicted for rebuilding it), then the bytes that are kept in addition are
limited to that share, wherever the peak may be. If even that is too much, the plan from before is restored. Where
memory cannot be measured, the prediction alone counts.

All else stays the same: steps follow the trace of the whole recorded step, and a step that differs is recorded anew.
"""

from __future__ import annotations

import statistics
import threading
import time

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.learn.recorded_step import RecordedStep
from leangrad.ledger.learn.timing import Timing
from leangrad.ledger.tune.history import BACKWARD_END, BACKWARD_START, FORWARD_END, History
from leangrad.policy.peak import Outcome
from leangrad.policy.relax import Relaxation
from leangrad.policy.replay import Replay
from leangrad.sizes import size_text

__all__ = ["HostLimit"]

STEADY = 8  # steps along the plan before the first measured one: they prove kernels and fill caches
RUNS = 5  # measured waits of each kind; the first does not count: it includes work that was issued before
IDLE = 0.03  # share of the time since the step began: if the host's wait is no longer, the GPU has waited for the host
MAX_ATTEMPTS = 3  # most measurements of one ledger: a model whose steps differ again and again is not measured for ever
SHARE = 0.5  # of the device's free memory: if more would be allowed on top of the lowest peak, the plan stays


class HostLimit:
    """Finds out over the steps of one ledger whether the GPU waits for the host, and what to keep if it does."""

    def __init__(self, spare: float) -> None:
        """``spare``: the memory that may be used above the lowest peak, as a share of that peak; 0: nothing is done."""
        self.spare = spare
        self.status = ""
        self._attempts = 0
        self.restart()

    def restart(self) -> None:
        """Start over, because a step differs from the recorded one."""
        self._attempts += 1
        self.is_over = not self.spare or self._attempts > MAX_ATTEMPTS
        self.status = ""
        self._steps = 0
        self._began: float | None = None  # time at which the step whose wait is measured began; None: there is none
        self._forward_waits: list[float] = []  # waits for the GPU after forward, as shares of the time since `_began`
        self._waits: list[float] = []  # the same after backward
        self._timing: Timing | None = None
        self._thread: int | None = None
        self._history: History | None = None  # of the running step; None: its memory is not measured
        self._at_output: _torch.Counters | None = None  # the allocator's counters when forward ended
        self._at_backward_start: _torch.Counters | None = None  # the counters when backward reached the model
        self._took = 0  # peak of the last measured step minus the memory allocated before it; bytes; 0: not known
        self._before: tuple[frozenset[int], int] | None = None  # the plan before more was kept, and its `_took`
        self._is_careful = False  # whether the kept bytes are limited as well as the peak

    def next_kept(
        self, step: RecordedStep, replay: Replay, kept: frozenset[int], *, on_gpu: bool
    ) -> tuple[frozenset[int], Timing | None]:
        """Return what the step that begins is to keep, and what times its rebuilds; None: they are not timed.

        kept: the items that the last step kept.
        """
        self._began = self._history = None  # drops those of a step whose backward never ran
        if self.is_over:
            return kept, None
        thread = self._thread = self._thread or threading.get_ident()
        if not on_gpu or thread != threading.get_ident():
            self.is_over = True
        elif self._steps < STEADY:
            self._steps += 1
        elif _torch.is_capturing():
            self.is_over = True
        elif self._before is not None:
            found = self._look_back(step, replay, kept)
            self._measure_step()
            return found, None
        elif self._timing is not None:
            self._before = kept, self._took
            found = self._more(step, replay, kept)
            self._measure_step()
            return found, None
        else:
            self._steps += 1
            if len(self._waits) >= RUNS:
                self.is_over = all(statistics.median(some[1:]) > IDLE for some in (self._waits, self._forward_waits))
                if not self.is_over:
                    self._timing = Timing(on_gpu=True)
                    self._measure_step()
            elif self._steps > STEADY + 4 * RUNS:  # too many of these steps had no backward
                self.is_over = True
            else:
                self._began = time.perf_counter()
        return kept, self._timing

    def added(self, kept: frozenset[int]) -> frozenset[int]:
        """The items of ``kept`` that are kept only to spare the host."""
        return frozenset() if self._before is None else kept - self._before[0]

    def note_output(self, made: Tensor | None) -> None:
        """Note that forward has ended: measure the wait now, or have the step measured when its backward has ended.

        made: an output from which backward may begin. None: there is none; if gradients are enabled, forward has
            failed, else it was an evaluation in between.
        """
        if made is None:
            if torch.is_grad_enabled():
                self._began = self._history = None
        elif self._began is not None and len(self._forward_waits) < RUNS:
            if not _torch.is_capturing():
                self._forward_waits.append(_waited(self._began))
            self._began = None
        elif self._began is not None or self._history is not None:
            if self._history is not None:
                self._at_output = _torch.cuda_counters()
                History.mark(FORWARD_END)
            made.register_hook(self._at_backward)

    def _at_backward(self, _: Tensor) -> None:
        if self._history is not None:
            self._at_backward_start = _torch.cuda_counters()
            History.mark(BACKWARD_START)
        _torch.after_backward(self._at_end)

    def _at_end(self) -> None:
        """Note the wait, or the peak, of the step whose backward has just been issued."""
        began, self._began = self._began, None
        history, self._history = self._history, None
        if history is not None:
            History.mark(BACKWARD_END)
            parts = history.stop(self._at_output, self._at_backward_start)
            self._took = 0 if parts is None else parts.highest
        elif began is not None and not _torch.is_capturing():
            self._waits.append(_waited(began))

    def _measure_step(self) -> None:
        """Measure the memory of the step that begins: see [Note: below the allocator's peak]."""
        self._took = 0
        if not self.is_over and (counters := _torch.cuda_counters()) is not None:
            self._history = History.begin(counters.allocated)

    def _more(self, step: RecordedStep, replay: Replay, kept: frozenset[int]) -> frozenset[int]:
        """Return ``kept`` and the tensors that cost the host the most per byte, within the memory that may be used."""
        assert self._timing is not None
        costs = self._timing.costs(step.items, [saved.item for saved in step.saved], kept)
        seconds = [0.0] * len(replay.graph.values)
        for n, cost in costs.items():
            seconds[n] = cost.host
        relaxation = Relaxation(Replay(replay.graph, seconds), kept)
        least = relaxation.play(kept)
        more = self.spare * least.peak_bytes
        if more > SHARE * _room():
            return kept
        most = least.peak_bytes + more
        most_kept = least.kept_bytes + more if self._is_careful else float("inf")

        def fits(outcome: Outcome) -> bool:
            return outcome.peak_bytes <= most and outcome.kept_bytes <= most_kept

        found = relaxation.within(fits)
        worth = kept | {n for n in found if n in costs}
        if not fits(relaxation.play(worth)):
            worth = kept
        outcome = relaxation.play(worth)
        if outcome.work < least.work:
            grown = outcome.peak_bytes / max(1, least.peak_bytes) - 1
            self.status = (
                f"the GPU waits for the host: {len(worth - kept)} tensors are kept that could be rebuilt, which spares "
                f"the host {1e3 * (least.work - outcome.work):.1f} of {1e3 * least.work:.1f} ms of rebuilding; saved "
                f"tensors take {size_text(outcome.peak_bytes)} at most, {100 * max(0.0, grown):.1f}% above the least"
            )
        return worth

    def _look_back(self, step: RecordedStep, replay: Replay, kept: frozenset[int]) -> frozenset[int]:
        """Check the peak of the step that kept more: if it was too high, keep less, or at last what was kept before."""
        assert self._before is not None
        before, took = self._before
        if kept == before or not took or self._took <= (1 + self.spare) * took:
            self.is_over = True
            return kept
        self.status = ""
        if self._is_careful:
            self.is_over = True
            return before
        self._is_careful = True
        return self._more(step, replay, before)


def _waited(began: float) -> float:
    """Wait until the GPU has done all its work; returns the time of the wait as a share of that since ``began``."""
    issued = time.perf_counter()
    _wait_for_gpu()
    now = time.perf_counter()
    return (now - issued) / (now - began)


def _wait_for_gpu() -> None:
    torch.cuda.current_stream().synchronize()


def _room() -> float:
    """The bytes that the device has left above the allocator's peak."""
    counters = _torch.cuda_counters()
    free = torch.cuda.mem_get_info()[0]
    return float(free if counters is None else max(0, free + counters.reserved - counters.highest))
