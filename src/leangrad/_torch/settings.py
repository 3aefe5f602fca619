"""Torch's settings that choose how a product is computed: precisions, disabled libraries, deterministic algorithms.

Under other settings the same product has other bits. Failed allocations count too: a convolution that cannot allocate
its workspace silently uses another algorithm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_b: Any = torch.backends
_PRECISION = "fp32_precision"
_NAMES = {
    "cuda.matmul": (
        _PRECISION,
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    "cudnn.conv": (_PRECISION,),
    "cudnn": ("enabled", "benchmark", "deterministic"),
    "mkldnn.matmul": (_PRECISION,),
    "mkldnn.conv": (_PRECISION,),
    "mkldnn": ("enabled", "deterministic"),
}


def _readable() -> tuple[tuple[Callable[[], Any], str], ...]:
    """Return, for each setting that this torch release has, a function that reads it, and its name."""
    found: list[tuple[Callable[[], Any], str]] = [
        (torch._C._get_deterministic_algorithms, "torch.use_deterministic_algorithms")
    ]
    for path, names in _NAMES.items():
        home = _b
        for part in path.split("."):
            home = getattr(home, part, None)
        for name in names:
            if hasattr(home, name):
                found.append((_reader(home, name), f"torch.backends.{path}.{name}"))
    return tuple(found)


def _reader(home: Any, name: str) -> Callable[[], Any]:
    """Return a function that reads a setting.

    All settings are read for every product, and torch's own attributes take ten times as long.
    """
    if name == _PRECISION and hasattr(torch._C, "_get_fp32_precision_getter"):
        kind = ("cuda", "matmul") if home is _b.cuda.matmul else (home.backend, home.op)
        return functools.partial(torch._C._get_fp32_precision_getter, *kind)
    own = vars(type(home)).get(name)
    direct = getattr(torch._C, f"_get_cublas_{name}", None) if home is _b.cuda.matmul else getattr(own, "getter", None)
    return direct or functools.partial(getattr, home, name)


_READERS, _WORDS = zip(*_readable(), strict=True)


def product_settings() -> tuple[Any, ...]:
    """Return the current values of the settings that choose how a product is computed."""
    return tuple([read() for read in _READERS])


_failed = 0  # failed allocations on GPUs, since `_observes` has attached the observer


def failed_allocations() -> int:
    """Return a number that grows with each failed allocation on a GPU; 0 before CUDA is initialized."""
    if not torch.cuda.is_initialized():
        return 0
    return _failed if _observes() else int(torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0))


@functools.cache
def _observes() -> bool:
    """Attach an observer of failed GPU allocations, once; returns False where torch's allocator does not support it.

    The observer also sees failures that the allocation's caller recovers from. The allocator's statistics have the
    number as well, but reading them takes as long as a small kernel, for each convolution.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    try:
        attach(_note_failure)  # type: ignore[misc]
    except (RuntimeError, TypeError):  # another allocator is in use, or torch lacks the name
        return False
    return True


def _note_failure(*_: object) -> None:
    global _failed
    _failed += 1


def changed_settings(before: tuple[Any, ...]) -> str:
    """Return in words which settings differ from ``before``; empty if none do."""
    now = product_settings()
    if now == before:
        return ""
    return "; ".join(f"{n} was {a}, is {b}" for n, a, b in zip(_WORDS, before, now, strict=True) if a != b)
