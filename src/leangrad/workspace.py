"""Workspaces: scratch buffers that are lent, given back and lent again instead of freed and allocated again.

    with workspace.default.borrow("scores", (n, m), like=x) as scores:
        torch.mm(x, y, out=scores.tensor)

[Note: capacity] The memory of a buffer has a capacity for each dimension, the next power of two. A request that fits is
lent contiguously from that memory and allocates nothing. If a dimension exceeds its capacity, that capacity grows and
the others stay; if all dimensions are a quarter of their capacity or less, all capacities shrink. So shapes that recur,
and do not differ by a factor of four in every dimension, allocate nothing the second time. Uses whose sizes differ more
should have different names.

[Note: never overwritten] A borrower gets a tensor object of its own (`detach`) on the memory. Everything that can read
the memory later (a node of autograd that saved the tensor, a view, a numpy array, the storage itself) raises a
reference count above its value at the time when only the workspace used the memory. These counts
(`leangrad._torch.reference_counts`) are recorded when the memory is new. Before the memory is lent again they must be
the same; if they differ or cannot be read, the memory is left to its holders and new memory is allocated. All tensors
that are lent from one memory share one version counter, so autograd's own version check is a second safeguard.

[Note: streams] A buffer belongs to the CUDA stream that was current when it was first lent, and is lent again only
there, so the writes of the next borrower are queued behind the work of the last one. If a borrower reads `tensor` on
another stream, that stream waits for the buffer's own stream, and before the buffer is lent again its own stream waits
for that one. A user who passes the tensor on to another stream must synchronize the streams, as always. A backward pass
that runs on another thread has buffers of its own.
"""

from __future__ import annotations

import math
import sysconfig
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from leangrad._torch import is_traced, raw_stream, reference_counts, transforms_active
from leangrad.errors import StaleError

__all__ = ["Borrowed", "Workspace", "default"]


class Borrowed:
    """A buffer that is lent until `release`, until the end of a `with`, or until this object is freed.

    Its first contents are arbitrary, NaN included. If a variable still holds the tensor when the buffer is borrowed
    again, new memory is allocated (see [Note: never overwritten]), so write `borrowed.tensor` where it is used.
    """

    __slots__ = ("__weakref__", "_buffer", "_tensor", "generation", "name")

    def __init__(self, name: str, buffer: _Buffer, tensor: Tensor, generation: int):
        self.name, self.generation = name, generation
        self._buffer = buffer
        self._tensor: Tensor | None = tensor

    @property
    def tensor(self) -> Tensor:
        """The tensor, in the requested shape; raises StaleError once the buffer was given back."""
        buffer, tensor = self._buffer, self._tensor
        if tensor is None or buffer.generation != self.generation:
            raise StaleError(
                f"borrow {self.generation} of {self.name!r} was given back and its memory may have been lent again "
                f"(it is at {buffer.generation}); borrow it anew, or release it later"
            )
        if buffer.stream is not None:
            buffer.visit(tensor)
        return tensor

    def release(self) -> None:
        """Give the buffer back. A second call does nothing."""
        self._tensor = None

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        what = "given back" if self._tensor is None else f"{tuple(self._tensor.shape)}, {self._tensor.dtype}"
        return f"Borrowed({self.name!r}, generation {self.generation}, {what})"


