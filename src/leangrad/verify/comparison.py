"""The results of a run, and the differences between the results of two runs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from leangrad.verify.generators import global_states

__all__ = ["Difference", "Kind", "Outcome", "collect", "difference", "differences", "largest"]

Kind = Literal["loss", "gradient", "input gradient", "buffer", "random state"]
Outcome = dict[tuple[Kind, str], Tensor | None]


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor or state that is not bitwise equal: its kind, its name, and how far it is off (see `difference`)."""

    kind: Kind
    name: str
    max_difference: float


def collect(model: nn.Module, inputs: dict[str, Tensor], loss: Tensor) -> Outcome:
    """Return everything that a training step computes, copied to the CPU.

    The random state after the step is included: a run that draws other random numbers changes the following step.
    """
    outcome: Outcome = {("loss", ""): _copy(loss)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            outcome["gradient", name] = _copy(parameter.grad)
    for name, tensor in inputs.items():
        outcome["input gradient", name] = _copy(tensor.grad)
    for name, buffer in model.named_buffers():
        outcome["buffer", name] = None if buffer.is_meta else _copy(buffer)
    for name, state in global_states(loss.device).items():
        outcome["random state", name] = state
    return outcome


def differences(plain: Outcome, lean: Outcome) -> list[Difference]:
    """Return a `Difference` for each entry that is not bitwise equal in both outcomes, or is in only one."""
    found = []
    for kind, name in {**plain, **lean}:
        distance = difference(plain.get((kind, name)), lean.get((kind, name)))
        if distance is not None:
            found.append(Difference(kind, name, distance))
    return found


def largest(found: Iterable[Difference]) -> float:
    """Return the largest `max_difference`, 0.0 if there is none."""
    return max((entry.max_difference for entry in found), default=0.0)


def difference(plain: Tensor | None, lean: Tensor | None) -> float | None:
    """Return max|plain − lean| / max|plain|, or None if both are bitwise equal. NaN equals NaN at the same place.

    The result is infinite if the difference cannot be rounding: integers, other shapes or dtypes, a missing gradient.

    >>> difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]))
    0.25
    >>> difference(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])) is None
    True
    """
    if plain is None or lean is None:
        return None if plain is lean else math.inf
    if plain.shape != lean.shape or plain.dtype != lean.dtype:
        return math.inf
    plain, lean = _flat(plain), _flat(lean)
    if torch.equal(_bits(plain), _bits(lean)):
        return None
    if not (plain.is_floating_point() or plain.is_complex()):
        return math.inf
    chunks = [_apart(a, b) for a, b in zip(plain.split(_CHUNK), lean.split(_CHUNK), strict=True)]
    found = [distance for distance, _ in chunks if distance is not None]
    largest, scale = max(found, default=None), max(size for _, size in chunks)
    if not largest:
        return largest  # None: NaN with other bits; 0.0: 0.0 and -0.0
    return largest / scale if scale > 0 else math.inf


_CHUNK = 1 << 16  # elements per chunk: in double precision it fits into a processor's cache


def _apart(a: Tensor, b: Tensor) -> tuple[float | None, float]:
    """Return the largest |a − b|, or None if both are the same; and the largest finite |a|."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    size = x.abs()
    if not (scale := size.max().item()) < math.inf:
        scale = size.nan_to_num(nan=0.0, posinf=0.0).max().item()
    if torch.equal(_bits(a), _bits(b)):
        return None, scale
    distance = (x - y).abs()
    if (largest := distance.max().item()) < math.inf:  # all is finite
        return largest, scale
    bits = _bits(a) != _bits(b)
    differs = (bits if bits.dim() == 1 else bits.any(1)) & ~(x.isnan() & y.isnan())
    if not differs.any():
        return None, scale
    return distance[differs].nan_to_num(nan=math.inf, posinf=math.inf).max().item(), scale


def _flat(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.resolve_conj().resolve_neg().contiguous().flatten()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(flat: Tensor) -> Tensor:
    """Return the bits of ``flat`` as integers; a complex128 element, which no integer dtype fits, as two."""
    size = flat.element_size()
    return flat.view(_INTEGERS[size]) if size in _INTEGERS else torch.view_as_real(flat).view(torch.int64)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)
