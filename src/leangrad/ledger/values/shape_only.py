"""Saved tensors of which backward reads only the sizes, or sizes and strides. They need not be kept.

[Note: which saved tensors are read for their shape alone]
Autograd saves a whole tensor wherever a derivative formula names it, even if the formula uses only its sizes: backward
of ``gather`` uses its input only to know how large a gradient to fill with zeros. ``SHAPE_ONLY`` lists such tensors, by
the type of the node and the name under which the node saves the tensor. The entries were read off torch's
``derivatives.yaml``. For each of them a test shows, with stand-ins of different values, that backward reads no element
and that gradients have the bits and strides of plain PyTorch. A formula may change with a release of torch: for a
release newer than ``NEWEST`` the list is empty.

SIZES    Backward reads sizes, dtype and device. The stand-in is one element, expanded.
LAYOUT   Backward reads strides too, mostly as the memory format of the gradient that it makes: ``zeros_like(self)``,
         ``self.suggest_memory_format()``. The stand-in is uninitialised, has the same sizes and strides, and lives only
         while its node runs. If another reader keeps the tensor anyway, unpack returns that tensor: a stand-in would
         add to the memory.
INDEXED  As LAYOUT, for a max pooling that saves its indices as well. The recipe of the indices reads the input, so
         where the indices are rebuilt, unpack returns the input itself. ``DeferredDecisions.is_shape_only`` decides.

Formulas for the second derivative read no more of these tensors: they use ``zeros_like(self)``, for which autograd
saves sizes and dtype by itself, and the indices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SIZES, LAYOUT, INDEXED = "sizes", "layout", "indexed"

# The newest release of torch whose formulas were read. Before you raise it, run tests/ledger/values/test_shape_only.py.
NEWEST = (2, 13)

ENTRIES: dict[str, dict[str, str]] = {
    "GatherBackward0": {"self": SIZES},
    "TakeBackward0": {"self": LAYOUT},
    "MaskedSelectBackward0": {"self": LAYOUT},
    "PutBackward0": {"source": SIZES},
    "IndexAddBackward0": {"source": SIZES},
    "IndexCopyBackward0": {"source": SIZES},
    "CummaxBackward0": {"self": SIZES},
    "CumminBackward0": {"self": SIZES},
    "ComplexBackward0": {"real": SIZES, "imag": SIZES},  # not read at all
    "FftR2CBackward0": {"self": SIZES},
    "MaxPool2DWithIndicesBackward0": {"self": INDEXED},
    "MaxPool3DWithIndicesBackward0": {"self": INDEXED},
    "AdaptiveMaxPool2DBackward0": {"self": INDEXED},
    "AdaptiveMaxPool3DBackward0": {"self": INDEXED},
    "FractionalMaxPool2DBackward0": {"self": LAYOUT},  # LAYOUT: its indices have no rule
    "FractionalMaxPool3DBackward0": {"self": LAYOUT},
    **{f"{kind}Pool{d}DBackward0": {"self": LAYOUT} for kind in ("Avg", "AdaptiveAvg") for d in "23"},
    **{f"{kind}Pad{d}DBackward0": {"self": LAYOUT} for kind in ("Reflection", "Replication") for d in "123"},
}


def entries_for(release: str) -> dict[str, dict[str, str]]:
    """Returns the list for a release of torch; it is empty for one that is newer than ``NEWEST``.

    >>> entries_for("2.13.0+cpu")["GatherBackward0"], entries_for("3.0.0")
    ({'self': 'sizes'}, {})
    """
    major, minor = release.split(".")[:2]
    return ENTRIES if (int(major), int(minor)) <= NEWEST else {}


SHAPE_ONLY = entries_for(torch.__version__)


class ShapeOnly(NamedTuple):
    """Packed in place of a saved tensor of which backward reads only the shape; unpack returns a stand-in."""

    sizes: torch.Size
    strides: tuple[int, ...] | None  # None: backward reads sizes only
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """The bytes of the saved tensor."""
        return self.sizes.numel() * self.dtype.itemsize

    @property
    def stand_in_bytes(self) -> int:
        """The bytes that the stand-in uses while its reader runs in backward."""
        return 0 if self.strides is None else self.nbytes

    def unpack(self) -> Tensor:
        """Returns a stand-in to autograd: backward does not read its elements."""
        return stand_in(self.sizes, self.strides, self.dtype, self.device)


def stand_in(sizes: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialised tensor of this shape; if ``strides`` is None, one element expanded to ``sizes``."""
    if strides is None:
        return torch.empty((), dtype=dtype, device=device).expand(sizes)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
