"""A chain of linear maps and activations, forward and backward, that keeps one map per layer.

    z_k = h_{k-1} W_kᵀ + b_k        h_k = act_k(z_k)        h_{-1} = x

Forward and backward are one loop each over the layers, with little Python in it: on an accelerator a step of such a
chain takes as long as the host needs to launch its kernels.

[Note: two gradients] Backward holds two gradients: that of z_k and that of h_{k-1}. The backward of the activation
writes the gradient of z_{k-1} over that of h_{k-1}. On the CPU freed memory costs page faults when it is allocated
again. There the next gradient is written into dead memory, which nothing reads any more (`Rooms`); if there is none,
into scratch, which outlives the chain. At the top of a chain of relus no memory is dead yet. There backward notes which
elements of a relu's output are zero, one byte each, and writes the gradient over that output. On an accelerator the
caching allocator does all of this at no cost: the memory of a dropped tensor is the next that it returns.

[Note: one pass] On CUDA one kernel rebuilds h_{k-1} over z_{k-1} and turns the gradient of h_{k-1} into that of z_{k-1}
(`leangrad.kernels.rebuild`). There are as many launches as in plain PyTorch, z_{k-1} is read once, and no memory is
allocated. On an H200 this launch costs the host 6 µs; torch's two launches cost 18 µs.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.engine.grad_buffer import return_scratch, take_scratch
from leangrad.kernels.rebuild import rebuild_and_backward
from leangrad.ops.activation import FRESH, OVER, Activation

__all__ = ["Chain"]

# A smaller map is stored, as plain PyTorch stores it: another kernel launch costs more than its bytes are worth.
REBUILD_MIN_BYTES = 1 << 20

Tensors = Sequence[Tensor | None]  # x, W_0, b_0, W_1, b_1, ...


class Writer(Protocol):
    """Computes the gradients of parameters. It writes a gradient into the parameter's own place, or returns it."""

    def product(self, index: int, x: Tensor, g: Tensor) -> Tensor | None:
        """Returns gᵀ x for the weight `tensors[index]`, or None if it was written or is not part of this backward."""

    def sum(self, index: int, g: Tensor) -> Tensor | None:
        """Returns Σ_rows g for the bias `tensors[index]`, or None if it was written or is not part of this backward."""


class Rooms:
    """Finds memory for results on the CPU: dead memory, which nothing reads any more, else scratch.

    `close` must be called at the end: it returns the scratch.
    """

    def __init__(self) -> None:
        self.dead: Tensor | None = None  # the largest dead memory; None if there is none
        self.scratch: list[Tensor] = []  # all scratch that was taken

    def room(self, shape: torch.Size, like: Tensor) -> Tensor:
        """Returns memory of `shape`, with arbitrary contents; `like` has the dtype and the device."""
        memory, numel = self.dead, shape.numel()
        if memory is None or memory.numel() < numel:
            memory = take_scratch(shape, like)
            self.scratch.append(memory)
        else:
            self.dead = None
        return memory if memory.shape == shape else memory.view(-1)[:numel].view(shape)

    def room_to_keep(self, shape: torch.Size) -> Tensor | None:
        """Returns the dead memory for a result that leaves the chain; None unless it fits exactly and is no scratch."""
        dead = self.dead
        if dead is None or dead.untyped_storage().nbytes() != shape.numel() * dead.element_size():
            return None
        return None if any(dead.data_ptr() == memory.data_ptr() for memory in self.scratch) else dead.view(shape)

    def drop(self, memory: Tensor) -> None:
        """Mark `memory` as dead. Only the larger of two is remembered: one is enough for the next gradient."""
        if memory.is_contiguous() and (self.dead is None or self.dead.numel() < memory.numel()):
            self.dead = memory

    def close(self) -> None:
        """Return the scratch to the store, where the next chain takes it."""
        for memory in self.scratch:
            return_scratch(memory)


