"""Leases: gradients that count the claims on their memory, and the pool of a tape's dead memory.

Whoever has the only claim may overwrite. When the last claim is released the memory is dead, and the next gradient of
the same tape is written there instead of into new memory.
"""

import torch
from torch import Tensor

__all__ = ["Lease", "Pool", "borrowed", "release_scratch", "return_scratch", "take_scratch"]


class Lease:
    """A tensor, the contiguous memory it lies in, and one claim on that memory.

    `claims` counts the claims of all leases on the memory; None, the usual case, is one. `scratch` memory outlives the
    tape; see `Pool`.
    """

    __slots__ = ("claims", "memory", "scratch", "tensor")

    def __init__(self, tensor: Tensor, memory: Tensor | None = None, scratch: bool = False):
        self.tensor, self.scratch = tensor, scratch
        self.memory = tensor if memory is None else memory
        self.claims: list[int] | None = None

    @property
    def owned(self) -> bool:
        """Nobody else has a claim: the tensor may be overwritten."""
        return self.claims is None or self.claims[0] == 1

    def lend(self) -> "Lease":
        """A second claim on the same memory: until one is released, neither may be overwritten."""
        if self.claims is None:
            self.claims = [1]
        self.claims[0] += 1
        return self.viewed_as(self.tensor)

    def viewed_as(self, tensor: Tensor) -> "Lease":
        """The same claim, moved to a view of the tensor."""
        lease = Lease(tensor, self.memory, self.scratch)
        lease.claims = self.claims
        return lease


def borrowed(tensor: Tensor) -> Lease:
    """A lease on memory that somebody outside holds as well, and that is therefore never owned."""
    lease = Lease(tensor)
    lease.claims = [2]
    return lease


# Scratch that waits for the next tape or chain, the largest two per dtype. Only on the CPU, where memory that was freed
# is paid for again in page faults; an accelerator's caching allocator is such a store already, and knows about streams.
# Taking is one `pop`, so two threads never get the same memory.
_waiting: dict[torch.dtype, list[Tensor]] = {}


def release_scratch() -> None:
    """Return the scratch that waits for the next tape to the allocator.

    >>> release_scratch()
    """
    _waiting.clear()


def take_scratch(shape: torch.Size, like: Tensor) -> Tensor:
    """Memory for at least this shape, with anything in it: what waits, or new."""
    waiting = _waiting.pop(like.dtype, []) if like.is_cpu else []
    taken = next((memory for memory in waiting if memory.numel() >= shape.numel()), None)
    if taken is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    _waiting[like.dtype] = [memory for memory in waiting if memory is not taken]
    return taken


def return_scratch(memory: Tensor) -> None:
    """Let memory that nobody looks at wait for whoever takes scratch next."""
    if memory.is_cpu and not memory.is_inference():
        waiting = [*_waiting.pop(memory.dtype, []), memory]
        _waiting[memory.dtype] = sorted(waiting, key=Tensor.numel)[-2:]


class Pool:
    """The memory of one tape that is dead and may be written again: scratch, and at most one other piece.

    One is enough for the next gradient, and what is freed early serves the gradients of the weights.
    """

    def __init__(self) -> None:
        self.scratch: list[Tensor] = []
        self.dead: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing is dead here."""
        return self.dead is None and not self.scratch

    def borrow(self, shape: torch.Size, like: Tensor) -> Lease:
        """A lease on memory of this shape, with anything in it, that must come back before the tape is done."""
        dead, numel = self.dead, shape.numel()
        if dead is not None and dead.numel() >= numel and _alike(dead, like):
            self.dead = None
            return Lease(dead if dead.shape == shape else dead.view(-1)[:numel].view(shape), dead)
        for i, memory in enumerate(self.scratch):
            if memory.numel() >= numel and _alike(memory, like):
                del self.scratch[i]
                break
        else:
            memory = take_scratch(shape, like)
        return Lease(memory if memory.shape == shape else memory.view(-1)[:numel].view(shape), memory, True)

    def give(self, shape: torch.Size, like: Tensor) -> Lease:
        """The same for a result that leaves the tape: memory that is exactly so large, and no scratch."""
        dead = self.dead
        if dead is not None and dead.numel() == shape.numel() and _alike(dead, like):
            self.dead = None
            return Lease(dead.view(shape))
        return Lease(torch.empty(shape, dtype=like.dtype, device=like.device))

    def release(self, lease: Lease) -> None:
        """Give one claim back; after the last one the memory is dead."""
        if lease.claims is not None:
            lease.claims[0] -= 1
            if lease.claims[0]:
                return
        if lease.scratch:
            self.scratch.append(lease.memory)
        else:
            self.bury(lease.memory)

    def bury(self, memory: Tensor) -> None:
        """Take over memory that nobody else will look at again."""
        if memory.is_contiguous() and (self.dead is None or self.dead.numel() < memory.numel()):
            self.dead = memory

    def close(self) -> None:
        """Let the scratch wait for the next tape, and forget the rest."""
        for memory in self.scratch:
            return_scratch(memory)
        self.scratch.clear()
        self.dead = None


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device
