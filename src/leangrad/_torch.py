"""Every private torch name that leangrad uses, each in one small function with a plain fallback.

Nothing outside this file may touch a name of torch that starts with an underscore and is not documented. A name that
a torch release drops makes leangrad plainer, never wrong: the fallback is always the answer that promises less.
"""

import sys
import weakref

import torch
from torch import Tensor


def reference_counts(tensor: Tensor) -> tuple[int, ...] | None:
    """Every count of who can see `tensor`: C++ and Python holders of it, of its storage and of its base; or None.

    The numbers include this call's own references, so they mean something only next to numbers that were taken by
    the same chain of calls.
    """
    try:
        storage, base = tensor.untyped_storage(), tensor._base
        counts = (
            tensor._use_count(),  # type: ignore[attr-defined]
            sys.getrefcount(tensor),
            weakref.getweakrefcount(tensor),
            torch._C._storage_Use_Count(storage._cdata),
            sys.getrefcount(storage),
        )
        if base is None:
            return counts
        return (*counts, base._use_count(), sys.getrefcount(base))  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def is_profiling() -> bool:
    """Whether torch's profiler is on in this thread. A second one would end the first without a word."""
    try:
        return bool(torch.autograd._profiler_enabled())
    except AttributeError:
        return False


def graph_is_kept() -> bool:
    """Whether the backward that runs now may run again (`retain_graph=True`); True where torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def transforms_active() -> bool:
    """Whether a `torch.func` transform (vmap, grad, jvp) is running; False where torch does not tell."""
    ask = getattr(torch._C, "_are_functorch_transforms_active", None)
    return False if ask is None else bool(ask())
