"""Passes over all flat buffers of a model: their norm, whether they are finite, and their product with a factor.

On CUDA a pass is one call for all buffers of a device and dtype, because a call takes the host as long as a buffer
takes the device. With Triton, the norm and the product are kernels of `leangrad.kernels.flat`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.kernels import serves

#: Elements of a row: few enough that a float32 sum of a row is exact to a few units in the last place.
_ROW = 4096


def norms_of(flats: Sequence[Tensor]) -> list[Tensor]:
    """Returns vectors of 2-norms of parts of `flats`, in float32 or wider; the norm of all these is that of `flats`."""
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
    """Returns the 2-norm of a vector on the CPU, from the norms of its rows.

    There one float32 sum over 8 million numbers is off by 6e-4, a sum by rows by 3e-8, at the same speed.
    """
    dtype = _sum_dtype(flat)
    whole = flat.numel() // _ROW * _ROW
    norm: Tensor = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    if whole > 0:
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
        norm = torch.linalg.vector_norm(torch.cat([rows, norm.unsqueeze(0)]))
    return norm


def are_finite(flats: Sequence[Tensor]) -> list[Tensor]:
    """Returns, for parts of `flats`, whether all values are finite; in one pass and with no temporary."""
    found: list[Tensor] = []
    for alike in _by_kind(flats):
        if alike[0].device.type == "cpu":
            found += [_is_finite(flat) for flat in alike]
        else:
            found.append(torch.isfinite(torch.stack(_torch.norms(alike, float("inf"), _sum_dtype(alike[0])))).all())
    return found


def _is_finite(flat: Tensor) -> Tensor:
    # A finite norm proves that all values are finite, three times as fast as `aminmax`. It may overflow where no value
    # does: then `aminmax` decides.
    if torch.isfinite(_norm_by_rows(flat)):
        return torch.ones((), dtype=torch.bool)
    return torch.isfinite(torch.stack(torch.aminmax(flat))).all()


def scale(flats: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply all vectors by one factor, in place."""
    for alike in _by_kind(flats):
        if isinstance(factor, Tensor) and _has_kernels(alike[0]):
            from leangrad.kernels import flat as kernels

            kernels.scale(alike, factor.to(alike[0].device, torch.float32), alike)
        else:  # torch multiplies many vectors at once only by a number of their own dtype
            _torch.scale_(alike, factor.to(alike[0]) if isinstance(factor, Tensor) else factor)


def narrow(flats: Sequence[Tensor], dtype: torch.dtype, factor: Tensor | None) -> list[Tensor]:
    """Returns each `flat * factor`, rounded to `dtype`, for vectors of one device and dtype; may overwrite `flats`."""
    if factor is not None and _has_kernels(flats[0]):
        from leangrad.kernels import flat as kernels

        narrowed = [torch.empty_like(flat, dtype=dtype) for flat in flats]
        kernels.scale(flats, factor.to(flats[0].device, torch.float32), narrowed)
        return narrowed
    if factor is not None:
        scale(flats, factor)
    return [flat.to(dtype) for flat in flats]


def whole(tensor: Tensor) -> Tensor:
    """Returns a sharded tensor in full, on every process; any other tensor as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _by_kind(flats: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns the vectors in groups of one device and dtype, in their order; complex numbers as pairs of real ones."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for flat in flats:
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        kinds.setdefault((flat.device, flat.dtype), []).append(flat)
    return list(kinds.values())


def _has_kernels(flat: Tensor) -> bool:
    """Whether the kernels apply. While a CUDA graph is captured they do not.

    The graph would record the copy of the kernels' table from memory that the graph does not own.
    """
    return serves(flat) and not (flat.is_cuda and torch.cuda.is_current_stream_capturing())


def _sum_dtype(flat: Tensor) -> torch.dtype:
    return flat.dtype if flat.dtype == torch.float64 else torch.float32
