"""Dense layers that keep each activation once and free it in backward: `Dense`, `MLP`.

A chain of layers (`leangrad.engine.chain`) is one autograd node. It keeps the caller's own input, and one map per
layer: the output of the activation if its backward can run from that (relu, tanh, ...), else its input. Calls that the
chain does not support (hooks on a child, a child that was replaced, a tensor subclass, `torch.compile`, `torch.func`)
run in plain PyTorch; an `MLP` then runs as the `nn.Sequential` that it also is.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad._torch import autocast_may_be_on, bare_modules, is_watched
from leangrad.engine.chain import Chain
from leangrad.engine.single_node import run_recorded
from leangrad.functional import activate, are_ordinary, autocast_enabled
from leangrad.ops.activation import Activation, resolve

__all__ = ["MLP", "Activate", "Dense"]


class Activate(nn.Module):
    """An activation by name, as a module. Equals `nn.ReLU()`, `nn.GELU()`, ...; see `leangrad.functional.activate`.

    >>> Activate("leaky_relu", 0.2)
    Activate(leaky_relu(negative_slope=0.2))
    """

    def __init__(self, activation: str | Activation, parameter: float | None = None):
        super().__init__()
        self.record = resolve(activation, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to x."""
        return activate(x, self.record)

    def extra_repr(self) -> str:
        """Show the name and the parameter."""
        return repr(self.record)


class Dense(nn.Linear):
    """A linear layer and its activation, which together keep one map.

    Equals `nn.Sequential(nn.Linear(in_features, out_features, bias), act)`, with the parameters of the `nn.Linear`.
    For swiglu and geglu the weight has 2 · out_features rows: the gates, then the values. Keeps for backward the
    caller's own x, and one map, with as many features as the weight has rows, if there is an activation. A second
    backward without `retain_graph=True` raises ConsumedError.

    >>> layer = Dense(3, 4, activation="gelu")
    >>> layer(torch.ones(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | Activation | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        record = None if activation is None else resolve(activation)
        rows = 2 * out_features if record is not None and record.gated else out_features
        super().__init__(in_features, rows, bias, device=device, dtype=dtype)
        self.record = record

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., out_features) for x of (..., in_features)."""
        program = _Program([self.record], [self.weight, self.bias])
        return program.plain(x, self.weight, self.bias) if is_watched() else _forward(x, program)

    def extra_repr(self) -> str:
        """Show the arguments of `nn.Linear`, and the activation."""
        return f"{super().extra_repr()}, activation={self.record}"


class MLP(nn.Sequential):
    """Dense layers in a row, as one autograd node.

    Equals `nn.Sequential(nn.Linear(s0, s1), act, nn.Linear(s1, s2), act, ..., nn.Linear(.., sn))`, bit for bit, and its
    state_dict has the same keys. Keeps for backward the caller's own x and one map for each layer with an activation
    (two for a hidden map below 1 MiB whose activation runs backward from its input); backward holds at most two
    gradient maps at any time. `output_activation` is applied to the last layer. With swiglu or geglu each hidden
    `nn.Linear` has twice as many rows as its size. One size means no layers: the input itself is returned.

    >>> mlp = MLP([2, 8, 1], "tanh", output_activation="sigmoid")
    >>> mlp(torch.zeros(5, 2)).shape, list(mlp.state_dict())
    (torch.Size([5, 1]), ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str | Activation = "relu",
        *,
        output_activation: str | Activation | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        sizes = list(sizes)
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"sizes: expected at least one positive int, got {sizes}")
        hidden, last = resolve(activation), None if output_activation is None else resolve(output_activation)
        records = [*[hidden] * (len(sizes) - 2), last]
        children: list[nn.Module] = []
        for in_features, out_features, record in zip(sizes, sizes[1:], records, strict=False):
            rows = 2 * out_features if record is not None and record.gated else out_features
            children.append(nn.Linear(in_features, rows, bias, device=device, dtype=dtype))
            if record is not None:
                children.append(Activate(record))
        super().__init__(*children)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., sizes[-1]) for x of (..., sizes[0])."""
        program = None if is_watched() else self._program()
        if program is None:
            y: Tensor = super().forward(x)
            return y
        return _forward(x, program) if program.records else x

    def _program(self) -> "_Program | None":
        """Returns the children as a chain; None if one of them has hooks or is not of a kind that `__init__` makes."""
        children = bare_modules(self)
        if children is None:
            return None
        records: list[Activation | None] = []
        parameters: list[Tensor | None] = []
        for child, own in children:
            if type(child) is nn.Linear and "weight" in own and "bias" in own:
                records.append(None)
                parameters += (own["weight"], own["bias"])
            elif type(child) is Activate and records and records[-1] is None:
                records[-1] = child.record
            else:
                return None
        return _Program(records, parameters)


class _Program:
    """The layers of a chain, and the three ways to run it.

    records: activation of each layer, or None. parameters: weight and bias of each layer, in turn.
    """

    def __init__(self, records: list[Activation | None], parameters: list[Tensor | None]):
        self.records, self.parameters = records, parameters

    def record(self, tensors: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor, Chain]:
        """Run forward; returns the output, and the `Chain` that holds what backward needs."""
        run = Chain(self.records, needs)
        return run.forward(tensors), run

    def infer(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """Run forward without a backward to follow: activations are written over their inputs where possible."""
        return Chain(self.records, (False,) * (1 + len(parameters))).forward((x, *parameters))

    def plain(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """Compute the same on autograd's own ops."""
        for record, weight, bias in zip(self.records, parameters[::2], parameters[1::2], strict=True):
            assert weight is not None
            x = F.linear(x, weight, bias)
            if record is not None:
                x = record.forward(x, record.parameter, None)
        return x


def _forward(x: Tensor, program: _Program) -> Tensor:
    """Run the layers as one autograd node; on autograd's own ops if a node cannot be used."""
    parameters = program.parameters
    if not are_ordinary(x, *parameters):
        return program.plain(x, *parameters)
    if not autocast_may_be_on() or not autocast_enabled(x.device.type):  # the second query is slow
        return _run(x, program, parameters)
    if any(record is not None and record.float32_in_autocast for record in program.records):
        return program.plain(x, *parameters)
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type)
    x, *parameters = (_autocast(t, dtype) for t in (x, *parameters))  # type: ignore[assignment]
    with torch.autocast(device_type, enabled=False):
        return _run(x, program, parameters)


def _run(x: Tensor, program: _Program, parameters: list[Tensor | None]) -> Tensor:
    """Run the layers as one autograd node, or without backward if no gradient is needed."""
    try:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters) if t is not None):
            y = run_recorded(program.record, program.plain, rows, *parameters)
        else:
            y = program.infer(rows, *parameters)
    except (RuntimeError, IndexError):  # arguments are checked only if torch raises, to name the wrong one
        _check(x, parameters[0])
        raise
    return y if rows is x else y.view(*x.shape[:-1], y.shape[-1])


def _autocast(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Cast an argument of `F.linear` as autocast does: every floating dtype but float64 becomes `dtype`."""
    return t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype)


def _check(x: Tensor, weight: Tensor | None) -> None:
    assert weight is not None
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x: expected (..., {weight.shape[1]}), got {tuple(x.shape)}")
    if x.dtype != weight.dtype:
        raise TypeError(f"x: expected the dtype of the weights, {weight.dtype}, got {x.dtype}; convert x or the module")
    if x.device != weight.device:
        raise ValueError(
            f"x: expected the device of the weights, {weight.device}, got {x.device}; move x or the module"
        )
