"""The work of an op in bytes moved: arithmetic counts as the bytes that take as long to move."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from leangrad.policy.ops import is_heavy

__all__ = ["work_of"]

Shape = tuple[int, ...]

BALANCE = 200  # operations that take as long as moving one byte, on a current accelerator in half precision
VECTOR = 3  # the same for depthwise convolutions, which do not run on matrix units


def work_of(name: str, shapes: Sequence[Shape], elements: int, moved: int) -> int:
    """Return the work of an op that has a kernel of its own.

    name: name of the op, without namespace and overload.
    shapes: shapes of its inputs.
    elements: number of elements of its output.
    moved: the bytes that it reads and writes.

    >>> work_of("mm", [(512, 512), (512, 512)], 512 * 512, moved=3 * 512 * 512 * 2)  # too small to be bound by products
    1572864
    >>> work_of("mm", [(4096, 4096), (4096, 4096)], 4096 * 4096, moved=3 * 4096 * 4096 * 2)
    687194767
    >>> work_of("linear_cross_entropy", [(8192, 4096), (128256, 4096), (8192,)], 1, moved=0)
    129106716917
    """
    return max(moved, _operations(name, shapes, elements) // (VECTOR if _is_depthwise(name, shapes) else BALANCE))


def _operations(name: str, shapes: Sequence[Shape], elements: int) -> int:
    """Return roughly how many operations a product takes: 2 per element of its result and of the inner dimension."""
    given = [shape for shape in shapes if len(shape) >= 2]
    if not given or not is_heavy(name):
        return 0
    if "linear_cross_entropy" in name and len(given) > 1:
        return 6 * prod(given[0]) * given[1][0]  # the gradients are computed with the loss
    is_backward = "backward" in name
    if "conv" in name and len(given) > 1:
        outer = prod(given[0]) if is_backward else elements
        return 2 * prod(given[-1][1:]) * outer * (2 if is_backward else 1)
    if "attention" in name and len(given) > 2:
        return 4 * prod(given[0]) * given[1][-2] * (2 if is_backward else 1)
    return 2 * elements * given[-2 if len(given) > 1 else 0][-1]


def _is_depthwise(name: str, shapes: Sequence[Shape]) -> bool:
    """Whether the op is a convolution in which each output channel reads only one input channel."""
    weights = [shape for shape in shapes if len(shape) >= 3]
    return "conv" in name and bool(weights) and weights[-1][1] == 1 and weights[-1][0] > 1
