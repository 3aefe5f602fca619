"""The joint forward and backward graph of one real step, as eager PyTorch runs it.

[Note: values] The recorder is a dispatch mode. It sees the ATen ops below autograd and autocast, in forward and in
backward, on real tensors, so data-dependent routing, Python scalars and custom autograd Functions need no special
treatment. A node of the graph is a value: the bytes that one tensor holds at one moment. Tensors are distinguished by
their storage and by the bytes of it that they cover, so a transpose is the same value as its base, and a slice is a
smaller value made from the larger one. An in-place op makes a new value; ops that have read the old value keep it as
their input. Two regions of a storage whose bytes interleave count as overlapping, and a slice is made from the first
tensor that it was cut from: both can only raise the floor.

[Note: one value] The same op on the same values, constants and random state is one value wherever it runs. A value that
a checkpoint computes again in backward is forward's own value, so a checkpointed model has the graph of the plain one.

[Note: the gradient] Everything that depends on the incoming gradient is one node, because none of it can be kept from
the forward. The other values that the ops of this node read are what backward needs. Work of the backward that does not
depend on the gradient (a mask, a derivative) could as well run in the forward, and is part of the graph like any other
op; it runs once, so it never counts as a product.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.floor.aten_op import UNWRITTEN, Op, stored_tensors

__all__ = ["Recorder", "Value"]


@dataclass(eq=False)
class Value:
    """The bytes of one tensor at one moment: a node of the graph."""

    index: int
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    module: str
    inputs: list[int]
    fixed: bool = False  # cannot be rebuilt: a product of the forward, or not made by an op at all
    free: bool = False  # exists anyway, so keeping it costs nothing
    needed: bool = False  # read by an op that depends on the incoming gradient
    unwritten: bool = False  # memory that no op has written yet


@dataclass(frozen=True)
class _Region:
    """The bytes of its storage that a tensor covers: an offset, then (stride, count) for each dimension, in bytes."""

    offset: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Region":
        """Return a tensor's region; dimensions are sorted and joined, so that a transpose has the same region."""
        item = tensor.element_size()
        if tensor.numel() == 0:
            return cls(0, ((1, 0),))
        runs = [(1, item)]
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            inner_stride, inner_count = runs[-1]
            if size == 1 or stride == 0:
                continue
            if stride * item == inner_stride * inner_count:
                runs[-1] = inner_stride, inner_count * size
            else:
                runs.append((stride * item, size))
        return cls(int(tensor.storage_offset()) * item, tuple(runs))

    @cached_property
    def end(self) -> int:
        return self.offset + sum(stride * (count - 1) for stride, count in self.runs) + 1

    @cached_property
    def bytes(self) -> int:
        return min(prod(count for _, count in self.runs), self.end - self.offset)  # bytes in several windows count once

    def is_apart_from(self, other: "_Region") -> bool:
        return self.end <= other.offset or other.end <= self.offset


