"""Cases of `linear_cross_entropy`: its tensors, and what it gives beside plain and float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import leangrad
from leangrad.loss.reference import Options, Tensors, plain_linear_cross_entropy
from tests.support.error_rule import Triple

# Each option with a value that shows.
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"linear_bias": True},
    "class weights": {"weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.3},
    "learned scale": {"logit_scale": True},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
}


@dataclass
class Case:
    """A problem of `tokens` by `hidden` by `classes`; True among the options stands for a random tensor."""

    tokens: int = 48
    hidden: int = 16
    classes: int = 40
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    ignored: int = 7  # one target of so many
    loss_scale: float = 1.0
    spread: float = 0.5  # of the logits: where it is small, plain's own error is hardly more than two roundings

    def draw(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Random input, weight and target, and all options."""
        x = torch.randn(self.tokens, self.hidden, device=self.device).to(self.dtype)
        weight = (self.spread * torch.randn(self.classes, self.hidden, device=self.device) / self.hidden**0.5).to(
            self.dtype
        )
        target = torch.randint(self.classes, (self.tokens,), device=self.device)
        if self.ignored:
            target[self.ignored - 1 :: self.ignored] = -100
        options = dict(self.options)
        if options.get("linear_bias") is True:
            options["linear_bias"] = torch.randn(self.classes, device=self.device).to(self.dtype)
        if options.get("weight") is True:
            options["weight"] = torch.rand(self.classes, device=self.device) + 0.5
        if options.get("logit_scale") is True:
            options["logit_scale"] = torch.tensor(0.3, device=self.device)
        return x, weight, target, options


def plain(x: Tensor, linear_weight: Tensor, target: Tensor, **given: Any) -> Tensor:
    """The expression in the docstring of `linear_cross_entropy`, by torch's own ops."""
    scale = given.get("logit_scale")
    if scale is not None and not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=x.dtype if x.dtype == torch.float64 else torch.float32, device=x.device)
    options = Options(
        given.get("reduction", "mean"),
        given.get("ignore_index", -100),
        given.get("label_smoothing", 0.0),
        given.get("z_loss", 0.0),
        given.get("softcap"),
    )
    tensors = Tensors(x, linear_weight, given.get("linear_bias"), scale, given.get("weight"), target)
    return plain_linear_cross_entropy(tensors, options)


def leaves(x: Tensor, weight: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    """What gets a gradient."""
    found = {"input": x, "weight": weight, "bias": options.get("linear_bias"), "scale": options.get("logit_scale")}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def results(function: Any, x: Tensor, weight: Tensor, target: Tensor, options: dict[str, Any], g: Any) -> list[Tensor]:
    """The loss and all gradients. g: a number, or for "none" one for each token."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    options = {k: v.detach() if isinstance(v, Tensor) else v for k, v in options.items()}
    for name in ("linear_bias", "logit_scale"):
        if isinstance(options.get(name), Tensor):
            options[name].requires_grad_()
    loss = function(x, weight, target, **options)
    g = g.to(loss.dtype) if isinstance(g, Tensor) else torch.full_like(loss, g)
    return [loss, *torch.autograd.grad(loss, list(leaves(x, weight, options).values()), g)]


def triples(case: Case, function: Any = leangrad.linear_cross_entropy) -> list[tuple[str, Triple]]:
    """Loss and gradients by `function`, plain, and plain in float64, for a random gradient of the loss."""
    x, weight, target, options = case.draw()
    g: Any = case.loss_scale * (0.1 + 3 * torch.rand(()).item())
    if options.get("reduction") == "none":
        g = torch.randn(case.tokens, device=case.device)
    double = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    ours = results(function, x, weight, target, options, g)
    other = results(plain, x, weight, target, options, g)
    truth = results(plain, x.double(), weight.double(), target, double, g)
    names = ["loss", *leaves(x, weight, options)]
    assert [t.dtype for t in ours] == [t.dtype for t in other]
    return [(name, triple) for name, *triple in zip(names, ours, other, truth, strict=True)]  # type: ignore[misc]
