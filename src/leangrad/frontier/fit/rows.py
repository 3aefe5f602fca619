"""Count the rows of a batch, and make a batch with more or fewer rows: dimension 0 of every tensor in it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leangrad.trees import tensors_in
from leangrad.verify.subject import describe

__all__ = ["count_rows", "with_rows"]


def count_rows(batch: Any) -> int:
    """Return the size of dimension 0 of the batch's tensors; raises a ValueError if they differ or if it is 0.

    >>> count_rows((torch.ones(3, 4), {"mask": torch.ones(3)}))
    3
    """
    sizes = {len(tensor): tensor for tensor in tensors_in(batch) if tensor.dim() > 0}
    if not sizes:
        raise ValueError(
            f"expected a batch with a tensor whose dimension 0 counts its rows, got {describe(batch)}, which has none"
        )
    if len(sizes) > 1:
        found = " and ".join(describe(tensor) for tensor in list(sizes.values())[:2])
        raise ValueError(
            f"expected all tensors of the batch to have the same dimension 0, which counts its rows, got {found}; keep "
            "what has no rows, such as a table of positions, in the model"
        )
    rows = next(iter(sizes))
    if rows == 0:
        raise ValueError(f"expected a batch with at least one row, got {describe(batch)}")
    return rows


def with_rows(batch: Any, rows: int) -> Any:
    """Return the batch with ``rows`` rows: its first rows, or all of them repeated.

    >>> with_rows([torch.tensor([1, 2]), "left as it is"], 3)
    [tensor([1, 2, 1]), 'left as it is']
    """
    if isinstance(batch, Tensor):
        return batch if batch.dim() == 0 or len(batch) == rows else _tensor_with_rows(batch, rows)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(with_rows(content, rows) for content in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(with_rows(content, rows) for content in batch)
    if isinstance(batch, Mapping):
        return {key: with_rows(content, rows) for key, content in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = {field.name: with_rows(getattr(batch, field.name), rows) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **changed)
    return batch


def _tensor_with_rows(tensor: Tensor, rows: int) -> Tensor:
    order = torch.arange(rows, device=tensor.device) % len(tensor)
    return tensor.detach().index_select(0, order).requires_grad_(tensor.requires_grad)
