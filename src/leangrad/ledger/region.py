"""One forward pass while it runs: its hooks, its function mode, and a decision for every saved tensor."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn

from leangrad import _torch
from leangrad.ledger.decision import Decider, SavedKind
from leangrad.ledger.deferred import DeferredDecisions
from leangrad.ledger.learn.early_end import Border, EarlyEnd, EarlyEnds
from leangrad.ledger.learn.recorded_step import Learned
from leangrad.ledger.learn.recorder import Recorder
from leangrad.ledger.learn.timing import UnpackHook
from leangrad.ledger.learn.trace import Trace, TraceMode, TraceRecorder
from leangrad.ledger.learn.unwatched import Handover, Span
from leangrad.ledger.observe.active_region import current, enter
from leangrad.ledger.observe.checkpoint import Placeholder, Recomputation, SegmentLedger, is_settled
from leangrad.ledger.observe.hooks import NOT_SET, Hooks
from leangrad.ledger.observe.processes import collectives
from leangrad.ledger.observe.processes.gathers import Gathers
from leangrad.ledger.observe.rng import Draw
from leangrad.ledger.origins.graph_walk import noted
from leangrad.ledger.origins.upstream_anchors import RecentProducts
from leangrad.ledger.values.cast import Anchor, Packed
from leangrad.ledger.values.pending_save import PendingSave, ShapeOnlyReader
from leangrad.ledger.values.saved import Bare, unpack
from leangrad.ledger.values.saved_view import SavedView
from leangrad.ledger.values.value import UNBOUNDED, Value

ENDED = -1


class LedgerState(Protocol):
    """What a Region needs from its Ledger: settings, and what earlier steps have shown."""

    min_bytes: int
    products: int  # how many products a recipe may run through in a row
    learned: Learned | None
    gathers: Gathers
    timing: UnpackHook | None  # times or marks the rebuilds of this step; None: neither
    early_ends: EarlyEnds
    splits_losses: bool  # whether cross entropy may be computed in parts

    @property
    def cap(self) -> int:
        """The most joins that a recipe may run through without a plan."""

    def note_difference(self, why: str) -> None:
        """Drop the plan, because this step differs from the recorded one; ``why``: the reason."""

    def segment(self, key: Hashable) -> SegmentLedger:
        """Return the ledger of a checkpointed segment, which opens a region when backward runs the segment again."""

    def runs_again(self, segment: Any) -> None:
        """Report that backward runs ``segment`` again to every recorder whose plan is still to be made."""


class Region:
    """One forward pass: its hooks and its function mode while it runs, and what it decided."""

    def __init__(
        self,
        ledger: LedgerState,
        recorder: Recorder | None,
        module: nn.Module | None = None,
        outer: Any = None,
        batch: Any = None,
    ) -> None:
        """Prepare the region of a step.

        outer: the pack hook of the checkpoint around the region; None: there is no checkpoint.
        batch: the arguments of forward; None: they are not known.
        """
        learned = ledger.learned  # read once: another thread may replace it
        self.min_bytes = ledger.min_bytes
        self.cap = ledger.cap
        self.max_products = ledger.products
        if ledger.products and learned is not None:  # the plan determines where recipes end
            self.max_products = UNBOUNDED
        self.product_settings = _torch.product_settings() if ledger.products else ()
        self.failed_allocations = _torch.failed_allocations() if ledger.products else 0
        self.trusted_from = self._began = 0
        self.is_packing = self.saves_cast_logits = False
        self.splits_losses = ledger.splits_losses
        self.changing: Any = None
        self.sizes = recorder is not None
        self.sharded = ledger.gathers.is_flat  # FSDP gathers and frees parameters unobserved: no recipe reads them
        self.shards = ledger.gathers.shards(is_recorded=recorder is not None)
        self._swapped: list[Any] = []  # hooks of FSDP2 that are replaced while the region is open
        self.watched_parameters: dict[int, list[weakref.ref[Anchor]]] = {}
        self.watched_memory: dict[int, list[weakref.ref[Anchor]]] = {}
        self.anchors: list[weakref.ref[Value]] = []  # values that recipes may read and plain PyTorch keeps too
        self.split_memory: set[int] = set()
        self.rewritten: dict[int, int] = {}  # memory that changed unrecorded: first node number after that
        self.waiting: list[weakref.ref[Value]] = []  # kept values that drop their recipe when the region ends
        self._ledger = ledger
        self.decisions = None if learned is None else learned.decisions
        self._saved_kinds: Sequence[SavedKind] = () if learned is None else learned.saved_kinds
        self.caught = None if learned is None else learned.caught
        self.saved_count = self.call = 0
        # To catch products uses memory in forward, so it is off if the recorded step caught none.
        self.catches: int = self.caught is None or bool(self.caught)
        self.slots: list[PendingSave] | None = None
        self.draw: Draw | None = None
        self.recorder = recorder
        trace = None if learned is None else learned.trace
        self.outer = outer
        self.drops = outer is not None and _torch.is_checkpoint(outer)
        self.runs_again = outer is not None and not self.drops
        self._module = None if module is None else weakref.ref(module)
        self._segments = 0
        self._frame: Any = None
        self._follows = (
            recorder is None and outer is None and trace is not None and not _torch.saved_tensor_hooks_active()
        )
        self.is_unwatched = False  # the function mode is not set: see [Note: without the function mode]
        self.constants = ledger.early_ends.constants  # see [Note: one constant] in ``observe/proof``
        self._unwatched = (sys.maxsize, sys.maxsize)  # the numbers of the first node made without it, and after that
        self._handover: Handover | None = None  # where it is not set; None: it stays
        self._spans: deque[Span] = deque()  # the next spans in there
        self._borders: list[EarlyEnd] = []
        # FSDP2's hooks suspend and restore the function mode, so with FSDP2 it stays until the region ends.
        if self._follows and trace is not None and module is not None and self.shards is None:
            self._set_borders(trace, batch)
        if recorder is not None:
            self.hooks = Hooks(self.pack, recorder.unpack) if outer is None else Hooks(self.pack_again, unpack)
            recorder.recording = TraceRecorder(self, recorder.saved)
            self._calls = TraceMode(self, recording=recorder.recording)
        elif outer is not None:
            self.hooks = Hooks(self.pack_again, unpack)
            self._calls = TraceMode(self)
        else:
            pack, give = self.pack_along if self._follows else self.pack, unpack
            if ledger.timing is not None:
                self._timing = ledger.timing
                pack, give = self._pack_timed, ledger.timing.unpack
            self.hooks = Hooks(pack, give)
            self._calls = TraceMode(self, trace if self._follows else None)
        self.products = RecentProducts(self, None if recorder is None else recorder.caught)
        self._unwatched_hooks = Hooks(self.pack_unwatched, unpack)
        self._decider = Decider(self, self.products, recorder)
        self._deferred = DeferredDecisions(self, self._decider, recorder)
        self._held: list[Value | SavedView] = []  # values of tensors that autograd saved without a hook

    def _set_borders(self, trace: Trace, batch: Any) -> None:
        """Prepare to remove the function mode where the plan does not need it."""
        ledger = self._ledger
        if trace.handover is None and trace.border is None:
            return
        is_usual = ledger.timing is None and not self.sharded
        handover, border = ledger.early_ends.allowed(trace.handover, trace.border, batch if is_usual else None)
        if handover is not None:
            learned = ledger.learned
            self._small = frozenset() if learned is None else learned.small
            self._handover, self._spans = handover, deque(handover.spans)
            self._add_border(self.hand_over, handover.border)
            for span in handover.spans:
                self._add_border(partial(self.begin_span, span), span.border)
            self._add_border(self.take_over, handover.back)
        self._add_border(self.end_early, border)

    def _add_border(self, change: Callable[[], None], border: Border | None) -> None:
        if border is not None:
            self._borders.append(EarlyEnd(self, change, border, self._ledger.early_ends.module(border)))

    def __enter__(self) -> Region:
        if self.shards is not None:
            self._ledger.gathers.begin(self.shards, self._swapped)
        self._noted_outside, noted.ids = noted.ids, set()  # another region may be open around backward
        self.trusted_from = self._began = _torch.next_sequence_nr()  # tensors made before were not watched
        if self._handover is not None and self._handover.border is None:
            self._calls.begin_later()
            self._go_on_unwatched()
        else:
            self._calls.__enter__()
        if not self._follows and self.outer is None:
            self.hooks.set_all()
        enter(self)
        self._is_watching = collectives.watch()
        if self.recorder is not None:
            self.recorder.start()
        for border in self._borders:
            border.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.region, noted.ids = None, self._noted_outside
        for border in self._borders:
            border.remove()
        if self.is_unwatched and self._unwatched_hooks.last != NOT_SET:
            self._unwatched_hooks.unset()  # forward has raised an error, or returned early
        if self._is_watching:
            collectives.unwatch()
        if self.shards is not None:
            self._ledger.gathers.end(self.shards, self._swapped)
        if not self._follows and self.outer is None:
            self.hooks.unset_all()
        self._calls.end()
        self._calls.__exit__(kind, error, trace)
        if self.recorder is not None:
            self.recorder.stop()
        for waiting in self.waiting:
            if (value := waiting()) is not None:
                value.forget_recipe()
        self._end()

    def _end(self) -> None:
        """Drop every reference that keeps the region alive, so that it is freed at once, without Python's collector.

        A function mode or hooks of others that were entered inside the region and are exited after it keep the region's
        own in place until then. Meanwhile the function mode passes every call through, and the pack hook keeps every
        tensor. A recording refers to its region for as long as the ledger holds the recording, so the region also drops
        everything that holds tensors, and the ledger.
        """
        self.is_packing, self.saved_count = True, ENDED
        del (
            self._calls,
            self.hooks,
            self._unwatched_hooks,
            self.products,
            self._decider,
            self._deferred,
            self.recorder,
            self._ledger,
        )
        self.outer = self._frame = self.changing = self.slots = self.shards = self._handover = None
        self._held.clear()
        self._borders.clear()

    # ---------------------------------------------------------------- pack

    def pack(self, tensor: Tensor) -> Packed | PendingSave:
        """The pack hook: return what autograd holds in place of ``tensor``, and unpacks in backward."""
        if self.saved_count == ENDED:
            return self.pack_along(tensor)
        self.is_packing = True
        if self.recorder is not None:
            self.recorder.saving()
        try:
            packed = self.pack_along(tensor)
        finally:
            self.is_packing = False
        if self.recorder is not None and type(packed) is not PendingSave:
            self.recorder.packed(packed)
        return packed

    def pack_along(self, tensor: Tensor) -> Packed | PendingSave:
        """The pack hook along a trace, without ``is_packing`` and the recorder.

        There hooks are set only while a call runs, and torch disables the function mode during the call.
        """
        n = self.saved_count
        if n == ENDED:
            return _kept(tensor)
        self.saved_count = n + 1
        if n == self.hooks.last:
            self.hooks.reach_last()
        kind = self._saved_kinds[n] if n < len(self._saved_kinds) else SavedKind.UNKNOWN
        if kind is SavedKind.BARE:
            return _kept(tensor)
        if kind is SavedKind.DECIDED or self.slots is None:
            return self._decider.decide(tensor)
        return self._deferred.defer(tensor, expected=kind is SavedKind.SHAPE_ONLY)

    def _pack_timed(self, tensor: Tensor) -> Packed | PendingSave:
        """The pack hook of a step whose rebuilds are timed, each under the number of its saved tensor."""
        number = self.saved_count
        packed = self.pack_along(tensor) if self._follows else self.pack(tensor)
        self._timing.note(packed, number)
        return packed

    def resolve(self, slots: Sequence[PendingSave], claimed: Mapping[int, ShapeOnlyReader]) -> None:
        """Decide about the tensors that a call saved, when it has ended; ``claimed``: readers of shapes, by slot id."""
        self._deferred.resolve(slots, claimed)

    def attach_recipe(self, node: Any, nr: int, name: str) -> None:
        """Give the recipe of output ``nr`` of ``node`` to the value that ``node`` saved under ``name``."""
        self._decider.attach_recipe(node, nr, name)
        self.needs_mode()

    def watch(self, value: Value) -> None:
        """Watch for in-place changes of ``value``, an anchor of recipes that plain PyTorch would not have kept.

        Parameters are looked up by their id, which is quick and sufficient: as soon as another tensor shares the memory
        of one, the memory itself is watched (``mutation.aliased``).
        """
        assert value.tensor is not None
        if value.op == "leaf":
            self.watched_parameters.setdefault(id(value.tensor), []).append(weakref.ref(value))
        else:
            memory = value.tensor.untyped_storage().data_ptr()
            self.watched_memory.setdefault(memory, []).append(weakref.ref(value))

    # -------------------------------- beside a checkpoint: see [Note: a region in a segment that is run again]

    def pack_again(self, tensor: Tensor) -> Packed | PendingSave:
        """The pack hook in a segment that a checkpoint runs again.

        It passes the tensor, or a placeholder for it, to the pack hook of the checkpoint, which stores it.
        """
        packed = self.pack(tensor)
        recorder = self.recorder
        if recorder is None and is_settled(packed):
            self.outer(tensor)
        else:
            self.outer(Placeholder(tensor, packed, None if recorder is None else recorder.read))
        return packed

    def update_checkpoint_frame(self) -> None:
        """Find out whether the call that is about to run is inside a checkpoint that began inside the region."""
        pack = _torch.innermost_pack_hook()
        if pack is not self._frame:
            self._frame = None if pack is self.outer or not _torch.is_checkpoint(pack) else pack

    def wrap_new_checkpoint(self) -> bool:
        """Make a new checkpoint inside the region run its function again in a region; False: there is no new one."""
        self.update_checkpoint_frame()
        frame = _torch.checkpoint_frame(self._frame)
        if frame is None or isinstance(frame.recompute_fn, Recomputation):
            return False
        frame.recompute_fn = self._recomputation(frame.recompute_fn)
        return True

    def wrap_new_reentrant(self, args: Any) -> bool:
        """Make a new reentrant checkpoint that made one of ``args`` run again in a region; False: none is new."""
        if isinstance(args, Tensor):
            node = _torch.reentrant_checkpoint(args)
            if node is None or isinstance(node.run_function, Recomputation) or node._sequence_nr() < self._began:
                return False
            node.run_function = self._recomputation(node.run_function)
            return True
        return type(args) in (tuple, list) and True in [self.wrap_new_reentrant(a) for a in args]

    def _recomputation(self, function: Callable[..., Any]) -> Recomputation:
        segment = self._ledger.segment(self._segments)
        self._segments += 1
        return Recomputation(function, self._ledger, segment, self._module)

    @property
    def is_dropped(self) -> bool:
        """Whether a checkpoint inside the region drops what the running call saves."""
        return self._frame is not None

    def suspend(self) -> None:
        """Ignore calls until `resume`, such as those of a segment that backward runs again in a region of its own."""
        self._calls.suspend()
        self.is_packing = True

    def resume(self) -> None:
        """Observe calls again."""
        self._calls.resume()
        self.is_packing = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Ignore all calls in this context, because they are not the model's."""
        self.suspend()
        try:
            with _torch.without_function_mode(self._calls):
                yield
        finally:
            self.resume()

    # ------------------------------------------- along a trace: see [Note: hooks only where they are needed]

    def anchor(self, tensor: Tensor, number: int) -> None:
        """Let recipes read saved tensor ``number``, which autograd saved without a hook."""
        self.saved_count = number + 1
        value = self._decider.find(tensor)
        if value is not None:
            self._held.append(value)

    def end_early(self) -> None:
        """Remove the function mode, because nothing is rebuilt after this module.

        It stays if the step has left the trace or another mode lies over it: see [Note: the function mode ends early].
        """
        self._calls.end_early()
        if self._calls.has_ended:
            self._ledger.early_ends.has_ended = True
            self.products.let_go()

    # ------------------------------------------------------------ see [Note: without the function mode]

    def hand_over(self) -> None:
        """Remove the function mode after this module."""
        if not self.is_unwatched and not _torch.saved_tensor_hooks_active():
            self._calls.end_early(is_idle=False)
            if self._calls.has_ended:
                self._go_on_unwatched()

    def _go_on_unwatched(self) -> None:
        self.is_unwatched = self._ledger.early_ends.has_ended = True
        self._unwatched = _torch.next_sequence_nr(), sys.maxsize
        self.catches = False
        self.products.let_go()
        if self._spans and self._spans[0].border is None:
            self.begin_span(self._spans[0])

    def begin_span(self, span: Span) -> None:
        """Set the saved-tensor hooks up to the last tensor of ``span``, if it is the next one."""
        if not self.is_unwatched or not self._spans or span is not self._spans[0] or self.decisions is None:
            return
        if self._unwatched_hooks.last == NOT_SET and self._unwatched_hooks.set(span.last):
            self._spans.popleft()
            self.saved_count = span.first
        else:
            self.report_difference("a tensor was not saved that was before")

    def take_over(self) -> None:
        """Set the function mode again after this module, unless the step has differed from the recorded one."""
        if not self.is_unwatched or self._handover is None:
            return
        is_whole = not self._spans and self._unwatched_hooks.last == NOT_SET
        if self._unwatched_hooks.last != NOT_SET:
            self._unwatched_hooks.unset()
        if self.decisions is not None and not is_whole:
            self.report_difference("a tensor was not saved that was before")
        if self.decisions is not None:
            self.is_unwatched, self.saved_count = False, self._handover.saved[1]
            self._unwatched = self._unwatched[0], _torch.next_sequence_nr()
            self._calls.begin_again()

    def pack_unwatched(self, tensor: Tensor) -> Packed | PendingSave:
        """The pack hook of a span."""
        n = self.saved_count
        if n == ENDED or self.is_packing:
            return _kept(tensor)
        self.saved_count = n + 1
        if n == self._unwatched_hooks.last:
            self._unwatched_hooks.reach_last()
        kind = self._saved_kinds[n] if n < len(self._saved_kinds) else SavedKind.BARE
        has_grown = n in self._small and tensor.nbytes >= self.min_bytes
        if kind is SavedKind.DECIDED and not has_grown:
            return self._decider.decide(tensor)
        if has_grown and self.decisions is not None:
            self.report_difference("a tensor has grown")
        return _kept(tensor)

    def needs_mode(self, node: Any = None) -> None:
        """Note in a recorded step that a call needs the function mode: the running one, or that which made ``node``."""
        if self.recorder is not None:
            self.recorder.needs_mode(node)

    def was_unwatched(self, node: Any) -> bool:
        """Whether ``node`` was made without the function mode, so that it has no note."""
        return bool(self._unwatched[0] <= node._sequence_nr() < self._unwatched[1])

    def distrust(self, until: int | None = None) -> None:
        """Let no recipe rely on the outputs of nodes with a sequence number below ``until``; None: of any made so far.

        ``trusted_from`` never falls: memory that has left torch stays untrusted to the end of the region.
        """
        self.trusted_from = max(self.trusted_from, _torch.next_sequence_nr() if until is None else until)
        self.needs_mode()

    def changes(self, number: int) -> None:
        """Record an in-place change of memory that the node ``number`` made; -1: the node is not known."""
        if self.recorder is not None:
            self.recorder.changes(number)

    @property
    def is_on_trace(self) -> bool:
        """Whether the step has matched the recorded one so far."""
        return self._calls.is_on_trace

    def report_difference(self, why: str) -> None:
        """Stop using the plan, because this step differs from the recorded one; ``why``: the reason."""
        self.decisions, self._saved_kinds, self.caught = None, (), None
        if self._follows:
            self._calls.leave_trace()
        if self.is_unwatched:
            self._ledger.early_ends.note_failure()
        self._ledger.note_difference(why)


def _kept(tensor: Tensor) -> Bare:
    """Keep ``tensor`` as it is; no recipe reads it."""
    if tensor.is_leaf:
        return Bare(tensor if tensor.requires_grad else tensor.detach(), tensor._version)
    return Bare(tensor.detach(), tensor._version, type(tensor.grad_fn))
