"""What a run gives, and how far two runs are apart."""

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
    """Something that is not the same bit for bit: what it is, its name, and how far it is apart (see `difference`)."""

    kind: Kind
    name: str
    max_difference: float


def collect(model: nn.Module, inputs: dict[str, Tensor], loss: Tensor) -> Outcome:
    """Everything that a training step gives, copied to the CPU.

    The random state after the step is part of it: a run that draws other numbers changes the step that follows.
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
    """All that is in one or both and is not the same."""
    found = []
    for kind, name in {**plain, **lean}:
        distance = difference(plain.get((kind, name)), lean.get((kind, name)))
        if distance is not None:
            found.append(Difference(kind, name, distance))
    return found


def largest(found: Iterable[Difference]) -> float:
    """The largest difference, 0.0 if there is none."""
    return max((entry.max_difference for entry in found), default=0.0)


def difference(plain: Tensor | None, lean: Tensor | None) -> float | None:
    """None if both are the same bit for bit, else max|plain − lean| / max|plain|. NaN equals NaN at the same place.

    Infinite where the difference is no matter of rounding: integers, shapes, a gradient that is missing.

    >>> difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]))
    0.25
    >>> difference(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])) is None
    True
    """
    if plain is None or lean is None:
        return None if plain is lean else math.inf
    if plain.shape != lean.shape or plain.dtype != lean.dtype:
        return math.inf
    plain, lean = _dense(plain), _dense(lean)
    plain_bytes, lean_bytes = _bytes(plain), _bytes(lean)
    if torch.equal(plain_bytes, lean_bytes):  # the usual case, without a mask as large as the tensor
        return None
    same = (plain_bytes == lean_bytes).all(dim=1)
    if not (plain.is_floating_point() or plain.is_complex()):
        return math.inf
    wide = torch.complex128 if plain.is_complex() else torch.float64
    a, b = plain.to(wide).flatten()[~same], lean.to(wide).flatten()[~same]
    apart = ~(a.isnan() & b.isnan())
    if not apart.any():
        return None
    finite = plain.to(wide).abs()
    scale = finite[finite.isfinite()].max() if finite.isfinite().any() else torch.tensor(0.0)
    largest = (a[apart] - b[apart]).abs().nan_to_num(nan=math.inf, posinf=math.inf).max()
    if largest == 0:
        return 0.0  # 0.0 and -0.0
    return (largest / scale).item() if scale > 0 else math.inf


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg().contiguous().flatten()
    return tensor.view(torch.uint8).view(-1, tensor.element_size())


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)
