"""The instruments of a measured run: the profiler, marks around module calls, and a watch on older memory.

None of them allocates tensor memory while the step runs, so their own memory is not counted.
"""

import contextlib
import functools
import gc
import os
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.measure.trace import LINE_MARK, MODULE_MARK, STEP_MARK, Change, Trace, read_trace

__all__ = ["Recording", "record"]


def record(run: Callable[[], object]) -> tuple[Trace, list[Change]]:
    """Call `run` once under the profiler; return the trace and the releases of older CPU memory."""
    recording = Recording()
    recording.start()
    try:
        run()
    except BaseException:
        recording.close()
        raise
    return recording.stop()


class Recording:
    """Profiles a part of the program from `start` to `stop`, both called on the same thread.

    lines: also record the source line of each op in a module.
    """

    def __init__(self, *, lines: bool = False) -> None:
        self._lines = lines
        self._open = contextlib.ExitStack()
        self._freed: list[Change] = []
        self._profiler: profile | None = None

    def start(self) -> None:
        """Start the profiler, the marks and the watch on older memory."""
        if _torch.is_profiling():
            raise LeangradError(
                "expected no profiler to be running, but torch's profiler is on; leangrad.measure uses the profiler "
                "itself and there is one per process: call measure outside the profiled region"
            )
        with contextlib.ExitStack() as entered:
            entered.enter_context(_torch.muted_kineto())
            entered.enter_context(_no_automatic_collection())
            self._freed = entered.enter_context(_watching_older_storages())
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            entered.enter_context(_running(self._profiler))
            torch.empty(1)  # before the step mark: `read_trace` uses it to check that memory is reported
            entered.enter_context(_marking_modules(lines=self._lines))
            entered.enter_context(record_function(STEP_MARK))
            self._open = entered.pop_all()

    def close(self) -> None:
        """Stop profiling, and restore everything that `start` changed."""
        self._open.close()

    def stop(self) -> tuple[Trace, list[Change]]:
        """Stop profiling; return the trace and the releases of older CPU memory."""
        assert self._profiler is not None
        self.close()
        with tempfile.TemporaryDirectory(prefix="leangrad-") as folder, _torch.muted_kineto():
            path = os.path.join(folder, "trace.json")
            self._profiler.export_chrome_trace(path)
            self._profiler = None
            return read_trace(path), self._freed


@contextlib.contextmanager
def _running(profiler: profile) -> Iterator[None]:
    """Run the profiler without torch 2.11's warning that a second cycle would clear the first: there is only one.

    `acc_events=True` would silence it too, but builds every event in Python: seconds for a step of some thousand ops.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        profiler.start()
    try:
        yield
    finally:
        profiler.stop()


@contextlib.contextmanager
def _no_automatic_collection() -> Iterator[None]:
    """Turn Python's garbage collection off, so that cycles stay alive until the step ends.

    When Python collects them otherwise depends on everything else in the process.
    """
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
def _marking_modules(*, lines: bool) -> Iterator[None]:
    """Put a mark into the trace around each call of a module, and with ``lines`` around each op in it.

    The marks are not made by module hooks: code that checks for hooks (torch.compile's guards, the fast paths of
    transformer layers and of leangrad.nn) would then run differently from the runs without instruments.
    """
    paths = _Paths()
    call = nn.Module.__call__

    def marked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        path = paths.path_of(self)
        marks_lines = lines and not paths.running and not any(map(_torch.is_compiled, self.modules()))
        paths.running.append((self, path))
        try:
            with record_function(MODULE_MARK + path), _MarkingLines() if marks_lines else contextlib.nullcontext():
                return call(self, *args, **kwargs)
        finally:
            paths.running.pop()

    nn.Module.__call__ = marked_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


class _MarkingLines(TorchFunctionMode):
    """Puts a mark around each op, with the source line that called the op.

    Not used around a model with compiled parts: torch.compile would compile them under the mode and again without it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling() or getattr(func, "__name__", "") == "__get__":  # attributes such as .shape
            return func(*args, **(kwargs or {}))
        with record_function(LINE_MARK + _source_line()):
            return func(*args, **(kwargs or {}))


# Folders of the sources of torch and of leangrad.
_OURS = tuple(os.path.dirname(str(file)) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))


def _source_line() -> str:
    """Return the innermost running line outside torch and leangrad, such as "file.py:12"; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def _short(path: str) -> str:
    """Return `path` relative to the working folder or a folder of `sys.path`, whichever is longest; else its name."""
    for folder in sorted({os.getcwd(), *sys.path}, key=len, reverse=True):
        if folder and path.startswith(folder + os.sep):
            return path[len(folder) + 1 :]
    return os.path.basename(path)


@contextlib.contextmanager
def _watching_older_storages() -> Iterator[list[Change]]:
    """Record releases of older CPU memory: the profiler reports only blocks whose allocation it saw.

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
    # Subclasses are skipped: their methods may do anything, and the tensors that they wrap are found here as well.
    for tensor in [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]:
        if tensor.device.type != "cpu":
            continue
        # A sparse tensor, or one of a `torch.func` transform, has no storage of its own.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            watch(tensor.untyped_storage())
            # A gradient that Python has not accessed yet is reachable only through its tensor.
            if tensor.is_leaf and tensor.grad is not None:
                watch(tensor.grad.untyped_storage())
