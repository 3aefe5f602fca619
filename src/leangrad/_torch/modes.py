"""Whether somebody watches or traces the calls: modes, transforms, forward mode, autocast, tracing, profiling."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from leangrad.switch import disabled


def is_profiling() -> bool:
    """Whether torch's profiler is on, in this thread or another. A second one would end the first without a word."""
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
    """The highest that the CPU memory made during a profile stood, in bytes; 0 where torch does not tell."""
    try:
        events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
        changes: list[int] = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    except AttributeError:
        return 0
    return max(itertools.accumulate(changes), default=0)


def without_override(mode: object) -> contextlib.AbstractContextManager[object]:
    """A context in which ``mode`` sees no call, if it is the innermost function override; else it sees all."""
    current = getattr(torch.overrides, "_get_current_function_mode", None)
    aside = getattr(torch.overrides, "_pop_mode_temporarily", None)
    if current is None or aside is None or current() is not mode:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = aside()
    return context


_transforms_active: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)


def transforms_active() -> bool:
    """Whether a `torch.func` transform (vmap, grad, jvp) is running; False where torch does not tell."""
    return False if _transforms_active is None else _transforms_active()


_forward_ad: Any = torch.autograd.forward_ad


def forward_mode_active() -> bool:
    """Whether a forward-mode level is open; False where torch does not tell (then torch raises for a Function)."""
    level = getattr(_forward_ad, "_current_level", -1)
    return isinstance(level, int) and level >= 0


def is_traced() -> bool:
    """Whether torch is recording this code instead of only running it: compile, export, jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


# How many `TorchDispatchMode`s listen, to whom every op has to be shown; 0 where torch does not tell.
dispatch_modes_active: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


# The `__torch_function__` of a class whose calls no override sees, if torch has it.
no_override: Any = getattr(torch._C, "_disabled_torch_function_impl", Tensor.__torch_function__)


def is_innermost_mode(mode: Any) -> bool:
    """Whether this function mode is the first to see a call; False where torch does not tell."""
    current = getattr(torch.overrides, "_get_current_function_mode", None)
    return current is not None and current() is mode


_is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]


def is_watched() -> bool:
    """Whether somebody must see torch's own ops: a compiler, a tracer, a `torch.func` transform, forward mode, a user.

    A user says so by `LEANGRAD_DISABLE=1`.
    """
    if torch.compiler.is_compiling() or _is_tracing() or transforms_active() or forward_mode_active():
        return True
    return disabled()


# Whether autocast is on for some kind of device; True where torch does not tell.
autocast_may_be_on: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_enabled(kind: str) -> bool:
    """Whether autocast is on for this kind of device, if it can be."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


@contextlib.contextmanager
def autocast_off(*kinds: str) -> Iterator[None]:
    """Turn autocast off for these kinds of device, and leave its cache alone.

    `torch.autocast(kind, enabled=False)` empties the cache, which is everybody's, where it ends as the outermost one of
    its thread: always in the threads that run backward on a GPU. A forward that follows in the user's autocast would
    cast its weights anew.
    """
    on = [kind for kind in kinds if autocast_enabled(kind)]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)
