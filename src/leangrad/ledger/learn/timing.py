"""What each rebuild takes: the unpack hooks of one step, timed, and shared out among the tensors that were made.

Or marked, in what counts the memory of the step: see [Note: what was not foreseen] in ``policy/replay.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from leangrad.ledger.learn.items import value_of
from leangrad.ledger.values.pending_save import PendingSave
from leangrad.ledger.values.saved import unpack
from leangrad.ledger.values.value import Value, watched_by
from leangrad.policy import graph as policy

__all__ = ["Cost", "SavedMarks", "Stopwatch", "Timing", "Unpacks"]


class Unpacks(Protocol):
    """What is in the place of the unpack hook in one step."""

    def note(self, packed: Any, number: int) -> None:
        """This is what saved tensor ``number`` was packed as."""

    def unpack(self, packed: Any) -> Tensor:
        """Backward asks for what was saved."""


class SavedMarks:
    """Marks the moments in which tensors are saved, and in which backward asks for them.

    `saves` and `reads` have their numbers, in order; -1 where nobody knows.
    """

    def __init__(self, mark_save: Callable[[], object], mark_read: Callable[[], object]) -> None:
        self.saves: list[int] = []
        self.reads: list[int] = []
        self._numbers: dict[int, list[int]] = {}  # by the id of what was packed, which several may share
        self._mark_save, self._mark_read = mark_save, mark_read

    def note(self, packed: Any, number: int) -> None:
        """This is what saved tensor ``number`` was packed as."""
        self._numbers.setdefault(id(packed), []).append(number)
        self.saves.append(number)
        self._mark_save()

    def unpack(self, packed: Any) -> Tensor:
        """Backward asks for what was saved: mark that, and hand it out. Of several that share it the last is first."""
        numbers = self._numbers.get(id(packed))
        self.reads.append(numbers.pop() if numbers else -1)
        self._mark_read()
        return unpack(packed)


class Stopwatch:
    """Moments of a step, on the clock of the device that it runs on: a GPU's own, which runs behind the host."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def now(self) -> Any:
        """This moment. On a GPU: the one in which it has done all that it was given so far."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two moments; on a GPU the host waits for the second."""
        if not self._on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Cost(NamedTuple):
    """What it takes to rebuild one tensor, in seconds."""

    host: float
    device: float


class _Op:
    """One op of a rebuild. A kernel that replays a chain takes what it reads itself: those ops are inside it."""

    def __init__(self, number: int) -> None:
        self.number = number  # of the saved tensor that it made; -1: of none that is known
        self.host = 0.0
        self.begin: Any = None
        self.end: Any = None
        self.inside: list[_Op] = []


class _Read(NamedTuple):
    """One saved tensor that backward asked for."""

    number: int
    host: float
    ops: list[_Op]


class Timing:
    """Times the unpack hooks of one step, op by op.

    [Note: each op has its own cost] One rebuild may run a convolution, its batch norm and an activation. To keep what
    the activation made spares next to nothing if the others still have to be made: so the cost of each is its own. What
    the host takes beside them is the same for all. What a kernel computes inside has a share in it, by its bytes.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._stopwatch = Stopwatch(on_gpu=on_gpu)
        self._numbers: dict[int, int] = {}  # by the id of what was packed
        self._made: dict[int, int] = {}  # by the id of its value
        self._reads: list[_Read] = []
        self._ops: list[_Op] = []  # of the rebuild that runs
        self._open: list[_Op] = []  # those that have not ended
        self._spent = 0.0  # on taking the time

    def note(self, packed: Any, number: int) -> None:
        """This is what saved tensor ``number`` was packed as."""
        self._numbers[id(packed)] = number
        if (value := value_of(packed)) is not None:
            self._made.setdefault(id(value), number)

    def unpack(self, packed: Any) -> Tensor:
        """Backward asks for what was saved: hand it out and note how long that took."""
        number = self._numbers.get(id(packed), -1)
        if type(packed) is PendingSave and (value := value_of(packed.packed)) is not None:
            self._made.setdefault(id(value), number)
        self._ops, self._open, self._spent = [], [], 0.0
        with watched_by(self):
            began = time.perf_counter()
            tensor = unpack(packed)
            host = time.perf_counter() - began
        self._reads.append(_Read(number, host - self._spent, self._ops))
        return tensor

    def begin(self, value: Value) -> None:
        """An op of a rebuild is about to run, which makes ``value``."""
        entered = time.perf_counter()
        op = _Op(self._made.get(id(value), -1))
        self._open.append(op)
        op.begin = self._stopwatch.now()
        op.host = time.perf_counter()
        self._spent += op.host - entered

    def end(self, *, has_run: bool) -> None:
        """It has run, or was left to others."""
        ended = time.perf_counter()
        op = self._open.pop()
        op.host = ended - op.host
        op.end = self._stopwatch.now()
        if has_run:
            (self._open[-1].inside if self._open else self._ops).append(op)
        else:
            (self._open[-1].inside if self._open else self._ops).extend(op.inside)
        self._spent += time.perf_counter() - ended

    def costs(self, items: Sequence[policy.Value], item_of: Sequence[int], kept: frozenset[int]) -> dict[int, Cost]:
        """Of each item that was rebuilt: what it took; see [Note: each op has its own cost].

        item_of: of every saved tensor, the item that it is; below 0: none.
        """
        found: dict[int, Cost] = {}
        for read in self._reads:
            item = item_of[read.number] if 0 <= read.number < len(item_of) else -1
            if item < 0:
                continue
            ran = self._by_item(read.ops, item_of, item)
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

    def _by_item(self, ops: Sequence[_Op], item_of: Sequence[int], last: int) -> dict[int, Cost]:
        """What each item took that ops have made; of others that were made on the way, the next item has the cost."""
        found: dict[int, Cost] = {}
        host = device = 0.0
        for op in _flat(ops):
            inside = op.inside
            host += op.host - sum(one.host for one in inside)
            device += self._seconds(op) - sum(self._seconds(one) for one in inside)
            item = item_of[op.number] if 0 <= op.number < len(item_of) else -1
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
    """In the order in which they ended."""
    for op in ops:
        yield from _flat(op.inside)
        yield op


def _inside(item: int, items: Sequence[policy.Value], known: AbstractSet[int]) -> list[int]:
    """What was made on the way to ``item`` and is not known: a kernel has computed it inside."""
    found, stack = list[int](), [*items[item].inputs]
    while stack:
        n = stack.pop()
        if n not in known and n not in found:
            found.append(n)
            stack.extend(items[n].inputs)
    return found
