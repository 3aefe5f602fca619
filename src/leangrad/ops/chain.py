"""A chain of linear maps and activations, forward and backward, that keeps one map a layer.

    z_k = h_{k-1} W_kᵀ + b_k        h_k = act_k(z_k)        h_{-1} = x

Each way is one loop over the layers with little Python in it, because on an accelerator a step of such a chain takes as
long as the host needs to launch it.

[Note: two gradients] Backward holds the gradient of z_k and that of h_{k-1}, which becomes that of z_{k-1} where it
lies. A map is dead when its last reader is done, and the next gradient is written there; what is missing comes from
scratch (`leangrad.lease`). At the top of a chain of relus nothing is dead yet. There, on the CPU, the zeros of the map
are noted, one byte each, and the gradient is written over it; on an accelerator that would be one launch more, and a
map out of its caching allocator costs none.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.lease import Lease, Pool, borrowed
from leangrad.ops.activation import Activation

__all__ = ["Chain"]

# Below this a map is stored, as plain PyTorch stores it: launching a kernel again costs more than the bytes are worth.
REBUILD_MIN_BYTES = 1 << 20

Tensors = Sequence[Tensor | None]  # x, W_0, b_0, W_1, b_1, ...


class Writer(Protocol):
    """Somebody who has a place for the gradients of parameters: each is computed there, or returned as usual."""

    def product(self, index: int, x: Tensor, g: Tensor) -> Tensor | None:
        """gᵀ x for the weight `tensors[index]`, or None where it has been written."""

    def sum(self, index: int, g: Tensor) -> Tensor | None:
        """Σ_rows g for the bias `tensors[index]`, or None where it has been written."""


class Chain:
    """One run through the layers, and what it keeps. `needs` says of x, W_0, b_0, ... which want a gradient.

    `kept[k]` is what the activation of layer k reads in backward: z_k or h_k. `hidden[k]` is h_k, which the weight of
    the next layer reads: the same tensor, or one more where the map is small, or None where it is rebuilt from z_k.
    The output is not among them: where `reads_output`, the caller has to hold it and hand it to `backward`.

    >>> run = Chain((None,), (True, False, False))
    >>> x, weight = torch.ones(2, 3), torch.ones(4, 3)
    >>> y = run.forward((x, weight, None))
    >>> run.backward(torch.ones(2, 4), (x, weight, None))[0].unique()
    tensor([4.])
    """

    def __init__(self, records: Sequence[Activation | None], needs: Sequence[bool]):
        self.records, self.needs = records, needs
        self.kept: list[Tensor | None] = [None] * len(records)
        self.hidden: list[Tensor | None] = [None] * len(records)
        self.reads_output = False
        self.writer: Writer | None = None

    def forward(self, tensors: Tensors) -> Tensor:
        """The output of the last layer, in memory of its own."""
        needs, last, pool = self.needs, len(self.records) - 1, Pool()
        h, flowing = tensors[0], needs[0]
        assert h is not None
        for k, record in enumerate(self.records):
            z = F.linear(h, tensors[2 * k + 1], tensors[2 * k + 2])  # type: ignore[arg-type]
            flowing = flowing or needs[2 * k + 1] or needs[2 * k + 2]
            read = k < last and needs[2 * k + 3]
            if record is None:
                h = z
            elif record.keeps == "output" or not flowing:
                h = record.forward(z, record.parameter, z if record.in_place else None)
                if flowing and k < last:
                    self.kept[k] = h
                self.reads_output = flowing and k == last
            else:
                self.kept[k] = z
                if k < last and z.numel() * z.element_size() >= REBUILD_MIN_BYTES:
                    lease = self._rebuild(k, pool)
                    h, read = lease.tensor, False
                    pool.release(lease)  # it is read before anybody writes there again
                else:
                    h = record.forward(z, record.parameter, None)
            if read:
                self.hidden[k] = h
        pool.close()
        return h

    def backward(
        self,
        g: Tensor,
        tensors: Tensors,
        output: Tensor | None = None,
        *,
        ours: bool = False,
        spent: bool = False,
    ) -> list[Tensor | None]:
        """A gradient for each of the tensors that wants one; see [Note: two gradients].

        `g` is overwritten where it is `ours`, and the maps where they are `spent`: nobody reads them after this.
        """
        needs, pool, writer = self.needs, Pool(), self.writer
        found: list[Tensor | None] = [None] * len(needs)
        first = needs.index(True)
        grad, zeros = Lease(g) if ours else borrowed(g), None
        for k in range(len(self.records) - 1, -1, -1):
            if zeros is not None:
                grad.tensor.masked_fill_(zeros, 0)
                zeros = None
            elif self.records[k] is not None:
                grad = self._activation_backward(k, grad, output, spent, pool)
            g, weight, room = grad.tensor, tensors[2 * k + 1], None
            assert weight is not None
            if needs[2 * k + 1]:
                h = self.hidden[k - 1] if k else tensors[0]
                if h is None:
                    room = self._rebuild(k - 1, pool)
                    h = room.tensor
                found[2 * k + 1] = torch.mm(g.t(), h) if writer is None else writer.product(2 * k + 1, h, g)
                del h
            if needs[2 * k + 2]:
                found[2 * k + 2] = g.sum(0) if writer is None else writer.sum(2 * k + 2, g)
            if first > 2 * k:  # nothing below wants a gradient
                break
            if room is None:
                zeros = self._note_zeros(k - 1, spent, pool) if k else None
                shape = torch.Size((g.shape[0], weight.shape[1]))
                if zeros is not None:
                    room = Lease(self._take(k - 1))
                else:  # what is written for x leaves the chain
                    room = pool.borrow(shape, g) if k else pool.give(shape, g)
            torch.mm(g, weight, out=room.tensor)
            pool.release(grad)
            grad = room
        if first == 0:
            found[0] = grad.tensor
        else:
            pool.release(grad)
        pool.close()
        return found

    def hand_over(self) -> list[Tensor]:
        """Give all that is kept away, each map once; `take_back` must come before backward."""
        maps = {id(t): t for t in (*self.kept, *self.hidden) if t is not None}
        places = {key: i for i, key in enumerate(maps)}
        self._places = [[-1 if t is None else places[id(t)] for t in row] for row in (self.kept, self.hidden)]
        self.take_back(None)
        return list(maps.values())

    def take_back(self, maps: Sequence[Tensor] | None) -> None:
        """Hold what `hand_over` gave, as it came back, or nothing."""
        for row, places in zip((self.kept, self.hidden), self._places, strict=True):
            row[:] = [None if maps is None or i < 0 else maps[i] for i in places]

    def _rebuild(self, k: int, pool: Pool) -> Lease:
        """h_k from z_k, in scratch."""
        record, z = self.records[k], self.kept[k]
        assert record is not None
        assert z is not None
        shape = torch.Size((*z.shape[:-1], z.shape[-1] // 2)) if record.gated else z.shape
        lease = pool.borrow(shape, z)
        record.forward(z, record.parameter, lease.tensor)
        return lease

    def _activation_backward(self, k: int, grad: Lease, output: Tensor | None, spent: bool, pool: Pool) -> Lease:
        """The gradient of z_k, written over that of h_k where it is owned, or over z_k where that is as large."""
        record, kept = self.records[k], self.kept[k]
        assert record is not None
        if kept is None:
            kept, spent = output, False
            assert kept is not None
        if spent:
            self._take(k)
        if record.gated:
            into = Lease(kept) if spent else pool.borrow(kept.shape, kept)
        else:
            into = grad if grad.owned else pool.borrow(kept.shape, kept)
        record.backward(grad.tensor, kept, record.parameter, into.tensor)
        if into is not grad:
            pool.release(grad)
        if spent and not record.gated:
            pool.bury(kept)
        return into

    def _note_zeros(self, k: int, spent: bool, pool: Pool) -> Tensor | None:
        """Where relu gave zero, if that is all its backward needs and its map is the best memory there is."""
        record, kept = self.records[k], self.kept[k]
        if record is None or not record.zero_where_masked or kept is None or not spent:
            return None
        return kept <= 0 if pool.is_empty and kept.is_cpu else None

    def _take(self, k: int) -> Tensor:
        """Move the map of layer k out."""
        kept = self.kept[k]
        assert kept is not None
        self.kept[k] = self.hidden[k] = None
        return kept
