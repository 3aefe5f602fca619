"""Measures the scratch memory of a convolution's backward on a CPU, once for each shape.

Scratch is the memory that the backward allocates beside its operands and gradients. No formula for it holds on every
machine: oneDNN reorders maps and weights, other CPUs unroll the windows of an image, and how many at once depends on
the number of threads. So after the backward pass of the recorded step, the backward of each of its convolutions runs
once more, alone, on zeros, under the memory events of torch's profiler. This takes about as long as those backwards did
in the step, and uses no more memory than each of them. If a profiler or a dispatch mode is already active, nothing is
measured, and the plan is made as if convolutions used no scratch.
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
        """Return a tensor of zeros with these sizes and strides."""
        return torch.empty_strided(*self, dtype=dtype).zero_()


class Convolution(NamedTuple):
    """The backward of one convolution: everything that its memory can depend on, except the number of threads."""

    gradient: Layout  # of the gradient of the output
    images: Layout
    weight: Layout
    dtype: torch.dtype
    settings: tuple[Any, ...]  # the arguments of `aten.convolution_backward` from ``bias_sizes`` to ``groups``
    needed: tuple[bool, ...]  # which gradients are needed: of images, weight and bias


def convolution_of(out: Any, args: tuple[Any, ...]) -> Convolution | None:
    """Return the backward of a convolution that was called with `args` and returned `out`.

    None if it did not run on a CPU, needs no gradient, or cannot be described.
    """
    if not isinstance(out, Tensor) or not out.is_cpu or out.grad_fn is None or len(args) < 2:
        return None
    settings = _torch.convolution_settings(out.grad_fn)
    images, weight = args[:2]
    if settings is None or not isinstance(images, Tensor) or images.dim() != out.dim():
        return None
    # Autocast casts the operands to the dtype of the output inside this call, and does not change their strides.
    gradient, maps, kernel = (Layout(t.shape, t.stride()) for t in (out, images, weight))
    needed = tuple(node is not None for node, _ in out.grad_fn.next_functions)
    return Convolution(gradient, maps, kernel, out.dtype, settings, needed)


_known: dict[tuple[Convolution, int], int] = {}  # measured bytes, by convolution and number of threads
MAX_KNOWN = 1 << 12  # entries of ``_known``, beyond which it is cleared


def measure(convolutions: Iterable[Convolution]) -> dict[Convolution, int]:
    """Return the scratch bytes of each convolution; 0 for one that cannot be measured now."""
    threads = torch.get_num_threads()
    if len(_known) > MAX_KNOWN:  # a model whose maps have a new size in every step
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
    """Run the backward once; return its peak memory minus the bytes of the gradients that it returned."""
    gradient, images, weight, dtype, settings, needed = convolution
    try:
        operands = [layout.zeros(dtype) for layout in (gradient, images, weight)]
        with _torch.muted_kineto(), profile(profile_memory=True) as profiler:
            results = aten.convolution_backward(*operands, *settings, needed)
    except RuntimeError:  # the elements of the images overlap in memory, or the images were padded on their way
        return 0
    given: int = sum(t.nbytes for t in results if t is not None)
    return max(0, _torch.peak_bytes(profiler) - given)
