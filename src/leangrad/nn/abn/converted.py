"""Batch norms that `convert_abn` has converted: plain ones, that can be called together with what follows them.

A converted norm stays the object it was and an instance of its class. Code that calls it gets what a batch norm
returns. Only a rewritten forward (``nn/rewriting``) calls it with `is_fused=True`, and leaves the activation after it
out; so all other callers of both, among them slices of an `nn.Sequential` and hooks, see a plain model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from leangrad._torch import runs_only_its_forward
from leangrad.nn.abn.layers import ABN, InPlaceABNSync
from leangrad.nn.abn.rule import DETERMINISTIC
from leangrad.ops.abn_activation import Activation

__all__ = ["IDENTITY", "Act", "ConvertedNorm", "act_of", "convert_norm", "fused_state", "is_convertible"]

# The attributes that the result of an activation depends on, and its name in `ABN`; "": ABN gets it as a function.
ACTIVATIONS: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.ReLU: ("relu", ()),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.ELU: ("elu", ("alpha",)),
    nn.SiLU: ("silu", ()),
    nn.GELU: ("gelu", ("approximate",)),
    nn.ReLU6: ("", ("min_val", "max_val")),
    nn.Hardtanh: ("", ("min_val", "max_val")),
    nn.Softplus: ("", ("beta", "threshold")),
    **dict.fromkeys((nn.Hardswish, nn.Hardsigmoid, nn.Tanh, nn.Sigmoid, nn.Mish), ("", ())),
}
assert set(DETERMINISTIC) <= set(ACTIVATIONS)


@dataclass(frozen=True)
class Act:
    """An activation: its name in `ABN`, or a class of modules, and the values of its attributes.

    >>> str(Act("leaky_relu", (0.1,)))
    'leaky_relu'
    """

    kind: str | type[nn.Module]
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.kind if isinstance(self.kind, str) else self.kind.__name__

    def module(self) -> nn.Module | None:
        """Returns a module that computes it out of place; None if `ABN` knows its name."""
        if isinstance(self.kind, str):
            return None
        made = self.kind()
        for name, value in zip(ACTIVATIONS[self.kind][1], self.values, strict=True):
            setattr(made, name, value)
        return made


IDENTITY = Act("identity")


def act_of(module: nn.Module) -> Act | None:
    """Returns the activation that a module computes; None if it is none that `ABN` can compute."""
    known = ACTIVATIONS.get(type(module))
    if known is None:
        return None
    name, attributes = known
    kind: Any = name or type(module)
    if not attributes:
        return _act(kind)
    values = tuple([getattr(module, attribute) for attribute in attributes])
    if name == "gelu":
        return _act("gelu_tanh" if values == ("tanh",) else "gelu")
    return Act(kind, values)


@cache
def _act(kind: Any) -> Act:
    return Act(kind)


class ConvertedNorm(ABN):
    """What all converted norms share. `fused_act` is the activation of a fused call."""

    plain: type[nn.Module]  # the class of the norm
    fused_act: Act

    def forward(
        self,
        input: Tensor,  # the name that callers of a batch norm may use
        residual: Any = None,
        *,
        is_fused: bool = False,
        adds_in_place: bool = False,
    ) -> Tensor:
        """Returns norm(x); with `is_fused` fused_act(norm(x) + residual).

        adds_in_place: the residual was added with `+=`, so the sum has the dtype and the shape of norm(x).
        """
        x = input
        self._check_input_dim(x)  # type: ignore[operator]
        if not is_fused and self.fused_act.kind != "identity":
            return self.plain.forward(self, x)  # type: ignore[no-any-return]
        if x.shape[1] != self.num_features:  # other code has cut channels off, and batch norm does not look
            y = self.plain.forward(self, x)
            return self._sum(y, residual, adds_in_place)
        if residual is None:
            return super().forward(x)
        alike = isinstance(residual, Tensor) and residual.shape == x.shape and residual.dtype == x.dtype
        if alike and residual.device == x.device:
            return super().forward(x, residual)
        return self._sum(self.plain.forward(self, x), residual, adds_in_place)

    def _sum(self, y: Tensor, residual: Any, adds_in_place: bool) -> Tensor:
        """Returns act(y + residual), op by op."""
        if residual is not None:
            y = y.add_(residual) if adds_in_place else y + residual
        return self._activate(y, None)

    def fuses_with(self, after: nn.Module) -> bool:
        """Whether this norm, and then `after`, can be one call: `after` is its activation, and neither has hooks."""
        return act_of(after) == self.fused_act and runs_only_its_forward(self) and runs_only_its_forward(after)

    def _load_from_state_dict(self, *args: Any, **named: Any) -> None:
        """Load as the norm would: that of `ABN` takes checkpoints without a count of batches too."""
        self.plain._load_from_state_dict(self, *args, **named)

    activation = property(lambda self: self._activation)
    activation_param = property(lambda self: self._activation_param)


class ConvertedBatchNorm1d(ConvertedNorm, nn.BatchNorm1d):  # type: ignore[misc]
    """`nn.BatchNorm1d` after `convert_abn`."""

    plain = nn.BatchNorm1d


class ConvertedBatchNorm2d(ConvertedNorm, nn.BatchNorm2d):  # type: ignore[misc]
    """`nn.BatchNorm2d` after `convert_abn`."""

    plain = nn.BatchNorm2d


class ConvertedBatchNorm3d(ConvertedNorm, nn.BatchNorm3d):  # type: ignore[misc]
    """`nn.BatchNorm3d` after `convert_abn`."""

    plain = nn.BatchNorm3d


class ConvertedSyncBatchNorm(ConvertedNorm, InPlaceABNSync, nn.SyncBatchNorm):  # type: ignore[misc]
    """`nn.SyncBatchNorm` after `convert_abn`."""

    plain = nn.SyncBatchNorm
    group = property(lambda self: self.process_group)


CLASSES: dict[type[nn.Module], type[ConvertedNorm]] = {
    kind.plain: kind
    for kind in (ConvertedBatchNorm1d, ConvertedBatchNorm2d, ConvertedBatchNorm3d, ConvertedSyncBatchNorm)
}


def is_convertible(module: nn.Module) -> bool:
    """Whether `convert_norm` takes this module: it is a batch norm of torch, and none of a subclass."""
    return type(module) in CLASSES


def convert_norm(norm: nn.Module, act: Act) -> None:
    """Make `norm` a converted one, which computes `act` too if it is called so."""
    vars(norm).update(fused_state(act), fused_act=act)
    norm.__class__ = CLASSES[type(norm)]


def fused_state(act: Act) -> dict[str, Any]:
    """Returns the attributes that an `ABN` with this activation has besides those of a batch norm.

    They go into `vars(norm)`: `setattr` would make the module of an activation a child of the norm.
    """
    name = act.kind if isinstance(act.kind, str) else "identity"
    param = float(act.values[0]) if isinstance(act.kind, str) and act.values else 0.01
    function = act.module()
    return {
        "absolute": False,
        "invert": False,
        "_known": Activation(name, param),
        "_function": function,
        "_activation": function or name,
        "_activation_param": param,
    }
