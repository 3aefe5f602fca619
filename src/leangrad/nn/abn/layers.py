"""Batch norm and its activation as one layer that keeps one map: `ABN`, `InPlaceABN`, `InPlaceABNSync`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from leangrad._torch import forward_mode_active, is_capturing, is_view, keeps_output, norm_tensors, transforms_active
from leangrad.nn.abn import rule as abn_rule  # noqa: F401  (the ledger learns to rebuild these layers)
from leangrad.nn.abn.autograd import Call, apply_abn
from leangrad.nn.abn.invertibility import ask, limits_of
from leangrad.ops.abn import is_dense
from leangrad.ops.abn_activation import Activation, activate_
from leangrad.switch import disabled

__all__ = ["ABN", "InPlaceABN", "InPlaceABNSync"]


class ABN(nn.Module):
    """Batch norm with its activation; keeps its input, never changes it, and computes the rest again in backward.

    Equals, with the same `state_dict` as `nn.BatchNorm1d/2d/3d`:

        activation(F.batch_norm(x, ...) + residual)

    Args:
        num_features: the size of dimension 1 of the input, which is (N, C) or (N, C, ...).
        eps, momentum, affine, track_running_stats: as in `nn.BatchNorm2d`.
        activation: "leaky_relu", "elu", "identity", "relu", "silu", "gelu", "gelu_tanh", or any function of a tensor
            that keeps its shape and has no parameters.
        activation_param: the slope of leaky_relu, the alpha of elu.
        absolute: apply |γ| + eps in place of γ, as older in-place batch norms do.

    Keeps for backward: one map, the input, and 16 bytes per channel; and the residual, if there is one and the
    activation is not "identity". An op that saves the output keeps it as a second map; inside
    `leangrad.nn.abn.recipe.rebuilding()`, as in a model from `convert_abn`, it keeps only a recipe.

    >>> abn = ABN(3, activation="silu")
    >>> plain = nn.Sequential(nn.BatchNorm2d(3), nn.SiLU())
    >>> x = torch.randn(2, 3, 4, 4)
    >>> torch.allclose(abn(x), plain(x), atol=1e-6)
    True
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str | Callable[[Tensor], Tensor] = "leaky_relu",
        activation_param: float = 0.01,
        *,
        absolute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats, self.absolute = affine, track_running_stats, absolute
        self._activation, self._activation_param = activation, activation_param
        self._known, self._function = _resolve(activation, activation_param)
        empty = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.ones(num_features, **empty)) if affine else None  # type: ignore[arg-type]
        self.bias = nn.Parameter(torch.zeros(num_features, **empty)) if affine else None  # type: ignore[arg-type]
        tracked = track_running_stats
        self.running_mean: Tensor | None
        self.running_var: Tensor | None
        self.num_batches_tracked: Tensor | None
        self.register_buffer("running_mean", torch.zeros(num_features, **empty) if tracked else None)  # type: ignore[arg-type]
        self.register_buffer("running_var", torch.ones(num_features, **empty) if tracked else None)  # type: ignore[arg-type]
        self.register_buffer("num_batches_tracked", torch.tensor(0, device=device) if tracked else None)

    @property
    def activation(self) -> str | Callable[[Tensor], Tensor]:
        """The activation: a name, or a function."""
        return self._activation

    @activation.setter
    def activation(self, activation: str | Callable[[Tensor], Tensor]) -> None:
        self._known, self._function = _resolve(activation, self._activation_param)
        self._activation = activation

    @property
    def activation_param(self) -> float:
        """The slope of leaky_relu, or alpha of elu."""
        return self._activation_param

    @activation_param.setter
    def activation_param(self, param: float) -> None:
        self._known, self._function = _resolve(self._activation, param)
        self._activation_param = param

    def reset_parameters(self) -> None:
        """Set the weights and the running statistics to their initial values."""
        with torch.no_grad():
            for t, value in ((self.weight, 1.0), (self.bias, 0.0), (self.running_mean, 0.0), (self.running_var, 1.0)):
                if t is not None:
                    t.fill_(value)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.zero_()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns activation(norm(x) + residual)."""
        weight, bias, mean, var, counter = norm_tensors(self)
        use_batch = self.training or mean is None
        self._check(x, residual, use_batch)
        call = self._call(use_batch, mean, var, counter)
        if _must_be_plain(x) or (call.group is None and (x.numel() == 0 or disabled())):
            return self._activate(self._plain(x, call), residual)
        if not use_batch and not torch.is_grad_enabled():
            return self._infer(self._plain(x, call), residual)
        if not is_dense(x):
            x = x.contiguous()
        if residual is not None and residual.dtype != x.dtype:  # the sum has the wider dtype: add it in plain PyTorch
            call.activation, call.function = Activation("identity"), None
            return self._activate(apply_abn(x, weight, bias, None, call), residual)
        if residual is not None and (residual.shape != x.shape or residual.stride() != x.stride()):
            residual = torch.empty_like(x).copy_(residual)
        self._prepare(x, weight, bias, residual, call)
        z: Tensor = apply_abn(x, weight, bias, residual, call)
        return z

    def _prepare(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
    ) -> None:
        """Set in `call` what is kept for backward; here always the input, so nothing changes."""

    def _group(self) -> dist.ProcessGroup | None:
        return None

    def _call(self, use_batch: bool, mean: Tensor | None, var: Tensor | None, counter: Tensor | None) -> Call:
        updates = self.training and self.track_running_stats  # as in `nn.BatchNorm2d`, which may have statistics still
        factor = 0.0 if self.momentum is None else self.momentum
        if not updates:
            counter = None
        elif counter is not None and self.momentum is None:
            factor, counter = 1.0 / float(counter.add_(1)), None
        running = None
        if mean is not None and var is not None and (updates or not use_batch):
            running = (mean, var)
        group = self._group() if use_batch else None
        known, function = self._known, self._function
        return Call(known, function, self.eps, use_batch, running, factor, self.absolute, False, False, group, counter)

    def _check(self, x: Tensor, residual: Tensor | None, use_batch: bool) -> None:
        shape = x.shape
        if len(shape) < 2 or shape[1] != self.num_features:
            raise ValueError(
                f"expected an input of shape (N, {self.num_features}, ...) for num_features={self.num_features}, "
                f"got {tuple(shape)}"
            )
        if residual is not None and not _fits(residual.shape, shape):
            raise ValueError(f"expected a residual of the input's shape {tuple(shape)}, got {tuple(residual.shape)}")
        if use_batch and x.numel() == shape[1] and self._group() is None:
            raise ValueError(
                f"expected more than one value per channel in training, got an input of shape {tuple(shape)}; "
                "use a larger batch, or eval()"
            )

    def _plain(self, x: Tensor, call: Call) -> Tensor:
        """Compute the norm in plain PyTorch.

        Used under torch.compile, torch.func, forward mode and `LEANGRAD_DISABLE`, for tensor subclasses and empty
        batches, and in eval mode without gradients.
        """
        if call.group is not None:
            raise RuntimeError("synchronized batch norm is not supported under torch.compile and torch.func")
        weight = self.weight if self.weight is None or not self.absolute else self.weight.abs() + self.eps
        mean, var = call.running or (None, None)
        if call.counter is not None:
            call.counter.add_(1)
        return F.batch_norm(x, mean, var, weight, self.bias, call.training, call.momentum, self.eps)

    def _infer(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """Add the residual to y and apply the activation, in place where possible: nothing is kept for backward."""
        if residual is not None:
            y = y.add_(residual) if residual.dtype == y.dtype else y + residual
        return activate_(y, self._known) if self._function is None else self._function(y)

    def _activate(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """Add the residual to y and apply the activation in plain PyTorch."""
        y = y if residual is None else y + residual
        if self._function is not None:
            return self._function(y)
        match self._known.name:
            case "leaky_relu":
                return F.leaky_relu(y, self._known.param)
            case "elu":
                return F.elu(y, self._known.param)
            case "gelu" | "gelu_tanh":
                return F.gelu(y, approximate="tanh" if self._known.name == "gelu_tanh" else "none")
            case "identity":
                return y
        return F.relu(y) if self._known.name == "relu" else F.silu(y)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key = prefix + "num_batches_tracked"
        if self.num_batches_tracked is not None and key not in state_dict:
            state_dict[key] = self.num_batches_tracked.clone()  # checkpoints of older batch norms have no such count
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """Show the arguments."""
        names = ("eps", "momentum", "affine", "track_running_stats", "activation", "activation_param")
        extra = ", absolute=True" if self.absolute else ""
        return ", ".join([str(self.num_features), *(f"{n}={getattr(self, n)!r}" for n in names)]) + extra


class InPlaceABN(ABN):
    """Batch norm with its activation, written over its input; keeps only its output, and inverts that in backward.

    Equals `ABN`. Use it after a convolution or another op that does not keep its own output, like other in-place batch
    norms. leaky_relu, elu and identity are inverted; with any other activation, or a residual, the layer keeps its
    input instead, as `ABN` does.

    The input is overwritten only if it is the output of an op that does not keep it, and not a view; so data and
    parameters are never changed. Other references to that tensor then see the output in it. If another op saved it, the
    backward of that op raises, as after `F.relu_`. If the input is a leaf that requires grad, the layer keeps the
    input, unless `invert=True`: autograd holds a leaf until backward in any case.

    Args:
        invert: True inverts where possible, and raises ValueError for an activation without an inverse; False never
            inverts; None, the default, inverts where that is accurate (elu only in float32 and float64).

    All other arguments are those of `ABN`. Channels with |β| > √2·|γ| also keep their input: if they were inverted,
    their dγ would have more than twice the error of plain PyTorch. If a 16-bit map is inverted, dγ contains the
    rounding error of the output, beside those of the input and of dz, which it contains in any case; with
    `invert=False` it does not.

    Keeps for backward: the output, which the next convolution keeps too, and 16 bytes per channel.

    >>> block = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), InPlaceABN(8), nn.Conv2d(8, 8, 3))
    >>> block(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(self, *args: Any, invert: bool | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        if invert and (self._function is not None or not self._known.inverts):
            raise ValueError(
                f"expected an activation that can be inverted (leaky_relu and elu with a positive activation_param, "
                f"identity), got {self.activation!r} with activation_param={self.activation_param}; "
                "leave invert=None to keep the input instead"
            )
        self.invert = invert

    def _prepare(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
    ) -> None:
        known, maker = self._known, x.grad_fn
        if residual is not None or self._function is not None or not known.inverts or self.invert is False:
            return
        if self.invert is None:
            if known.name == "elu" and x.dtype.itemsize < 4:
                return  # too coarse to invert elu
            if maker is None and x.requires_grad:
                return  # a leaf, which autograd holds until backward: keeping it costs nothing
        capturing = x.is_cuda and is_capturing()
        call.invert = not capturing  # which channels invert may differ in each replay of the graph
        if capturing or not torch.is_grad_enabled():
            return
        call.in_place = _may_be_overwritten(x, maker)
        limits = limits_of(known.name, known.param, x.dtype, self.eps if self.absolute else 0.0)
        call.answer = ask(self, weight, bias, limits)
        call.limits = limits


class InPlaceABNSync(InPlaceABN):
    """`InPlaceABN` with the statistics of all processes' batches together; these may differ in size.

    Equals `InPlaceABN` on the concatenated batch. The gradients of γ and β are those of the local batch: data
    parallelism averages them, as it does all others. Without an initialized process group it is `InPlaceABN`.

    Args:
        group: the process group; None is the default one. CPU tensors work over gloo.

    >>> InPlaceABNSync(4).eval()(torch.randn(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(self, *args: Any, group: dist.ProcessGroup | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self.group = group

    def _group(self) -> dist.ProcessGroup | None:
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = self.group if self.group is not None else dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlaceABNSync:
        """Copy everything but the process group, which the copy shares."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__ = {
            k: v if k in ("group", "process_group") else copy.deepcopy(v, memo) for k, v in self.__dict__.items()
        }
        return new


def _resolve(
    activation: str | Callable[[Tensor], Tensor], param: float
) -> tuple[Activation, Callable[[Tensor], Tensor] | None]:
    """Returns the activation as a record of `ops.abn` and None, or identity and the activation as a function."""
    if isinstance(activation, str):
        if activation not in Activation.NAMES:
            raise ValueError(f"expected an activation of {Activation.NAMES} or a function, got {activation!r}")
        return Activation(activation, param), None
    if isinstance(activation, nn.Module):
        if next(activation.parameters(), None) is not None:
            raise ValueError(
                f"expected an activation without parameters, got {type(activation).__name__}; "
                "apply it after an ABN with activation='identity'"
            )
        if getattr(activation, "inplace", False):
            activation = copy.copy(activation)
            activation.inplace = False  # type: ignore[assignment]
    return Activation("identity"), activation


def _fits(shape: torch.Size, other: torch.Size) -> bool:
    """Whether a sum of tensors of these shapes has the shape `other`; checks first for equal shapes, the usual case."""
    return shape == other or torch.broadcast_shapes(shape, other) == other


def _may_be_overwritten(x: Tensor, maker: Node | None) -> bool:
    """Whether x may be overwritten: an op made it and does not keep it, and it is no view.

    maker: `x.grad_fn`; None: x is a leaf or data of the caller.
    """
    if maker is None or is_view(x) or keeps_output(type(maker)):
        return False
    written_in_python = issubclass(type(maker), BackwardCFunction)
    # Another in-place norm keeps its output.
    return not (written_in_python and isinstance(getattr(maker, "call", None), Call))


def _must_be_plain(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or transforms_active() or forward_mode_active():
        return True
    return type(x) is not Tensor or x.is_meta
