"""Private facts of `torch.utils.checkpoint`: whether a checkpoint is active, and of which kind."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from leangrad._torch.autograd import innermost_pack_hook
from leangrad._torch.dispatch import python_dispatch
from leangrad._torch.modes import dispatch_modes_active


def is_checkpointing() -> bool:
    """Whether the innermost saved-tensor hooks are those of a checkpoint, in forward or in its recomputation."""
    return getattr(innermost_pack_hook(), "__module__", "") == "torch.utils.checkpoint"


def checkpoint_frame(pack: Any) -> Any:
    """Return the frame object of a non-reentrant checkpoint if ``pack`` is the pack hook of its forward.

    Backward calls the frame's ``recompute_fn``, which may be replaced. None for other hooks, and where torch builds its
    checkpoints differently.
    """
    if not _is_hook_of(pack, "_checkpoint_hook"):
        return None
    for cell in pack.__closure__ or ():
        if callable(getattr(cell.cell_contents, "recompute_fn", None)):
            return cell.cell_contents
    return None


def reentrant_checkpoint(tensor: Tensor) -> Any:
    """Return the node of the reentrant checkpoint that made ``tensor``, or None.

    Backward calls the node's ``run_function`` again, which may be replaced.
    """
    node = tensor.grad_fn if tensor._base is None else tensor._base.grad_fn
    is_one = type(node).__name__ == "CheckpointFunctionBackward" and callable(getattr(node, "run_function", None))
    return node if is_one else None


def is_checkpoint(pack: Any) -> bool:
    """Whether ``pack`` is the pack hook of a non-reentrant checkpoint's forward."""
    return _is_hook_of(pack, "_checkpoint_hook")


def is_recomputation(pack: Any) -> bool:
    """Whether ``pack`` is the pack hook that is set while a non-reentrant checkpoint runs its function again."""
    return _is_hook_of(pack, "_recomputation_hook")


def _is_hook_of(pack: Any, name: str) -> bool:
    return getattr(pack, "__module__", "") == CHECKPOINTS and pack.__qualname__.startswith(name)


CHECKPOINTS = "torch.utils.checkpoint"


def is_selective() -> bool:
    """Whether a selective checkpoint records the ops that run now: it must see the model's ops only."""
    if not dispatch_modes_active():
        return False
    modes: list[Any] = getattr(python_dispatch, "_get_current_dispatch_mode_stack", list)()
    return any(type(mode).__module__ == CHECKPOINTS for mode in modes)


def unseen() -> Any:
    """Return a context in which a selective checkpoint does not see ops; without effect where torch lacks the name."""
    if not is_selective():
        return contextlib.nullcontext()
    return getattr(python_dispatch, "_disable_current_modes", contextlib.nullcontext)()


def copy_unseen(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of ``tensor`` in ``dtype``; a selective checkpoint does not see the op that copies it."""
    if not dispatch_modes_active():
        return tensor.to(dtype, copy=True)
    with unseen():
        return tensor.to(dtype, copy=True)
