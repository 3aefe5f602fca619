"""What both searches share: the plans of a recorded step, and steps that are timed.

[Note: time] The time of a step runs from its beginning to the beginning of the next step, on the clock of the device.
It includes forward, backward and everything else that the user's loop does. Of a few steps the shortest time counts,
where plans for a budget are compared. For a bound on the time that is not enough: see [Note: times on a restless host]
in ``ratios.py``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leangrad.ledger.learn.recorded_step import LAST_SHAPES, RecordedStep
from leangrad.ledger.learn.timing import Cost, SavedMarks, Stopwatch, Timing
from leangrad.ledger.tune.goal import Goal, StepMode
from leangrad.ledger.tune.peaks import Peaks
from leangrad.policy.choice import lowest_peak
from leangrad.policy.graph import Graph
from leangrad.policy.peak import Outcome
from leangrad.policy.relax import Relaxation
from leangrad.policy.replay import Replay

__all__ = ["WARM", "PlanSearch"]

WARM = 3  # steps before the first timed one: the first steps prove kernels and fill caches
RUNS = 4  # timed steps of each plan; the plans alternate
TIMED = 2  # steps in which every rebuild is timed


class PlanSearch:
    """Base class of the searches: from one recorded step to a plan that meets the goal.

    A plan is the set of the items of the recorded step that later steps keep.

    - `step`, `replay`: the recorded step, and the `Replay` that predicts its peak and its work under a plan.
    - `smallest`: the plan with the lowest peak; `smallest_took`: its measured peak minus the memory allocated before
      the step, None if it was not measured; `others`: a list of the plan that runs no product twice, empty if no recipe
      runs a product.
    - `status`: the text about the search in the ledger's summary.
    - `is_final`: whether the plan of the step that runs stays, unless a step that the user measures corrects it.
    """

    def __init__(
        self, goal: Goal, peaks: Peaks, step: RecordedStep, replay: Replay, kept: frozenset[int] | None
    ) -> None:
        """``kept``: the plan with the lowest predicted peak; None: the plan is what ``step`` has kept."""
        self.goal, self.peaks, self.step = goal, peaks, step
        self.status = ""
        self.is_final = False
        self.may_plan = kept is not None
        self.smallest_took: int | None = None
        plans = [step.kept_items()]
        # Use ``kept`` only if it is predicted to save memory: the peak of what the recorded step kept was measured.
        if kept is not None and replay.play(kept).peak_bytes < replay.play(plans[0]).peak_bytes:
            plans = [kept]
        if any(value.products for value in replay.graph.values):
            plans.append(_without_products(replay))
        self.smallest, *self.others = plans
        self._recorded = self.relaxed(replay, self.smallest)  # predictions from before any step was measured
        self._marks: SavedMarks | None = None  # marks of the running step; None if its memory is not measured
        self.use(replay)
        self.note_peak(step.kept_items(), is_recorded=True)

    def step_modes(self) -> Iterator[StepMode]:
        """Yield for one step after another how it is to run."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------------- plans

    def use(self, replay: Replay) -> None:
        """Set `replay`, and relax `smallest` and `others` by its costs."""
        self.replay = replay
        self.relaxation = self.relaxed(replay, self.smallest)
        self.beside = [self.relaxed(replay, kept) for kept in self.others]

    def relaxed(self, replay: Replay, kept: frozenset[int]) -> Relaxation:
        """The `Relaxation` from ``kept`` to plans that keep more."""
        return Relaxation(replay, kept, self.step.shape_bytes)

    def take_for_smallest(self, kept: frozenset[int]) -> None:
        """Make ``kept`` the smallest plan: it was found to have a lower peak than the one before."""
        self.smallest, self.smallest_took = kept, None
        self.use(self.replay)

    def play(self, kept: frozenset[int]) -> Outcome:
        """Predict the peak, the kept bytes and the work of a step that keeps ``kept``."""
        return self.relaxation.play(kept)

    @property
    def all_kept(self) -> frozenset[int]:
        """All items that a plan may keep."""
        return self.smallest.union(self.relaxation.order)

    def mode_keeping(self, kept: frozenset[int]) -> StepMode:
        """How a step runs that keeps ``kept``.

        If ``kept`` is everything, the step runs plain PyTorch, provided that its peak is allowed: plain PyTorch also
        keeps tensors that no plan keeps.
        """
        if not self.all_kept <= kept:
            return StepMode(kept)
        return StepMode(None if self.is_allowed(self.peaks.foreseen(self.play(kept), self.step.unkept_bytes)) else kept)

    def is_allowed(self, peak: float) -> bool:
        """Whether the goal allows a step with a peak of ``peak`` bytes."""
        return True

    def note_peak(self, kept: frozenset[int], *, is_recorded: bool = False, is_early: bool = False) -> None:
        """Compare the measured peak of the last step with its prediction, and correct later predictions.

        kept: the items that the last step kept.
        is_recorded: the last step was the recorded one; its peak is not taken for that of the smallest plan.
        is_early: kernels were still being proven in the steps so far, so the scratch learned from this step replaces
            that learned from them.
        """
        peaks = self.peaks
        stood = peaks.compare(self._recorded.play(kept))
        extra, in_forward = peaks.excess, peaks.forward_excess
        self._raise_scratch(kept, is_early)
        peaks.compare(self.play(kept))
        # Scratch learned from other plans may be too much for this one; that must not lower the prediction of a third.
        if extra is not None and peaks.excess is not None:
            peaks.excess = max(peaks.excess, min(0, extra))
        if in_forward is not None and peaks.forward_excess is not None:
            peaks.forward_excess = max(peaks.forward_excess, min(0, in_forward))
        if peaks.peak is not None and kept == self.smallest and not is_recorded and not peaks.has_compared:
            self.smallest_took = peaks.peak - stood

    def _raise_scratch(self, kept: frozenset[int], is_early: bool) -> None:
        """Add scratch to the ops at which the last step exceeded its prediction: see [Note: what was not foreseen]."""
        marks, self._marks, peaks = self._marks, None, self.peaks
        if LAST_SHAPES in kept:  # the replay does not know from when to when these tensors are held
            return
        if marks is None or (len(marks.saves) + 1, len(marks.reads) + 1) != (len(peaks.saves), len(peaks.reads)):
            return
        made_at = {number: saved.item for number, saved in enumerate(self.step.saved)}
        made = _in_order(marks.saves, made_at, peaks.saves)
        read = _in_order(marks.reads, self.step.read_at, peaks.reads)
        base = Replay(self._recorded.graph, self.replay.costs) if is_early else self.replay
        self.use(base.raised(kept, made, read))

    def measure(self, kept: frozenset[int], *, is_early: bool = False) -> Iterator[StepMode]:
        """Run one step that keeps ``kept``, measure its memory, and compare its peak with the prediction."""
        yield self.with_measurement(StepMode(kept))
        self.note_peak(kept, is_early=is_early)

    def with_measurement(self, mode: StepMode) -> StepMode:
        """Measure the memory of the step that begins; returns ``mode`` with marks at its saves and reads.

        The memory is measured by torch's allocation history on a GPU, and by `leangrad.measure` on a CPU.
        """
        self.peaks.measure_step()
        self._marks = None if mode.kept is None else self.peaks.marks()
        return StepMode(mode.kept, self._marks)

    # ----------------------------------------------------------------------------------------------------------- times

    def shortest(self, *step_modes: frozenset[int] | None, runs: int = RUNS) -> Generator[StepMode, None, list[float]]:
        """Run steps as `run` does; returns the shortest time of each plan, in seconds."""
        times = yield from self.run(*step_modes, runs=runs)
        return [min(some) for some in times]

    def run(self, *step_modes: frozenset[int] | None, runs: int = RUNS) -> Generator[StepMode, None, list[list[float]]]:
        """Time ``runs`` steps of each plan, the plans in alternation; returns the times of each plan, in seconds.

        step_modes: the items that each plan keeps; None: plain PyTorch.
        Each time a plan runs for two steps, of which only the second counts: the first one finds caches and the
        allocator as the other plan left them.
        """
        stopwatch = Stopwatch(on_gpu=self.peaks.on_gpu)
        times: list[list[float]] = [[] for _ in step_modes]
        for _ in range(runs):
            for n, kept in enumerate(step_modes):
                yield StepMode(kept)
                first = len(self.peaks.moments) - 1
                yield StepMode(kept)
                begin, end = self.peaks.moments[first : first + 2]
                times[n].append(stopwatch.seconds(begin.time, end.time))
        return times

    def time_rebuilds(self) -> Iterator[StepMode]:
        """Run two steps in which every rebuild is timed; from then on the work of plans is in seconds.

        Of the two times of a rebuild the shorter one counts, because a kernel may be compiled during the other.
        """
        items, costs = self.step.items, dict[int, Cost]()
        for _ in range(TIMED):
            timing = Timing(on_gpu=self.peaks.on_gpu)
            yield StepMode(self.smallest, timing)
            self.note_peak(self.smallest)
            cast_from = {n: source for n, (source, _) in self.step.sources.items()}
            found = timing.costs(items, [saved.item for saved in self.step.saved], self.smallest, cast_from)
            costs = {n: cost if n not in costs else min(cost, costs[n], key=max) for n, cost in found.items()}
        cheap = [n for n in costs if not items[n].products]
        spent = sum(max(costs[n]) for n in cheap)
        rate = spent / max(1, sum(items[n].nbytes for n in cheap))  # seconds per byte, for kept items: not timed
        seconds = [0.0 if item.is_fixed else rate * item.nbytes for item in items]
        seconds += [0.0] * (len(self.replay.graph.values) - len(items))
        for n, second in self.evened({n: max(cost) for n, cost in costs.items()}).items():
            seconds[n] = second
        self.use(Replay(self.replay.graph, seconds))

    def evened(self, costs: dict[int, float]) -> dict[int, float]:
        """Give tensors that are alike, such as those of equal blocks, the same cost: the mean of their ``costs``.

        Single timings of them differ by chance, and a plan by these would keep an arbitrary part of them. Of tensors
        with equal costs those of the last layers are kept first, and the function mode ends where nothing is rebuilt
        any more: see `early_end`.
        """
        items, ops = self.step.items, {s.item: s.made_by[0] for s in self.step.saved if s.made_by is not None}
        alike: dict[Any, list[int]] = {}
        for n in costs:
            kind = (ops.get(n), items[n].nbytes, items[n].products, len(items[n].inputs), items[n].may_end_chain)
            alike.setdefault(kind, []).append(n)
        return {n: sum(costs[i] for i in some) / len(some) for some in alike.values() for n in some}


def _in_order(numbers: Sequence[int], places: Mapping[int, int], held: Sequence[int]) -> list[tuple[int, int]]:
    """The places of saved tensors in increasing order, each with the most bytes held from it until the next one.

    numbers: the saved tensors, in the order in which they were marked.
    places: the place of each saved tensor; one that has none is unknown.
    held: the most bytes held before the first mark, then after each mark. The bytes of a mark whose place is unknown,
        or no later than the place before it, are counted to the place before it.
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
    """The plan with the lowest peak among those that run no product twice."""
    values = replay.graph.values
    fixed = (replace(value, is_fixed=True, can_be_kept=True) if value.products else value for value in values)
    graph = Graph(tuple(fixed))
    return lowest_peak(graph, Replay(graph).play)
