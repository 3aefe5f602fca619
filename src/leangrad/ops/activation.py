"""Activations: each has a forward with `out=`, and a backward that may write over the gradient it reads.

Every activation is one frozen record in `ACTIVATIONS`: two functions, and which tensor backward needs of forward.

    y  = forward(x, parameter, out)          out=None allocates; out may be x where `in_place`
    dx = backward(g, kept, parameter, into)  into=None allocates (with grad mode on: differentiably); into may be g

`kept` is the input x or the output y: see `keeps`, which is "output" only if plain PyTorch's own backward op gives the
same bits from y. To add an activation, write the two functions and one line in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad._torch import direct, softmax_backward

__all__ = ["ACTIVATIONS", "FRESH", "OVER", "Activation", "resolve"]

aten: Any = torch.ops.aten

# Elements of scratch for backward ops of torch that cannot write into a given buffer: small enough to stay in cache.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Activation:
    """One activation: its forward, its backward, and what backward needs of forward.

    >>> ACTIVATIONS["tanh"].keeps
    'output'
    """

    name: str
    forward: Callable[[Tensor, float, Tensor | None], Tensor]
    backward: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    keeps: Literal["input", "output"]
    parameter: float = 0.0
    parameter_name: str = ""
    parameter_min: float = -float("inf")
    in_place: bool = True  # forward may be given its input as `out`
    gated: bool = False  # x is (..., 2N): a gate and a value; y is (..., N)
    float32_in_autocast: bool = False  # CUDA autocast runs it in float32
    zero_where_masked: bool = False  # dx is g, with 0 where y <= 0: all that backward needs of y

    def __repr__(self) -> str:
        return f"{self.name}({self.parameter_name}={self.parameter})" if self.parameter_name else self.name


def resolve(activation: str | Activation, parameter: float | None = None) -> Activation:
    """Returns the record of an activation, given by its name or itself; `parameter` replaces its slope, alpha or beta.

    >>> resolve("leaky_relu", 0.2)
    leaky_relu(negative_slope=0.2)
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}; got {activation!r}")
        activation = ACTIVATIONS[activation]
    if not isinstance(activation, Activation):
        raise TypeError(f"activation: expected a name or an Activation, got {type(activation).__name__}")
    if parameter is None:
        return activation
    if not activation.parameter_name:
        raise ValueError(f"parameter: {activation.name} has none, got {parameter!r}")
    if not parameter >= activation.parameter_min:
        raise ValueError(
            f"parameter: {activation.name} needs {activation.parameter_name} >= {activation.parameter_min}, "
            f"got {parameter!r}"
        )
    return replace(activation, parameter=float(parameter))


def _forward_of(op: Any) -> Callable[..., Tensor]:
    """Returns `run(out, *args)`, which computes `op(*args)`, into `out` if that is not None."""
    fresh, into_out = op.default, direct(op.out)

    def run(out: Tensor | None, *args: Any) -> Tensor:
        y: Tensor = fresh(*args) if out is None else into_out(*args, out=out)
        return y

    return run


def _backward_of(op: Any, **options: Any) -> Callable[..., Tensor]:
    """Returns `run(into, *args)`: as `_forward_of`, for torch's backward ops, which call their buffer `grad_input`."""
    fresh, into_grad = op.default, direct(op.grad_input)  # looked up once: finding them costs as much as calling them

    def run(into: Tensor | None, *args: Any) -> Tensor:
        if into is None:
            dx: Tensor = fresh(*args, **options)
            return dx
        into_grad(*args, **options, grad_input=into)
        return into

    return run


def _run_in_chunks(op: Any, into: Tensor | None, g: Tensor, x: Tensor, *, rounds_alike: bool) -> Tensor:
    """Run a backward op that cannot write into a buffer chunk by chunk, so that its scratch is smaller than a map.

    rounds_alike: whether the scalar loop of its CPU kernel rounds as the vector loop does. Each thread runs the scalar
        loop over the last elements of its part of a tensor. The parts of a chunk end at other elements than those of
        the whole tensor. So with several threads an op that does not round alike runs on the whole tensor, with as much
        scratch as plain PyTorch uses.
    """
    if into is None:
        dx: Tensor = op.default(g, x)
        return dx
    splits_alike = rounds_alike or not into.is_cpu or torch.get_num_threads() == 1
    dense = into.is_contiguous() and g.is_contiguous() and x.is_contiguous()
    if into.numel() <= _CHUNK or not dense or not splits_alike:
        return into.copy_(op.default(g, x))
    for into_c, g_c, x_c in zip(*(t.view(-1).split(_CHUNK) for t in (into, g, x)), strict=True):
        into_c.copy_(op.default(g_c, x_c))
    return into