class Chain:
    """One run through the layers, and the maps that it keeps for backward.

    records: the activation of each layer; None for a layer without one.
    needs: for each of x, W_0, b_0, ..., whether it needs a gradient.

    `kept[k]` is the tensor that the backward of the activation of layer k reads: z_k or h_k. `hidden[k]` is h_k, which
    the gradient of the next weight reads. It is the same tensor as `kept[k]` if that is h_k, else a second one; it is
    None if h_k is rebuilt from z_k, or not needed. The output is never among them: if `reads_output`, the caller must
    hold it and pass it to `backward`. Unless `can_overwrite`, `backward` gains little by a gradient that is `ours`.

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
        self.reads_output, self.can_overwrite = False, True
        self.writer: Writer | None = None
        self.output: Tensor | None = None  # in backward, if `reads_output`: the output, until it has been read
        self._borrowers: list[weakref.ref[object]] = []

    @property
    def can_lend(self) -> bool:
        """Whether the output is an activation of a kept input, from which it can be computed again."""
        record = self.records[-1] if self.records else None
        return record is not None and record.keeps == "input" and self.kept[-1] is not None

    def lend(self, borrower: object) -> tuple[Activation, Tensor]:
        """Returns the last activation and its kept input, which backward does not overwrite while `borrower` exists."""
        record, kept = self.records[-1], self.kept[-1]
        assert record is not None
        assert kept is not None
        self._borrowers.append(weakref.ref(borrower))
        return record, kept

    def forward(self, tensors: Tensors) -> Tensor:
        """Returns the output of the last layer, in memory of its own."""
        needs, kept, hidden, last = self.needs, self.kept, self.hidden, len(self.records) - 1
        h, first = tensors[0], needs.index(True) if True in needs else len(needs)
        assert h is not None
        linear, rooms = F.linear, Rooms() if h.is_cpu else None
        self.can_overwrite = rooms is not None or self.records[last] is not None
        asked = fresh = over = None
        for k, record in enumerate(self.records):
            i = 2 * k + 1
            h = z = linear(h, tensors[i], tensors[i + 1])  # type: ignore[arg-type]
            if record is not asked:
                asked, fresh, over = record, *_torchs_own(record)
            if record is None:
                pass
            elif first > i + 1 or record.keeps == "output":
                h = over(z) if over else record.forward(z, record.parameter, z if record.in_place else None)
                if first <= i + 1:  # x, or a weight or bias up to here, needs a gradient
                    kept[k] = h
            else:
                kept[k] = z
                is_rebuilt = k < last and z.nbytes >= REBUILD_MIN_BYTES
                if is_rebuilt and rooms is not None:
                    h = record.forward(z, record.parameter, rooms.room(_shape_after(record, z), z))
                    rooms.drop(h)  # the next layer reads h before this memory is written again
                else:
                    h = fresh(z) if fresh else record.forward(z, record.parameter, None)
                if is_rebuilt:
                    continue
            if k < last and needs[i + 2]:
                hidden[k] = h
        if kept[last] is h:
            kept[last], self.reads_output = None, True
        if rooms is not None:
            rooms.close()
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
        """Returns a gradient for each of `tensors` that needs one, else None; see [Note: two gradients].

        output: that of `forward`, if `reads_output`. It may be left in `self.output` instead: backward takes it out
            there, so that it can be freed as soon as it was read.
        ours: `g` may be overwritten.
        spent: the kept maps may be overwritten: nothing reads them after this call.
        """
        if output is not None:
            self.output = output
        if g.is_cpu:
            return self._backward_in_rooms(g, tensors, ours, spent)
        return self._backward_on_device(g, tensors, ours, spent)

    def _backward_on_device(self, g: Tensor, tensors: Tensors, ours: bool, spent: bool) -> list[Tensor | None]:
        """Backward on an accelerator, with little work for the host. `spare` is the gradient before the last one."""
        needs, records, writer, mm = self.needs, self.records, self.writer, torch.mm
        found: list[Tensor | None] = [None] * len(needs)
        first, last = needs.index(True), len(records) - 1
        spare, spare_width, asked, one_pass = None, -1, None, None
        record: Any  # record and z are set wherever h is None
        z: Any
        if records[last] is not None:
            g, ours = self._last_activation_backward(g, ours, spent, None), True
        for k in range(last, -1, -1):
            i, record, z, h, below = 2 * k + 1, None, None, tensors[0], None
            if k:
                record, z, h = records[k - 1], self.kept[k - 1], self.hidden[k - 1]
                if spent:
                    self.kept[k - 1] = self.hidden[k - 1] = None
            weight: Tensor = tensors[i]  # type: ignore[assignment]
            rows, columns = weight.shape
            room = spare if spare_width == columns else None
            if needs[i + 1]:
                found[i + 1] = g.sum(0) if writer is None else writer.sum(i + 1, g)
            if needs[i]:
                if h is None and spent and first < i:
                    if asked is not record:
                        asked, one_pass = record, rebuild_and_backward(record, z)
                    if one_pass is not None:
                        below, h = mm(g, weight) if room is None else mm(g, weight, out=room), z
                        one_pass(below, z)
                if h is None:
                    h = room = record.forward(z, record.parameter, room)
                found[i] = mm(g.t(), h) if writer is None else writer.product(i, h, g)
            if first >= i:  # nothing before this weight needs a gradient
                break
            h = None  # frees the map, unless another name refers to it
            if below is None:
                below = mm(g, weight) if room is None else mm(g, weight, out=room)
                if record is not None and record.gated:
                    below = _activation_backward(record, z, below, True, spent, None)
                elif record is not None:
                    record.backward(below, z, record.parameter, below)
            if ours and g.is_contiguous():  # kernels take it by address
                spare, spare_width = g, rows
            g, ours = below, True
        found[0] = g if first == 0 else None
        return found

    def _backward_in_rooms(self, g: Tensor, tensors: Tensors, ours: bool, spent: bool) -> list[Tensor | None]:
        """Backward on the CPU, where new memory is costly: results are written into `Rooms`."""
        needs, records, rooms, writer = self.needs, self.records, Rooms(), self.writer
        found: list[Tensor | None] = [None] * len(needs)
        first, last = needs.index(True), len(records) - 1
        if records[last] is not None:
            g, ours = self._last_activation_backward(g, ours, spent, rooms), True
        for k in range(last, -1, -1):
            weight: Tensor = tensors[2 * k + 1]  # type: ignore[assignment]
            room = zeros = None
            if needs[2 * k + 2]:
                found[2 * k + 2] = g.sum(0) if writer is None else writer.sum(2 * k + 2, g)
            if needs[2 * k + 1]:
                h = self.hidden[k - 1] if k else tensors[0]
                if h is None:
                    h = room = self._rebuild(k - 1, rooms.room(torch.Size((g.shape[0], weight.shape[1])), g))
                found[2 * k + 1] = torch.mm(g.t(), h) if writer is None else writer.product(2 * k + 1, h, g)
            if first > 2 * k:
                break
            if room is None:
                room, zeros = self._find_room(k, g, weight, rooms, spent)
            if ours:
                rooms.drop(g)
            g, ours = torch.mm(g, weight, out=room), True
            if zeros is not None:
                g.masked_fill_(zeros, 0)
            elif k and (record := records[k - 1]) is not None:
                g = _activation_backward(record, self._take(k - 1, spent), g, True, spent, rooms)
        found[0] = g if first == 0 else None
        rooms.close()
        return found

    def hand_over(self) -> list[Tensor]:
        """Returns all kept maps, each once, and drops them; `take_back` must be called before `backward`."""
        maps = {id(t): t for t in (*self.kept, *self.hidden) if t is not None}
        places = {key: i for i, key in enumerate(maps)}
        self._places = [[-1 if t is None else places[id(t)] for t in row] for row in (self.kept, self.hidden)]
        self.let_go()
        return list(maps.values())

    def take_back(self, maps: Sequence[Tensor], alone: Sequence[bool]) -> bool:
        """Store the maps of `hand_over` again; returns whether all are `alone`, so that backward may overwrite them."""
        for row, places in zip((self.kept, self.hidden), self._places, strict=True):
            row[:] = [None if i < 0 else maps[i] for i in places]
        return all(alone)

    def let_go(self) -> None:
        """Drop all kept maps."""
        for row in (self.kept, self.hidden):
            row[:] = [None] * len(row)

    def _rebuild(self, k: int, room: Tensor | None) -> Tensor:
        """Returns h_k, rebuilt from z_k, in `room` if given."""
        record, z = self.records[k], self.kept[k]
        assert record is not None
        assert z is not None
        return record.forward(z, record.parameter, room)

    def _last_activation_backward(self, g: Tensor, ours: bool, spent: bool, rooms: Rooms | None) -> Tensor:
        """Returns the gradient of the last z, from its kept map or from the output, which belongs to the caller."""
        last = len(self.records) - 1
        record = self.records[last]
        assert record is not None
        if self.reads_output:
            output, self.output = self.output, None
            assert output is not None
            return _activation_backward(record, output, g, ours, False, rooms)
        spent = spent and not any(borrower() is not None for borrower in self._borrowers)
        return _activation_backward(record, self._take(last, spent), g, ours, spent, rooms)

    def _find_room(
        self, k: int, g: Tensor, weight: Tensor | None, rooms: Rooms, spent: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns memory for the gradient of h_{k-1}, or None, and the zeros of a relu's output, or None.

        The zeros are returned if the memory is that of the output of relu: its backward needs them after that output
        was overwritten.
        """
        assert weight is not None
        shape = torch.Size((g.shape[0], weight.shape[1]))
        if k == 0:
            room = rooms.room_to_keep(shape)
            rooms.dead = None  # the last product: dead memory of another size would only add to the peak
            return room, None
        record, kept = self.records[k - 1], self.kept[k - 1]
        if record is not None and record.zero_where_masked and kept is not None and spent and rooms.dead is None:
            return self._take(k - 1, spent), kept <= 0
        return rooms.room(shape, g), None

    def _take(self, k: int, spent: bool) -> Tensor:
        """Returns the kept map of layer k; if `spent`, this object drops it."""
        kept = self.kept[k]
        assert kept is not None
        if spent:
            self.kept[k] = self.hidden[k] = None
        return kept


def _activation_backward(
    record: Activation, kept: Tensor, g: Tensor, ours: bool, spent: bool, rooms: Rooms | None
) -> Tensor:
    """Returns the gradient of z: over `g` if it is `ours`; for a gated activation over `kept`, z, if it is `spent`.

    The gradient of a gated activation's z is as large as z, and twice as large as `g`.
    """
    if record.gated:
        into: Tensor | None = kept if spent else torch.empty_like(kept)
    elif ours:
        into = g
    else:
        into = None if rooms is None else rooms.room(kept.shape, kept)
    dz = record.backward(g, kept, record.parameter, into)
    if rooms is not None:
        if ours and into is not g:
            rooms.drop(g)
        if spent and into is not kept:
            rooms.drop(kept)
    return dz


def _torchs_own(record: Activation | None) -> tuple[Callable[[Tensor], Tensor] | None, ...]:
    """Returns the torch functions that equal the activation: into new memory, and over its input; None if none does."""
    return (None, None) if record is None else (FRESH.get(record.forward), OVER.get(record.forward))


def _shape_after(record: Activation, z: Tensor) -> torch.Size:
    return torch.Size((*z.shape[:-1], z.shape[-1] // 2)) if record.gated else z.shape
