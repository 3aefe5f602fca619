"""The tensors in the inputs and outputs of models: nested mappings, sequences and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, tuples, lists and dataclasses, in order.

    >>> import torch
    >>> [tensor.numel() for tensor in tensors_in({"a": torch.ones(2), "b": [torch.ones(3), "no tensor"]})]
    [2, 3]
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for child in tree.values():
            yield from tensors_in(child)
    elif isinstance(tree, tuple | list):
        for child in tree:
            yield from tensors_in(child)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))
