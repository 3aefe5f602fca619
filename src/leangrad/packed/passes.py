"""Passes over all the buffers of a model: their norm, whether they are finite, and a factor on them.

On CUDA a pass is one call for all buffers of a device and dtype, because the host needs as long for a call as the
device for a buffer. Where there is Triton, the norm and the factor are kernels of `leangrad.kernels.flat`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.kernels import serves

#: A row is short enough that a float32 sum of it is exact to a few units in the last place.
_ROW = 4096


def norms_of(flats: Sequence[Tensor]) -> list[Tensor]:
    """Vectors of the 2-norms of parts of `flats`, in float32 or wider: the norm of all norms is that of all parts."""
    norms: list[Tensor] = []
    for alike in _by_kind(flats):
        if _has_kernels(alike[0]):
            from leangrad.kernels import flat as kernels

            norms.append(kernels.piece_norms(alike))
        elif alike[0].device.type == "cpu":
            norms.append(torch.stack([_norm_by_rows(flat) for flat in alike]))
        else:
            norms.append(torch.stack(_torch.norms(alike, 2.0, _sum_dtype(alike[0]))))
    return norms


def _norm_by_rows(flat: Tensor) -> Tensor:
    """On CPU one float32 sum over 8 million numbers is off by 6e-4, a sum of rows by 3e-8, at the same speed."""
    dtype = _sum_dtype(flat)
    whole = flat.numel() // _ROW * _ROW
    norm: Tensor = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    if whole > 0:
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
        norm = torch.linalg.vector_norm(torch.cat([rows, norm.unsqueeze(0)]))
    return norm


def are_finite(flats: Sequence[Tensor]) -> list[Tensor]:
    """Whether all values are finite, by parts, in one pass and with no temporary."""
    found: list[Tensor] = []
    for alike in _by_kind(flats):
        if alike[0].device.type == "cpu":
            found += [_is_finite(flat) for flat in alike]
        else:
            found.append(torch.isfinite(torch.stack(_torch.norms(alike, float("inf"), _sum_dtype(alike[0])))).all())
    return found


def _is_finite(flat: Tensor) -> Tensor:
    # A finite norm proves it at three times the speed of the extremes; a norm may overflow where no value does.
    if torch.isfinite(_norm_by_rows(flat)):
        return torch.ones((), dtype=torch.bool)
    return torch.isfinite(torch.stack(torch.aminmax(flat))).all()


def scale(flats: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply all vectors by one factor, in place."""
    for alike in _by_kind(flats):
        if isinstance(factor, Tensor) and _has_kernels(alike[0]):
            from leangrad.kernels import flat as kernels

            kernels.scale(alike, factor.to(alike[0].device, torch.float32), alike)
        else:  # torch multiplies many vectors at once by a number of their own dtype only
            _torch.scale_(alike, factor.to(alike[0]) if isinstance(factor, Tensor) else factor)


def narrow(flats: Sequence[Tensor], dtype: torch.dtype, factor: Tensor | None) -> list[Tensor]:
    """Each `flat * factor` rounded to `dtype`, for vectors of one device and dtype. They hold anything afterwards."""
    if factor is not None and _has_kernels(flats[0]):
        from leangrad.kernels import flat as kernels

        narrowed = [torch.empty_like(flat, dtype=dtype) for flat in flats]
        kernels.scale(flats, factor.to(flats[0].device, torch.float32), narrowed)
        return narrowed
    if factor is not None:
        scale(flats, factor)
    return [flat.to(dtype) for flat in flats]


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor as one that every process has in full."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _by_kind(flats: Sequence[Tensor]) -> list[list[Tensor]]:
    """The vectors by device and dtype, each kind in its order; complex numbers as pairs of real ones."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for flat in flats:
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        kinds.setdefault((flat.device, flat.dtype), []).append(flat)
    return list(kinds.values())


def _has_kernels(flat: Tensor) -> bool:
    """Not while a CUDA graph is captured: it would send the kernel's table from memory that is not its own."""
    return serves(flat) and not (flat.is_cuda and torch.cuda.is_current_stream_capturing())


def _sum_dtype(flat: Tensor) -> torch.dtype:
    return flat.dtype if flat.dtype == torch.float64 else torch.float32
