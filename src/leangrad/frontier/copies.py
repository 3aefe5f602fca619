"""Copies of a model that share its tensors, so that many ways to train it need the memory of one model only."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.lean import plain

__all__ = ["Copies"]


class Copies:
    """Makes copies of a model; each copy has its own modules, and all copies share one set of parameters and buffers.

    The copies' parameters are not those of the model: they have their own gradients and hooks. With `own_values` they
    have their own memory too, which an optimizer can write to; without, they are aliases of the model's parameters and
    allocate nothing. The copies' buffers always have their own memory. A copy is plain, even if the model is lean.

    - `first`: a copy that no way trains; its tensors are those of all copies.

    Raises:
        TypeError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, *, own_values: bool) -> None:
        self._model = model
        self._tensors: dict[int, Tensor] = {}  # the copies' tensors, by the ids of the model's tensors
        try:
            for parameter in model.parameters():
                self._tensors[id(parameter)] = _parameter(parameter, own_values)
            for buffer in model.buffers():
                self._tensors[id(buffer)] = copy.deepcopy(buffer.detach())
            self.first = self.new()
        except Exception as error:
            raise TypeError(
                f"expected a model that copy.deepcopy can copy, got {type(model).__name__}, which it cannot: "
                f"{type(error).__name__}: {error}; pass the model before it is wrapped"
            ) from error

    def new(self) -> nn.Module:
        """Return another copy."""
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
