"""Memory from before a step: parameters, gradients, the optimizers' state, and what else the GPU's allocator counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from leangrad.timeline.categories import GRADIENTS, OTHER, PARAMETERS, STATE
from leangrad.trees import tensors_in

__all__ = ["standing_bytes"]


def standing_bytes(
    modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], device: str
) -> dict[str, int]:
    """The bytes on ``device`` by category: parameters (with buffers), gradients, optimizer state and other memory.

    A storage counts once, for the first of these categories that holds it. On a CPU other memory is not counted.
    """
    groups: dict[str, list[Tensor]] = {PARAMETERS: [], GRADIENTS: [], STATE: []}
    for module in modules:
        groups[PARAMETERS] += [*module.parameters(), *module.buffers()]
    for optimizer in optimizers:
        groups[PARAMETERS] += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        groups[STATE] += tensors_in(list(optimizer.state.values()))
    groups[GRADIENTS] = [parameter.grad for parameter in groups[PARAMETERS] if parameter.grad is not None]
    seen: set[int] = set()
    found = {name: sum(_new_bytes(tensor, device, seen) for tensor in tensors) for name, tensors in groups.items()}
    if device.startswith("cuda"):
        found[OTHER] = max(0, torch.cuda.memory_allocated(device) - sum(found.values()))
    return found


def _new_bytes(tensor: Tensor, device: str, seen: set[int]) -> int:
    """The bytes of the tensor's storage if it is on ``device`` and not in ``seen`` yet, else 0; adds it to ``seen``."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor that has no storage of its own
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        where = f"{storage.device.type}:{storage.device.index}" if storage.device.type == "cuda" else "cpu"
        if where == device and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            return storage.nbytes()
    return 0
