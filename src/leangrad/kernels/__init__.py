"""Triton kernels, for the ops where they pay; `serves` says whether they can take a tensor.

Each file is imported on first use, so a machine without Triton never misses it. With `TRITON_INTERPRET=1` in the
environment the kernels also take CPU tensors: that is how they are tested where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

__all__ = ["has_device", "serves"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def serves(t: torch.Tensor) -> bool:
    """Whether the kernels can run on this tensor: CUDA (or interpreted), float32 or lower.

    >>> serves(torch.empty(2, dtype=torch.float64))
    False
    """
    return (t.is_cuda or (INTERPRETED and t.is_cpu)) and t.dtype in _DTYPES and _has_triton()


def has_device() -> bool:
    """Whether there is a device that the kernels run on: a GPU that can round to bfloat16, or the interpreter."""
    if not _has_triton():
        return False
    return INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0))
