"""Gradients of a user's autograd Function under torch's own backends, against eager mode: no code of leangrad runs.

    python -m benchmarks.compiled.custom_function

Torch 2.11 loses the gradient, also with its own ``eager`` backend, if a Function's forward returns a tensor that is
also one of its intermediate results: after ``y += 1`` (https://github.com/pytorch/pytorch/issues/180642), and with
``y.to(y.dtype)``, which returns ``y``. The zoo's ``custom`` model does the latter. In 2.13 all gradients are right.
Each printed line is one Function and one backend: for each gradient, the largest difference from eager mode's gradient
and the largest element of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")


def _function(finish: Callable[[Tensor], Tensor]) -> type[torch.autograd.Function]:
    class Quantize(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, size: Tensor) -> Tensor:
            level = x / size
            ctx.save_for_backward(level.round() - level)
            return finish(level.round() * size)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            (slope,) = ctx.saved_tensors
            return grad, (grad * slope).sum()

    return Quantize


FUNCTIONS = {
    "returns its result": _function(lambda y: y),
    "returns y.to(y.dtype), which is y": _function(lambda y: y.to(torch.float32)),
    "returns y after y += 1": _function(lambda y: y.add_(1)),
}


def gradients(function: Any, backend: str | None) -> list[Tensor]:
    """Return the gradients of a step with two calls of a Function; ``backend``: None for eager mode."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, size = torch.randn(16, 16, requires_grad=True), torch.tensor(0.05, requires_grad=True)

    def step(x: Tensor, size: Tensor) -> Tensor:
        loss: Tensor = function.apply(function.apply(x, size).sin(), size).square().mean()
        return loss

    run = step if backend is None else torch.compile(step, backend=backend)
    found = torch.autograd.grad(run(x, size), (x, size), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip((x, size), found, strict=True)]


def main() -> None:
    """Print a line for each Function and backend."""
    print("torch", torch.__version__)
    for name, function in FUNCTIONS.items():
        plain = gradients(function, None)
        for backend in BACKENDS:
            found = gradients(function, backend)
            words = ", ".join(
                f"{float((f - p).abs().max()):.1e} of {float(p.abs().max()):.1e}"
                for f, p in zip(found, plain, strict=True)
            )
            print(f"{name:36} {backend:28} {words}")


if __name__ == "__main__":
    main()
