"""`Lease`: a gradient that counts the claims on its memory. `Pool`: the dead memory of a tape.

The holder of the only claim may overwrite the memory. When the last claim is released, the memory is dead: nothing
reads it any more, and the next gradient of the same tape is written there instead of into new memory.
"""

import torch
from torch import Tensor

__all__ = ["Lease", "Pool", "borrowed", "release_scratch", "return_scratch", "take_scratch"]


class Lease:
    """A tensor, the memory it lies in, and one claim on that memory.

    claims: the number of claims on the memory, in a list that all leases on it share; None, the usual case, means one.
    scratch: whether the memory outlives the tape; see `Pool`.
    """

    __slots__ = ("claims", "memory", "scratch", "tensor")

    def __init__(self, tensor: Tensor, memory: Tensor | None = None, scratch: bool = False):
        self.tensor, self.scratch = tensor, scratch
        self.memory = tensor if memory is None else memory
        self.claims: list[int] | None = None

    @property
    def owned(self) -> bool:
        """Whether this is the only claim, so that the tensor may be overwritten."""
        return self.claims is None or self.claims[0] == 1

    def lend(self) -> "Lease":
        """Returns a second claim on the same memory. Until one of the two is released, neither lease is owned."""
        if self.claims is None:
            self.claims = [1]
        self.claims[0] += 1
        return self.viewed_as(self.tensor)

    def viewed_as(self, tensor: Tensor) -> "Lease":
        """Returns this claim as a lease on `tensor`, which lies in the same memory. It replaces this lease."""
        lease = Lease(tensor, self.memory, self.scratch)
        lease.claims = self.claims
        return lease


def borrowed(tensor: Tensor) -> Lease:
    """Returns a lease on memory that something outside the tape holds as well, so that it is never owned."""
    lease = Lease(tensor)
    lease.claims = [2]
    return lease


# Scratch that waits for the next tape or chain: the largest two pieces per dtype. Only on the CPU, where freed memory
# costs page faults when it is allocated again; an accelerator's caching allocator is such a store already, and knows
# about streams. Scratch is taken with one `dict.pop`, so two threads never get the same memory.
_waiting: dict[torch.dtype, list[Tensor]] = {}


def release_scratch() -> None:
    """Free the scratch that waits for the next tape or chain.

    >>> release_scratch()
    """
    _waiting.clear()


def take_scratch(shape: torch.Size, like: Tensor) -> Tensor:
    """Returns memory for at least `shape`, with arbitrary contents: scratch that waits, or new memory."""
    waiting = _waiting.pop(like.dtype, []) if like.is_cpu else []
    taken = next((memory for memory in waiting if memory.numel() >= shape.numel()), None)
    if taken is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    _waiting[like.dtype] = [memory for memory in waiting if memory is not taken]
    return taken


def return_scratch(memory: Tensor) -> None:
    """Store dead `memory` as scratch, for the next call of `take_scratch`; only on the CPU."""
    if memory.is_cpu and not memory.is_inference():
        waiting = [*_waiting.pop(memory.dtype, []), memory]
        _waiting[memory.dtype] = sorted(waiting, key=Tensor.numel)[-2:]


class Pool:
    """The dead memory of one tape, which may be written again: scratch, and at most one other piece, `dead`.

    One piece is enough for the next gradient. All other memory is freed early, so that the gradients of the weights can
    be allocated there.
    """

    def __init__(self) -> None:
        self.scratch: list[Tensor] = []
        self.dead: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the pool has no memory."""
        return self.dead is None and not self.scratch

    def borrow(self, shape: torch.Size, like: Tensor) -> Lease:
        """Returns a lease on memory of `shape`, with arbitrary contents, to be released before the tape is done."""
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
        """Returns a lease on memory for a result that leaves the tape: exactly as large as `shape`, and no scratch."""
        dead = self.dead
        if dead is not None and dead.numel() == shape.numel() and _alike(dead, like):
            self.dead = None
            return Lease(dead.view(shape))
        return Lease(torch.empty(shape, dtype=like.dtype, device=like.device))

    def release(self, lease: Lease) -> None:
        """Release one claim; after the last one the memory is dead and belongs to the pool."""
        if lease.claims is not None:
            lease.claims[0] -= 1
            if lease.claims[0]:
                return
        if lease.scratch:
            self.scratch.append(lease.memory)
        else:
            self.bury(lease.memory)

    def bury(self, memory: Tensor) -> None:
        """Take over dead memory, which nothing reads any more, if it is contiguous and larger than `dead`."""
        if memory.is_contiguous() and (self.dead is None or self.dead.numel() < memory.numel()):
            self.dead = memory

    def close(self) -> None:
        """Return the scratch to the store, where the next tape takes it, and drop the other memory."""
        for memory in self.scratch:
            return_scratch(memory)
        self.scratch.clear()
        self.dead = None


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device
