"""One forward region: the decision, for every tensor that autograd wants to keep, while a model runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn

from leangrad import _torch
from leangrad.ledger.decision import Decider, Decision, SavedKind
from leangrad.ledger.learn.early_end import EarlyEnd
from leangrad.ledger.learn.recorder import Recorder
from leangrad.ledger.learn.timing import Unpacks
from leangrad.ledger.learn.trace import Trace, TraceMode, TraceRecorder
from leangrad.ledger.observe.active_region import enter, opened
from leangrad.ledger.observe.checkpoint import Placeholder, Recomputation, SegmentLedger, is_settled
from leangrad.ledger.observe.hooks import Hooks
from leangrad.ledger.observe.processes import collectives
from leangrad.ledger.observe.processes.gathers import Gathers
from leangrad.ledger.observe.rng import Draw
from leangrad.ledger.origins.graph_walk import UnsavedInput
from leangrad.ledger.origins.upstream_anchors import RecentProducts
from leangrad.ledger.values.cast import Anchor, Packed
from leangrad.ledger.values.pending_save import PendingSave, ShapeOnlyReader
from leangrad.ledger.values.saved import Bare, unpack
from leangrad.ledger.values.saved_view import SavedView
from leangrad.ledger.values.value import UNBOUNDED, Value

ENDED = -1


class LedgerState(Protocol):
    """What a region asks of its ledger: settings, and what earlier steps have shown."""

    min_bytes: int
    products: int  # that a recipe may run through in a row
    saved_kinds: Sequence[SavedKind]  # of each saved tensor of the recorded step
    trace: Trace | None
    gathers: Gathers
    timing: Unpacks | None  # times the rebuilds of this step, or marks them

    @property
    def cap(self) -> int:
        """How deep a recipe may be where nothing was learned."""

    @property
    def decisions(self) -> Sequence[Decision | None] | None:
        """What was learned, for each saved tensor of a step in order; None: nothing is decided on it."""

    @property
    def catches(self) -> bool:
        """Whether outputs of products are held for a while, to be kept in the stead of a larger tensor."""

    @property
    def caught(self) -> Collection[int] | None:
        """The calls of which a product was kept, by their number; None: any may be."""

    def differs(self, why: str) -> None:
        """This step is not like the one that was learned from, because of ``why``."""

    def segment(self, key: Hashable) -> SegmentLedger:
        """What opens a region in a checkpointed segment of this one, when backward runs it again."""

    def runs_again(self, segment: Any) -> None:
        """Backward runs a segment again: the plans that are to be made have to know."""


class Region:
    """One forward region: the hooks and the function override while it runs, and what it decided."""

    def __init__(
        self, ledger: LedgerState, recorder: Recorder | None, module: nn.Module | None = None, outer: Any = None
    ) -> None:
        """``outer``: the pack hook of the checkpoint that is in force around the region, if one is."""
        self.min_bytes = ledger.min_bytes
        self.cap = ledger.cap
        self.max_products = ledger.products
        if ledger.products and ledger.decisions is not None:  # the plan says where a recipe ends
            self.max_products = UNBOUNDED
        self.product_settings = _torch.product_settings() if ledger.products else ()
        self.failed_allocations = _torch.failed_allocations() if ledger.products else 0
        self.fence = self._began = 0
        self.packing = False
        self.changing: Any = None
        self.sizes = recorder is not None
        self.sharded = ledger.gathers.is_flat  # parameters come and go, and nobody tells: no recipe reads them
        self.shards = ledger.gathers.shards(is_recorded=recorder is not None)
        self._swapped: list[Any] = []  # hooks of FSDP2
        self.watched_parameters: dict[int, list[weakref.ref[Anchor]]] = {}
        self.watched_memory: dict[int, list[weakref.ref[Anchor]]] = {}
        self.anchors: list[weakref.ref[Value]] = []  # what recipes may read and autograd keeps as well
        self.rewritten: dict[int, int] = {}  # memory that was changed unseen, and the first node after that
        self.waiting: list[weakref.ref[Value]] = []
        self._ledger = ledger
        self.decisions = ledger.decisions
        self._saved_kinds = ledger.saved_kinds
        self.packs = self.call = 0
        self.catches: int = ledger.catches
        self.slots: list[PendingSave] | None = None
        self.draw: Draw | None = None
        self.recorder = recorder
        trace = ledger.trace  # another thread may end it
        self.outer = outer
        self.drops = outer is not None and _torch.is_checkpoint(outer)
        self.runs_again = outer is not None and not self.drops
        self.caught = ledger.caught
        self._module = None if module is None else weakref.ref(module)
        self._segments = 0
        self._frame: Any = None
        self._follows = (
            recorder is None and outer is None and trace is not None and not _torch.saved_tensor_hooks_active()
        )
        self._early_end: EarlyEnd | None = None
        # FSDP2's hooks suspend the override and bring it back: with these it stays to the end.
        border = trace.border if self._follows and trace is not None and self.shards is None else None
        if border is not None and module is not None:
            self._early_end = EarlyEnd(self, border, module)
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
        self._decider = Decider(self, self.products, recorder)
        self._held: list[Value | SavedView] = []  # what recipes may read and nobody else holds as a value

    def __enter__(self) -> Region:
        if self.shards is not None:
            self._ledger.gathers.begin(self.shards, self._swapped)
        if not self.runs_again:  # a region may be open around backward
            UnsavedInput.noted.clear()
        self.fence = self._began = _torch.next_sequence_nr()  # what was made before, nobody watched
        self._calls.__enter__()
        if not self._follows and self.outer is None:
            self.hooks.set_all()
        enter(self)
        self._is_watching = collectives.watch()
        if self.recorder is not None:
            self.recorder.start()
        if self._early_end is not None:
            self._early_end.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened.region = None
        if self._early_end is not None:
            self._early_end.remove()
        if self._is_watching:
            collectives.unwatch()
        if self.shards is not None:
            self._ledger.gathers.end(self.shards, self._swapped)
        if not self._follows and self.outer is None:
            self.hooks.take_back_all()
        self._calls.end()
        self._calls.__exit__(kind, error, trace)
        if self.recorder is not None:
            self.recorder.stop()
        for waiting in self.waiting:
            if (value := waiting()) is not None:
                value.forget_recipe()
        self._end()

    def _end(self) -> None:
        """Part from all that knows the region, so that it dies here and now, with no help of Python's collector.

        A mode or hooks that were set inside it and are left after it keep ours in place for so long. Then every call
        passes, and every tensor is simply kept. The recording of a step knows its region as long as the ledger knows
        the recording: the region parts from all that holds tensors, and from the ledger.
        """
        self.packing, self.packs = True, ENDED
        del self._calls, self.hooks, self.products, self._decider, self.recorder, self._ledger
        self.outer = self._frame = self.changing = self.slots = self._early_end = self.shards = None
        self._held.clear()

    # ---------------------------------------------------------------- pack

    def pack(self, tensor: Tensor) -> Packed | PendingSave:
        """Autograd wants to keep ``tensor``; what it gets is a value that can give it back."""
        if self.packs == ENDED:
            return self.pack_along(tensor)
        self.packing = True
        if self.recorder is not None:
            self.recorder.saving()
        try:
            packed = self.pack_along(tensor)
        finally:
            self.packing = False
        if self.recorder is not None and type(packed) is not PendingSave:
            self.recorder.packed(packed)
        return packed

    def pack_along(self, tensor: Tensor) -> Packed | PendingSave:
        """The same along a trace: hooks are set inside calls only, where torch itself has taken the override away."""
        n = self.packs
        if n == ENDED:
            return _kept(tensor)
        self.packs = n + 1
        if n == self.hooks.last:
            self.hooks.reach_last()
        kind = self._saved_kinds[n] if n < len(self._saved_kinds) else SavedKind.UNKNOWN
        if kind is SavedKind.BARE:
            return _kept(tensor)
        if kind is SavedKind.DECIDED or self.slots is None:
            return self._decider.decide(tensor)
        return self._decider.defer(tensor, expected=kind is SavedKind.SHAPE_ONLY)

    def _pack_timed(self, tensor: Tensor) -> Packed | PendingSave:
        """The same in a step whose rebuilds are timed: they are known by the number of the saved tensor."""
        number = self.packs
        packed = self.pack_along(tensor) if self._follows else self.pack(tensor)
        self._timing.note(packed, number)
        return packed

    def resolve(self, slots: Sequence[PendingSave], claimed: Mapping[int, ShapeOnlyReader]) -> None:
        """A call has ended: decide what becomes of the tensors that it saved; ``claimed``: see `Decider.resolve`."""
        self._decider.resolve(slots, claimed)

    def settle(self, node: Any, nr: int, name: str) -> None:
        """Give the recipe of output ``nr`` of ``node`` to the value that was kept as its saved ``name``."""
        self._decider.settle(node, nr, name)

    def watch(self, value: Value) -> None:
        """``value`` is an anchor that plain PyTorch would not have kept: it must not change under its recipe.

        Parameters are known by themselves, which is quick and enough: what else shares their memory is looked up when
        it is made (``mutation.aliased``).
        """
        assert value.tensor is not None
        if value.op == "leaf":
            self.watched_parameters.setdefault(id(value.tensor), []).append(weakref.ref(value))
        else:
            memory = value.tensor.untyped_storage().data_ptr()
            self.watched_memory.setdefault(memory, []).append(weakref.ref(value))

    # -------------------------------- beside a checkpoint: see [Note: a region in a segment that is run again]

    def pack_again(self, tensor: Tensor) -> Packed | PendingSave:
        """The same in a segment that a checkpoint runs again: it stores the tensor, or what stands for it."""
        packed = self.pack(tensor)
        recorder = self.recorder
        if recorder is None and is_settled(packed):
            self.outer(tensor)
        else:
            self.outer(Placeholder(tensor, packed, None if recorder is None else recorder.read))
        return packed

    def looks_around(self) -> None:
        """A call is about to run, maybe inside of a checkpoint that has begun inside the region."""
        pack = _torch.innermost_pack_hook()
        if pack is not self._frame:
            self._frame = None if pack is self.outer or not _torch.is_checkpoint(pack) else pack

    def finds_checkpoint(self) -> bool:
        """Whether such a checkpoint was not seen yet: its segment gets a region when it is run again."""
        self.looks_around()
        frame = _torch.checkpoint_frame(self._frame)
        if frame is None or isinstance(frame.recompute_fn, Recomputation):
            return False
        frame.recompute_fn = self._recomputation(frame.recompute_fn)
        return True

    def finds_reentrant(self, args: Any) -> bool:
        """Whether a tensor among ``args`` was made by a reentrant checkpoint that was not seen yet: the same for it."""
        if isinstance(args, Tensor):
            node = _torch.reentrant_checkpoint(args)
            if node is None or isinstance(node.run_function, Recomputation) or node._sequence_nr() < self._began:
                return False
            node.run_function = self._recomputation(node.run_function)
            return True
        return type(args) in (tuple, list) and True in [self.finds_reentrant(a) for a in args]

    def _recomputation(self, function: Callable[..., Any]) -> Recomputation:
        segment = self._ledger.segment(self._segments)
        self._segments += 1
        return Recomputation(function, self._ledger, segment, self._module)

    @property
    def is_dropped(self) -> bool:
        """Whether a checkpoint inside the region drops what the call that runs saves."""
        return self._frame is not None

    def suspend(self) -> None:
        """Backward runs inside this region, and in it a segment that has a region of its own."""
        self._calls.suspend()
        self.packing = True

    def resume(self) -> None:
        """The segment has been run."""
        self._calls.resume()
        self.packing = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs now is not the model's: the region looks at no call."""
        self.suspend()
        try:
            with _torch.without_override(self._calls):
                yield
        finally:
            self.resume()

    # ------------------------------------------- along a trace: see [Note: hooks only where they are needed]

    def anchor(self, tensor: Tensor, number: int) -> None:
        """Saved tensor ``number``, which autograd keeps by itself, may be read by recipes."""
        self.packs = number + 1
        value = self._decider.find(tensor)
        if value is not None:
            self._held.append(value)

    def end_early(self) -> None:
        """The border has come after which the plan needs no override; see [Note: the override ends early]."""
        self._calls.end_early()
        if self._calls.has_ended:
            self.products.let_go()

    def changes(self, number: int) -> None:
        """Memory changes in place that the node of this ``number`` has made; -1: one that is not known."""
        if self.recorder is not None:
            self.recorder.changes(number)

    @property
    def is_on_trace(self) -> bool:
        """Whether the step has been like the recorded one so far."""
        return self._calls.is_on_trace

    def differ(self, why: str) -> None:
        """This step is not like the one that was recorded, because of ``why``: what was learned serves it no more."""
        self.decisions, self._saved_kinds, self.caught = None, (), None
        if self._follows:
            self._calls.leave_trace()
        self._ledger.differs(why)


def _kept(tensor: Tensor) -> Bare:
    """A tensor that is kept, and that no recipe reads."""
    if tensor.is_leaf:
        return Bare(tensor if tensor.requires_grad else tensor.detach(), tensor._version)
    return Bare(tensor.detach(), tensor._version, type(tensor.grad_fn))
