"""What each rebuild takes: the unpack hooks of one step, timed, and shared out among the tensors that were made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad.ledger.values.saved import unpack
from leangrad.policy import graph as policy

__all__ = ["Cost", "Stopwatch", "Timing"]


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


class Timing:
    """Times the unpack hooks of one step, by the number of the saved tensor."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._stopwatch = Stopwatch(on_gpu=on_gpu)
        self.numbers: dict[int, int] = {}  # by the id of what was packed: the number of the saved tensor
        self._reads: list[tuple[int, float, Any, Any]] = []

    def unpack(self, packed: Any) -> Tensor:
        """Backward asks for what was saved: hand it out and note how long that took."""
        number = self.numbers.get(id(packed), -1)
        begin = self._stopwatch.now()
        host = time.perf_counter()
        tensor = unpack(packed)
        host = time.perf_counter() - host
        self._reads.append((number, host, begin, self._stopwatch.now()))
        return tensor

    def costs(self, items: Sequence[policy.Value], item_of: Sequence[int], kept: frozenset[int]) -> dict[int, Cost]:
        """Of each item that was rebuilt: what it took. What was made on the way to it has its share, by its bytes.

        item_of: of every saved tensor, the item that it is; below 0: none.
        """
        found: dict[int, Cost] = {}
        for number, host, begin, end in self._reads:
            item = item_of[number] if 0 <= number < len(item_of) else -1
            if item < 0:
                continue
            device = self._stopwatch.seconds(begin, end)
            if item in found:  # made on the way to another, and not held: its kernels computed it inside
                found[item] = Cost(found[item].host + host, found[item].device + device)
                continue
            made, stack = list[int](), [item]
            while stack:
                n = stack.pop()
                if n not in kept and n not in found and n not in made:
                    made.append(n)
                    stack.extend(items[n].inputs)
            total = sum(items[n].nbytes for n in made)
            for n in made:
                share = items[n].nbytes / total if total else 1 / len(made)
                found[n] = Cost(host * share, device * share)
        return found
