"""Saved for its shape alone: tensors of which backward reads only the sizes, or sizes and strides, are not kept.

[Note: which saved tensors are read for their shape alone]
Autograd saves a whole tensor wherever a derivative formula names it, even if the formula asks only for its sizes:
``gather`` needs its input to know how large a gradient to fill with zeros. ``SHAPE_ONLY`` lists these, by the type of
the node and the name under which the node saves the tensor. The entries were read off torch's ``derivatives.yaml``.
That no value is read, and that gradients have plain's bits and strides, is tested for each of them, with stand-ins of
different values. A formula may change with a release: for one that is newer than ``NEWEST`` the list is empty.

SIZES    Backward reads sizes, dtype and device. The stand-in is one element, expanded.
LAYOUT   Backward reads strides too, mostly as the memory format of the gradient that it makes: ``zeros_like(self)``,
         ``self.suggest_memory_format()``. The stand-in is uninitialised, of the same sizes and strides, and lives for
         the one node. A tensor that another reader keeps anyway is handed out itself: a stand-in would only add to it.
INDEXED  As LAYOUT, for a max pooling that saves its indices as well. Where the indices are rebuilt their recipe needs
         the input, so the input itself is handed out. ``Decider.is_shape_only`` decides.

Formulas for the second derivative read no more of these tensors: they ask for ``zeros_like(self)``, for which autograd
saves sizes and dtype by itself, and for the indices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SIZES, LAYOUT, INDEXED = "sizes", "layout", "indexed"

# The release of torch whose formulas were read last; run tests/ledger/values/test_shape_only.py to raise it.
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
    "FractionalMaxPool2DBackward0": {"self": LAYOUT},  # its indices have no rule
    "FractionalMaxPool3DBackward0": {"self": LAYOUT},
    **{f"{kind}Pool{d}DBackward0": {"self": LAYOUT} for kind in ("Avg", "AdaptiveAvg") for d in "23"},
    **{f"{kind}Pad{d}DBackward0": {"self": LAYOUT} for kind in ("Reflection", "Replication") for d in "123"},
}


def entries_for(release: str) -> dict[str, dict[str, str]]:
    """The list for a release of torch.

    >>> entries_for("2.13.0+cpu")["GatherBackward0"], entries_for("3.0.0")
    ({'self': 'sizes'}, {})
    """
    major, minor = release.split(".")[:2]
    return ENTRIES if (int(major), int(minor)) <= NEWEST else {}


SHAPE_ONLY = entries_for(torch.__version__)


class ShapeOnly(NamedTuple):
    """A saved tensor of which backward reads the shape: what the stand-in is made from."""

    sizes: torch.Size
    strides: tuple[int, ...] | None  # None: backward reads sizes only
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return self.sizes.numel() * self.dtype.itemsize

    @property
    def stand_in_bytes(self) -> int:
        """What backward takes for the stand-in at its reader."""
        return 0 if self.strides is None else self.nbytes

    def unpack(self) -> Tensor:
        """Autograd wants its tensor back: a stand-in, whose values nobody reads."""
        return stand_in(self.sizes, self.strides, self.dtype, self.device)


def stand_in(sizes: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape with whatever values; without ``strides``, all its elements are one."""
    if strides is None:
        return torch.empty((), dtype=dtype, device=device).expand(sizes)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
