"""What watches the one instrumented run: the profiler, marks around module calls, and an eye on older memory.

Nothing here allocates memory of a tensor while the step runs, so that nothing of it is counted.
"""

import contextlib
import gc
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.measure.trace import MODULE_MARK, STEP_MARK, Change, Trace, read_trace

__all__ = ["record"]


def record(run: Callable[[], object]) -> tuple[Trace, list[Change]]:
    """Call `run` once under the profiler; return the trace, and when older CPU memory was released."""
    if _torch.is_profiling():
        raise LeangradError(
            "expected no profiler to be running, but torch's profiler is on; leangrad.measure uses the profiler "
            "itself and there is one per process: call measure outside the profiled region"
        )
    with tempfile.TemporaryDirectory(prefix="leangrad-") as folder, _torch.muted_kineto():
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _no_automatic_collection(), _watching_older_storages() as freed, profiler:
            torch.empty(1)  # the reader looks for this allocation before the step to know that memory is reported
            with _marking_modules(), record_function(STEP_MARK):
                run()
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        return read_trace(path), freed


@contextlib.contextmanager
def _no_automatic_collection() -> Iterator[None]:
    """Keep cycles until the step ends: when Python would collect them depends on everything else in the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Paths(threading.local):
    """The modules that are running on this thread, outermost first, and the names below each outermost one."""

    def __init__(self) -> None:
        self.running: list[tuple[nn.Module, str]] = []
        self.names: dict[nn.Module, dict[nn.Module, str]] = {}

    def path_of(self, module: nn.Module) -> str:
        if not self.running:
            return type(module).__name__
        root, root_path = self.running[0]
        if root not in self.names:
            self.names[root] = {below: name for name, below in root.named_modules() if name}
        name = self.names[root].get(module)
        return f"{root_path}.{name}" if name is not None else f"{self.running[-1][1]}.{type(module).__name__}"


@contextlib.contextmanager
def _marking_modules() -> Iterator[None]:
    """Put a mark into the trace around each call of a module.

    Not by hooks: code that looks for them (torch.compile's guards, the fast paths of transformer layers and of
    leangrad.nn) would then run otherwise than in the untouched runs.
    """
    paths = _Paths()
    call = nn.Module.__call__

    def marked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        path = paths.path_of(self)
        paths.running.append((self, path))
        try:
            with record_function(MODULE_MARK + path):
                return call(self, *args, **kwargs)
        finally:
            paths.running.pop()

    nn.Module.__call__ = marked_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


@contextlib.contextmanager
def _watching_older_storages() -> Iterator[list[Change]]:
    """Note when memory that stood before is released: the CPU's profiler only reports blocks that it saw made.

    Without this, a step that begins with `zero_grad()` would seem to hold both the old gradients and the new.
    """
    freed: list[Change] = []
    watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def watch(storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()

        def note(_: object) -> None:
            freed.append(Change(time.time_ns(), threading.get_native_id(), "cpu", -size, None))

        if size and storage.data_ptr() not in watched:
            watched[storage.data_ptr()] = weakref.ref(storage, note)

    _watch_tensors(watch)
    try:
        yield freed
    finally:
        watched.clear()


def _watch_tensors(watch: Callable[[torch.UntypedStorage], None]) -> None:
    # Not subclasses: their methods may be anything, and those that wrap tensors wrap some that are found here.
    for tensor in [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]:
        if tensor.device.type != "cpu":
            continue
        # A sparse tensor, or one of a transform, has no storage of its own.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            watch(tensor.untyped_storage())
            # A gradient that Python has not asked for is known to its tensor only.
            if tensor.is_leaf and tensor.grad is not None:
                watch(tensor.grad.untyped_storage())
