"""Starting a Triton kernel again and again with the same signature, at a fraction of the usual cost.

Triton's own `kernel[grid](...)` looks at every argument of every call to find the compiled version that serves them:
20 to 60 µs of Python, while many kernels here run for less than 10. A `Launch` is made once for a layer's shape, dtypes
and constants. Its first call goes through Triton, which compiles; later calls go straight to what was compiled.

That is sound because all that Triton specializes on is fixed: the constants are the same objects, the dtypes belong to
the key under which the launch was made, floats are never specialized on their value, and the alignment of pointers is
checked at each call. Whatever does not fit goes through Triton again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from leangrad._torch import raw_stream
from leangrad.kernels import INTERPRETED

__all__ = ["Launch"]

ALIGNMENT = 16  # bytes; what Triton asks of a pointer before it loads vectors from there

# What a compiled kernel must have to be started directly; a Triton without it is always asked the usual way.
NEEDED = {"run", "function", "packed_metadata"}


class Launch:
    """`kernel[grid](*tensors, *floats, *constants, num_warps=warps)`, over and over.

    The constants are ints, bools and strings; the floats may differ between calls. All tensors lie on `device`, and
    have the same dtypes at every call.
    """

    def __init__(
        self, kernel: Any, device: torch.device, grid: tuple[int, ...], constants: tuple[Any, ...], warps: int
    ) -> None:
        self.kernel, self.device, self.constants, self.warps = kernel, device, constants, warps
        self.grid = (*grid, 1, 1)[:3]
        self.compiled: Any = None

    def __call__(self, tensors: tuple[Tensor, ...], floats: tuple[float, ...] = ()) -> None:
        """Run on the current stream."""
        pointers = [t.data_ptr() for t in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        aligned = bits % ALIGNMENT == 0
        compiled, device = self.compiled, self.device
        if compiled is None or not aligned or torch.cuda.current_device() != device.index or _has_hooks():
            self._through_triton(tensors, floats, aligned)
            return
        compiled.run(
            *self.grid, raw_stream(device), compiled.function, compiled.packed_metadata, None, None, None,
            *pointers, *floats, *self.constants,
        )  # fmt: skip

    def _through_triton(self, tensors: tuple[Tensor, ...], floats: tuple[float, ...], aligned: bool) -> None:
        arguments = (*tensors, *floats, *self.constants)
        if INTERPRETED:
            self.kernel[self.grid](*arguments, num_warps=self.warps)
            return
        with torch.cuda.device(self.device):
            compiled = self.kernel[self.grid](*arguments, num_warps=self.warps)
        if aligned and NEEDED.issubset(dir(compiled)):
            self.compiled = compiled


def _has_hooks() -> bool:
    """Whether somebody (a profiler) wants to hear of launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
