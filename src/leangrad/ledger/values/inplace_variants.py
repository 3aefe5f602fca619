"""Results that are written over an input which nobody else sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Functions of one or two tensors, and the form that writes over the first. The rules fill it.
IN_PLACE: dict[Any, Callable[..., Tensor]] = {}
COMMUTES: set[Any] = set()  # those of two that may write over either
WITH_OUT: set[Any] = set()  # functions that write over the first or the second of their arguments, as their ``out``
PLAIN_SUM: tuple[dict[str, Any], ...] = ({}, {"alpha": 1})  # keywords under which a sum commutes


def with_out(function: Callable[..., Tensor]) -> None:
    """``function(a, b, ..., out=None)`` may be given ``a`` or ``b`` as ``out``, if these are laid out alike."""
    IN_PLACE[function] = function
    WITH_OUT.add(function)


def overwrite(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], owned: int, dtype: torch.dtype | None
) -> Tensor:
    """``function(*args, **kwargs)``, over the owned one of its inputs where it can be; else in new memory.

    dtype: of the result, where the function alone would not tell.
    """
    inplace = IN_PLACE.get(function)
    if function in WITH_OUT:
        target, other = args[owned], args[1 - owned]
        over = target if other is None or _fits(target, other, dtype) else None
        result: Tensor = function(*args, **kwargs, out=over)
        return result
    if inplace is not None:
        count = len(args)
        if count == 1:
            return inplace(args[0], **kwargs)
        if count == 2 and (owned == 0 or (function in COMMUTES and kwargs in PLAIN_SUM)):
            target, other = args[owned], args[1 - owned]
            if _fits(target, other, dtype):
                return inplace(target, other, **kwargs)
    tensor: Tensor = function(*args, **kwargs)
    return tensor


def _fits(target: Tensor, other: Any, dtype: torch.dtype | None) -> bool:
    """Whether a pointwise result of both is laid out like ``target``, in its dtype."""
    own = target.dtype
    if dtype is not None and dtype != own:
        return False
    if not isinstance(other, Tensor):
        return torch.result_type(target, other) == own
    if other.dtype != own and torch.result_type(target, other) != own:
        return False
    return other.dim() == 0 or (other.shape == target.shape and other.stride() == target.stride())
