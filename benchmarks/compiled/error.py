"""Error of the gradients of a compiled model against float64, with leangrad's backend ("ours") and inductor ("stock").

    python -m benchmarks.compiled.error            # a GPU if there is one, under bfloat16 autocast; else float32

There are 8 seeds, each with its own weights and batch. The RMS of the relative errors of all gradients may be 1.05
times stock's, that of a single tensor at most twice stock's. A relative error is |found − truth| / |truth| in the
2-norm; stock's counts as at least one rounding to the gradient's dtype. Two kinds of gradients are treated differently:

- A gradient that is 0 except for rounding (a bias before a norm) has no meaningful relative error. If stock has no
  correct digit of it, it is not in the RMS over all gradients; as a single tensor it is still compared with stock's.
- The error of a tensor of fewer than 16 elements is mostly chance; it is not compared as a single tensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.compiled import compile_lean

SEEDS = 8
TIMES, TIMES_OF_ONE, ELEMENTS_OF_ONE = 1.05, 2.0, 16
ROUNDING = math.sqrt(3 / (8 * math.log(2)) / 12)  # relative RMS error of one rounding, in units of eps
NO_DIGIT = 0.5  # a gradient with a relative error of this or more has no correct digit


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(h)
        wide: Tensor = F.gelu(self.up(self.second(x)))
        return x + self.down(wide)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A language model of a few blocks; its forward takes tokens and returns the loss of predicting each next token."""

    def __init__(self, vocabulary: int = 64, length: int = 32, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.places.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


class ViT(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 8, 8), nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), _classes(images))


class ConvNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.silu(self.norms[0](self.first(images)))
        x = F.silu(x + self.norms[1](self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), _classes(images))


def _classes(images: Tensor) -> Tensor:
    return torch.arange(len(images), device=images.device) % 10


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (GPT, lambda: torch.randint(64, (8, 33))),
    "vit": (ViT, lambda: torch.randn(8, 3, 32, 32)),
    "convnet": (ConvNet, lambda: torch.randn(8, 3, 32, 32)),
}


@dataclass
class Errors:
    """The relative errors of each gradient, by name, with one entry for each seed.

    - `ours`, `stock`: the errors with leangrad's backend and with inductor.
    - `sizes`: the number of elements of each gradient.
    """

    ours: dict[str, list[float]] = field(default_factory=dict)
    stock: dict[str, list[float]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def times(self) -> float:
        """The RMS of our errors over that of stock's, for all gradients of which stock has a correct digit."""
        names = [name for name, errors in self.stock.items() if max(errors) < NO_DIGIT]
        return _rms(e for name in names for e in self.ours[name]) / _rms(e for n in names for e in self.stock[n])

    @property
    def times_of_one(self) -> dict[str, float]:
        """The RMS of our errors over that of stock's, for each gradient of at least `ELEMENTS_OF_ONE` elements."""
        large = [name for name, size in self.sizes.items() if size >= ELEMENTS_OF_ONE]
        return {name: _rms(self.ours[name]) / _rms(self.stock[name]) for name in large}

    def worst(self) -> tuple[str, float]:
        """Return the gradient with the largest value in `times_of_one`, and that value."""
        return max(self.times_of_one.items(), key=lambda item: item[1])


def errors_of(
    make: Callable[[], nn.Module],
    batch: Callable[[], Tensor],
    *,
    device: str = "cpu",
    autocast: torch.dtype | None = None,
    seeds: int = SEEDS,
) -> Errors:
    """Compile a model that returns its loss with both backends, and compare the gradients of both to float64."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().to(device)
    truth = copy.deepcopy(model).double()
    runs: dict[str, Any] = {
        "stock": torch.compile(model, backend="inductor"),
        "ours": torch.compile(copy.deepcopy(model), backend=compile_lean),
    }
    found = Errors()
    for seed in range(seeds):
        torch.manual_seed(seed)
        weights, given = make().state_dict(), batch().to(device)
        truth.load_state_dict(weights)
        expected = _gradients(truth, given.double() if given.is_floating_point() else given, None)
        for name, run in runs.items():
            run.load_state_dict({f"_orig_mod.{k}": v for k, v in weights.items()})
            errors = found.stock if name == "stock" else found.ours
            for key, gradient in _gradients(run, given, autocast).items():
                key = key.removeprefix("_orig_mod.")
                rounding = ROUNDING * torch.finfo(autocast or gradient.dtype).eps if name == "stock" else 0.0
                errors.setdefault(key, []).append(max(_relative_error(gradient, expected[key]), rounding))
                found.sizes[key] = gradient.numel()
    if found.ours.keys() != found.stock.keys() or not found.ours:
        raise AssertionError("ours and stock have gradients of different parameters, or none")
    return found


def _gradients(model: nn.Module, given: Tensor, autocast: torch.dtype | None) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast(given.device.type, autocast) if autocast else nullcontext():
        loss = model(given)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _relative_error(found: Tensor, truth: Tensor) -> float:
    error, size = float((found.double() - truth).norm()), float(truth.norm())
    if not math.isfinite(error):
        raise ArithmeticError("a gradient is not finite")
    return error / size if size else (0.0 if error == 0.0 else math.inf)


def _rms(errors: Any) -> float:
    squares = [e * e for e in errors]
    return math.sqrt(sum(squares) / len(squares))


def main() -> None:
    """Print a line for each model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = torch.bfloat16 if device == "cuda" else None
    for name, (make, batch) in CASES.items():
        found = errors_of(make, batch, device=device, autocast=autocast)
        worst, times = found.worst()
        print(f"{name}: all {found.times:.3f} times stock's ({TIMES} allowed); {worst} {times:.2f} ({TIMES_OF_ONE})")


if __name__ == "__main__":
    main()
