"""Replacements of the unpack hook for one step: ``Timing`` measures rebuilds, ``SavedMarks`` marks a memory history.

``Timing`` times every unpack hook of a step and splits the time among the tensors that were rebuilt. ``SavedMarks``
marks in the memory history of a step when tensors are saved and read: see [Note: what was not foreseen] in
``policy/replay.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from leangrad.ledger.learn.items import value_of
from leangrad.ledger.values.pending_save import PendingSave
from leangrad.ledger.values.rebuild.replays import timed_by
from leangrad.ledger.values.saved import unpack
from leangrad.ledger.values.value import Value
from leangrad.policy import graph as policy

__all__ = ["Cost", "SavedMarks", "Stopwatch", "Timing", "UnpackHook"]


class UnpackHook(Protocol):
    """Protocol: replaces the unpack hook for one step."""

    def note(self, packed: Any, number: int) -> None:
        """Note that saved tensor ``number`` was packed as ``packed``."""

    def unpack(self, packed: Any) -> Tensor:
        """Return the saved tensor for backward."""


class SavedMarks:
    """Marks the times at which tensors are saved and at which backward reads them.

    - `saves`, `reads`: the numbers of the saved tensors, in the order of the marks; -1 for a read of an unknown one.
    - `mark_save`, `mark_read`: functions that set one mark in the memory history of the step.
    """

    def __init__(self, mark_save: Callable[[], object], mark_read: Callable[[], object]) -> None:
        self.saves: list[int] = []
        self.reads: list[int] = []
        # Numbers of saved tensors by the id of what they were packed as; several may share one packed object.
        self._numbers: dict[int, list[int]] = {}
        self._mark_save, self._mark_read = mark_save, mark_read

    def note(self, packed: Any, number: int) -> None:
        """Note that saved tensor ``number`` was packed as ``packed``, and mark the save."""
        self._numbers.setdefault(id(packed), []).append(number)
        self.saves.append(number)
        self._mark_save()

    def unpack(self, packed: Any) -> Tensor:
        """Mark the read and return the saved tensor; of several with one ``packed``, the last one is read first."""
        numbers = self._numbers.get(id(packed))
        self.reads.append(numbers.pop() if numbers else -1)
        self._mark_read()
        return unpack(packed)


class Stopwatch:
    """Reads the clock of the device of a step; on a GPU by CUDA events, because the GPU runs behind the host."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def now(self) -> Any:
        """Return the current time; on a GPU, an event recorded after all kernels that were issued so far."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two results of ``now``; on a GPU this waits until ``end`` has completed."""
        if not self._on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Cost(NamedTuple):
    """The time to rebuild one tensor, in seconds."""

    host: float
    device: float


class _Op:
    """One timed op of a rebuild. A kernel that replays a chain rebuilds its own inputs: those ops are inside it."""

    def __init__(self, number: int) -> None:
        self.number = number  # number of the saved tensor that the op made; -1: not known, or it was not saved
        self.host = 0.0  # host time at the begin of the op; after its end, its seconds on the host
        self.begin: Any = None  # result of ``Stopwatch.now``
        self.end: Any = None  # result of ``Stopwatch.now``
        self.inside: list[_Op] = []  # ops that ran while this one did


class _Read(NamedTuple):
    """One read of a saved tensor in backward."""

    number: int  # of the saved tensor; -1: not known
    host: float  # seconds of the unpack hook on the host, without those of the timer itself
    ops: list[_Op]  # the outermost ops of the rebuild


