"""Private facts of what observes or changes calls: modes, transforms, forward mode, autocast, tracing, profiling."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from leangrad.switch import disabled


def is_profiling() -> bool:
    """Whether torch's profiler runs, in any thread; a second one would silently end it. False if torch lacks it."""
    ask = getattr(torch.autograd, "_profiler_enabled", None)
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", False) or (ask is not None and bool(ask()))


@contextlib.contextmanager
def muted_kineto() -> Iterator[None]:
    """Keep torch 2.13's Kineto from writing two log lines per profile to stderr; it reads its level only once."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "99"  # above all of its levels
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def peak_bytes(profiler: Any) -> int:
    """Return the peak of the CPU memory allocated during a profile, in bytes; 0 where torch lacks the events."""
    try:
        events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
        changes: list[int] = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    except AttributeError:
        return 0
    return max(itertools.accumulate(changes), default=0)


def without_function_mode(mode: object) -> contextlib.AbstractContextManager[object]:
    """Return a context that disables the function mode ``mode`` if it is the innermost one; else one without effect."""
    current = getattr(torch.overrides, "_get_current_function_mode", None)
    aside = getattr(torch.overrides, "_pop_mode_temporarily", None)
    if current is None or aside is None or current() is not mode:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = aside()
    return context


_count_of_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


def function_modes_active() -> bool:
    """Whether a function mode is set, by which other code may run in each call; True where torch lacks the count."""
    return _count_of_modes() > 0


_transforms_active: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)


def transforms_active() -> bool:
    """Whether a `torch.func` transform (vmap, grad, jvp) is running; False where torch lacks the name."""
    return False if _transforms_active is None else _transforms_active()


_functorch: Any = getattr(torch._C, "_functorch", None)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the innermost tensor that `torch.func` transforms have wrapped, or ``tensor`` itself if it is not wrapped.

    >>> x = torch.zeros(3)
    >>> unwrapped(x) is x
    True
    """
    if transforms_active() and _functorch is not None:
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
    return tensor


def is_batched(grad: torch.Tensor) -> bool:
    """Whether ``grad`` is a batch of gradients, as in `torch.autograd.grad(..., is_grads_batched=True)`.

    True where torch lacks `torch._C._functorch`.
    """
    kinds = ("is_batchedtensor", "is_legacy_batchedtensor")
    return _functorch is None or any(getattr(_functorch, kind, lambda _: False)(grad) for kind in kinds)


_forward_ad: Any = torch.autograd.forward_ad


def forward_mode_active() -> bool:
    """Whether a forward-mode AD level is open; False where torch lacks the name (then torch raises for a Function)."""
    level = getattr(_forward_ad, "_current_level", -1)
    return isinstance(level, int) and level >= 0


def is_traced() -> bool:
    """Whether torch is recording this code instead of only running it: compile, export, jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


# Returns how many `TorchDispatchMode`s are active, which must see every op; 0 where torch lacks the name.
dispatch_modes_active: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


# As `__torch_function__` of a tensor class: its ops are not overridden. The default one where torch lacks the name.
no_torch_function: Any = getattr(torch._C, "_disabled_torch_function_impl", Tensor.__torch_function__)


def is_innermost_mode(mode: Any) -> bool:
    """Whether ``mode`` is the innermost function mode, the first to see a call; False where torch lacks the name."""
    current = getattr(torch.overrides, "_get_current_function_mode", None)
    return current is not None and current() is mode


_is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]


def is_watched() -> bool:
    """Whether torch's own ops must run: for a compiler, a tracer, a `torch.func` transform, forward mode or the user.

    The user requests it by `LEANGRAD_DISABLE=1`.
    """
    if torch.compiler.is_compiling() or _is_tracing() or transforms_active() or forward_mode_active():
        return True
    return disabled()


# Returns whether autocast is on for any device type; True where torch lacks the name.
autocast_may_be_on: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_enabled(kind: str) -> bool:
    """Whether autocast is on for the device type ``kind``; False for a type that has no autocast."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


@contextlib.contextmanager
def autocast_off(*kinds: str) -> Iterator[None]:
    """Turn autocast off for these device types, without clearing its cache.

    `torch.autocast(kind, enabled=False)` clears the cache, which all threads share, when it exits as the outermost
    context of its thread. In the threads that run backward on a GPU it always is the outermost. The next forward under
    the user's autocast would then have to cast its weights again.
    """
    on = [kind for kind in kinds if autocast_enabled(kind)]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)
