"""`torch.utils.checkpoint`: whether one is around, and which."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from leangrad._torch.autograd import innermost_pack_hook
from leangrad._torch.dispatch import python_dispatch
from leangrad._torch.modes import dispatch_modes_active


def is_checkpointing() -> bool:
    """Whether the hooks in force are those of `torch.utils.checkpoint`, in forward or as it runs again."""
    return getattr(innermost_pack_hook(), "__module__", "") == "torch.utils.checkpoint"


def checkpoint_frame(pack: Any) -> Any:
    """What a checkpoint without reentrance knows of its segment, if ``pack`` is the pack hook of its forward.

    Its ``recompute_fn`` is what backward runs again, and may be replaced. None for other hooks, and where torch's
    checkpoints are not what they were.
    """
    if not _is_hook_of(pack, "_checkpoint_hook"):
        return None
    for cell in pack.__closure__ or ():
        if callable(getattr(cell.cell_contents, "recompute_fn", None)):
            return cell.cell_contents
    return None


def reentrant_checkpoint(tensor: Tensor) -> Any:
    """The node of the reentrant checkpoint that made ``tensor``, or None.

    Its ``run_function`` is what backward runs again, and may be replaced.
    """
    node = tensor.grad_fn if tensor._base is None else tensor._base.grad_fn
    is_one = type(node).__name__ == "CheckpointFunctionBackward" and callable(getattr(node, "run_function", None))
    return node if is_one else None


def is_checkpoint(pack: Any) -> bool:
    """Whether ``pack`` is the pack hook of a checkpoint's forward."""
    return _is_hook_of(pack, "_checkpoint_hook")


def is_recomputation(pack: Any) -> bool:
    """Whether ``pack`` is the hook under which a checkpoint runs its function again."""
    return _is_hook_of(pack, "_recomputation_hook")


def _is_hook_of(pack: Any, name: str) -> bool:
    return getattr(pack, "__module__", "") == CHECKPOINTS and pack.__qualname__.startswith(name)


CHECKPOINTS = "torch.utils.checkpoint"


def is_selective() -> bool:
    """Whether a selective checkpoint counts the ops that run now: it must see none that is not the model's."""
    if not dispatch_modes_active():
        return False
    modes: list[Any] = getattr(python_dispatch, "_get_current_dispatch_mode_stack", list)()
    return any(type(mode).__module__ == CHECKPOINTS for mode in modes)


def unseen() -> Any:
    """A context in which a selective checkpoint does not see what runs."""
    if not is_selective():
        return contextlib.nullcontext()
    return getattr(python_dispatch, "_disable_current_modes", contextlib.nullcontext)()


def copy_unseen(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy, in this dtype, which a selective checkpoint does not see."""
    if not dispatch_modes_active():
        return tensor.to(dtype, copy=True)
    with unseen():
        return tensor.to(dtype, copy=True)
