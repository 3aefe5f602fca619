"""Whether two tensors have the same bits: the one meaning that "the same gradients" has in these tests.

``torch.equal`` takes -0.0 for 0.0 and says nothing about strides. Here -0.0 is not 0.0. A NaN is a failure, as it is
for ``torch.equal``: a step that computes nothing but NaN must not pass. Where a test has NaN on purpose it says so, by
``nans="bits"`` if the very bits of it count too, or by ``nans="any"`` if not: the sign and the payload of a NaN carry
no number, and IEEE 754 leaves them to the processor, which takes them from one of two operands.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Nans = Literal["none", "bits", "any"]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def same_bits(a: Tensor | None, b: Tensor | None, *, nans: Nans = "none", strides: bool = False) -> bool:
    """Whether ``a`` and ``b`` have one dtype, device, layout and shape, and the same bits in every element.

    nans: "none": a NaN equals nothing. "bits": it equals one of the same bits. "any": it equals any other.
    strides: strides must be the same too, but for those of dimensions that have one element.
    """
    return difference(a, b, nans=nans, strides=strides) == ""


def assert_same_bits(
    a: Tensor | None, b: Tensor | None, what: object = "", *, nans: Nans = "none", strides: bool = False
) -> None:
    """The same as an assertion that says what differs."""
    found = difference(a, b, nans=nans, strides=strides)
    assert not found, f"{what}: {found}" if what != "" else found


def difference(a: Tensor | None, b: Tensor | None, *, nans: Nans = "none", strides: bool = False) -> str:
    """What differs, in words; empty: nothing."""
    if a is None or b is None:
        return "" if a is b else f"one is None: {a is None}, {b is None}"
    a, b = a.detach(), b.detach()
    for kind in ("dtype", "device", "layout", "shape"):
        if getattr(a, kind) != getattr(b, kind):
            return f"{kind} {getattr(a, kind)}, not {getattr(b, kind)}"
    if a.layout is torch.sparse_coo:
        if a.is_coalesced() != b.is_coalesced():
            return "only one is coalesced"
        indices = difference(a._indices(), b._indices())
        return indices or difference(a._values(), b._values(), nans=nans)
    if a.layout is not torch.strided:
        return difference(a.to_sparse_coo(), b.to_sparse_coo(), nans=nans)
    if strides and _strides(a) != _strides(b):
        return f"strides {a.stride()}, not {b.stride()}"
    return _different_elements(_real(a), _real(b), nans)


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    if not tensor.numel():
        return []
    return [(d, s) for d, (n, s) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if n > 1]


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _different_elements(a: Tensor, b: Tensor, nans: Nans) -> str:
    differ = _integers(a) != _integers(b)
    if a.is_floating_point():
        nan_a, nan_b = a.isnan(), b.isnan()
        if nans == "none":
            differ = differ | nan_a | nan_b
        elif nans == "any":
            differ = differ & ~(nan_a & nan_b)
    count = int(differ.count_nonzero())
    if not count:
        return ""
    first = tuple(int(n) for n in differ.nonzero()[0])
    return f"{count} of {a.numel()} elements differ, the first at {first}: {a[first].item()!r}, not {b[first].item()!r}"


def _integers(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.view(INTEGERS[tensor.element_size()])