class Timing:
    """Times the unpack hooks of one step, op by op.

    [Note: each op has its own cost] One rebuild may run a convolution, its batch norm and an activation. Keeping the
    output of the activation saves next to nothing if the other two still have to be rebuilt. So each tensor has the
    cost of its own op only. The host time of the unpack hook outside of all ops is split evenly among the tensors that
    were made. If a fused kernel computes several tensors, each has a share in its cost, in proportion to its bytes.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._stopwatch = Stopwatch(on_gpu=on_gpu)
        self._numbers: dict[int, int] = {}  # number of a saved tensor by the id of what it was packed as
        self._pending: list[tuple[PendingSave, int]] = []  # saved tensors that may be undecided, with their numbers
        self._made: dict[int, int] = {}  # number of a saved tensor by the id of its Value
        self._reads: list[_Read] = []
        self._ops: list[_Op] = []  # outermost ops of the rebuild that is running
        self._open: list[_Op] = []  # ops that have not ended, the innermost last
        self._spent = 0.0  # seconds that the timer itself has used in this rebuild

    def note(self, packed: Any, number: int) -> None:
        """Note that saved tensor ``number`` was packed as ``packed``."""
        self._numbers[id(packed)] = number
        if type(packed) is PendingSave:
            self._pending.append((packed, number))
        elif (value := value_of(packed)) is not None:
            self._made.setdefault(id(value), number)

    def unpack(self, packed: Any) -> Tensor:
        """Return the saved tensor for backward, and record how long that took."""
        for pending, place in self._pending:  # all are decided now, and this rebuild may make any of them on its way
            if (value := value_of(pending.packed)) is not None:
                self._made.setdefault(id(value), place)
        self._pending.clear()
        number = self._numbers.get(id(packed), -1)
        self._ops, self._open, self._spent = [], [], 0.0
        with timed_by(self):
            began = time.perf_counter()
            tensor = unpack(packed)
            host = time.perf_counter() - began
        self._reads.append(_Read(number, host - self._spent, self._ops))
        return tensor

    def begin(self, value: Value) -> None:
        """Start the time of an op of a rebuild; ``value``: what the op makes."""
        entered = time.perf_counter()
        op = _Op(self._made.get(id(value), -1))
        self._open.append(op)
        op.begin = self._stopwatch.now()
        op.host = time.perf_counter()
        self._spent += op.host - entered

    def end(self, *, has_run: bool) -> None:
        """Stop the time of the op begun last; ``has_run``: False if a fused kernel declined and other ops run instead.

        An op that has not run is dropped; the ops inside it count for the op around it.
        """
        ended = time.perf_counter()
        op = self._open.pop()
        op.host = ended - op.host
        op.end = self._stopwatch.now()
        if has_run:
            (self._open[-1].inside if self._open else self._ops).append(op)
        else:
            (self._open[-1].inside if self._open else self._ops).extend(op.inside)
        self._spent += time.perf_counter() - ended

    def costs(
        self,
        items: Sequence[policy.Value],
        item_of: Sequence[int],
        kept: frozenset[int],
        cast_from: Mapping[int, int] | None = None,
    ) -> dict[int, Cost]:
        """Return the cost of each item that was rebuilt: see [Note: each op has its own cost].

        items: the items of the recorded step.
        item_of: the item of each saved tensor; below 0 if it is not an item.
        kept: the items that were kept in the timed step.
        cast_from: maps items that are casts to the items that they were cast from; ignored where the source is a saved
            tensor itself.
        """
        cast_from = {n: source for n, source in (cast_from or {}).items() if source not in item_of}
        found: dict[int, Cost] = {}
        for read in self._reads:
            item = item_of[read.number] if 0 <= read.number < len(item_of) else -1
            if item < 0:
                continue
            ran = self._by_item(read.ops, item_of, item, cast_from)
            beside = max(0.0, read.host - sum(cost.host for cost in ran.values())) / len(ran)
            known = found.keys() | kept
            for n, cost in ran.items():
                made = [n, *_inside(n, items, known | ran.keys())]
                total = sum(items[m].nbytes for m in made)
                for m in made:
                    share = items[m].nbytes / total if total else 1 / len(made)
                    before = found.get(m, Cost(0.0, 0.0))
                    found[m] = Cost(before.host + share * (cost.host + beside), before.device + share * cost.device)
        return found

    def _by_item(
        self, ops: Sequence[_Op], item_of: Sequence[int], last: int, cast_from: Mapping[int, int]
    ) -> dict[int, Cost]:
        """Return the cost of each item that the ops of one read made.

        The cost of an op that made no item is added to the item that is made next.

        last: the item that was read; it also gets the cost of the ops after the last item.
        """
        found: dict[int, Cost] = {}
        host = device = 0.0
        for op in _flat(ops):
            inside = op.inside
            item = item_of[op.number] if 0 <= op.number < len(item_of) else -1
            if item in cast_from and host > 0:  # the ops on the way to a cast made its source
                before = found.get(cast_from[item], Cost(0.0, 0.0))
                found[cast_from[item]] = Cost(before.host + host, before.device + max(0.0, device))
                host = device = 0.0
            host += op.host - sum(one.host for one in inside)
            device += self._seconds(op) - sum(self._seconds(one) for one in inside)
            if item >= 0:
                before = found.get(item, Cost(0.0, 0.0))
                found[item] = Cost(before.host + max(0.0, host), before.device + max(0.0, device))
                host = device = 0.0
        before = found.get(last, Cost(0.0, 0.0))
        found[last] = Cost(before.host + host, before.device + device)
        return found

    def _seconds(self, op: _Op) -> float:
        return self._stopwatch.seconds(op.begin, op.end)


def _flat(ops: Sequence[_Op]) -> Iterator[_Op]:
    """Yield all ops in the order in which they ended."""
    for op in ops:
        yield from _flat(op.inside)
        yield op


def _inside(item: int, items: Sequence[policy.Value], known: AbstractSet[int]) -> list[int]:
    """Return the items below ``item`` that are not in ``known``: those that a fused kernel computed on the way."""
    found, stack = list[int](), [*items[item].inputs]
    while stack:
        n = stack.pop()
        if n not in known and n not in found:
            found.append(n)
            stack.extend(items[n].inputs)
    return found
