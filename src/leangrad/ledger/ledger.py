"""What is learned from step to step: settings, one recorded step, and the plan that later steps follow."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, TracebackType
from typing import Any, Literal

import torch
from torch import nn

from leangrad import _torch, kernels
from leangrad.errors import BudgetError
from leangrad.ledger.decision import DEEPEST, Decision, SavedKind
from leangrad.ledger.gc_pause import GcPause
from leangrad.ledger.learn.entries import Entry, Totals
from leangrad.ledger.learn.recorded_step import RecordedStep
from leangrad.ledger.learn.recorder import Recorder
from leangrad.ledger.learn.timing import Unpacks
from leangrad.ledger.learn.trace import Trace
from leangrad.ledger.observe.active_region import region_is_open
from leangrad.ledger.observe.processes.gathers import Gathers
from leangrad.ledger.observe.unseen_writes import may_write_unseen
from leangrad.ledger.region import Region
from leangrad.ledger.summary import bytes_for_backward, summarize
from leangrad.ledger.tune.goal import PRODUCTS, Goal, Way
from leangrad.ledger.tune.host_limit import HostLimit
from leangrad.ledger.tune.peaks import first_graded
from leangrad.ledger.tune.tuner import Tuner
from leangrad.policy.choice import lowest_peak
from leangrad.policy.replay import Replay
from leangrad.switch import NAME, disabled

MIN_BYTES = 16 * 1024  # below this a tensor costs more to look into than to keep
LONGEST_PAUSE = 10  # lessons; a model whose steps differ again and again is learned from ever more seldom
STEADY = 64  # steps along what was learned, after which a difference is the first one again


class Ledger:
    """Decides, for every tensor that autograd wants to keep: keep it, share it, or store a recipe.

    A context manager for the forward region, to be entered once per step. The first step is recorded; from what it
    shows the later steps know which tensors to keep without looking, and where to cut residual chains so that the peak
    is lowest. What was learned only steers the choice between two ways that are both right, so a step that differs is
    never wrong: its first different tensor ends the use of what was learned, and the next step is recorded anew.
    """

    def __init__(
        self,
        *,
        residual_depth: int | Literal["auto"],
        min_bytes: int,
        products: int = 0,
        goal: Goal | None = None,
        spare: float = 0.0,
    ) -> None:
        """``products``: how many products one recipe may run through in a row; 0: no product is computed twice.

        spare: the share of the least peak that may be taken beside it where the GPU waits for the host.
        """
        if residual_depth != "auto" and not (type(residual_depth) is int and residual_depth >= 0):
            raise ValueError(f'residual_depth must be "auto" or an int >= 0, got {residual_depth!r}')
        if type(min_bytes) is not int or min_bytes < 0:
            raise ValueError(f"min_bytes must be an int >= 0, got {min_bytes!r}")
        if type(products) is not int or products < 0:
            raise ValueError(f"products must be an int >= 0, got {products!r}")
        if isinstance(spare, bool) or not isinstance(spare, int | float) or not 0 <= spare < 1:
            raise ValueError(f"spare must be a number from 0 to 1, such as 0.02, got {spare!r}")
        has_budget = goal is not None and goal.budget is not None
        self.residual_depth = residual_depth
        self.products = self._first_products = products or (PRODUCTS if has_budget else 0)
        self.min_bytes = min_bytes
        self.gathers = Gathers()  # the modules whose parameters are sharded
        self.remark: Callable[[Sequence[Entry]], str] = lambda _: ""  # what else the summary says, of a recorded step
        self.goal = goal
        self.timing: Unpacks | None = None  # times the rebuilds of the step that runs, or marks them
        self._tuner = Tuner(goal) if goal is not None else None
        self._host = HostLimit(spare if goal is None else 0.0)
        self._is_plain = False  # all is kept, so no region is opened
        self._lessons = 0  # what was learned and then was of no use
        self._pause = 0  # steps until the next one is recorded
        self._steps = 0  # along what was learned
        self._recorder: Recorder | None = None  # of the step that is being learned from
        self._recorded: Recorder | None = None  # of the last step that was recorded, for the summary
        self._decisions: list[Decision | None] | None = None
        self.differences = 0  # steps that were not like the recorded one
        self._difference = ""  # why the last of them was not
        self._kept_items: frozenset[int] | None = None  # what the plan keeps of the step that was learned from
        self.saved_kinds: Sequence[SavedKind] = ()  # of each saved tensor of the recorded step
        self.trace: Trace | None = None  # the calls of the recorded step
        self._peak_bytes = 0  # of backward, by the plan
        self._is_planning = False
        self._segments: dict[Hashable, Ledger] = {}
        self._local = threading.local()
        # One course for all threads. Without one, what a thread has learned is replaced as a whole.
        self._lock: AbstractContextManager[Any] = nullcontext() if goal is None else threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the same settings and has learned nothing."""
        return _fresh, (self.residual_depth, self.min_bytes, self._first_products, self.goal, self._host.spare)

    def fresh(self) -> Ledger:
        """One with the same settings that has learned nothing."""
        ledger = _fresh(self.residual_depth, self.min_bytes, self._first_products, self.goal, self._host.spare)
        ledger.remark = self.remark
        return ledger

    def region(self, module: nn.Module | None = None) -> Region | None:
        """One forward region; none where hooks cannot or need not be set, or a region is open already."""
        if (
            _torch.is_traced()
            or not torch.is_grad_enabled()
            or region_is_open()
            or disabled()
            or not _torch.saved_tensor_hooks_allowed()
            or not _torch.ledger_names_present()
        ):
            return None
        self.gathers.look(module)
        outer = _torch.innermost_pack_hook()
        if outer is None or _is_ours(outer):
            with self._lock:
                recorder = self._learn(module) if self._tuner is None else self._learn_by(self._tuner, module)
                return None if self._is_plain else Region(self, recorder, module)
        if _torch.is_checkpoint(outer):  # it drops all that is saved
            return Region(self, None, module, outer)
        if _torch.is_recomputation(outer):
            return self.segment(None).region_inside(module)
        _warn_of_other_hooks()
        return None

    def segment(self, key: Hashable) -> Ledger:
        """The ledger of a checkpointed segment, which backward runs again: what it learns is its own.

        key: the segments of one region by their number; None: the region itself, where a checkpoint is around it.
        """
        segment = self._segments.get(key)
        if segment is None:
            segment = _fresh(self.residual_depth, self.min_bytes, 0 if self.goal is not None else self.products)
            segment = self._segments.setdefault(key, segment)
        segment.gathers = self.gathers
        return segment

    def region_inside(self, module: nn.Module | None) -> Region | None:
        """A region where a checkpoint runs its function again; None where there can be none."""
        outer = _torch.innermost_pack_hook()
        if _torch.is_traced() or not torch.is_grad_enabled():
            return None
        if outer is None or _is_ours(outer):  # a reentrant one has no hooks
            return Region(self, self._learn(module), module)
        return Region(self, self._learn(module), module, outer) if _torch.is_recomputation(outer) else None

    def __enter__(self) -> Ledger:
        region = self.region()
        rest = None
        if region is not None:
            region.__enter__()
            rest = GcPause()
        self._stack().append((region, rest))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region, rest = self._stack().pop()
        if region is not None:
            rest.end()
            region.__exit__(kind, error, trace)

    def _stack(self) -> list[Any]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack  # type: ignore[no-any-return]

    def _learn_by(self, tuner: Tuner, module: nn.Module | None) -> Recorder | None:
        """The same on the tuner's course, which begins anew where an interrupt has broken it off."""
        try:
            tuner.begin(module, on_gpu=_is_on_gpu(module))
            return self._learn(module)
        except BudgetError:
            raise
        except BaseException:
            self.differs("the plan was interrupted")
            raise

    def _learn(self, module: nn.Module | None) -> Recorder | None:
        """What the last recorded step showed becomes the plan; where there is none, this step is recorded."""
        tuner = self._tuner
        _fused()
        if self._decisions is not None or self._plan():
            self._steps += 1
            if tuner is None:
                self._spare_host(module)
                return None
            if self._follow(tuner.next_way()):
                return None
        if self._pause > 0:
            self._pause -= 1
            return None
        self.gathers.is_flat = _torch.is_flat(module)
        self._recorder = self._recorded = Recorder(module, self.min_bytes)
        if tuner is not None:
            self._recorder.is_tuned = True
            self._recorder.leaves_stay = module is not None and _has_no_gradients(module)
            self._recorder.may_end_early = module is not None and _may_end_early(module)
        return self._recorder

    def _plan(self) -> bool:
        """Make the plan of the recorded step, if there is one and its backward has come to its end."""
        recorder = self._recorder
        if recorder is None or recorder.step is None or not recorder.was_read:
            return False
        if self._is_planning:  # two segments that were run again, each while the other was alive
            return False
        self._is_planning = True
        try:
            graph = recorder.graph()
        finally:
            self._is_planning = False
        backward = Replay(graph)
        step = recorder.step
        kept = None
        if self.residual_depth == "auto":
            kept = lowest_peak(graph, backward.play)
        self._adopt(step, backward, kept)
        self._replay = backward
        if self._tuner is not None:
            self._tuner.start(step, backward, kept, recorder.outputs_nbytes())
        return True

    def _adopt(self, step: RecordedStep, backward: Replay, kept: frozenset[int] | None) -> None:
        """Later steps keep the items ``kept``; without them, what the recorded one kept."""
        self._peak_bytes = backward.play(step.kept_items() if kept is None else kept).peak_bytes
        self.saved_kinds, self.trace = step.saved_kinds(kept), step.trace(kept, is_tuned=self.goal is not None)
        self._decisions = step.decisions(kept, frozenset() if kept is None else backward.held(kept))
        self._kept_items = kept

    def _spare_host(self, module: nn.Module | None) -> None:
        """Keep more where the GPU waits for the host: see [Note: the host is the limit]."""
        recorder, kept = self._recorder, self._kept_items
        if self._host.is_over or recorder is None or recorder.step is None or kept is None:
            self.timing = None
            return
        step = recorder.step
        found, self.timing = self._host.next_kept(step, self._replay, kept, on_gpu=_is_on_gpu(module))
        if found != kept:
            step.spared = self._host.added(found)
            self._adopt(step, self._replay, found)

    def _follow(self, way: Way) -> bool:
        """Run the step that begins as the tuner says; False: it is to be recorded."""
        if way.products is not None:
            self.products, self._is_plain = way.products, False
            self._forget()
            return False
        self.timing, self._is_plain = way.timing, way.kept is None
        if way.kept is not None and way.kept != self._kept_items and self._recorder is not None:
            step = self._recorder.step
            assert step is not None
            course = None if self._tuner is None else self._tuner.course
            self._adopt(step, self._replay if course is None else course.replay, way.kept)
        return True

    @property
    def is_settled(self) -> bool:
        """Whether its plan stands: until then steps are recorded, measured and timed, and plans are compared."""
        if self._decisions is None:  # a step that saves nothing needs no plan
            step = None if self._recorder is None else self._recorder.step
            return step is not None and not step.saved
        if self._tuner is not None:
            return self._tuner.peaks.is_settled
        return self._host.is_over or self._kept_items is None

    @property
    def has_failed(self) -> bool:
        """Whether its budget could not be met."""
        return self._tuner is not None and self._tuner.has_failed

    def sees_output(self, output: object) -> None:
        """Forward has ended, and hands this out."""
        if self._tuner is not None:
            self._tuner.sees_output(output)
        elif not self._host.is_over:
            self._host.sees_output(first_graded(output))

    def end_step(self) -> None:
        """The next step is another ledger's."""
        if self._tuner is not None:
            self._tuner.end_step()

    def runs_again(self, segment: Ledger) -> None:
        """Backward runs a segment again: the plans that are to be made have to know.

        Not only this region's, but also that of a segment which the other lies in. A segment that is over already does
        not mind: nothing of it is alive by then, whatever its plan.
        """
        for ledger in (self, *self._segments.values()):
            recorder = ledger.last_recorder
            if recorder is not None and ledger is not segment and ledger.decisions is None:
                recorder.runs_again(segment)

    @property
    def last_recorder(self) -> Recorder | None:
        """Of the step that is being learned from."""
        return self._recorder

    def peak_bytes(self) -> int:
        """What backward holds at most of the tensors of this region, by its plan; 0 where there is none."""
        if self._decisions is None:
            self._plan()
        return self._peak_bytes

    def differs(self, why: str) -> None:
        """This step is not like the one that was recorded, because of ``why``."""
        with self._lock:
            self._difference, self.differences = why, self.differences + 1
            self._forget()
            self._is_plain = False
            self._host.restart()
            if self._tuner is not None:
                self._tuner.restart()
                self.products = self._first_products
            self._lessons = self._lessons + 1 if self._steps < STEADY else 1
            self._pause = 2 ** min(self._lessons, LONGEST_PAUSE) - 2  # 0, 2, 6, 14, ...
            self._steps = 0

    def _forget(self) -> None:
        """Nothing is known of the steps to come."""
        self._decisions, self._recorder, self.trace, self.saved_kinds = None, None, None, ()
        self.timing = None

    @property
    def decisions(self) -> list[Decision | None] | None:
        """What was learned: for each saved tensor of a step in order, its op, whether to simply keep it, its bytes."""
        return self._decisions

    @property
    def catches(self) -> bool:
        """Whether outputs of products are held for a while, to be kept in the stead of a larger tensor.

        That takes memory in forward; a model whose recorded step caught none runs without it.
        """
        recorder = self._recorder  # another thread may let go of it
        return self._decisions is None or recorder is None or bool(recorder.caught)

    @property
    def caught(self) -> Collection[int] | None:
        """The calls of the recorded step of which a product was kept, by their number; None: nothing was learned."""
        recorder = self._recorder
        return None if self._decisions is None or recorder is None else recorder.caught

    @property
    def cap(self) -> int:
        """How deep a recipe may be where nothing was learned. Where products are run again, their sums are anchors."""
        deepest = 0 if self.products else DEEPEST
        return deepest if self.residual_depth == "auto" else self.residual_depth

    @property
    def trace_status(self) -> str:
        """Whether steps follow the trace of the recorded one; if not, what differed."""
        if disabled():
            return f"{NAME} is set: everything runs plain"
        if self._recorded is None:
            return ""
        if self.trace is not None:
            return "steps follow the trace of the recorded one"
        if self._decisions is not None:
            return "steps follow no trace: the recorded one saved tensors outside of all calls of torch"
        if self._difference:
            return f"steps follow no trace: {self._difference}"
        return "no step has followed this one yet"

    def totals(self) -> Totals:
        """The bytes that the last recorded step kept, rebuilt and shared; zeros if no step has been recorded.

        >>> import torch, leangrad
        >>> x = torch.ones(64, 64, requires_grad=True)
        >>> with leangrad.saving() as ledger:
        ...     y = torch.nn.functional.gelu(x @ x).sin()  # keeps the product; sin asks for its GELU, which is rebuilt
        >>> ledger.totals()
        Totals(kept_bytes=16384, rebuilt_bytes=16384, shared_bytes=0, shape_only_bytes=0)
        """
        return Totals.of(self.entries())

    def entries(self, *, planned: bool = False) -> list[Entry]:
        """What became of each tensor, here and in the segments that checkpoints inside or around it run again.

        Of the step that was recorded last; ``planned``: with the choices of the steps that follow it.
        """
        recorder, own = self._recorded, list[Entry]()
        if recorder is not None:
            follows = planned and self._decisions is not None
            step = recorder.step
            own = step.entries_under(self._kept_items) if follows and step is not None else recorder.entries
        return own + [entry for segment in self._segments.values() for entry in segment.entries(planned=planned)]

    def small_bytes(self) -> int:
        """What the recorded step kept without looking into it."""
        own = 0 if self._recorded is None else self._recorded.small_bytes
        return own + sum(segment.small_bytes() for segment in self._segments.values())

    def bytes_for_backward(self) -> tuple[int, int]:
        """What plain keeps of a step for backward, and what lean keeps: the two totals below the summary's table.

        The same figure twice where a goal lets steps run plain; zeros if no step has been recorded.
        """
        plain, lean = bytes_for_backward(self.entries(planned=True), self.small_bytes())
        return plain, plain if self._is_plain else lean

    @property
    def goal_status(self) -> str:
        """What is foreseen of the plan that a budget, a slowdown or the host's limit has led to; nothing: no plan."""
        return self._host.status if self._tuner is None else self._tuner.status

    def summary(self) -> str:
        """What is kept, rebuilt and shared, by the module that made it, the op, and the module that reads it; and why.

        Of the step that was recorded last, with the choices of the steps that follow it.
        """
        text = summarize(self.entries(planned=True), small_bytes=self.small_bytes(), status=self.trace_status)
        if self.goal_status:
            text = f"{text}\n{self.goal_status}"
        if remark := self.remark(self.entries(planned=True)):
            text = f"{text}\n{remark}"
        fused = _fused()
        return f"{text}\n{fused.summarize()}" if fused is not None and fused.report()["programs"] else text


