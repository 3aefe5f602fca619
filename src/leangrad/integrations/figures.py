"""The figures that a trainer logs about a lean model while it trains.

Logging them costs no measurement. The share comes from the ledger, which knows for every saved tensor what plain
PyTorch would have kept. The peak comes from the GPU's allocator, whose counters are read and never reset. A CPU has no
such counters; use `leangrad.measure(step)` there.
"""

from __future__ import annotations

import torch
from torch import nn

from leangrad.lean import is_lean, ledger_of

__all__ = ["PEAK", "SAVED", "lean_figures"]

SAVED = "lean_saved_share"
PEAK = "peak_memory_bytes"


def lean_figures(model: nn.Module) -> dict[str, float]:
    """Return the figures of ``model`` that are known by now, by name.

    lean_saved_share: share of the bytes that plain PyTorch keeps from forward to backward and lean does not, over all
        lean modules in ``model``. A checkpointed segment counts with what is kept when backward runs it again. Missing
        until a first step has been recorded.
    peak_memory_bytes: ``torch.cuda.max_memory_allocated`` of the model's GPU, since the process began or the user reset
        it: parameters, gradients and optimizer included. Only on a GPU.

    >>> import leangrad
    >>> model = leangrad.lean(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)))
    >>> model(torch.ones(256, 64)).sum().backward()
    >>> lean_figures(model)  # of the inputs of the norm, of GELU and of the second layer, the first is kept
    {'lean_saved_share': 0.6667}
    """
    kept = [ledger_of(module).bytes_for_backward() for module in model.modules() if is_lean(module)]
    plain, lean = sum(one for one, _ in kept), sum(one for _, one in kept)
    found: dict[str, float] = {SAVED: round(1 - lean / plain, 4)} if plain else {}
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is not None and device.type == "cuda":
        found[PEAK] = torch.cuda.max_memory_allocated(device)
    return found