class Workspace:
    """Scratch buffers by name, separate for each number of dimensions, dtype, device, stream and thread.

    `borrow(name, shape)` equals `torch.empty(shape)` whose memory is used again once it was given back. One name may be
    borrowed several times at once: nested borrowers never share memory. Threads may share a workspace. It may be copied
    and pickled with a module; a copy is empty.

    `allocations` counts the tensors that were allocated, `bytes` is the memory held now, `high_water` its maximum.

    >>> workspace = Workspace()
    >>> with workspace.borrow("scores", (3, 100)) as scores:
    ...     torch.full((3, 100), float("nan"), out=scores.tensor).isnan().all()
    tensor(True)
    >>> with workspace.borrow("scores", (4, 120)) as scores:
    ...     torch.mm(torch.ones(4, 2), torch.ones(2, 120), out=scores.tensor).unique()
    tensor([2.])
    >>> workspace  # capacity (4, 128)
    Workspace(buffers=1, allocations=1, bytes=2048, high_water=2048)
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.RLock()  # guards the counters and `_shelves`; not taken if nothing is allocated
        self._shelves: list[weakref.ref[_Shelf]] = []
        self._allocations = self._high_water = 0

    def borrow(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        like: Tensor | None = None,
    ) -> Borrowed:
        """Lend a contiguous buffer of this shape, with arbitrary contents.

        dtype and device default to those of `like`, and without `like` to torch's defaults. Keeps nothing for backward.
        Where memory cannot be used again safely (under a compiler or tracer, in a `torch.func` transform, in the
        capture of a CUDA graph, on a type of device whose order of execution is not known here), the buffer is new each
        time, and is not counted.

        >>> Workspace().borrow("row", (5,), dtype=torch.float64).tensor.shape
        torch.Size([5])
        """
        if like is not None and device is None:
            device, dtype = like.device, dtype or like.dtype
        else:
            device, dtype = _resolve(device), dtype or (like.dtype if like is not None else torch.get_default_dtype())
        shape = torch.Size(shape)
        kind = device.type
        if not _may_pool(kind):
            return Borrowed(name, _NO_BUFFER, torch.empty(shape, dtype=dtype, device=device), 0)
        stream = raw_stream(device) if kind == "cuda" else 0
        buffers = self._shelf().setdefault((name, len(shape), dtype, device, stream), [])
        for buffer in buffers:
            if buffer.is_free:
                break
        else:
            buffer = _Buffer(torch.cuda.current_stream(device) if kind == "cuda" else None)
            buffers.append(buffer)
        return buffer.fit(self, shape, dtype, device).lend(name)

    @property
    def allocations(self) -> int:
        """How often memory was allocated, in all threads, since this workspace was made."""
        return self._allocations

    @property
    def bytes(self) -> int:
        """The bytes held now, lent or not, in all threads."""
        return sum(buffer.nbytes for buffer in self._buffers())

    @property
    def high_water(self) -> int:
        """The maximum of `bytes` so far."""
        return self._high_water

    def clear(self) -> None:
        """Free all memory, of all threads; memory that is lent is freed when its borrower drops it.

        >>> workspace = Workspace()
        >>> with workspace.borrow("row", (5,)):
        ...     pass
        >>> workspace.clear()
        >>> workspace.bytes, workspace.high_water
        (0, 32)
        """
        with self._lock:
            for shelf in self._shelves:
                buffers = shelf()
                if buffers is not None:
                    buffers.clear()

    def _shelf(self) -> _Shelf:
        """Return the buffers of this thread. They are freed with the thread."""
        shelf: _Shelf | None = getattr(self._local, "shelf", None)
        if shelf is None:
            shelf = self._local.shelf = _Shelf()
            with self._lock:
                self._shelves = [s for s in self._shelves if s() is not None] + [weakref.ref(shelf)]
        return shelf

    def _buffers(self) -> Iterator[_Buffer]:
        for ref in list(self._shelves):
            shelf = ref()
            for buffers in [] if shelf is None else list(shelf.values()):
                yield from list(buffers)

    def _count_allocation(self) -> None:
        with self._lock:
            self._allocations += 1
            self._high_water = max(self._high_water, self.bytes)

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()

    def __repr__(self) -> str:
        counts = f"allocations={self.allocations}, bytes={self.bytes}, high_water={self.high_water}"
        return f"Workspace(buffers={sum(1 for _ in self._buffers())}, {counts})"


class _Shelf(dict[tuple[Any, ...], "list[_Buffer]"]):
    """The buffers of one thread, by name, rank, dtype, device and stream."""

    __slots__ = ("__weakref__",)


class _Buffer:
    """Memory of one capacity, and its current borrower."""

    __slots__ = ("borrower", "capacity", "counts", "generation", "memory", "shaped", "stream", "visitors")

    def __init__(self, stream: torch.cuda.Stream | None):
        self.stream = stream
        self.capacity: tuple[int, ...] | None = None
        self.memory: Tensor | None = None
        self.shaped: Tensor | None = None  # the memory in the shape that was lent last
        self.counts: tuple[int, ...] | None = None
        self.generation = 0
        self.borrower: weakref.ref[Borrowed] | None = None
        self.visitors: set[torch.cuda.Stream] = set()

    @property
    def nbytes(self) -> int:
        memory = self.memory
        return 0 if memory is None else memory.numel() * memory.element_size()

    @property
    def is_free(self) -> bool:
        """Whether the last borrower has given the buffer back, or was freed."""
        borrower = None if self.borrower is None else self.borrower()
        return borrower is None or borrower._tensor is None

    @property
    def is_held(self) -> bool:
        """Whether a tensor or array outside the workspace may still read the memory; see [Note: never overwritten]."""
        return self.counts is None or self._count() != self.counts

    def fit(self, workspace: Workspace, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Buffer:
        """Provide memory for this shape that nothing else can see, and allocate it only if there is none."""
        lent_before = self.shaped is not None and self.shaped.shape == shape
        # A shape that was lent just before leaves the capacity as it is.
        capacity = self.capacity if lent_before and self.capacity is not None else _capacity(self.capacity, shape)
        if capacity != self.capacity or self.is_held:
            self._allocate(workspace, capacity, dtype, device)
            lent_before = False
        if not lent_before:
            assert self.memory is not None
            self.shaped = self.memory.as_strided(shape, _contiguous_strides(shape))
        return self

    def lend(self, name: str) -> Borrowed:
        """Return the next generation of this buffer, with a tensor object of its own on the memory."""
        assert self.shaped is not None
        for stream in self.visitors:
            assert self.stream is not None
            self.stream.wait_stream(stream)
        self.visitors.clear()
        self.generation += 1
        borrowed = Borrowed(name, self, self.shaped.detach(), self.generation)
        self.borrower = weakref.ref(borrowed)
        return borrowed

    def _allocate(
        self, workspace: Workspace, capacity: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Free the old memory, then allocate new memory."""
        self.capacity = self.memory = self.shaped = self.counts = None
        self.visitors.clear()  # a stream that still reads there was recorded with the allocator
        with torch.inference_mode(False):  # an inference tensor could not be saved for a backward later
            self.memory = torch.empty(math.prod(capacity), dtype=dtype, device=device)
            self.shaped = self.memory[:0]  # for the counts, which always include such a view
        self.capacity = capacity
        # The counts of a subclass (FakeTensor), or split reference counts (no GIL), do not show who holds the memory.
        self.counts = self._count() if _COUNTS_TELL and type(self.memory) is Tensor else None
        workspace._count_allocation()

    def visit(self, tensor: Tensor) -> None:
        """If the current stream is another than the buffer's own, let it wait for that one; see [Note: streams]."""
        assert self.stream is not None
        if raw_stream(tensor.device) == self.stream.cuda_stream:
            return
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_stream(self.stream)
        tensor.record_stream(stream)
        self.visitors.add(stream)

    def _count(self) -> tuple[int, ...] | None:
        return None if self.memory is None else reference_counts(self.memory)


