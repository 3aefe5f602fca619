"""Steps without arithmetic: every tensor has its memory, and nobody ever touches it.

A training step of any size runs here as it is: the real model, the real ledger, the real FSDP2, the real optimizer and
the real allocator, as one rank of torch's fake process group. Only the kernels are left out. What an op returns is
asked of torch's fake tensors, and allocated uninitialised. Memory that is never written to takes addresses and nothing
of the machine, so that a rank of a 70B model fits into a small one. And since it is the allocator's own memory,
``leangrad.measure`` counts it as it counts any other step's, with what FSDP2 resizes and what backward frees.

Not counted is what a kernel allocates and frees within itself. Computed after all are views, ops on integers alone
(tokens, positions, targets) and ops on a few elements (rotary frequencies, the loss): programs branch on those.
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

FEW = 256  # elements: floating tensors up to this size are computed
PLAIN = {Tensor, torch.nn.Parameter}
PR_SET_THP_DISABLE = 41
READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)  # of ops that return what values say


@contextlib.contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """The first of so many ranks, of which no other exists: its collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def avoid_huge_pages() -> None:
    """Keep Linux from backing the few bytes that the allocator writes beside each block with 2 MB, in this process.

    Four blocks of Llama 8B: the process takes 0.52 GB, with huge pages 0.92.
    """
    with contextlib.suppress(AttributeError, OSError):  # another system
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


class Result(NamedTuple):
    """A tensor that an op returns: new memory, or that of one of its arguments."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    argument: int | None  # the number of the tensor in whose memory it lies
    is_argument: bool  # it is that tensor itself, as in-place ops return it

    def make(self, arguments: list[Tensor]) -> Tensor:
        """This result of a call with these tensors."""
        if self.argument is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        argument = arguments[self.argument]
        return argument if self.is_argument else argument.as_strided(self.shape, self.stride, self.offset)


class Untouched(TorchDispatchMode):
    """Inside of it ops on the CPU allocate what they return, and compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode()
        self._known: dict[Any, Any] = {}  # by an op and what its arguments look like: its results; None: it is computed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What ``func`` returns, uninitialised."""
        kwargs = kwargs or {}
        if FakeTensor in types:  # by which DTensor finds out about placements
            return func(*args, **kwargs)
        if not PLAIN.issuperset(types):  # a DTensor first does what it does with its local tensors
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
        """What a call of ``func`` gives back, and its form, by fake tensors; None: it is to be computed."""
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
    """All of an argument that an op's results depend on, but for the values of tensors, which go into ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.untyped_storage().nbytes()
    if isinstance(value, list | tuple):
        return type(value), tuple([_look(one, tensors) for one in value])
    return type(value), value


def _fake(tensor: Tensor) -> Tensor:
    """A fake tensor that looks like this one."""
    whole = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= FEW or not (tensor.is_floating_point() or tensor.is_complex())