_aten_leaky_relu = _forward_of(aten.leaky_relu)
_aten_elu = _forward_of(aten.elu)
_aten_silu = _forward_of(aten.silu)
_aten_softplus = _forward_of(aten.softplus)
_aten_hardswish = _forward_of(aten.hardswish)
_aten_mish = _forward_of(aten.mish)
_aten_leaky_relu_backward = _backward_of(aten.leaky_relu_backward)
_aten_elu_backward = _backward_of(aten.elu_backward)
_aten_silu_backward = _backward_of(aten.silu_backward)
_aten_sigmoid_backward = _backward_of(aten.sigmoid_backward)
_aten_tanh_backward = _backward_of(aten.tanh_backward)
_aten_softplus_backward = _backward_of(aten.softplus_backward)
_threshold_into = direct(aten.threshold_backward.grad_input)  # these two are called directly, for chains of layers
_gelu_into = direct(aten.gelu_backward.grad_input)
_aten_gelu_tanh_backward = _backward_of(aten.gelu_backward, approximate="tanh")


# relu: y = max(x, 0); dx = g where y > 0, else 0


def _relu(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.relu(x)
    return x.relu_() if out is x else torch.clamp_min(x, 0, out=out)  # relu has no `out`; clamp_min equals it


def _relu_backward(g: Tensor, y: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    dx: Tensor = aten.threshold_backward(g, y, 0) if into is None else _threshold_into(g, y, 0, grad_input=into)
    return dx


# leaky_relu: y = x where x > 0, else slope x; the sign of y is that of x, since slope >= 0


def _leaky_relu(x: Tensor, slope: float, out: Tensor | None) -> Tensor:
    return _aten_leaky_relu(out, x, slope)


def _leaky_relu_backward(g: Tensor, y: Tensor, slope: float, into: Tensor | None) -> Tensor:
    return _aten_leaky_relu_backward(into, g, y, slope, True)


# elu: y = x where x > 0, else alpha (e^x - 1). From y, dx = g (y + alpha) loses the digits of a small e^x: keep x.


def _elu(x: Tensor, alpha: float, out: Tensor | None) -> Tensor:
    return _aten_elu(out, x, alpha)


def _elu_backward(g: Tensor, x: Tensor, alpha: float, into: Tensor | None) -> Tensor:
    return _aten_elu_backward(into, g, alpha, 1, 1, False, x)


# gelu: y = x Φ(x), by erf or by tanh


def _gelu(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return F.gelu(x, out=out)  # type: ignore[call-arg]


def _gelu_backward(g: Tensor, x: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    dx: Tensor = aten.gelu_backward(g, x) if into is None else _gelu_into(g, x, grad_input=into)
    return dx


def _gelu_tanh(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return F.gelu(x, approximate="tanh", out=out)  # type: ignore[call-arg]


def _gelu_tanh_backward(g: Tensor, x: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    return _aten_gelu_tanh_backward(into, g, x)


# silu: y = x σ(x)


def _silu(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return _aten_silu(out, x)


def _silu_backward(g: Tensor, x: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    if into is None and torch.is_grad_enabled():  # torch has no derivative of silu_backward
        s = torch.sigmoid(x)
        return g * s * (1 + x * (1 - s))
    return _aten_silu_backward(into, g, x)


# sigmoid: y = σ(x); dx = g y (1 - y)


def _sigmoid(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return torch.sigmoid(x, out=out)


def _sigmoid_backward(g: Tensor, y: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    return _aten_sigmoid_backward(into, g, y)


# tanh: dx = g (1 - y²)


def _tanh(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return torch.tanh(x, out=out)


def _tanh_backward(g: Tensor, y: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    return _aten_tanh_backward(into, g, y)


# softplus: y = log(1 + e^(beta x)) / beta, and x itself where beta x > 20


def _softplus(x: Tensor, beta: float, out: Tensor | None) -> Tensor:
    return _aten_softplus(out, x, beta, 20)


def _softplus_backward(g: Tensor, x: Tensor, beta: float, into: Tensor | None) -> Tensor:
    return _aten_softplus_backward(into, g, x, beta, 20)


# hardswish: y = x clamp(x + 3, 0, 6) / 6


def _hardswish(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return _aten_hardswish(out, x)


def _hardswish_backward(g: Tensor, x: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    return _run_in_chunks(aten.hardswish_backward, into, g, x, rounds_alike=True)


# mish: y = x tanh(softplus(x))


def _mish(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return _aten_mish(out, x)


def _mish_backward(g: Tensor, x: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    if into is None and torch.is_grad_enabled():  # torch has no derivative of mish_backward
        t = torch.tanh(F.softplus(x))
        return g * (t + x * torch.sigmoid(x) * (1 - t * t))
    return _run_in_chunks(aten.mish_backward, into, g, x, rounds_alike=False)  # because of exp and log1p


# softmax over the last dimension: dx = y (g - Σ g y)


def _softmax(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return torch.softmax(x, -1) if out is None else torch.softmax(x, -1, out=out)


def _softmax_backward(g: Tensor, y: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    dx = softmax_backward(g, y)
    # Every element of dx depends on its whole row of g: torch does not promise that dx may be written over g.
    return dx if into is None else into.copy_(dx)


# Gated: x = [a, b] along the last dimension; y = f(a) b; da = f'(a) g b, db = g f(a)


def _gated(f: Any, x: Tensor, out: Tensor | None) -> Tensor:
    a, b = x.chunk(2, -1)
    y: Tensor = f(a, 0.0, None) * b if out is None else f(a, 0.0, out).mul_(b)
    return y


def _gated_backward(f: Any, f_backward: Any, g: Tensor, x: Tensor, into: Tensor | None) -> Tensor:
    a, b = x.chunk(2, -1)
    if into is None:
        return torch.cat([f_backward(g * b, a, 0.0, None), g * f(a, 0.0, None)], -1)
    if into is not x:
        da, db = into.chunk(2, -1)
        f_backward(torch.mul(g, b, out=da), a, 0.0, da)
        f(a, 0.0, db).mul_(g)
        return into
    rows = max(1, _CHUNK // max(1, a.shape[-1]))
    for g_c, a_c, b_c in zip(*(t.flatten(0, -2).split(rows) for t in (g, a, b)), strict=True):
        db_c = f(a_c, 0.0, None).mul_(g_c)
        f_backward(b_c.mul_(g_c), a_c, 0.0, a_c)
        b_c.copy_(db_c)
    return x


def _swiglu(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return _gated(_silu, x, out)


def _swiglu_backward(g: Tensor, x: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    return _gated_backward(_silu, _silu_backward, g, x, into)


def _geglu(x: Tensor, parameter: float, out: Tensor | None) -> Tensor:
    return _gated(_gelu, x, out)


def _geglu_backward(g: Tensor, x: Tensor, parameter: float, into: Tensor | None) -> Tensor:
    return _gated_backward(_gelu, _gelu_backward, g, x, into)


ACTIVATIONS: dict[str, Activation] = {
    record.name: record
    for record in (
        Activation("relu", _relu, _relu_backward, "output", zero_where_masked=True),
        Activation("leaky_relu", _leaky_relu, _leaky_relu_backward, "output", 0.01, "negative_slope", 0.0),
        Activation("elu", _elu, _elu_backward, "input", 1.0, "alpha"),
        Activation("gelu", _gelu, _gelu_backward, "input"),
        Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_backward, "input"),
        Activation("silu", _silu, _silu_backward, "input"),
        Activation("sigmoid", _sigmoid, _sigmoid_backward, "output"),
        Activation("tanh", _tanh, _tanh_backward, "output"),
        Activation("softplus", _softplus, _softplus_backward, "input", 1.0, "beta", float32_in_autocast=True),
        Activation("hardswish", _hardswish, _hardswish_backward, "input"),
        Activation("mish", _mish, _mish_backward, "input"),
        Activation("softmax", _softmax, _softmax_backward, "output", in_place=False, float32_in_autocast=True),
        Activation("swiglu", _swiglu, _swiglu_backward, "input", in_place=False, gated=True),
        Activation("geglu", _geglu, _geglu_backward, "input", in_place=False, gated=True),
    )
}

# forward(x, parameter, None) and forward(x, parameter, x), for the activations that are a single function of torch. A
# long chain of small layers takes as long as the host needs, and every call in between costs a microsecond.
FRESH: dict[Callable[..., Tensor], Callable[[Tensor], Tensor]] = {
    _relu: torch.relu,
    _gelu: F.gelu,
    _sigmoid: torch.sigmoid,
    _tanh: torch.tanh,
}
OVER: dict[Callable[..., Tensor], Callable[[Tensor], Tensor]] = {
    _relu: torch.relu_,
    _sigmoid: torch.sigmoid_,
    _tanh: torch.tanh_,
}
