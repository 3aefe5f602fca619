"""Triton kernels, for the ops where they pay off; `serves` tells whether they can run on a tensor.

A file that imports Triton is itself imported on first use, so leangrad works without Triton. With `TRITON_INTERPRET=1`
in the environment the kernels also run on CPU tensors: this is how they are tested without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from typing import Any

import torch

__all__ = ["has_device", "kernels_of", "serves"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def kernels_of(name: str) -> Any:
    """Import the module of kernels `name` on first use, because Triton may not be installed; returns the module."""
    return importlib.import_module(f"leangrad.kernels.{name}")


def serves(t: torch.Tensor) -> bool:
    """Whether the kernels can run on this tensor: CUDA (or interpreted), float32 or lower.

    >>> serves(torch.empty(2, dtype=torch.float64))
    False
    """
    return (t.is_cuda or (INTERPRETED and t.is_cpu)) and t.dtype in _DTYPES and _has_triton()


def has_device() -> bool:
    """Whether there is a device on which the kernels run: a GPU that can round to bfloat16, or the interpreter."""
    if not _has_triton():
        return False
    return INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0))
