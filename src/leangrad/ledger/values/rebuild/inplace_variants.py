"""In-place variants of ops: a replay may write a result over an input that only the replay holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# By function of one or two tensors: its variant that writes over the first. ``origins/rules`` fills it.
IN_PLACE: dict[Any, Callable[..., Tensor]] = {}
COMMUTES: set[Any] = set()  # functions of two tensors that commute, so the variant may write over either
WITH_OUT: set[Any] = set()  # functions whose ``out`` may be the first or the second of their arguments
PLAIN_SUM: tuple[dict[str, Any], ...] = ({}, {"alpha": 1})  # the keyword arguments with which a sum commutes


def with_out(function: Callable[..., Tensor]) -> None:
    """Register ``function(a, b, ..., out=None)``: its ``out`` may be ``a`` or ``b``, if both have the same layout."""
    IN_PLACE[function] = function
    WITH_OUT.add(function)


def overwrite(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], owned: int, dtype: torch.dtype | None
) -> Tensor:
    """Returns ``function(*args, **kwargs)``, written over ``args[owned]`` if that is possible, else in new memory.

    owned: the index, 0 or 1, of an argument that only the replay holds.
    dtype: that of the result, where ``function`` may give another one; else None.
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
    """Whether a pointwise result of ``target`` and ``other`` has the shape, strides and dtype of ``target``."""
    own = target.dtype
    if dtype is not None and dtype != own:
        return False
    if not isinstance(other, Tensor):
        return torch.result_type(target, other) == own
    if other.dtype != own and torch.result_type(target, other) != own:
        return False
    return other.dim() == 0 or (other.shape == target.shape and other.stride() == target.stride())
