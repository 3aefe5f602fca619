"""Listens to one step: what it saves, what becomes of each tensor and why, and in which order backward reads them."""

from __future__ import annotations

import bisect
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from leangrad import _torch
from leangrad.ledger.learn.early_end import Change, Ends, Exit
from leangrad.ledger.learn.entries import EXTRA, HAS_ROOM, LOWER_PEAK, SHAPE_ONLY, SHARED, Entry
from leangrad.ledger.learn.items import Items, value_of
from leangrad.ledger.learn.reads import Reader, Reads, Segment
from leangrad.ledger.learn.recorded_step import RecordedStep, SavedTensor
from leangrad.ledger.learn.trace import TraceRecorder
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.pending_save import PendingSave
from leangrad.ledger.values.saved import unpack
from leangrad.ledger.values.saved_view import SavedView
from leangrad.ledger.values.shape_only import ShapeOnly
from leangrad.ledger.values.value import Value
from leangrad.policy import graph as policy


class _Entering:
    """A forward pre-hook: the module called ``name`` runs."""

    is_leangrads = True

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not is_dynamo_compiling():  # a compiled function inside a lean model is compiled as it is
            self._recorder.enter(self._name)


class _Leaving:
    """A forward hook: the module that ran last is done."""

    is_leangrads = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_dynamo_compiling():
            self._recorder.leave()


