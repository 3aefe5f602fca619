"""Where the GPU waits for the host: what costs the host much to rebuild and saves little memory is kept.

[Note: the host is the limit]
A rebuild costs the host 40 to 150 microseconds, however many bytes it saves. Where the GPU has enough to do nobody
notices; a model of many small kernels becomes slower. And some of what is rebuilt matters little to the peak: it is
small, or it is read, and gone, before backward comes to the layers whose tensors are large.

So a model without a budget or a bound on the time is measured, once its plan stands: in a few steps the host waits for
the GPU when forward has been issued, in a few others when backward has, and notes how long. If that is next to nothing
at either time, the GPU waits for the host. (The last kernels of backward are those of the first layers, the largest of
a convolutional net: they keep the GPU busy at the end of a step for most of which it had nothing to do.)

Then every rebuild of one step is timed, and what is dearest to the host for each of its bytes is kept, as long as the
peak that is foreseen is no more than a small share above the least. That step, and the next one, are listened to: if
the peak of the second is higher by more than that share (a chain that runs as one kernel takes less than is foreseen
for rebuilding it), then no more bytes are kept than that share, wherever the peak may be. If even that is too much, all
is as it was before. Where nobody can listen, what is foreseen has to do.

Everything else is as ever: the whole step is followed, and one that differs is learned from anew.
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
from leangrad.ledger.tune.history import AFTER, END, TURN, History
from leangrad.policy.peak import Outcome
from leangrad.policy.relax import Relaxation
from leangrad.policy.replay import Replay
from leangrad.sizes import size_text

__all__ = ["HostLimit"]

STEADY = 8  # steps along the plan before any is measured: kernels are proven and caches filled in the first ones
RUNS = 5  # steps that are measured of each kind; the first of them only waits for what was issued before it
IDLE = 0.03  # of the time up to then: if the host waits no longer than that, the GPU has waited for the host
COURSES = 3  # a model whose steps differ again and again is not measured for ever
SHARE = 0.5  # of the memory that the device has left: where more than that would be taken, nothing is


class HostLimit:
    """Finds out, from step to step of one ledger, whether the host is the limit, and what to keep if it is."""

    def __init__(self, spare: float) -> None:
        """``spare``: the share of the least peak that may be taken beside it."""
        self.spare = spare
        self.status = ""
        self._courses = 0
        self.restart()

    def restart(self) -> None:
        """A step differs from the recorded one."""
        self._courses += 1
        self.is_over = not self.spare or self._courses > COURSES
        self.status = ""
        self._steps = 0
        self._began: float | None = None  # the step that is being measured
        self._forward_waits: list[float] = []  # for the GPU, as shares of the time from the beginning of the step
        self._waits: list[float] = []  # the same of a whole step
        self._timing: Timing | None = None
        self._thread: int | None = None
        self._history: History | None = None  # of a step that is listened to
        self._at_output: _torch.Counters | None = None  # when forward ended
        self._at_turn: _torch.Counters | None = None  # when backward came to the model
        self._took = 0  # the last step that was listened to, beside what stood before it; 0: nobody knows
        self._before: tuple[frozenset[int], int] | None = None  # what was kept before more was, and what that took
        self._is_careful = False  # no more bytes are kept than may be taken

    def next_kept(
        self, step: RecordedStep, replay: Replay, kept: frozenset[int], *, on_gpu: bool
    ) -> tuple[frozenset[int], Timing | None]:
        """A step begins, and the last one has kept ``kept``: what it is to keep, and what times its rebuilds."""
        self._began = self._history = None  # of a step whose backward never came
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
            self._listen()
            return found, None
        elif self._timing is not None:
            self._before = kept, self._took
            found = self._more(step, replay, kept)
            self._listen()
            return found, None
        else:
            self._steps += 1
            if len(self._waits) >= RUNS:
                self.is_over = all(statistics.median(some[1:]) > IDLE for some in (self._waits, self._forward_waits))
                if not self.is_over:
                    self._timing = Timing(on_gpu=True)
                    self._listen()
            elif self._steps > STEADY + 4 * RUNS:  # of some of these nobody ran the backward
                self.is_over = True
            else:
                self._began = time.perf_counter()
        return kept, self._timing

    def added(self, kept: frozenset[int]) -> frozenset[int]:
        """What of ``kept`` is kept for the host's sake."""
        return frozenset() if self._before is None else kept - self._before[0]

    def sees_output(self, made: Tensor | None) -> None:
        """Forward handed this out: measure the step, if it is to be measured, when its backward has ended.

        None: nothing that a backward may begin at. If it is no evaluation in between, forward has failed.
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
                History.mark(END)
            made.register_hook(self._at_backward)

    def _at_backward(self, _: Tensor) -> None:
        if self._history is not None:
            self._at_turn = _torch.cuda_counters()
            History.mark(TURN)
        _torch.after_backward(self._at_end)

    def _at_end(self) -> None:
        """All of backward has been issued."""
        began, self._began = self._began, None
        history, self._history = self._history, None
        if history is not None:
            History.mark(AFTER)
            parts = history.stop(self._at_output, self._at_turn)
            self._took = 0 if parts is None else parts.highest
        elif began is not None and not _torch.is_capturing():
            self._waits.append(_waited(began))

    def _listen(self) -> None:
        """Find out what the step that begins takes: see [Note: below the allocator's peak]."""
        self._took = 0
        if not self.is_over and (counters := _torch.cuda_counters()) is not None:
            self._history = History.begin(counters.allocated)

    def _more(self, step: RecordedStep, replay: Replay, kept: frozenset[int]) -> frozenset[int]:
        """What to keep beside ``kept``: the dearest to the host, within what may be taken."""
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
        """A step that kept more has run: if it took more than was foreseen, less is kept, and at last what was."""
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
    """How long the GPU has still to do, as a share of the time since ``began``."""
    issued = time.perf_counter()
    _wait_for_gpu()
    now = time.perf_counter()
    return (now - issued) / (now - began)


def _wait_for_gpu() -> None:
    torch.cuda.current_stream().synchronize()


def _room() -> float:
    """What the device has left above the allocator's peak."""
    counters = _torch.cuda_counters()
    free = torch.cuda.mem_get_info()[0]
    return float(free if counters is None else max(0, free + counters.reserved - counters.highest))