class _Look(NamedTuple):
    """The properties of a value that the table shows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Look":
        return cls(tuple(tensor.shape), tensor.dtype, _Region.of(tensor).bytes)


@dataclass(eq=False)
class _Storage:
    """What a storage holds now: the value of the whole, and of each region of it that was read or written so far."""

    whole: Value
    whole_bytes: int
    regions: dict[_Region, Value]
    foreign: bool  # no recorded op made it: it is the caller's, or a constant
    parents: dict[_Region, _Region] = field(default_factory=dict)  # of a slice of a slice: the outer slice
    death: object = None  # weak reference whose callback forgets the storage


class Recorder(_torch.DispatchMode):
    """Runs every op unchanged and records which value was made from which."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.modules = [""]  # names of the modules that are running, the innermost last
        self.in_backward = False
        self._gradient = self._add("gradient", _Look((), torch.float32, 0), [])
        self._storages: dict[int, _Storage] = {}
        self._seen: dict[object, list[Value]] = {}

    def begin_backward(self, loss: Tensor) -> Tensor:
        """End the forward: mark the caller's storages and the loss as free. Returns the gradient of the loss."""
        for storage in list(self._storages.values()):
            self._free(storage)
        self.read(loss).free = True
        self.in_backward = True
        gradient = torch.ones_like(loss)
        self._store(gradient, self._gradient, gradient.nbytes)
        return gradient

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and record the value of each tensor that it made or changed."""
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a wrapper subclass: the ops on its inner tensors arrive here later
        kwargs = kwargs or {}
        op = Op(func, args, kwargs)
        inputs = [self._read_written(tensor, op) for tensor in op.reads]
        key = None if op.name in UNWRITTEN else (func, self._freeze_call(op), op.random_state())
        result = func(*args, **kwargs)
        outputs, given = (
            stored_tensors(result),
            {_torch.storage_address(tensor): tensor for tensor in reversed(op.tensors)},
        )
        fresh = [tensor for tensor in outputs if _torch.storage_address(tensor) not in given]
        looks = [_Look.of(tensor) for tensor in (*op.writes, *fresh)]
        made = self._make(op.name, looks, inputs, key)
        for value in made:
            value.fixed |= op.is_product and not self.in_backward
            value.unwritten = op.name in UNWRITTEN
        for tensor, value in zip(op.writes, made, strict=False):
            self._write(tensor, value, op.name)
        born: dict[int, _Storage] = {}
        for tensor, value in zip(fresh, made[len(op.writes) :], strict=True):
            if (address := _torch.storage_address(tensor)) in born:  # two outputs in one buffer
                born[address].regions[_Region.of(tensor)] = value
            else:
                born[address] = self._store(tensor, value, _Region.of(tensor).bytes)
        for tensor in outputs:
            if (address := _torch.storage_address(tensor)) in given:
                self._note_view(given[address], tensor)
        return result

    # Values

    def _add(self, op: str, look: _Look, inputs: Sequence[Value]) -> Value:
        sources = list(dict.fromkeys(value.index for value in inputs))
        self.values.append(Value(len(self.values), op, *look, self.modules[-1], sources))
        return self.values[-1]

    def _make(self, op: str, looks: Sequence[_Look], inputs: Sequence[Value], key: object) -> list[Value]:
        """Return a value for each look; see the notes `one value` and `the gradient`."""
        if self._gradient in inputs:
            for value in inputs:
                value.needed = value is not self._gradient
            return [self._gradient] * len(looks)
        if key is not None and key in self._seen:
            return self._seen[key]
        made = [self._add(op, look, inputs) for look in looks]
        if key is not None:
            self._seen[key] = made
        return made

    def _freeze_call(self, op: Op) -> object:
        return tuple((name, self._freeze(op.given[name], name not in op.unread)) for name in sorted(op.given))

    def _freeze(self, tree: Any, is_read: bool) -> object:
        """Return a key that is equal for two arguments with which an op gives the same result."""
        if isinstance(tree, Tensor) and tree.layout == torch.strided:
            content = self.read(tree).index if is_read else None
            return content, tree.shape, tree.stride(), tree.dtype, tree.device, tree.is_conj(), tree.is_neg()
        if isinstance(tree, Tensor):
            return tree.layout, self._freeze(stored_tensors(tree), is_read)
        if isinstance(tree, list | tuple):
            return tuple(self._freeze(one, is_read) for one in tree)
        return type(tree), tree.hex() if isinstance(tree, float) else tree  # 0.0 == -0.0, but not in hex

    # Storages

    def read(self, tensor: Tensor) -> Value:
        """Return the value that the tensor holds now."""
        return self._read_region(self._storage(tensor), _Region.of(tensor), tensor)

    def _read_written(self, tensor: Tensor, op: Op) -> Value:
        value = self.read(tensor)
        if value.unwritten and value.bytes and not op.writes and not op.is_view:
            raise LeangradError(
                f"{op.name} in module {self.modules[-1]!r} reads a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
                " that no op has written: a kernel was launched past PyTorch's dispatcher, and what it reads cannot be "
                "seen; make it an op with torch.library.custom_op, or take the floor of the model without it"
            )
        return value

    def _read_region(self, storage: _Storage, region: _Region, tensor: Tensor) -> Value:
        if region not in storage.regions:
            parent = storage.parents.get(region)
            base = storage.whole if parent is None else self._read_region(storage, parent, tensor)
            if region.bytes >= storage.whole_bytes or base is self._gradient:
                return base
            name = f"{base.op.removesuffix(' (part)')} (part)"
            [value] = self._make(name, [_Look.of(tensor)], [base], ("part", base.index, region))
            value.unwritten = base.unwritten
            storage.regions[region] = value
        return storage.regions[region]

    def _note_view(self, base: Tensor, view: Tensor) -> None:
        """Record that a slice of a slice is made from the outer slice, so that a cut may keep either."""
        storage, outer, inner = self._storage(base), _Region.of(base), _Region.of(view)
        if inner.bytes < outer.bytes < storage.whole_bytes:
            storage.parents.setdefault(inner, outer)
        self._read_region(storage, inner, view)

    def _write(self, tensor: Tensor, value: Value, op: str) -> None:
        """Record that the tensor's region holds `value` from now on; the rest of its storage is unchanged."""
        storage, region = self._storage(tensor), _Region.of(tensor)
        if region.bytes >= storage.whole_bytes:
            storage.whole, storage.whole_bytes, storage.regions = value, region.bytes, {region: value}
            return
        whole = storage.whole
        look = _Look(whole.shape, whole.dtype, storage.whole_bytes)
        [storage.whole] = self._make(op, [look], [whole, value], ("write", whole.index, value.index, region))
        storage.regions = {one: old for one, old in storage.regions.items() if one.is_apart_from(region)}
        storage.regions[region] = value

    def _storage(self, tensor: Tensor) -> _Storage:
        found = self._storages.get(_torch.storage_address(tensor))
        if found is None:
            size = tensor.untyped_storage().nbytes()
            value = self._add("constant", _Look(tuple(tensor.shape), tensor.dtype, size), [])
            value.fixed, value.free = True, self.in_backward
            found = self._store(tensor, value, size, foreign=True)
        return found

    def _store(self, tensor: Tensor, value: Value, size: int, foreign: bool = False) -> _Storage:
        address = _torch.storage_address(tensor)
        storage = _Storage(value, size, {} if foreign else {_Region.of(tensor): value}, foreign)
        self._storages[address] = storage

        def forget(death: object) -> None:
            """Drop the storage: another one may get its address."""
            self._free(storage)
            if self._storages.get(address) is storage:
                del self._storages[address]

        storage.death = weakref.ref(tensor.untyped_storage(), forget)
        return storage

    def _free(self, storage: _Storage) -> None:
        """Mark the last state of a foreign storage as free, in forward only.

        It exists anyway, and a constant whose storage was freed can be made again from Python.
        """
        if storage.foreign and not self.in_backward:
            for value in (storage.whole, *storage.regions.values()):
                value.free = True
