"""Records one step: what becomes of each saved tensor and why, and the order in which backward reads them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from leangrad import _torch
from leangrad.ledger.learn.early_end import Change, Ends, Exit, InertHook
from leangrad.ledger.learn.entries import EXTRA, HAS_ROOM, LOWER_PEAK, SHAPE_ONLY, SHARED, Entry
from leangrad.ledger.learn.items import Items, value_of
from leangrad.ledger.learn.reads import Reader, Reads, Segment
from leangrad.ledger.learn.recorded_step import RecordedStep, SavedTensor
from leangrad.ledger.learn.trace import RecordedCall, TraceRecorder
from leangrad.ledger.learn.unwatched import Needs
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.pending_save import PendingSave
from leangrad.ledger.values.saved import unpack
from leangrad.ledger.values.saved_view import SavedView
from leangrad.ledger.values.shape_only import ShapeOnly
from leangrad.ledger.values.value import Value
from leangrad.policy import graph as policy


class _Entering:
    """A forward pre-hook that notifies the recorder that the module with path ``name`` begins to run."""

    is_leangrads = True

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __reduce__(self) -> tuple[Any, ...]:
        return InertHook, ()  # a model may be copied during its own forward

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not is_dynamo_compiling():  # keep the recorder out of a compiled function inside a lean model
            self._recorder.enter(self._name)


class _Leaving:
    """A forward hook that notifies the recorder that the running module has returned."""

    is_leangrads = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __reduce__(self) -> tuple[Any, ...]:
        return InertHook, ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_dynamo_compiling():
            self._recorder.leave()


class Recorder:
    """Records one region and the backward passes that follow it.

    - `step`: the recorded step as plain data; None until the region has ended.
    - `was_read`: whether a backward pass over the step has ended; only then may later steps use what was recorded.
    """

    def __init__(self, root: nn.Module | None, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.entries: list[Entry] = []
        self._items = Items(min_bytes)
        self._reads = Reads(self._items.found)
        # Products that are kept although autograd did not save them, by the numbers of the calls that made them.
        self.caught: dict[int, list[ref[Value]]] = {}
        self._ops: list[str] = []  # the op of each decision, in order
        self._decided: list[tuple[Value, str, str]] = []  # of each decision: value, running module, why it was kept
        self._undecided: dict[int, int] = {}  # items about which no decision was made, by the index of their entry
        self._made_by: dict[int, str] = {}  # by the id of a value, the module whose forward made it
        # Whenever another module began to run: the number of the next autograd node, and that module.
        self._changes: list[tuple[int, str]] = []
        self.small_bytes = 0  # bytes of tensors kept without a decision because they are smaller than ``min_bytes``
        self.saved: list[Packed] = []  # what each saved tensor was packed as, in order
        self._saved_by: list[int] = []  # for each saved tensor, the number of the node that saved it
        self._saved_in: list[str] = []  # for each saved tensor, the module that was running
        self.recording: TraceRecorder | None = None
        self.may_end_early = False  # whether the function mode of later steps may end before their forward does
        self.may_go_unwatched = False  # whether later steps may run without the function mode: see ``unwatched.py``
        self._needs: set[int] = set()  # numbers of the calls that needed the function mode
        self._leaves: list[Exit] = []  # modules that have returned
        self._changes_seen: list[Change] = []  # in-place changes of memory
        self.step: RecordedStep | None = None
        self.leaves_stay = False  # whether the plan counts gradients of parameters as new memory
        self.is_tuned = False  # whether the plan may keep values that are otherwise always rebuilt: random numbers
        self.was_read = self._is_reading = False
        self._root = root
        self._root_name = "" if root is None else type(root).__name__
        self._stack: list[str] = []  # paths of the modules that are running, the innermost last
        self._handles: list[Any] = []  # of the forward hooks that track them

    # ---------------------------------------------------------------- in forward

    def start(self) -> None:
        """Set forward hooks that track which module runs; not on compiled modules, which would compile again."""
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
        """Note that the module with path ``name`` begins to run."""
        self._stack.append(name)
        self._changes.append((_torch.next_sequence_nr(), self.module()))

    def leave(self) -> None:
        """Note that the innermost running module has returned."""
        if self._stack:
            name = self._stack.pop()
            if self.recording is not None:
                self._leaves.append(Exit(name, len(self.recording.calls)))
        self._changes.append((_torch.next_sequence_nr(), self.module()))

    def _maker(self, number: int) -> str:
        """Return the path of the module that was running when the node with this ``number`` was made."""
        at = bisect.bisect_right(self._changes, number, key=lambda change: change[0])
        return self._changes[at - 1][1] if at else self._root_name

    def module(self) -> str:
        """Return the path of the innermost module that is running; outside of all, the class name of the root."""
        return self._stack[-1] if self._stack else self._root_name

    def changes(self, number: int) -> None:
        """Note an in-place change of memory; ``number``: of the node that made the changed tensor, -1 if unknown."""
        if self.recording is not None:
            self._changes_seen.append(Change(len(self.recording.calls), number))

    def needs_mode(self, node: Any = None) -> None:
        """Note that a call needs the function mode: the running one, or that which made ``node``."""
        if self.recording is not None:
            numbers = self.recording.numbers
            made = len(numbers) if node is None else bisect.bisect_right(numbers, node._sequence_nr())
            self._needs.add(max(0, made - 1))

    def saving(self) -> None:
        """Note that a tensor is about to be saved; the node that saves it is the one made last."""
        self._saved_by.append(_torch.next_sequence_nr() - 1)

    def packed(self, packed: Packed) -> None:
        """Note what the next saved tensor was packed as."""
        self.saved.append(packed)
        self._saved_in.append(self.module())

    def decided(self, value: Value, op: str, why: str, number: int) -> None:
        """Note the decision on ``value``: it is kept because of ``why``, or rebuilt; ``number``: of its node."""
        self._made_by[id(value)] = self._maker(number)
        self._ops.append(op)
        self._decided.append((value, self.module(), why))

    def kept_after_all(self, value: Value, why: str) -> None:
        """Note that ``value``, for which a recipe was chosen before, is kept because of ``why``."""
        self._decided = [(v, module, why if v is value else reason) for v, module, reason in self._decided]

    def shared(self, value: Value, nbytes: int) -> None:
        """Note that a saved tensor is ``value``, which exists already and is kept or rebuilt once for all readers."""
        if nbytes >= self.min_bytes:
            made_by = self._made_by.get(id(value), "")
            self.entries.append(Entry(self.module(), value.op, "shared", nbytes, SHARED, made_by))

    def shape_only(self, op: str, nbytes: int, number: int) -> None:
        """Note a saved tensor that is not kept because backward reads only its shape; ``number``: of its node."""
        self.entries.append(Entry(self.module(), op, SHAPE_ONLY, nbytes, "", self._maker(number)))

    def stop(self) -> None:
        """Turn what was recorded into plain data and let go of the values; called when the region ends."""
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
                    reads=items.read_for(packed),
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
            caught={call: self._items_of(values) for call, values in self.caught.items()},
            min_bytes=self.min_bytes,
            needs=self._needs_of(recording.calls) if self.may_go_unwatched else None,
        )

    def _needs_of(self, calls: Sequence[RecordedCall]) -> Needs | None:
        """Return the calls that needed the function mode.

        None, for all, if tensors that were cast are kept in fewer bits: the mode holds what they were cast from.
        """
        if any(value.narrow_bytes for value, _, _ in self._decided):
            return None
        return Needs([*self._needs], self._leaves, [call.first for call in calls], len(self.saved))

    def _items_of(self, values: Sequence[ref[Value]]) -> frozenset[int]:
        """Return the numbers of the items that these values are; empty if one of them is none."""
        found = [at() for at in values]
        are_items = all(value is not None and value.items is self._items for value in found)
        return frozenset(value.ordinal for value in found if value is not None) if are_items else frozenset()

    def _bytes_if_small(self, packed: Packed) -> int:
        """Return the bytes of a saved tensor that was kept without a decision because it is small; else -1."""
        return packed.nbytes if type(packed) is Value and packed.free and packed.nbytes < self.min_bytes else -1

    def _note_undecided(self) -> None:
        """Add entries for values about which no decision was made.

        These are saved values that are rebuilt, such as the noise of a dropout, which is drawn again, and anchors of
        recipes that autograd did not save.
        """
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
        """Unpack a saved tensor for backward, and record the read: the unpack hook of a recorded step."""
        self.read(packed)
        return unpack(packed)

    def read(self, packed: Packed | PendingSave | None) -> None:
        """Record that backward reads a saved tensor.

        The first read schedules the end of the recording: later steps use a recorded step only if its backward pass ran
        to its end.
        """
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
        # The value may belong to another recorder: autocast's cache may return a cast that another thread made.
        if value is not None and value.items is self._items:
            self._reads.add(value.ordinal, node)

    def _end(self) -> None:
        self.was_read = True
        self._reads.measure_scratch()

    def runs_again(self, segment: Segment) -> None:
        """Record that backward recomputes a checkpointed segment."""
        self._reads.add_segment(segment)

    def outputs_nbytes(self) -> int:
        """Return the bytes of the region's outputs; what follows the region, such as a loss, keeps about as many."""
        return 0 if self.recording is None else self.recording.graph.outputs_nbytes()

    def graph(self) -> policy.Graph:
        """Return the step as the policy sees it: its tensors, and the ops of backward that read them."""
        assert self.step is not None
        assert self.recording is not None
        return self._reads.graph(self.step, self.recording.graph, leaves_stay=self.leaves_stay)
