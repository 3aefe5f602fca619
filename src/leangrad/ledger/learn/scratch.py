"""What the backward of a convolution takes on a CPU beside its operands and gradients: measured, once for each shape.

oneDNN reorders maps and weights, other CPUs unroll the windows of an image, by how many depends on the threads: no
formula holds on every machine. So the recorded step runs the backward of each of its convolutions once more when its
own backward has ended, alone, on zeros, under the memory events of torch's profiler. That takes about the time of those
backwards, and no more memory than each took in the step. Where a profiler is on already nothing is measured, and the
plan is made as if no scratch were taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from leangrad import _torch

__all__ = ["FUNCTIONS", "Convolution", "convolution_of", "measure"]

aten: Any = torch.ops.aten

FUNCTIONS = {getattr(torch, f"conv{kind}{d}d") for kind in ("", "_transpose") for d in "123"}


class Layout(NamedTuple):
    """The sizes and strides of a dense tensor."""

    shape: torch.Size
    stride: tuple[int, ...]

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """A tensor that lies so."""
        return torch.empty_strided(*self, dtype=dtype).zero_()


class Convolution(NamedTuple):
    """The backward of one convolution: all that its memory can depend on, but for the threads."""

    gradient: Layout
    images: Layout
    weight: Layout
    dtype: torch.dtype
    settings: tuple[Any, ...]  # from the sizes of the bias to the groups, as `aten.convolution_backward` takes them
    needed: tuple[bool, ...]  # the gradients of images, weight and bias


def convolution_of(out: Any, args: tuple[Any, ...]) -> Convolution | None:
    """The backward of a convolution that was called with `args` and gave `out`; None where it is not on a CPU."""
    if not isinstance(out, Tensor) or not out.is_cpu or out.grad_fn is None or len(args) < 2:
        return None
    settings = _torch.convolution_settings(out.grad_fn)
    images, weight = args[:2]
    if settings is None or not isinstance(images, Tensor) or images.dim() != out.dim():
        return None
    # Autocast casts the operands below this call to the dtype of the output, and leaves their strides.
    gradient, maps, kernel = (Layout(t.shape, t.stride()) for t in (out, images, weight))
    needed = tuple(node is not None for node, _ in out.grad_fn.next_functions)
    return Convolution(gradient, maps, kernel, out.dtype, settings, needed)


_known: dict[tuple[Convolution, int], int] = {}  # by the number of threads too
MAX_KNOWN = 1 << 12


def measure(convolutions: Iterable[Convolution]) -> dict[Convolution, int]:
    """The bytes of scratch of each; of those that cannot be measured now, none."""
    threads = torch.get_num_threads()
    if len(_known) > MAX_KNOWN:  # somebody's maps have a new size in every step
        _known.clear()
    found = {}
    for convolution in set(convolutions):
        key = (convolution, threads)
        if key not in _known and not _torch.is_profiling() and not _torch.dispatch_modes_active():
            _known[key] = _measured(convolution)
        found[convolution] = _known.get(key, 0)
    return found


@torch.no_grad()
def _measured(convolution: Convolution) -> int:
    """Run it once; the highest that memory stood, less the gradients that it gave."""
    gradient, images, weight, dtype, settings, needed = convolution
    try:
        operands = [layout.zeros(dtype) for layout in (gradient, images, weight)]
        with _torch.muted_kineto(), profile(profile_memory=True) as profiler:
            results = aten.convolution_backward(*operands, *settings, needed)
    except RuntimeError:  # images that overlap themselves, or were padded on their way
        return 0
    given: int = sum(t.nbytes for t in results if t is not None)
    return max(0, _torch.peak_bytes(profiler) - given)
