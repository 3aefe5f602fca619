"""Settings that choose how a product is computed: a precision, a library switched off, deterministic algorithms.

Under others the same product has other bits. An allocation that failed counts too: a convolution that finds no memory
for its workspace is computed by another algorithm, with no word about it.
"""

from __future__ import annotations

import functools
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


_failed = 0  # allocations on GPUs, since `_observes` was asked


def failed_allocations() -> int:
    """How many allocations have failed on GPUs: a number that grows with each of them."""
    if not torch.cuda.is_initialized():
        return 0
    return _failed if _observes() else int(torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0))


@functools.cache
def _observes() -> bool:
    """Whether torch's allocator tells of each failure, those that its caller gets over too: asked for once.

    Its statistics have the number as well, but reading them takes as long as a small kernel, for each convolution.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    try:
        attach(_note_failure)  # type: ignore[misc]
    except (RuntimeError, TypeError):  # another allocator, or a release without it
        return False
    return True


def _note_failure(*_: object) -> None:
    global _failed
    _failed += 1


def changed_settings(before: tuple[Any, ...]) -> str:
    """What differs between the settings ``before`` and now, in words; empty: nothing."""
    now = product_settings()
    if now == before:
        return ""
    names = (*[name for _, _, name in _SETTINGS], _LAST)
    return "; ".join(f"{n} was {a}, is {b}" for n, a, b in zip(names, before, now, strict=True) if a != b)
