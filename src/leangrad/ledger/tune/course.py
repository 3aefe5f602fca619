"""What both courses have in common: the plans of a recorded step, and steps that are timed.

[Note: time] A step lasts from its beginning to that of the next one, on the clock of the device: forward, backward and
all else that the user does in it. Of a few steps the shortest counts; where a bound on the time has to hold, so must
the median of how much longer each was than the plain one before it: the shortest of few steps is a matter of luck.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leangrad.ledger.learn.recorded_step import LAST_SHAPES, RecordedStep
from leangrad.ledger.learn.timing import Cost, SavedMarks, Stopwatch, Timing
from leangrad.ledger.tune.goal import Goal, Way
from leangrad.ledger.tune.peaks import Peaks
from leangrad.policy.choice import lowest_peak
from leangrad.policy.graph import Graph
from leangrad.policy.peak import Outcome
from leangrad.policy.relax import Relaxation
from leangrad.policy.replay import Replay

__all__ = ["WARM", "Course"]

WARM = 3  # steps before one is timed: kernels are proven and caches filled in the first ones
RUNS = 4  # of each way, in turns
TIMED = 2  # steps in which every rebuild is


class Course:
    """The way to a goal from one recorded step on.

    - `step`, `replay`: the recorded step, and how it plays out if this or that is kept.
    - `smallest`: what the plan with the least memory keeps; `smallest_took`: what it was measured to take, above what
      stood before it; `others`: what plans keep that run no product twice.
    - `status`: what the summary says.
    """

    def __init__(
        self, goal: Goal, peaks: Peaks, step: RecordedStep, replay: Replay, kept: frozenset[int] | None
    ) -> None:
        """``kept``: the plan that takes the least memory; without one, what the step kept."""
        self.goal, self.peaks, self.step = goal, peaks, step
        self.status = ""
        self.may_plan = kept is not None
        self.smallest_took: int | None = None
        plans = [step.kept_items() if kept is None else kept]
        if any(value.products for value in replay.graph.values):
            plans.append(_without_products(replay))
        self.smallest, *self.others = plans
        self._recorded = self.relaxed(replay, self.smallest)  # as it was foreseen before any step was measured
        self._marks: SavedMarks | None = None  # of the step that runs, if it is listened to
        self.use(replay)
        self.note_peak(step.kept_items(), is_recorded=True)

    def ways(self) -> Iterator[Way]:
        """How one step after another is to run."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------------- plans

    def use(self, replay: Replay) -> None:
        """Relax the plans by the costs of ``replay``."""
        self.replay = replay
        self.relaxation = self.relaxed(replay, self.smallest)
        self.beside = [self.relaxed(replay, kept) for kept in self.others]

    def relaxed(self, replay: Replay, kept: frozenset[int]) -> Relaxation:
        """The plans that keep more than ``kept``."""
        return Relaxation(replay, kept, self.step.shape_bytes)

    def take_for_smallest(self, kept: frozenset[int]) -> None:
        """Another plan is found to take the least memory."""
        self.smallest, self.smallest_took = kept, None
        self.use(self.replay)

    def play(self, kept: frozenset[int]) -> Outcome:
        """How a step plays out that keeps so much."""
        return self.relaxation.play(kept)

    @property
    def all_kept(self) -> frozenset[int]:
        """All that may be kept."""
        return self.smallest.union(self.relaxation.order)

    def way(self, kept: frozenset[int]) -> Way:
        """Keep ``kept``; where that is all that there is, run plain, if plain is allowed what it keeps beside it."""
        if not self.all_kept <= kept:
            return Way(kept)
        return Way(None if self.is_allowed(self.peaks.foreseen(self.play(kept), self.step.unkept_bytes)) else kept)

    def is_allowed(self, peak: float) -> bool:
        """Whether a step may take so much."""
        return True

    def note_peak(self, kept: frozenset[int], *, is_recorded: bool = False, is_early: bool = False) -> None:
        """Compare what the last step took, in which ``kept`` was kept, with what was foreseen.

        is_early: kernels were still being proven, so that the next step will tell more.
        """
        peaks = self.peaks
        stood = peaks.compare(self._recorded.play(kept))
        extra, in_forward = peaks.extra, peaks.in_forward
        self._raise_scratch(kept, is_early)
        peaks.compare(self.play(kept))
        # Scratch that other plans have taught may be too much for this one: no reason to foresee less of a third.
        if extra is not None and peaks.extra is not None:
            peaks.extra = max(peaks.extra, min(0, extra))
        if in_forward is not None and peaks.in_forward is not None:
            peaks.in_forward = max(peaks.in_forward, min(0, in_forward))
        if peaks.peak is not None and kept == self.smallest and not is_recorded and not peaks.has_compared:
            self.smallest_took = peaks.peak - stood

    def _raise_scratch(self, kept: frozenset[int], is_early: bool) -> None:
        """Learn where the last step took more than was foreseen: see [Note: what was not foreseen]."""
        marks, self._marks, peaks = self._marks, None, self.peaks
        if LAST_SHAPES in kept:  # where they are held it does not know
            return
        if marks is None or (len(marks.saves) + 1, len(marks.reads) + 1) != (len(peaks.saves), len(peaks.reads)):
            return
        made_at = {number: saved.item for number, saved in enumerate(self.step.saved)}
        made = _in_order(marks.saves, made_at, peaks.saves)
        read = _in_order(marks.reads, self.step.read_at, peaks.reads)
        base = Replay(self._recorded.graph, self.replay.costs) if is_early else self.replay
        self.use(base.raised(kept, made, read))

    def seen(self, kept: frozenset[int], *, is_early: bool = False) -> Iterator[Way]:
        """A step that keeps so much, and what it takes is compared with what was foreseen."""
        yield self.listened(Way(kept))
        self.note_peak(kept, is_early=is_early)

    def listened(self, way: Way) -> Way:
        """The same way for the step that begins, of which is asked what it takes, and where."""
        self.peaks.listen()
        self._marks = None if way.kept is None else self.peaks.marks()
        return Way(way.kept, self._marks)

    # ----------------------------------------------------------------------------------------------------------- times

    def shortest(self, *ways: frozenset[int] | None, runs: int = RUNS) -> Generator[Way, None, list[float]]:
        """The times of the shortest step of each way."""
        times = yield from self.run(*ways, runs=runs)
        return [min(some) for some in times]

    def run(self, *ways: frozenset[int] | None, runs: int = RUNS) -> Generator[Way, None, list[list[float]]]:
        """Some steps of each way in turns: what is kept, None for plain. Their times.

        The first step of a turn does not count: what the one before it left in caches and allocators is of another
        kind.
        """
        stopwatch = Stopwatch(on_gpu=self.peaks.on_gpu)
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(runs):
            for n, kept in enumerate(ways):
                yield Way(kept)
                first = len(self.peaks.moments) - 1
                yield Way(kept)
                begin, end = self.peaks.moments[first : first + 2]
                times[n].append(stopwatch.seconds(begin.time, end.time))
        return times

    def time_rebuilds(self) -> Iterator[Way]:
        """Two steps in which every rebuild is timed; from then on work is told in seconds.

        The shorter time counts: a kernel may be compiled on its way.
        """
        items, costs = self.step.items, dict[int, Cost]()
        for _ in range(TIMED):
            timing = Timing(on_gpu=self.peaks.on_gpu)
            yield Way(self.smallest, timing)
            self.note_peak(self.smallest)
            found = timing.costs(items, [saved.item for saved in self.step.saved], self.smallest)
            costs = {n: cost if n not in costs else min(cost, costs[n], key=max) for n, cost in found.items()}
        cheap = [n for n in costs if not items[n].products]
        spent = sum(max(costs[n]) for n in cheap)
        rate = spent / max(1, sum(items[n].nbytes for n in cheap))  # of what was kept in this step, and so not timed
        seconds = [0.0 if item.is_fixed else rate * item.nbytes for item in items]
        seconds += [0.0] * (len(self.replay.graph.values) - len(items))
        for n, second in self.evened({n: max(cost) for n, cost in costs.items()}).items():
            seconds[n] = second
        self.use(Replay(self.replay.graph, seconds))

    def evened(self, costs: dict[int, float]) -> dict[int, float]:
        """The same cost for tensors that are alike, those of equal blocks: their mean.

        One timing of each differs by chance, and then the plan would keep some of these and some of those. Of equal
        ones the last layers' are kept first, and where nothing is rebuilt any more the override ends: `early_end`.
        """
        items, ops = self.step.items, {s.item: s.made_by[0] for s in self.step.saved if s.made_by is not None}
        alike: dict[Any, list[int]] = {}
        for n in costs:
            kind = (ops.get(n), items[n].nbytes, items[n].products, len(items[n].inputs), items[n].may_end_chain)
            alike.setdefault(kind, []).append(n)
        return {n: sum(costs[i] for i in some) / len(some) for some in alike.values() for n in some}


def _in_order(numbers: Sequence[int], places: Mapping[int, int], held: Sequence[int]) -> list[tuple[int, int]]:
    """The places of saved tensors, in order, and the most that was held from each on until the next.

    held: the first of it was before all of them. What comes again, or nobody knows where, belongs to the one before it.
    """
    found = [(0, held[0])]
    for number, most in zip(numbers, held[1:], strict=True):
        place, (last, before) = places.get(number, -1), found[-1]
        if place > last:
            found.append((place, most))
        else:
            found[-1] = last, max(before, most)
    return found


def _without_products(replay: Replay) -> frozenset[int]:
    """The plan that takes the least memory and runs no product twice."""
    values = replay.graph.values
    graph = Graph(tuple(replace(value, is_fixed=True) if value.products else value for value in values))
    return lowest_peak(graph, Replay(graph).play)
