"""Starting a Triton kernel again and again with the same signature, at a fraction of the usual cost.

Triton's own `kernel[grid](...)` looks at every argument of every call to find the compiled version that serves them:
20 to 60 µs of Python, while many kernels here run for less than 10. A `Launch` is made once for a layer's shape, dtypes
and constants. Its first call goes through Triton, which compiles; later calls go straight to what was compiled.

That is sound because all that Triton specializes on is fixed: the constants are the same objects, the dtypes belong to
the key under which the launch was made, floats are never specialized on their value, and the alignment of pointers is
checked at each call. Whatever does not fit goes through Triton again.
"""

from __future__ import annotations

import copy
import operator
import threading
from functools import reduce
from typing import Any

import torch
import triton
from torch import Tensor

from leangrad._torch import current_device, is_capturing, raw_stream
from leangrad.kernels import INTERPRETED

__all__ = ["Launch", "scratch", "stream_for"]

_address = Tensor.data_ptr

ALIGNMENT = 16  # bytes; what Triton asks of a pointer before it loads vectors from there

# What a compiled kernel must have to be started directly; a Triton without it is always asked the usual way.
NEEDED = {"run", "function", "packed_metadata"}


_runtime = triton.knobs.runtime  # knows whether somebody (a profiler) wants to hear of launches


def stream_for(device: torch.device) -> int | None:
    """The current stream, for launches on `device`; None where each has to go through Triton."""
    if INTERPRETED or current_device() != device.index:
        return None
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return None
    return raw_stream(device)


class _Scratch(threading.local):
    """One buffer per stream and thread: what a stream runs is in order, but two threads may take turns at one."""

    def __init__(self) -> None:
        self.of: dict[tuple[torch.device, int], Tensor] = {}


_scratch = _Scratch()


def scratch(device: torch.device, stream: int | None, size: int) -> Tensor:
    """A float32 buffer of at least so many elements, to be used by the launches that follow at once, and not kept."""
    if stream is None or is_capturing():  # a graph must own what it writes to
        return torch.empty(size, dtype=torch.float32, device=device)
    of, place = _scratch.of, (device, stream)
    buffer = of.get(place)
    if buffer is None or buffer.numel() < size:
        buffer = of[place] = torch.empty(max(size, 1 << 16), dtype=torch.float32, device=device)
    return buffer


class Launch:
    """`kernel[grid](*tensors, *floats, *constants, num_warps=warps, **options)`, over and over.

    The constants are ints, bools and strings; the floats may differ between calls. All tensors lie on `device`, and
    have the same dtypes at every call.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        grid: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
        **options: Any,
    ) -> None:
        self.kernel, self.device, self.constants = kernel, device, constants
        self.options = {"num_warps": warps, **options}
        self.grid = (*grid, 1, 1)[:3]
        self.compiled: tuple[Any, tuple[Any, ...]] | None = None  # what starts it, and what that takes after the stream

    def __call__(self, stream: int | None, tensors: tuple[Tensor, ...], floats: tuple[float, ...] = ()) -> None:
        """Run on `stream`, which is what `stream_for` said."""
        pointers = [*map(_address, tensors)]
        misaligned = reduce(operator.or_, pointers) % ALIGNMENT
        if misaligned or self.compiled is None or stream is None:
            self._through_triton(tensors, floats, not misaligned)
            return
        start, middle = self.compiled
        start(*self.grid, stream, *middle, *pointers, *floats, *self.constants)

    def _through_triton(self, tensors: tuple[Tensor, ...], floats: tuple[float, ...], aligned: bool) -> None:
        arguments = (*tensors, *floats, *self.constants)
        if INTERPRETED:
            self.kernel[self.grid](*arguments, **self.options)
            return
        with torch.cuda.device(self.device):
            compiled = self.kernel[self.grid](*arguments, **self.options)
        if aligned and NEEDED.issubset(dir(compiled)):
            self.compiled = _last_call(compiled.run, (compiled.function, compiled.packed_metadata, None, None, None))


def _last_call(run: Any, middle: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What Triton's launcher calls in the end, and what that takes between the stream and a kernel's own arguments.

    The launcher itself only looks whether the kernel needs memory from the host, in three calls of Python. Which
    arguments it passes on differs between releases, so a copy of it is called, whose end only listens. Where that does
    not say the expected, the answer is the launcher and what that takes.
    """
    heard: list[tuple[Any, ...]] = []
    own = object()  # stands for the kernel's arguments
    try:
        listener, end = copy.copy(run), run.launch
        if listener.global_scratch_size or listener.profile_scratch_size:
            return run, middle
        listener.launch = lambda *arguments: heard.append(arguments)
        listener(1, 1, 1, 0, *middle, own)
    except (AttributeError, TypeError):
        return run, middle
    if len(heard) != 1 or heard[0][:4] != (1, 1, 1, 0) or heard[0][-1] is not own:
        return run, middle
    return end, heard[0][4:-1]
