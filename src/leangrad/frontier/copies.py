"""Copies of a model that share its tensors, so that many ways to train it stand side by side in the memory of one."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.lean import plain

__all__ = ["Copies"]


class Copies:
    """Makes copies of a model. They have modules of their own, and parameters and buffers in common.

    The parameters are others than those of the model: they have gradients and hooks of their own. With `own_values`
    they have memory of their own too, for an optimizer to write to; else they are aliases of the model's, and nothing
    is allocated for them. Buffers always have memory of their own. A copy is plain, also that of a lean model.

    Raises:
        TypeError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, *, own_values: bool) -> None:
        self._model = model
        self._tensors: dict[int, Tensor] = {}  # those of the copies, by the ids of the model's
        try:
            for parameter in model.parameters():
                self._tensors[id(parameter)] = _parameter(parameter, own_values)
            for buffer in model.buffers():
                self._tensors[id(buffer)] = copy.deepcopy(buffer.detach())
            self.first = self.new()  # the copy that stands for all: its tensors are theirs
        except Exception as error:
            raise TypeError(
                f"expected a model that copy.deepcopy can copy, got {type(model).__name__}, which it cannot: "
                f"{type(error).__name__}: {error}; pass the model before it is wrapped"
            ) from error

    def new(self) -> nn.Module:
        """Another copy."""
        made = copy.deepcopy(self._model, dict[int, Any](self._tensors))
        for module in made.modules():
            plain(module)
        return made

    def clear_gradients(self) -> None:
        """Set `.grad` of the copies' parameters to None."""
        for parameter in self.first.parameters():
            parameter.grad = None


def _parameter(parameter: nn.Parameter, own_values: bool) -> Tensor:
    if own_values or type(parameter) is not nn.Parameter:
        made: Tensor = copy.deepcopy(parameter)
        made.grad = None
        return made
    with torch.no_grad():
        alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)
    return alias
