"""A case in which torch's own activation_memory_budget gives wrong gradients: dropout under backend="inductor".

    python -m benchmarks.compiled.stock_budget                  # a CPU and its C++ compiler are enough

A six-layer MLP with dropout is compiled with budgets from 1 downwards, and with ``backend="leangrad"``. All weights are
the identity, and the inputs are ones: the model multiplies its input by each dropout mask, so the gradient of the sum
with respect to the input must equal the output of forward. Each printed line has the relative error of that gradient:
0 if backward used the masks of forward, about 1 if it drew others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config

from leangrad.compiled import compile_lean

BUDGETS = (1.0, 0.5, 0.3, 0.1)


class Masked(nn.Module):
    """Dropout between matmuls with the identity: for inputs that are not negative, the input times every mask."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.relu(F.dropout(x @ weight, 0.1))
        return x


def error(backend: str | Callable[..., Any], *, layers: int = 6, width: int = 64, rows: int = 8192) -> float:
    """Return the relative error of the input's gradient; the output of forward is the exact gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.ones(rows, width, requires_grad=True)
    result = torch.compile(Masked(layers, width), backend=backend)(x)
    result.sum().backward()
    assert x.grad is not None
    return float((x.grad - result.detach()).norm() / result.detach().norm())


def main() -> None:
    """Print the error for each budget of inductor, and for leangrad's backend."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled.stock_budget", description=main.__doc__)
    parser.add_argument("--budget", type=float, nargs="+", default=BUDGETS)
    chosen = parser.parse_args()
    for budget in chosen.budget:
        with config.patch(activation_memory_budget=budget):
            print(f"inductor, activation_memory_budget {budget}: error {error('inductor'):.3f}", flush=True)
    print(f"leangrad: error {error(compile_lean):.3f}")


if __name__ == "__main__":
    main()
