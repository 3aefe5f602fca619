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
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.measure.trace import MODULE_MARK, STEP_MARK, Change, Trace, read_trace

__all__ = ["record"]

_MUTE = "99"  # above all of Kineto's levels


def record(run: Callable[[], object]) -> tuple[Trace, list[Change]]:
    """Call `run` once under the profiler; return the trace, and when older CPU memory was released."""
    if _torch.is_profiling():
        raise LeangradError(
            "expected no profiler to be running, but torch's profiler is on; leangrad.measure uses the profiler "
            "itself and there is one per process: call measure outside the profiled region"
        )
    with tempfile.TemporaryDirectory(prefix="leangrad-") as folder, _muted_kineto():
        # Cycles of earlier work that are collected during the step would be seen as the step's own releases.
        gc.collect()
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _watching_older_storages() as freed, profiler:
            torch.empty(1)  # the reader looks for this allocation before the step to know that memory is reported
            with _marking_modules(), record_function(STEP_MARK):
                run()
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        return read_trace(path), freed


@contextlib.contextmanager
def _muted_kineto() -> Iterator[None]:
    """Keep torch 2.13's Kineto from writing two log lines per profile to stderr; it reads its level only once."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = _MUTE
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


class _ModuleMarks(threading.local):
    """The modules that are running on this thread, outermost first, and the paths below each outermost one."""

    def __init__(self) -> None:
        self.running: list[tuple[nn.Module, str, record_function]] = []
        self.paths: dict[nn.Module, dict[nn.Module, str]] = {}

    def enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        path = self._path(module)
        mark = record_function(MODULE_MARK + path)
        mark.__enter__()
        self.running.append((module, path, mark))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not any(running is module for running, _, _ in self.running):
            return
        while True:
            running, _, mark = self.running.pop()
            mark.__exit__(None, None, None)
            if running is module:
                return

    def _path(self, module: nn.Module) -> str:
        if not self.running:
            return type(module).__name__
        root, root_path, _ = self.running[0]
        if root not in self.paths:
            self.paths[root] = {below: name for name, below in root.named_modules() if name}
        name = self.paths[root].get(module)
        if name is not None:
            return f"{root_path}.{name}"
        _, parent_path, _ = self.running[-1]
        return f"{parent_path}.{type(module).__name__}"


@contextlib.contextmanager
def _marking_modules() -> Iterator[None]:
    marks = _ModuleMarks()
    handles = [
        register_module_forward_pre_hook(marks.enter),
        register_module_forward_hook(marks.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        # A module that raised something which hooks do not see (KeyboardInterrupt) leaves its mark open.
        while marks.running:
            marks.running.pop()[2].__exit__(None, None, None)


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

    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):
            # A subclass, or a tensor of a transform, may have no storage of its own.
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                _watch_tensor(found, watch)
    del found
    try:
        yield freed
    finally:
        watched.clear()


def _watch_tensor(tensor: torch.Tensor, watch: Callable[[torch.UntypedStorage], None]) -> None:
    if tensor.device.type != "cpu":
        return
    watch(tensor.untyped_storage())
    # A gradient that Python has not asked for is known to its tensor only.
    if tensor.is_leaf and tensor.grad is not None:
        watch(tensor.grad.untyped_storage())
