"""Listens to one step: what it saves, what becomes of each tensor and why, and in which order backward reads them."""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from leangrad import _torch
from leangrad.ledger.learn import scratch
from leangrad.ledger.learn.early_end import Change, Ends, Exit
from leangrad.ledger.learn.entries import EXTRA, HAS_ROOM, LOWER_PEAK, SHARED, Entry
from leangrad.ledger.learn.recorded_step import KEPT, REBUILT, SHAPE, RecordedStep, SavedTensor
from leangrad.ledger.learn.scratch import Convolution
from leangrad.ledger.learn.trace import TraceRecorder
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.inplace_variants import WITH_OUT
from leangrad.ledger.values.pending_save import PendingSave
from leangrad.ledger.values.saved import unpack
from leangrad.ledger.values.saved_view import SavedPart, SavedView
from leangrad.ledger.values.shape_only import ShapeOnly
from leangrad.ledger.values.value import SUMS, Value
from leangrad.policy import graph as policy


class Reader(NamedTuple):
    """A node that reads a saved tensor in backward."""

    node: int  # its number
    guess: int  # the bytes of the gradients at that time, where the graph does not tell
    scratch: int = 0  # the bytes that it takes beside them
    convolution: Convolution | None = None  # whose scratch counts too


class Segment(Protocol):
    """What a plan asks of the ledger of a checkpointed segment."""

    def peak_bytes(self) -> int:
        """What backward holds at most of the tensors of the segment."""


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
        self.items: list[policy.Value] = []  # the tensors of the step, as the policy sees them
        self.reads: list[tuple[int, ...]] = []  # of each op of backward that is noted: the items it reads
        self.readers: list[Reader] = []  # of each read
        self._readers: dict[int, list[Reader]] = {}  # of each item: those that will read it, in order
        self._scratch: dict[Convolution, int] = {}  # what they take, in bytes
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
        self._dear: set[int] = set()  # the values that will be kept because rebuilding them is too much work
        self._segments: list[tuple[int, Segment]] = []  # which read is a segment that was run again
        self.on_accelerator = False
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
        self.entries.append(Entry(self.module(), op, "shape only", nbytes, "", self._maker(number)))

    def stop(self) -> None:
        """The region ends: number the values, and turn what was decided into plain data."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._dear = {id(value) for value, _, _ in self._decided if _is_dear(value)}
        if self.on_accelerator:
            self._spare()
        first_decision = len(self.entries)
        if self.is_tuned:
            self._number_all()
        for value, module, why in self._decided:
            self._number(value)
            outcome = "kept" if value.tensor is not None else "rebuilt"
            why = why if outcome == "kept" else ""
            self.entries.append(Entry(module, value.op, outcome, value.nbytes, why, self._made_by[id(value)]))
        self._note_undecided()
        self.step = self._as_data(first_decision)
        self._note_readers(self.step)
        once = {id(p): tensor.small_bytes for p, tensor in zip(self.saved, self.step.saved, strict=True)}
        self.small_bytes = sum(nbytes for nbytes in once.values() if nbytes > 0)
        for value, _, _ in self._decided:
            value.forget_recipe()
        self._decided, self._made_by, self._changes, self._root, self._dear = [], {}, [], None, set()
        self.saved.clear()
        self._saved_in.clear()

    def _as_data(self, first_decision: int) -> RecordedStep:
        assert self.recording is not None
        ops = {id(value): op for op, (value, _, _) in zip(self._ops, self._decided, strict=True)}
        needed, read_by = self._needed(), self._read_by() if self.is_tuned else {}
        recording, ends = self.recording, None
        if self.may_end_early:
            ends = Ends(self._leaves, self._changes_seen, recording.numbers)
        saved = []
        for packed in self.saved:
            value = _value_of(packed)
            saved.append(
                SavedTensor(
                    item=self._item(packed),
                    made_by=None if value is None else (ops.get(id(value), value.op), value.nbytes),
                    is_bare=self._is_bare(packed, needed),
                    has_node=type(packed) is SavedView or (type(packed) is Value and packed.op != "input"),
                    small_bytes=self._bytes_if_small(packed),
                    read_by=read_by.get(id(value)) if value is not None else None,
                )
            )
        return RecordedStep(
            items=self.items,
            decided=[(value.ordinal, self._is_kept(value)) for value, _, _ in self._decided],
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

    def _number_all(self) -> None:
        """Give also that a number which is always made again otherwise: random numbers, and what a recipe runs through
        before autograd asks for it. The plan may keep them. What a value is made from comes before it.
        """
        saved = [v for v in map(_value_of, self.saved) if v is not None and v.function is not None and v.tensor is None]
        asked = {id(v): v for v in (*saved, *(v for v, _, _ in self._decided)) if v.nbytes >= self.min_bytes}
        for value in asked.values():
            stack, seen = [(value, False)], set[int]()
            while stack:
                v, has_sources = stack.pop()
                if has_sources:
                    self._number(v)
                elif v.recorder is not self and id(v) not in seen:
                    seen.add(id(v))
                    if id(v) in asked:
                        stack.append((v, True))
                    stack.extend((one, False) for one in v.inputs if v.tensor is None)

    def _note_undecided(self) -> None:
        """Enter what no decision was made for: the noise of a dropout, which is drawn again, and what recipes start
        from although autograd has not asked for it."""
        known = {id(v) for v, _, _ in self._decided}
        for packed, module in zip(self.saved, self._saved_in, strict=True):
            value = _value_of(packed)
            if value is not None and id(value) not in known:
                known.add(id(value))
                if value.tensor is None and value.function is not None and value.nbytes >= self.min_bytes:
                    if value.recorder is self:
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

    def _note_readers(self, step: RecordedStep) -> None:
        """Of each item: who will read it, and whose scratch that will take."""
        convolutions = {
            place: call.convolution for call in step.calls for place in range(call.first, call.first + len(call.names))
        }
        for place, (tensor, node) in enumerate(zip(step.saved, self._saved_by, strict=False)):
            if tensor.item >= 0:
                reader = Reader(node, 2 * self.items[tensor.item].nbytes, convolution=convolutions.get(place))
                self._readers.setdefault(tensor.item, []).append(reader)

    def _spare(self) -> None:
        """Keep the smallest of what would be rebuilt: a recipe costs the host the same however little it saves."""
        values = {id(v): v for v, _, _ in self._decided}.values()
        left = SPARE * sum(v.nbytes for v in values if v.tensor is not None)
        for value in sorted((v for v in values if v.tensor is None and not v.depth), key=lambda v: v.nbytes):
            left -= value.nbytes
            if left < 0:
                return
            self._dear.add(id(value))

    def _needed(self) -> set[int]:
        """The values that some recipe reads."""
        stack = [v for v in map(_value_of, self.saved) if v is not None and not self._is_kept(v)]
        needed: set[int] = set()
        while stack:
            for v in stack.pop().inputs:
                if id(v) not in needed:
                    needed.add(id(v))
                    if not self._is_kept(v):
                        stack.append(v)
        return needed

    def _read_by(self) -> dict[int, frozenset[int]]:
        """Of the values that are no items and that only recipes of items read: of which."""
        found: dict[int, set[int]] = {}
        others: set[int] = set()  # those that recipes of other values read
        stack = [v for v in map(_value_of, self.saved) if v is not None]
        for value in stack:
            if value.recorder is not self:
                found.setdefault(id(value), set())
        stack += [value for value, _, _ in self._decided]
        seen: set[int] = set()
        while stack:
            owner = stack.pop()
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            inside, walked = [owner], set[int]()
            while inside:
                for v in inside.pop().inputs:
                    if v.recorder is self:
                        stack.append(v)
                    elif id(v) not in walked:
                        walked.add(id(v))
                        if owner.recorder is self:
                            found.setdefault(id(v), set()).add(owner.ordinal)
                        else:
                            others.add(id(v))
                        inside.append(v)
        return {n: frozenset(items) for n, items in found.items() if n not in others}

    def _item(self, packed: Packed) -> int:
        """The item that a saved tensor is, or a view of; KEPT, REBUILT or SHAPE where it is none."""
        if type(packed) is ShapeOnly:
            return SHAPE
        value = _value_of(packed)
        if value is None:
            return KEPT
        return value.ordinal if value.recorder is self else KEPT if value.tensor is not None else REBUILT

    def _is_kept(self, value: Value) -> bool:
        return value.tensor is not None or id(value) in self._dear

    def _is_bare(self, packed: Packed, needed: set[int]) -> bool:
        if type(packed) is ShapeOnly:
            return False
        value = _value_of(packed)
        return value is None or (id(value) not in needed and self._is_kept(value))

    def _number(self, value: Value) -> int:
        if value.recorder is not self:
            is_kept = self._is_kept(value)
            can_be_rebuilt = value.function is not None and not value.blocked and id(value) not in self._dear
            found, products = self._sources(value) if can_be_rebuilt else (set[int](), 0)
            sources = tuple(sorted(found))
            is_link = bool(sources) and self._is_link(value)
            value.ordinal, value.recorder = len(self.items), self
            self.items.append(
                policy.Value(
                    value.nbytes,
                    sources,
                    is_fixed=not can_be_rebuilt or (is_kept and not is_link),
                    is_output=value.pinned,
                    may_end_chain=is_link,
                    is_repeatable=can_be_rebuilt and value.function in WITH_OUT,
                    products=products,
                )
            )
        return value.ordinal

    def _is_link(self, value: Value) -> bool:
        """Whether a chain of rebuilt values may end with this one: a residual sum, or what was made of it since.

        Where products are run again, all that follows a sum has its depth up to the next one: of that the first counts.
        """
        if not value.max_products:
            return _joins(value) or (value.depth > 0 and id(value) not in self._dear)
        stack = [value]
        while stack:
            v = stack.pop()
            if v.op in SUMS and _joins(v):
                return True
            if not v.is_product:
                stack.extend(i for i in v.inputs if i.recorder is not self and not i.free)
        return False

    def _sources(self, value: Value) -> tuple[set[int], int]:
        """The items that ``value`` is rebuilt from, through all that is no item; how many products that runs."""
        found, products = set[int](), int(value.is_product)
        stack, seen = [value], set[int]()
        while stack:
            for v in stack.pop().inputs:
                if v.recorder is self:
                    found.add(v.ordinal)
                elif id(v) in seen or v.free or (v.nbytes < self.min_bytes and v.tensor is not None):
                    continue
                elif v.tensor is not None:
                    found.add(self._number(v))
                else:
                    seen.add(id(v))
                    stack.append(v)
                    products += v.is_product
        return found, products

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
            self._note_reader(Reader(node, packed.nbytes, packed.stand_in_bytes))
            return
        value = _value_of(packed)
        if value is not None and value.recorder is self:  # autocast hands one thread the cast that another made
            self.reads.append((value.ordinal,))
            readers = self._readers.get(value.ordinal)  # backward comes to the last of them first
            self.readers.append(readers.pop() if readers else Reader(node, 2 * self.items[value.ordinal].nbytes))

    def _end(self) -> None:
        self.was_read = True
        if any(len(item.inputs) > 1 for item in self.items):  # else there is nothing to plan
            self._scratch = scratch.measure(r.convolution for r in self.readers if r.convolution is not None)

    def runs_again(self, segment: Segment) -> None:
        """Backward has come to a checkpoint and runs its segment again: the plan takes it for a read with scratch."""
        self._segments.append((len(self.reads), segment))
        self._note_reader(Reader(-1, 0))

    def _note_reader(self, reader: Reader) -> None:
        """Backward is just now at a node that reads nothing which was kept or rebuilt."""
        self.reads.append(())
        self.readers.append(reader)

    def outputs_nbytes(self) -> int:
        """The bytes of what the region handed out: what comes after it, a loss, keeps about as many."""
        return 0 if self.recording is None else self.recording.graph.outputs_nbytes()

    def graph(self) -> policy.Graph:
        """The step as the policy sees it: its tensors, and the ops of backward that read them."""
        alive = self._alive()
        segments = dict(self._segments)
        others = sorted(alive.keys() - {r.node for r in self.readers})
        ops: list[policy.Value] = []
        for at, (read, reader) in enumerate(zip(self.reads, self.readers, strict=True)):
            nbytes = alive.get(reader.node, reader.guess) + reader.scratch
            if reader.convolution is not None:
                nbytes += self._scratch.get(reader.convolution, 0)
            if at in segments:
                nbytes = segments[at].peak_bytes()
            between = 0
            while others and others[-1] > reader.node >= 0:
                between = max(between, alive[others.pop()])
            if between > nbytes:  # nodes that read nothing, and so use none of the items
                ops.append(policy.Value(0, is_backward=True, scratch=between))
            ops.append(policy.Value(0, read, is_backward=True, scratch=nbytes))
        return policy.Graph((*self._held_items(), *ops))

    def _held_items(self) -> list[policy.Value]:
        """The items. What autograd has saved it holds, also if this backward did not come to its reader."""
        assert self.step is not None
        unread = {tensor.item for tensor in self.step.saved}.difference(*self.reads)
        return [
            replace(item, is_asked_for=True) if n in unread and item.is_fixed else item
            for n, item in enumerate(self.items)
        ]

    def _alive(self) -> dict[int, int]:
        """The bytes of gradients that are alive while each node runs."""
        assert self.recording is not None
        ran = {r.node for r in self.readers}
        idle = {r.node for readers in self._readers.values() for r in readers} - ran
        return self.recording.graph.alive(without=idle, leaves_stay=self.leaves_stay)


def _joins(value: Value) -> bool:
    """Whether it is made from several values that have nothing in common."""
    return len({id(v.root or v) for v in value.inputs if not v.free}) > 1


def _value_of(packed: Packed | None) -> Value | None:
    """The value of a saved tensor, or of what it is a view of; None: it is kept with no value around it."""
    if type(packed) is Value:
        return packed
    return packed.owner if type(packed) is SavedView or type(packed) is SavedPart else None


# Of the kept bytes, on an accelerator: the casts of a ResNet's weights are half of its recipes and 1% of it; those of
# the attention of a ViT-L a quarter of its recipes and 3%.
SPARE = 0.03
DEAR = 64  # bytes that may be made to rebuild one byte: the statistics of a norm are kept, not summed again


def _is_dear(value: Value) -> bool:
    """Whether rebuilding ``value`` makes many times its bytes on the way.

    A link of a residual chain is the plan's to decide, however long the chain; a statistic of such a link is not.
    """
    if value.tensor is not None or value.function is None:
        return False
    work = largest = 0
    stack, seen = [value], set()
    while stack:
        v = stack.pop()
        if v.tensor is None and id(v) not in seen:
            seen.add(id(v))
            work += v.nbytes
            largest = max(largest, v.nbytes)
            stack.extend(v.inputs)
    return (largest if value.depth else work) > DEAR * value.nbytes
