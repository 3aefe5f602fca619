"""Settings that choose how a product is computed: a precision, a library switched off, deterministic algorithms.

Under others the same product has other bits. An allocation that failed counts too: a convolution that finds no memory
for its workspace is computed by another algorithm, with no word about it.
"""

from __future__ import annotations

from typing import Any

import torch

_b: Any = torch.backends
_NAMES = {
    "cuda.matmul": (
        "fp32_precision",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    "cudnn.conv": ("fp32_precision",),
    "cudnn": ("enabled", "benchmark", "deterministic"),
    "mkldnn.matmul": ("fp32_precision",),
    "mkldnn.conv": ("fp32_precision",),
    "mkldnn": ("enabled", "deterministic"),
}


def _readable() -> tuple[tuple[Any, str, str], ...]:
    """Of each setting that this release of torch has: where it is, its name there, its whole name."""
    found = []
    for path, names in _NAMES.items():
        home = _b
        for part in path.split("."):
            home = getattr(home, part, None)
        found += [(home, name, f"torch.backends.{path}.{name}") for name in names if hasattr(home, name)]
    return tuple(found)


_SETTINGS = _readable()
_LAST = "torch.use_deterministic_algorithms"


def product_settings() -> tuple[Any, ...]:
    """The settings as they are now."""
    return (*[getattr(home, name) for home, name, _ in _SETTINGS], torch.are_deterministic_algorithms_enabled())


def failed_allocations() -> int:
    """How many allocations have failed on the current device of this process."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0))


def changed_settings(before: tuple[Any, ...]) -> str:
    """What differs between the settings ``before`` and now, in words; empty: nothing."""
    now = product_settings()
    if now == before:
        return ""
    names = (*[name for _, _, name in _SETTINGS], _LAST)
    return "; ".join(f"{n} was {a}, is {b}" for n, a, b in zip(names, before, now, strict=True) if a != b)
