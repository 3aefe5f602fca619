"""Hooks into the replay of recipes: fused kernels that replay several ops as one, and timers of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, ClassVar, Protocol

from torch import Tensor

# By the function of a recipe: what may replay that recipe together with those below it, as one kernel. It is called
# with the value, the tensors that this rebuild has made so far (by the id of their value) and the id of the backward
# pass. It returns the tensor and whether that is owned, or None: the recipe is to be replayed op by op. ``fused.py``
# registers itself here.
Replayer = Callable[[Any, dict[int, Tensor], int], tuple[Tensor, bool] | None]
replayers: dict[Any, Replayer] = {}


def fuses() -> bool:
    """Whether fused kernels are registered, so that several recipes may be replayed as one kernel."""
    return bool(replayers)


class Comparisons:
    """Counts how often a fused kernel was compared with a replay op by op. Such a step uses more memory."""

    count: ClassVar[int] = 0


class OpTimer(Protocol):
    """Times the ops that rebuild tensors."""

    def begin(self, value: Any) -> None:
        """Called before an op, or a fused kernel, that makes ``value``."""

    def end(self, *, has_run: bool) -> None:
        """Called after it; ``has_run`` is False if the fused kernel declined and the ops run one by one."""


op_timers: dict[int, OpTimer] = {}  # by thread id


@contextmanager
def timed_by(watch: OpTimer) -> Iterator[None]:
    """Let ``watch`` time the ops that rebuild tensors in this thread, while the context is open."""
    thread = get_ident()
    op_timers[thread] = watch
    try:
        yield
    finally:
        op_timers.pop(thread, None)
