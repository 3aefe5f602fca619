"""`Subject`: the model, batch and loss given to `verify`, `floor` and `frontier`, checked, and called as one step."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.trees import tensors_in

__all__ = ["Arguments", "Subject", "default_loss", "describe"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of the model


@dataclass
class Subject:
    """A model with its batch and loss, which make up a training step."""

    model: nn.Module
    arguments: Arguments
    loss: Callable[[Any], Tensor]
    autocast: torch.dtype | None
    batch: str  # description of the batch, for errors
    caller: str  # the leangrad function that was called, for errors

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: Any,
        loss: Callable[[Any], Tensor] | None,
        autocast: torch.dtype | None,
        *,
        caller: str,
    ) -> "Subject":
        """Make a subject of a user's arguments; raise a TypeError or ValueError if they are invalid."""
        _check_arguments(model, loss, autocast, caller)
        return cls(model, _arguments(batch), loss or default_loss, autocast, describe(batch), caller)

    def fresh_arguments(self) -> tuple[Arguments, dict[str, Tensor]]:
        """Return the arguments of one run, with new leaves for tensors that require grad, and these leaves by path."""
        inputs: dict[str, Tensor] = {}
        args, kwargs = self.arguments
        return (tuple(_with_own_leaves(list(args), "", inputs)), _with_own_leaves(kwargs, "", inputs)), inputs

    def forward(self, arguments: Arguments) -> Tensor:
        """Call the model and the loss; return the loss, a checked scalar."""
        args, kwargs = arguments
        try:
            output = self.model(*args, **kwargs)
        except Exception as error:
            error.add_note(f"leangrad.{self.caller} called {type(self.model).__name__} with the batch {self.batch}")
            raise
        value = self.loss(output)
        _check_loss(value)
        return value

    def under_autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context that forward and loss run in: autocast, if the user gave a dtype."""
        if self.autocast is None:
            return contextlib.nullcontext()
        found = next((one.device.type for one in (*self.model.parameters(), *tensors_in(self.arguments))), "cpu")
        return torch.autocast(found, dtype=self.autocast)


def default_loss(output: Any) -> Tensor:
    """Return the loss of a model's output if the user gave no loss function: see the argument `loss` of `verify`."""
    if isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point():
        return output
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not tensors:
        raise ValueError(
            f"expected an output with a floating tensor that requires a gradient, got {describe(output)}; pass "
            "`loss=`, a function of the output that gives a scalar"
        )
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def _with_own_leaves(value: Any, path: str, inputs: dict[str, Tensor]) -> Any:
    """Return `value` with each tensor that requires a gradient replaced by a leaf that shares its memory.

    The leaves are added to `inputs`, by their path. So backward does not continue into a graph that made the batch, and
    does not write to the `.grad` of the caller's tensors.
    """
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value
        inputs[path] = value.detach().requires_grad_()
        return inputs[path]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_with_own_leaves(v, _below(path, i), inputs) for i, v in enumerate(value)))
    if type(value) in (tuple, list):
        return type(value)(_with_own_leaves(v, _below(path, i), inputs) for i, v in enumerate(value))
    if type(value) is dict:
        return {key: _with_own_leaves(v, _below(path, key), inputs) for key, v in value.items()}
    return value


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    raise TypeError(
        "expected batch to be a tensor, a tuple or list of positional arguments, or a mapping from names to keyword "
        f"arguments, got {describe(batch)}; pass () for a model that takes none"
    )


def _check_arguments(model: Any, loss: Any, autocast: Any, caller: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected model to be a torch.nn.Module, got {describe(model)}; call {caller}(model, batch, loss)"
        )
    if any(
        isinstance(p, nn.UninitializedParameter | nn.UninitializedBuffer)
        for p in [*model.parameters(), *model.buffers()]
    ):
        raise ValueError("expected a model whose parameters exist, got lazy ones; call the model once first")
    if loss is not None and not callable(loss):
        raise TypeError(
            f"expected loss to be a function of the model's output, or None, got {describe(loss)}; for targets pass "
            "such as `loss=lambda output: criterion(output, targets)`"
        )
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"expected autocast to be a dtype such as torch.bfloat16, or None, got {describe(autocast)}")
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "expected to be outside torch.inference_mode(), in which nothing can be trained; leave it first"
        )


def _check_loss(value: Any) -> None:
    mend = "pass `loss=`, a function of the model's output that gives a scalar tensor, such as `lambda out: out.mean()`"
    if not isinstance(value, Tensor):
        raise TypeError(f"expected the loss to be a scalar tensor, got {describe(value)}; {mend}")
    if value.numel() != 1:
        raise ValueError(f"expected the loss to be a scalar, got {describe(value)}; {mend}")
    if not value.requires_grad:
        raise ValueError(f"expected a loss that depends on a parameter, got one that requires no gradient; {mend}")


def describe(value: Any) -> str:
    """Return a short description of a value: of tensors, the dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(content)}" for key, content in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(describe(content) for content in value) + ")"
    return type(value).__name__
