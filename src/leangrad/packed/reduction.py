"""Averages gradients over processes: each range is sent as soon as backward has filled it.

[Note: one order]
All processes must start their collectives in the same order, whatever backward does on each of them. Ranges are sent
from the last to the first, each only after the one before it. A range that waits for an unused parameter holds back the
rest until the end of backward. Then every process sends all that are left, followed by one small vector that says which
parameters had a gradient anywhere. Those get a gradient on every process; the others keep None, as under
DistributedDataParallel.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .ranges import Range
from .slots import Slot
from .streams import order, stream_of


class Reduction:
    """Averages the gradients of one backward over the processes of a group."""

    def __init__(self, pairs: Sequence[tuple[nn.Parameter, Slot]], group: dist.ProcessGroup | None) -> None:
        self._pairs, self._group = pairs, group
        self._size = dist.get_world_size(group)
        # The ranges that are not sent yet, in their order: see [Note: one order].
        self._queue: list[Range] = list(dict.fromkeys(slot.range for _, slot in reversed(pairs)))
        self._missing = {range_: set(range_.slots) for range_ in self._queue}  # slots whose gradient has not arrived
        # The streams on which the gradients of a range arrived.
        self._streams: dict[Range, set[torch.cuda.Stream | None]] = {range_: set() for range_ in self._queue}
        self._sent: dict[Range, Tensor] = {}
        self._works: list[dist.Work] = []

    def watch(self) -> None:
        """Become the `watcher` of all ranges, so that `arrived` is called for every gradient."""
        for range_ in self._queue:
            range_.watcher = self

    def stop(self) -> None:
        """Undo `watch`."""
        for range_ in self._missing:
            range_.watcher = None

    def arrived(self, slot: Slot) -> None:
        """Note that the gradient of `slot` is complete; send the ranges that are complete, up to one that is not."""
        self._missing[slot.range].discard(slot)
        self._streams[slot.range].add(stream_of(slot.range.device))
        while self._queue and not self._missing[self._queue[0]]:
            self._send(self._queue.pop(0))

    def has_sent(self, range_: Range) -> bool:
        """Whether the range was sent."""
        return range_ in self._sent

    def finish(self) -> None:
        """Send the ranges that are left, wait for all, and give a gradient to each parameter that has one anywhere."""
        # References until the end: nothing else may keep the buffer of a range without a gradient alive here.
        for range_ in self._queue:
            range_.leave()
        bases = [range_.standing() for range_ in self._queue]
        unsent = set(self._queue)
        for parameter, slot in self._pairs:
            if slot.range in unsent:
                slot.settle(parameter)
        while self._queue:
            self._send(self._queue.pop(0))
        used = torch.tensor([int(parameter.grad is not None) for parameter, _ in self._pairs])
        used = used.to(self._pairs[0][1].range.device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        for work in self._works:
            work.wait()
        for (parameter, slot), is_used in zip(self._pairs, used.tolist(), strict=True):
            if is_used and parameter.grad is None:
                slot.attach(parameter, slot.view())
                slot.is_zero = False
        del bases

    def _send(self, range_: Range) -> None:
        range_.clear_pads()
        flat = range_.flat()
        assert flat is not None, "a range is complete only while its gradients stand"
        self._sent[range_] = flat
        for stream in self._streams[range_]:
            order(stream, stream_of(range_.device), flat)
        # Divided before the sum, as in DistributedDataParallel: a sum over many processes could overflow.
        flat.mul_(1.0 / self._size)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._works.append(work)