_NO_BUFFER = _Buffer(None)  # of tensors that are not pooled; its generation stays 0
_COUNTS_TELL = not sysconfig.get_config_var("Py_GIL_DISABLED")


def _capacity(capacity: tuple[int, ...] | None, shape: torch.Size) -> tuple[int, ...]:
    """Return the capacity of a buffer after a request for ``shape``; see [Note: capacity]."""
    if min(shape, default=0) < 0:
        raise ValueError(f"shape: expected sizes of 0 or more, got {tuple(shape)}")
    wanted = tuple([_power_of_two(size) for size in shape])
    if capacity is None or (shape and all(4 * size <= c for size, c in zip(shape, capacity, strict=True))):
        return wanted
    return tuple(map(max, capacity, wanted))


def _contiguous_strides(shape: torch.Size) -> list[int]:
    strides, stride = [0] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        strides[i] = stride
        stride *= max(shape[i], 1)
    return strides


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size` and at least 1."""
    return 1 << (size - 1).bit_length() if size > 1 else 1


def _resolve(device: torch.device | str | int | None) -> torch.device:
    """Return the device with its index, so that `cuda` and `cuda:0` are the same."""
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type != "cuda":
        return device
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _may_pool(kind: str) -> bool:
    """Whether memory may be lent again on this type of device, in the current context."""
    if is_traced() or transforms_active():
        return False
    if kind == "cuda":  # a captured graph owns its memory, and writes there at every replay
        return not torch.cuda.is_current_stream_capturing()
    return kind in ("cpu", "mps")


#: The workspace of callers that have none of their own. Every thread has its own buffers in it.
default = Workspace()