@functools.cache
def _fused() -> ModuleType | None:
    """What replays chains of recipes as one kernel, where Triton has a device; it takes a while to import."""
    if not kernels.has_device():
        return None
    from leangrad.ledger.fuse import fused

    fused.register()
    return fused


def _is_ours(pack: Any) -> bool:
    return str(getattr(pack, "__module__", "")).startswith("leangrad.")


@functools.cache
def _warn_of_other_hooks() -> None:
    warnings.warn(
        "a lean model runs plain inside saved-tensor hooks that others have set around it, such as "
        "torch.autograd.graph.save_on_cpu: the hooks get every tensor, and leangrad saves no memory. Choose one of the "
        "two: leangrad.plain(model), or no hooks around the model.",
        stacklevel=2,
    )


def _is_on_gpu(module: nn.Module | None) -> bool:
    """Whether a step runs on a GPU: where its parameters are, if it is that of a module."""
    parameter = None if module is None else next(module.parameters(), None)
    return torch.cuda.is_initialized() if parameter is None else parameter.is_cuda


def _may_end_early(module: nn.Module) -> bool:
    """Whether the override of a step may end before its forward: see [Note: the override ends early].

    What is compiled is compiled anew where the override is gone.
    """
    if any(_torch.is_compiled(part) for part in module.modules()) or _torch.is_replica(module):
        return False
    return not may_write_unseen(module)


def _has_no_gradients(module: nn.Module) -> bool:
    """Whether backward will make gradients anew: none stands when forward begins."""
    return all(parameter.grad is None for parameter in module.parameters() if parameter.requires_grad)


def _fresh(
    residual_depth: int | Literal["auto"],
    min_bytes: int,
    products: int = 0,
    goal: Goal | None = None,
    spare: float = 0.0,
) -> Ledger:
    return Ledger(residual_depth=residual_depth, min_bytes=min_bytes, products=products, goal=goal, spare=spare)
