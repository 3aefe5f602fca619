"""The state that lasts from step to step: settings, one recorded step, and the plan that later steps follow."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, TracebackType
from typing import Any, Literal

import torch
from torch import nn

from leangrad import _torch, kernels
from leangrad.errors import BudgetError
from leangrad.ledger.decision import DEEPEST, Decision
from leangrad.ledger.gc_pause import GcPause
from leangrad.ledger.learn.early_end import EarlyEnds
from leangrad.ledger.learn.entries import Entry, Totals
from leangrad.ledger.learn.recorded_step import Learned, RecordedStep
from leangrad.ledger.learn.recorder import Recorder
from leangrad.ledger.learn.timing import UnpackHook
from leangrad.ledger.learn.trace import Trace
from leangrad.ledger.observe.active_region import region_is_open
from leangrad.ledger.observe.processes.gathers import Gathers
from leangrad.ledger.region import Region
from leangrad.ledger.summary import bytes_for_backward, summarize
from leangrad.ledger.tune.goal import PRODUCTS, Goal, StepMode
from leangrad.ledger.tune.host_limit import HostLimit
from leangrad.ledger.tune.peaks import first_graded
from leangrad.ledger.tune.tuner import Tuner
from leangrad.policy.choice import lowest_peak
from leangrad.policy.replay import Replay
from leangrad.switch import NAME, disabled

MIN_BYTES = 16 * 1024  # a tensor with fewer bytes costs more to examine than to keep
# The limit of ``_recent_differences`` as an exponent: a model whose steps keep differing is recorded less often.
LONGEST_PAUSE = 10
STEADY = 64  # steps with a plan after which the next difference counts as the first one again


class Ledger:
    """Decides, for every tensor that autograd saves, whether to keep it, share it, or store a recipe.

    A context manager for the forward region; enter it once per step. The first step is recorded. The recording gives a
    plan: which tensors later steps keep without examining them, and where residual chains are cut so that the peak is
    lowest. The plan only chooses between keeping and rebuilding a tensor, which give the same bits, so a step that
    differs from the recorded one is never wrong: its first different tensor ends the use of the plan, and the next step
    is recorded anew (after a pause that grows if steps keep differing).
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

        With a budget, 0 means ``PRODUCTS``.
        spare: where the GPU waits for the host, a step may use this fraction of the least peak in addition to it.
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
        self.gathers = Gathers()  # the modules whose parameters FSDP shards
        self.remark: Callable[[Sequence[Entry]], str] = lambda _: ""  # from entries, a further line of the summary
        self.goal = goal
        self.timing: UnpackHook | None = None  # times or marks the rebuilds of the running step; None: neither
        self._tuner = Tuner(goal) if goal is not None else None
        self._host = HostLimit(spare if goal is None else 0.0)
        self._is_plain = False  # the plan keeps every tensor, so no region is opened
        self._recent_differences = 0  # differences in a row with fewer than ``STEADY`` planned steps in between
        self._pause = 0  # steps to run before the next one is recorded
        self._steps = 0  # steps that began with a plan since the last difference
        self._recorder: Recorder | None = None  # of the step that the plan is made from; None after a difference
        self._recorded: Recorder | None = None  # of the last recorded step, for the summary
        self._replay: Replay | None = None  # the recorded step's backward pass, to simulate plans
        self.learned: Learned | None = None  # the plan, decisions and trace that steps use; None: no plan yet
        self.differences = 0  # how many steps differed from the recorded one
        self._difference = ""  # why the last of them differed
        self._is_planning = False  # True while `_plan` builds the graph of the recorded step
        self.early_ends = EarlyEnds()
        # Whether cross entropy may be computed in parts; False once that would take memory: `loss/in_parts.py`.
        self.splits_losses = True
        self._segments: dict[Hashable, Ledger] = {}  # the ledgers of checkpointed segments
        self._local = threading.local()
        # All threads share one search. Without a goal there is no search, and `learned` is replaced as a whole.
        self._lock: AbstractContextManager[Any] = nullcontext() if goal is None else threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the settings; the copy has learned nothing."""
        return _fresh, (self.residual_depth, self.min_bytes, self._first_products, self.goal, self._host.spare)

    def fresh(self) -> Ledger:
        """Return a ledger with the same settings that has learned nothing."""
        ledger = _fresh(self.residual_depth, self.min_bytes, self._first_products, self.goal, self._host.spare)
        ledger.remark = self.remark
        return ledger

    def region(self, module: nn.Module | None = None, batch: Any = None) -> Region | None:
        """Return a region for one forward pass; None if hooks cannot or need not be set, or one is already open.

        batch: all arguments of the forward of ``module``, as positional and keyword ones; None: they are not known.
        """
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
                if self._tuner is None:
                    recorder = self._begin_step(module, batch)
                else:
                    recorder = self._begin_tuned_step(self._tuner, module, batch)
                return None if self._is_plain else Region(self, recorder, module, batch=batch)
        if _torch.is_checkpoint(outer):  # its forward, which drops every saved tensor
            return Region(self, None, module, outer)
        if _torch.is_recomputation(outer):
            return self.segment(None).region_inside(module)
        _warn_of_other_hooks()
        return None

    def segment(self, key: Hashable) -> Ledger:
        """Return the ledger of a checkpointed segment, which backward runs again; it learns separately.

        key: the number of the segment in its region; None: the region itself, if it lies inside a checkpoint.
        """
        segment = self._segments.get(key)
        if segment is None:
            segment = _fresh(self.residual_depth, self.min_bytes, 0 if self.goal is not None else self.products)
            segment = self._segments.setdefault(key, segment)
        segment.gathers = self.gathers
        return segment

    def region_inside(self, module: nn.Module | None) -> Region | None:
        """Return a region for the function that a checkpoint runs again; None if none can be opened."""
        outer = _torch.innermost_pack_hook()
        if _torch.is_traced() or not torch.is_grad_enabled():
            return None
        if outer is None or _is_ours(outer):  # a reentrant checkpoint sets no hooks
            return Region(self, self._begin_step(module), module)
        return Region(self, self._begin_step(module), module, outer) if _torch.is_recomputation(outer) else None

    def __enter__(self) -> Ledger:
        region = self.region()
        gc_pause = None
        if region is not None:
            region.__enter__()
            gc_pause = GcPause()
        self._stack().append((region, gc_pause))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region, gc_pause = self._stack().pop()
        if region is not None:
            gc_pause.end()
            region.__exit__(kind, error, trace)

    def _stack(self) -> list[Any]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack  # type: ignore[no-any-return]

    def _begin_tuned_step(self, tuner: Tuner, module: nn.Module | None, batch: Any) -> Recorder | None:
        """`_begin_step` for a ledger with a goal. If it is interrupted, the tuner starts its search anew."""
        try:
            tuner.begin(module, on_gpu=_is_on_gpu(module))
            return self._begin_step(module, batch)
        except BudgetError:
            raise
        except BaseException:
            self.note_difference("the plan was interrupted")
            raise

    def _begin_step(self, module: nn.Module | None, batch: Any = None) -> Recorder | None:
        """Return the Recorder of the step that begins; None if the step follows a plan or falls into the pause.

        Makes the plan first, if the recorded step allows it and there is none yet.
        """
        tuner = self._tuner
        _fused()
        if not self.early_ends.begin_step():
            self.note_difference("what backward reads was changed in place where nobody watched")
        if self.learned is not None or self._plan():
            self._steps += 1
            if tuner is None:
                self._spare_host(module)
                return None
            if self._follow(tuner.next_step_mode()):
                return None
        if self._pause > 0:
            self._pause -= 1
            return None
        self.gathers.is_flat = _torch.is_flat(module)
        recorder = Recorder(module, self.min_bytes)
        if module is not None:
            self.early_ends.record(module, batch)
            recorder.may_end_early = tuner is not None and self.early_ends.may_end
            # Where products are run again, a handler checks the settings under which each of them ran.
            recorder.may_go_unwatched = self.early_ends.has_proof and not self.products
        if tuner is not None:
            recorder.is_tuned = True
            recorder.leaves_stay = module is not None and _has_no_gradients(module)
        self._recorder = self._recorded = recorder
        return recorder

    def _plan(self) -> bool:
        """Make the plan from the recorded step; False if there is no such step or its backward pass has not ended."""
        recorder = self._recorder
        if recorder is None or recorder.step is None or not recorder.was_read:
            return False
        if self._is_planning:  # recursion: two segments, each run again while the other was alive
            return False
        self._is_planning = True
        try:
            graph = recorder.graph()
        finally:
            self._is_planning = False
        backward = Replay(graph)
        step = recorder.step
        if step.shares_logits and self.splits_losses:  # torch's own call takes less memory: record a step with that
            self.splits_losses = False
            self._forget()
            return False
        kept = None
        if self.residual_depth == "auto":
            kept = lowest_peak(graph, backward.play)
        self._adopt(step, backward, kept)
        self._replay = backward
        if self._tuner is not None:
            self._tuner.start(step, backward, kept, recorder.outputs_nbytes())
        return True

    def _adopt(self, step: RecordedStep, backward: Replay, kept: frozenset[int] | None) -> None:
        """Let later steps keep the items ``kept``; None: the items that the recorded step kept."""
        self.learned = Learned(
            kept,
            step.decisions(kept, frozenset() if kept is None else backward.held(kept)),
            step.saved_kinds(kept),
            step.trace(kept, is_tuned=self.goal is not None),
            step.caught_under(kept),
            backward.play(step.kept_items() if kept is None else kept).peak_bytes,
            step.small,
        )

    def _spare_host(self, module: nn.Module | None) -> None:
        """Keep more tensors if the GPU waits for the host; see [Note: the host is the limit]."""
        recorder, kept, replay = self._recorder, self._kept_items, self._replay
        if self._host.is_over or recorder is None or recorder.step is None or kept is None or replay is None:
            self.timing = None
            return
        step = recorder.step
        found, self.timing = self._host.next_kept(step, replay, kept, on_gpu=_is_on_gpu(module))
        if found != kept:
            step.spared = self._host.added(found)
            self._adopt(step, replay, found)

    def _follow(self, mode: StepMode) -> bool:
        """Set up the step that begins as ``mode`` says; False: the step has to be recorded."""
        if mode.products is not None:
            self.products, self._is_plain = mode.products, False
            self._forget()
            return False
        self.timing, self._is_plain = mode.timing, mode.kept is None
        if mode.kept is not None and mode.kept != self._kept_items and self._recorder is not None:
            step = self._recorder.step
            assert step is not None
            search = None if self._tuner is None else self._tuner.search
            replay = self._replay if search is None else search.replay
            assert replay is not None
            self._adopt(step, replay, mode.kept)
        return True

    @property
    def is_settled(self) -> bool:
        """Whether the plan is final. Until then steps are recorded, measured and timed, and plans are compared."""
        if self.learned is None:  # a step that saves nothing needs no plan
            step = None if self._recorder is None else self._recorder.step
            return step is not None and not step.saved
        if self._tuner is not None:
            return self._tuner.is_final
        return self._host.is_over or self._kept_items is None

    @property
    def has_failed(self) -> bool:
        """Whether the budget could not be met."""
        return self._tuner is not None and self._tuner.has_failed

    def note_output(self, output: object) -> None:
        """Note that forward has ended with ``output``, for the measurement of the step."""
        if self._tuner is not None:
            self._tuner.note_output(output)
        elif not self._host.is_over:
            self._host.note_output(first_graded(output))

    def end_step(self) -> None:
        """End the measurement of the last step, because the next step belongs to another ledger."""
        if self._tuner is not None:
            self._tuner.end_step()

    def runs_again(self, segment: Ledger) -> None:
        """Report that backward runs ``segment`` again to every recorder whose plan is still to be made.

        Not only to that of this region: ``segment`` may lie inside another segment. To report it to a segment that is
        already over does no harm: none of that segment's tensors is alive by then, whatever its plan.
        """
        for ledger in (self, *self._segments.values()):
            recorder = ledger.last_recorder
            if recorder is not None and ledger is not segment and ledger.decisions is None:
                recorder.runs_again(segment)

    @property
    def last_recorder(self) -> Recorder | None:
        """The Recorder of the step that the plan is made from; None: there is none."""
        return self._recorder

    def peak_bytes(self) -> int:
        """Return the predicted peak of this region's tensors in backward under its plan; 0 without a plan."""
        if self.learned is None:
            self._plan()
        return 0 if self.learned is None else self.learned.peak_bytes

    def note_difference(self, why: str) -> None:
        """Drop the plan, because this step differs from the recorded one; ``why``: the reason."""
        with self._lock:
            self._difference, self.differences = why, self.differences + 1
            self._forget()
            self._is_plain = False
            self._host.restart()
            if self._tuner is not None:
                self._tuner.restart()
                self.products = self._first_products
            self._recent_differences = self._recent_differences + 1 if self._steps < STEADY else 1
            self._pause = 2 ** min(self._recent_differences, LONGEST_PAUSE) - 2  # 0, 2, 6, 14, ...
            self._steps = 0

    def _forget(self) -> None:
        """Drop the plan and the recorder of the step it was made from."""
        self.learned = self._recorder = None
        self.timing = None

    @property
    def decisions(self) -> Sequence[Decision | None] | None:
        """For each saved tensor of a step, in order: its op, whether to keep it, and its bytes; None without a plan."""
        return None if self.learned is None else self.learned.decisions

    @property
    def trace(self) -> Trace | None:
        """The trace that steps follow; None: they follow no trace."""
        return None if self.learned is None else self.learned.trace

    @property
    def _kept_items(self) -> frozenset[int] | None:
        """The items that the plan keeps; None without a plan, or if it keeps what the recorded step kept."""
        return None if self.learned is None else self.learned.kept

    @property
    def cap(self) -> int:
        """The most joins that a recipe may run through without a plan, unless ``residual_depth`` sets it.

        0 if products may be run again: then residual sums are anchors.
        """
        deepest = 0 if self.products else DEEPEST
        return deepest if self.residual_depth == "auto" else self.residual_depth

    @property
    def trace_status(self) -> str:
        """The summary's sentence on whether steps follow the trace of the recorded one; if not, what differed."""
        if disabled():
            return f"{NAME} is set: everything runs plain"
        if self._recorded is None:
            return ""
        if self.trace is not None:
            return "steps follow the trace of the recorded one"
        if self.learned is not None:
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
        """Return what happened to each saved tensor of the last recorded step.

        Includes the segments that checkpoints inside or around the region run again.
        planned: with the choices of the plan, which later steps follow, instead of those of the recorded step.
        """
        recorder, own = self._recorded, list[Entry]()
        if recorder is not None:
            follows = planned and self.learned is not None
            step = recorder.step
            own = step.entries_under(self._kept_items) if follows and step is not None else recorder.entries
        return own + [entry for segment in self._segments.values() for entry in segment.entries(planned=planned)]

    def small_bytes(self) -> int:
        """Return the bytes that the recorded step kept without examining them, because the tensors were small."""
        own = 0 if self._recorded is None else self._recorded.small_bytes
        return own + sum(segment.small_bytes() for segment in self._segments.values())

    def bytes_for_backward(self) -> tuple[int, int]:
        """Return the bytes that plain PyTorch and the ledger keep for backward: the totals below the summary's table.

        Both are the same if a goal lets steps run plain; zeros if no step has been recorded.
        """
        plain, lean = bytes_for_backward(self.entries(planned=True), self.small_bytes())
        return plain, plain if self._is_plain else lean

    @property
    def goal_status(self) -> str:
        """The summary's sentence on the plan that a budget, a slowdown or the host limit led to; empty without one."""
        return self._host.status if self._tuner is None else self._tuner.status

    def summary(self) -> str:
        """Return a table of what is kept, rebuilt and shared, by producing module, op and reading module, and why.

        It shows the last recorded step with the choices of the plan, which later steps follow.
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
    """Import and return ``fuse.fused``, which replays chains of recipes as one kernel; None if Triton has no device."""
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
    """Whether ``module`` runs on a GPU: its first parameter is there; without a parameter: CUDA is initialized."""
    parameter = None if module is None else next(module.parameters(), None)
    return torch.cuda.is_initialized() if parameter is None else parameter.is_cuda


def _has_no_gradients(module: nn.Module) -> bool:
    """Whether no parameter has a gradient when forward begins, so that backward allocates all of them."""
    return all(parameter.grad is None for parameter in module.parameters() if parameter.requires_grad)


def _fresh(
    residual_depth: int | Literal["auto"],
    min_bytes: int,
    products: int = 0,
    goal: Goal | None = None,
    spare: float = 0.0,
) -> Ledger:
    return Ledger(residual_depth=residual_depth, min_bytes=min_bytes, products=products, goal=goal, spare=spare)
