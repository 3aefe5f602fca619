"""Training steps without arithmetic: the memory of every tensor is allocated, but never written to or read.

A training step of any size runs here with the real model, the real ledger, the real FSDP2, the real optimizer and the
real allocator, as one rank of torch's fake process group. Only the kernels do not run. Torch's fake tensors give the
shape, stride and dtype of what an op returns, and that is allocated uninitialised. Memory that is never written to
uses virtual addresses but no physical memory, so a rank of a 70B model fits into a small machine. It comes from the
usual allocator, so ``leangrad.measure`` counts it like that of any step, with the storages that FSDP2 resizes and those
that backward frees.

Memory that a kernel allocates and frees internally is not counted. Views, ops on integers only (tokens, positions,
targets) and ops on few elements (rotary frequencies, the loss) are computed, because programs branch on their values.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

FEW = 256  # elements; an op is computed if none of its floating-point tensors has more
PLAIN = {Tensor, torch.nn.Parameter}
PR_SET_THP_DISABLE = 41
READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)  # ops whose result depends on values


@contextlib.contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """Be rank 0 of ``ranks`` ranks inside the context; no other rank exists, and collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def avoid_huge_pages() -> None:
    """Disable huge pages in this process.

    The allocator writes a few bytes beside each block; with huge pages Linux backs them with 2 MB of physical memory.
    With four blocks of Llama 8B the process uses 0.52 GB, with huge pages 0.92 GB.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


class Result(NamedTuple):
    """A description of a tensor that an op returns, in new memory or in that of one of its arguments."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    argument: int | None  # index of the argument tensor whose memory it uses; None: new memory
    is_argument: bool  # whether it is that tensor itself, as in-place ops return it

    def make(self, arguments: list[Tensor]) -> Tensor:
        """Return the result tensor of a call with these argument tensors."""
        if self.argument is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        argument = arguments[self.argument]
        return argument if self.is_argument else argument.as_strided(self.shape, self.stride, self.offset)


class Untouched(TorchDispatchMode):
    """A mode in which ops on the CPU allocate what they return and compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode()
        # Results by op and description of the arguments: their `Result`s and tree structure, or None if it is computed.
        self._known: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what ``func`` returns, uninitialised; compute it if it is one of the exceptions."""
        kwargs = kwargs or {}
        if FakeTensor in types:  # DTensor uses fake tensors to find out about placements
            return func(*args, **kwargs)
        if not PLAIN.issuperset(types):  # let a DTensor run first: it calls ops on its local tensors
            return NotImplemented
        if func.is_view or func.namespace == "profiler" or any(tag in func.tags for tag in READS):
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        key = (func, _look(args, tensors), _look(tuple(kwargs.items()), tensors))
        if key not in self._known:
            self._known[key] = self._results(func, args, kwargs)
        if self._known[key] is None:
            return func(*args, **kwargs)
        results, form = self._known[key]
        made = [r.make(tensors) if isinstance(r, Result) else r for r in results]
        return made[0] if form.is_leaf() else tree_unflatten(made, form)

    def _results(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with fake tensors; return its results and their tree structure, or None to compute it."""
        with self._fake:
            args, kwargs = tree_map_only(Tensor, _fake, (args, kwargs))
            found, form = tree_flatten(func(*args, **kwargs))
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(map(_is_small, (t for t in (*arguments, *found) if isinstance(t, Tensor)))):
            return None
        memory = {_memory(argument): n for n, argument in enumerate(arguments)}
        itself = {id(argument): n for n, argument in enumerate(arguments)}
        results = []
        for one in found:
            if isinstance(one, Tensor):
                facts = tuple(one.shape), one.stride(), one.dtype, int(one.storage_offset())
                argument = itself.get(id(one), memory.get(_memory(one)))
                one = Result(*facts, argument, id(one) in itself)
            results.append(one)
        return results, form


def _look(value: Any, tensors: list[Tensor]) -> Any:
    """Return a hashable description of an argument: of a tensor shape, stride, dtype, offset and storage size.

    The tensors themselves are appended to ``tensors``.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.untyped_storage().nbytes()
    if isinstance(value, list | tuple):
        return type(value), tuple([_look(one, tensors) for one in value])
    return type(value), value


def _fake(tensor: Tensor) -> Tensor:
    """Return a fake tensor with geometry, dtype and storage size of ``tensor``; to be called in the fake mode."""
    whole = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= FEW or not (tensor.is_floating_point() or tensor.is_complex())
