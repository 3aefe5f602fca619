"""Converts attention masks of the usual shapes to the one form that attention takes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fit_mask"]


def fit_mask(
    mask: Tensor | None, shape: tuple[int, int], heads: int, causal: bool, dtype: torch.dtype
) -> tuple[Tensor | None, bool]:
    """Returns a 4-D mask that broadcasts to (B, heads, T, T), and whether attention still has to be causal.

    `shape` is (B, T). A boolean mask is True where a key takes part; a floating one is added to the scores, in `dtype`.
    A mask and `causal` are combined into one mask, since kernels take only one of the two.

    >>> fit_mask(torch.tensor([[True, False]]), (1, 2), 4, True, torch.float32)
    (tensor([[[[ True, False],
              [ True, False]]]]), False)
    """
    if mask is None:
        return None, causal
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: expected a boolean tensor (True takes part) or a floating one (added), got {found}")
    batch, length = shape
    full = mask
    if mask.dim() == 2:
        full = mask[:, None, None, :]
    elif mask.dim() == 3:
        full = mask[:, None]
    fits = full.dim() == 4 and full.shape[3] == length and full.shape[2] in (1, length)
    if not fits or full.shape[0] not in (1, batch) or full.shape[1] not in (1, heads):
        raise ValueError(
            f"mask: expected ({batch}, {length}), ({batch}, {length}, {length}) or "
            f"({batch} or 1, {heads} or 1, {length} or 1, {length}), got {tuple(mask.shape)}"
        )
    if full.is_floating_point():
        full = full.to(dtype)
    if not causal:
        return full, False
    before = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return (full & before if full.dtype == torch.bool else full.masked_fill(~before, float("-inf"))), False