class Recorder:
    """Listens to one region and to the backward passes that follow it."""

    def __init__(self, root: nn.Module | None, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.entries: list[Entry] = []
        self._items = Items(min_bytes)
        self._reads = Reads(self._items.found)
        self.caught: set[int] = set()  # the calls of which a tensor was kept although autograd did not ask for it
        self._ops: list[str] = []  # of every decision, in order
        self._decided: list[tuple[Value, str, str]] = []  # value, module, why it was kept
        self._undecided: dict[int, int] = {}  # of entries of what no decision was made for: the item
        self._made_by: dict[int, str] = {}  # of each value: the module whose forward made it
        self._changes: list[tuple[int, str]] = []  # the number of the next node, whenever another module began to run
        self.small_bytes = 0  # of what was kept unseen for having so few
        self.saved: list[Packed] = []  # what every saved tensor in order became
        self._saved_by: list[int] = []  # the number of the node that saved each
        self._saved_in: list[str] = []  # the module that ran
        self.recording: TraceRecorder | None = None
        self.may_end_early = False  # whether the override of later steps may end before their forward does
        self._leaves: list[Exit] = []
        self._changes_seen: list[Change] = []
        self.step: RecordedStep | None = None  # once the region has ended
        self.leaves_stay = False  # whether the plan counts gradients of parameters as new ones
        self.is_tuned = False  # whether the plan may keep what is always rebuilt otherwise: random numbers
        self.was_read = self._is_reading = False
        self._root = root
        self._root_name = "" if root is None else type(root).__name__
        self._stack: list[str] = []
        self._handles: list[Any] = []

    # ---------------------------------------------------------------- in forward

    def start(self) -> None:
        """Follow which module runs. Hooks of compiled modules are left alone: a change of them compiles anew."""
        for name, module in self._modules():
            self._handles.append(module.register_forward_pre_hook(_Entering(self, name)))
            self._handles.append(module.register_forward_hook(_Leaving(self), always_call=True))

    def _modules(self) -> list[tuple[str, nn.Module]]:
        if self._root is None:
            return []
        named = dict(self._root.named_modules())
        compiled = [name for name in named if name.endswith("_orig_mod")]
        return [
            (name, module)
            for name, module in named.items()
            if name  # the root is running already
            and not hasattr(module, "_orig_mod")
            and not any(name.startswith(c) for c in compiled)
        ]

    def enter(self, name: str) -> None:
        """The module called ``name`` begins to run."""
        self._stack.append(name)
        self._changes.append((_torch.next_sequence_nr(), self.module()))

    def leave(self) -> None:
        """The module that began last has run."""
        if self._stack:
            name = self._stack.pop()
            if self.recording is not None:
                self._leaves.append(Exit(name, len(self.recording.calls)))
        self._changes.append((_torch.next_sequence_nr(), self.module()))

    def _maker(self, number: int) -> str:
        """The module that ran when the node of this number was made."""
        at = bisect.bisect_right(self._changes, number, key=lambda change: change[0])
        return self._changes[at - 1][1] if at else self._root_name

    def module(self) -> str:
        """The path of the module that runs now."""
        return self._stack[-1] if self._stack else self._root_name

    def changes(self, number: int) -> None:
        """Memory changes in place that the node of this ``number`` has made; -1: one that is not known."""
        if self.recording is not None:
            self._changes_seen.append(Change(len(self.recording.calls), number))

    def saving(self) -> None:
        """A tensor is about to be saved, by the node that was made last."""
        self._saved_by.append(_torch.next_sequence_nr() - 1)

    def packed(self, packed: Packed) -> None:
        """A tensor was saved."""
        self.saved.append(packed)
        self._saved_in.append(self.module())

    def decided(self, value: Value, op: str, why: str, number: int) -> None:
        """The ledger chose: ``value``, made by the node of this ``number``, is kept because of ``why``, or rebuilt."""
        self._made_by[id(value)] = self._maker(number)
        self._ops.append(op)
        self._decided.append((value, self.module(), why))

    def kept_after_all(self, value: Value, why: str) -> None:
        """A value that was to be rebuilt is kept, because of ``why``."""
        self._decided = [(v, module, why if v is value else reason) for v, module, reason in self._decided]

    def shared(self, value: Value, nbytes: int) -> None:
        """A tensor was asked for again."""
        if nbytes >= self.min_bytes:
            made_by = self._made_by.get(id(value), "")
            self.entries.append(Entry(self.module(), value.op, "shared", nbytes, SHARED, made_by))

    def shape_only(self, op: str, nbytes: int, number: int) -> None:
        """Backward reads only the shape of a tensor, made by the node of this ``number``, so it is not kept."""
        self.entries.append(Entry(self.module(), op, SHAPE_ONLY, nbytes, "", self._maker(number)))

    def stop(self) -> None:
        """The region ends: number the values, and turn what was decided into plain data."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        decided = [value for value, _, _ in self._decided]
        self._items.choose_dear(decided)
        first_decision = len(self.entries)
        if self.is_tuned:
            self._items.add_all(map(value_of, self.saved), decided)
        for value, module, why in self._decided:
            self._items.add(value)
            outcome = "kept" if value.tensor is not None else "rebuilt"
            why = why if outcome == "kept" else ""
            self.entries.append(Entry(module, value.op, outcome, value.nbytes, why, self._made_by[id(value)]))
        self._note_undecided()
        self.step = self._as_data(first_decision)
        self._reads.expect(self.step, self._saved_by)
        once = {id(p): tensor.small_bytes for p, tensor in zip(self.saved, self.step.saved, strict=True)}
        self.small_bytes = sum(nbytes for nbytes in once.values() if nbytes > 0)
        for value in decided:
            value.forget_recipe()
        self._items.close()
        self._decided, self._made_by, self._changes, self._root = [], {}, [], None
        self.saved.clear()
        self._saved_in.clear()

    def _as_data(self, first_decision: int) -> RecordedStep:
        assert self.recording is not None
        ops = {id(value): op for op, (value, _, _) in zip(self._ops, self._decided, strict=True)}
        items, values, decided = self._items, list(map(value_of, self.saved)), [value for value, _, _ in self._decided]
        needed, read_by = items.needed(values), items.read_by(values, decided) if self.is_tuned else {}
        recording, ends = self.recording, None
        if self.may_end_early:
            ends = Ends(self._leaves, self._changes_seen, recording.numbers)
        saved = []
        for packed, value in zip(self.saved, values, strict=True):
            saved.append(
                SavedTensor(
                    item=items.number_of(packed),
                    made_by=None if value is None else (ops.get(id(value), value.op), value.nbytes),
                    is_bare=items.is_bare(packed, needed),
                    has_node=type(packed) is SavedView or (type(packed) is Value and packed.op != "input"),
                    small_bytes=self._bytes_if_small(packed),
                    read_by=read_by.get(id(value)) if value is not None else None,
                    shape_bytes=packed.nbytes if type(packed) is ShapeOnly else 0,
                )
            )
        return RecordedStep(
            items=items.found,
            decided=[(value.ordinal, items.is_kept(value)) for value in decided],
            sources=items.sources(decided),
            saved=saved,
            entries=self.entries,
            first_decision=first_decision,
            undecided=self._undecided,
            why_kept=HAS_ROOM if self.is_tuned else LOWER_PEAK,
            calls=recording.calls,
            ends=ends,
            caught=self.caught,
            min_bytes=self.min_bytes,
        )

    def _bytes_if_small(self, packed: Packed) -> int:
        """The bytes of a saved tensor that was kept unseen for having so few; else -1."""
        return packed.nbytes if type(packed) is Value and packed.free and packed.nbytes < self.min_bytes else -1

    def _note_undecided(self) -> None:
        """Enter what no decision was made for: the noise of a dropout, which is drawn again, and what recipes start
        from although autograd has not asked for it."""
        known = {id(v) for v, _, _ in self._decided}
        known |= {id(v.inputs[0]) for v, _, _ in self._decided if v.narrow_bytes and v.inputs}  # the plan decides
        for packed, module in zip(self.saved, self._saved_in, strict=True):
            value = value_of(packed)
            if value is not None and id(value) not in known:
                known.add(id(value))
                if value.tensor is None and value.function is not None and value.nbytes >= self.min_bytes:
                    if value.items is self._items:
                        self._undecided[len(self.entries)] = value.ordinal
                    self.entries.append(Entry(module, value.op, "rebuilt", value.nbytes, "", module))
        stack = [v for v, _, _ in self._decided if v.tensor is None]
        while stack:
            for v in stack.pop().inputs:
                if id(v) in known:
                    continue
                known.add(id(v))
                if v.tensor is None:
                    stack.append(v)
                elif not v.free:
                    self.entries.append(Entry("", v.op, "kept", v.nbytes, EXTRA, "", is_extra=True))

    # ---------------------------------------------------------------- in backward

    def unpack(self, packed: Packed | PendingSave) -> Tensor:
        """Backward asks for what was saved: note it, and hand it out."""
        self.read(packed)
        return unpack(packed)

    def read(self, packed: Packed | PendingSave | None) -> None:
        """Backward asked for what was saved. A step is learned from only if its backward came to its end."""
        node = -1
        if type(packed) is PendingSave:
            node, packed = self._saved_by[packed.number], packed.packed
        if not self._is_reading:
            self._is_reading = True
            self.was_read = not _torch.after_backward(self._end)
        if type(packed) is ShapeOnly:
            self._reads.add_other(Reader(node, packed.nbytes, packed.stand_in_bytes))
            return
        value = value_of(packed)
        if value is not None and value.items is self._items:  # autocast hands one thread the cast that another made
            self._reads.add(value.ordinal, node)

    def _end(self) -> None:
        self.was_read = True
        self._reads.measure_scratch()

    def runs_again(self, segment: Segment) -> None:
        """Backward has come to a checkpoint and runs its segment again."""
        self._reads.add_segment(segment)

    def outputs_nbytes(self) -> int:
        """The bytes of what the region handed out: what comes after it, a loss, keeps about as many."""
        return 0 if self.recording is None else self.recording.graph.outputs_nbytes()

    def graph(self) -> policy.Graph:
        """The step as the policy sees it: its tensors, and the ops of backward that read them."""
        assert self.step is not None
        assert self.recording is not None
        return self._reads.graph(self.step, self.recording.graph, leaves_stay=self.leaves_stay)
