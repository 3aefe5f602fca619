"""Diffusion in the plane, out of `leangrad.nn.DiffusionBlock` with EDM preconditioning; draws its samples.

    python examples/diffusion_2d.py            # about a minute on two cores; writes diffusion_2d.svg
    python examples/diffusion_2d.py --small    # some seconds, as the tests run it

The data are points on a spiral. Each coordinate of a point is a token, so attention is what ties x to y.
"""

import argparse
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from leangrad.nn import DiffusionBlock
from leangrad.nn.diffusion import embed_time, precondition

DATA_STD = 0.5
CONDITION_WIDTH = 32


@dataclass(frozen=True)
class Size:
    """Of the model and of its training."""

    width: int = 64
    heads: int = 4
    blocks: int = 3
    batch: int = 512
    steps: int = 800


SMALL = Size(width=32, heads=2, blocks=1, batch=256, steps=300)


class Network(nn.Module):
    """F(x; σ): coordinates to tokens by waves of several lengths, blocks that know σ, and back."""

    def __init__(self, size: Size):
        super().__init__()
        self.waves = nn.Linear(1, size.width)
        self.tokens = nn.Linear(size.width, size.width)
        self.places = nn.Parameter(torch.randn(2, size.width))
        self.blocks = nn.ModuleList(
            DiffusionBlock(size.width, size.heads, condition_width=CONDITION_WIDTH) for _ in range(size.blocks)
        )
        self.norm = nn.LayerNorm(size.width)
        self.out = nn.Linear(size.width, 1)
        nn.init.normal_(self.waves.weight, std=2.0)
        nn.init.uniform_(self.waves.bias, -math.pi, math.pi)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Points of (B, 2) and their noise levels, (B,), to (B, 2)."""
        condition = embed_time(sigma.log() / 4, CONDITION_WIDTH, longest=1e-2)
        h = self.tokens(torch.sin(self.waves(x.unsqueeze(-1)))) + self.places
        for block in self.blocks:
            h = block(h, condition)
        y: Tensor = self.out(self.norm(h)).squeeze(-1)
        return y

    def denoise(self, x: Tensor, sigma: Tensor) -> Tensor:
        """What the points were before the noise, at best guess."""
        return precondition(sigma, data_std=DATA_STD).denoise(lambda scaled: self(scaled, sigma), x)


def spiral(turns: Tensor) -> Tensor:
    """Points on the curve, for places from 0 to 1 along it."""
    angle = 3 * math.pi * turns.sqrt()
    return torch.stack([angle.cos(), angle.sin()], -1) * turns.sqrt().unsqueeze(-1)


def train(network: Network, size: Size) -> float:
    """Denoise at random noise levels, with the weights of EDM; the mean loss of the last tenth (1 is no knowledge)."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (size.steps + 1))
    losses = []
    for _ in track(range(size.steps), "denoising", console=Console(file=sys.stderr)):
        points = spiral(torch.rand(size.batch))
        sigma = torch.exp(1.2 * torch.randn(size.batch) - 1.2)
        noisy = points + sigma.unsqueeze(1) * torch.randn_like(points)
        weight = precondition(sigma, data_std=DATA_STD).loss_weight.unsqueeze(1)
        loss = (weight * (network.denoise(noisy, sigma) - points).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, size.steps // 10) :]
    return sum(last) / len(last)


@torch.no_grad()
def sample(network: Network, count: int, steps: int = 24) -> Tensor:
    """From noise to points along dx/dσ = (x − D(x; σ))/σ, with Heun's method."""
    levels = torch.linspace(5.0 ** (1 / 7), 0.005 ** (1 / 7), steps) ** 7
    x = levels[0] * torch.randn(count, 2)
    for now, then in itertools.pairwise(levels):
        slope = (x - network.denoise(x, now.expand(count))) / now
        guess = x + (then - now) * slope
        x = x + (then - now) * (slope + (guess - network.denoise(guess, then.expand(count))) / then) / 2
    return x


def distance_to_spiral(points: Tensor) -> float:
    """The mean distance of points to the curve."""
    curve = spiral(torch.linspace(0, 1, 2000))
    return torch.cdist(points, curve).min(1).values.mean().item()


def draw(points: Tensor, path: Path) -> None:
    """The curve in grey and the points on top of it, as SVG."""

    def place(point: list[float]) -> tuple[float, float]:
        return 300 + 220 * point[0], 300 - 220 * point[1]

    curve = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, spiral(torch.linspace(0, 1, 400)).tolist()))
    dots = "\n".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in map(place, points.tolist()))
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="600" height="600" viewBox="0 0 600 600">\n'
        '<rect width="600" height="600" fill="white"/>\n'
        f'<polyline points="{curve}" fill="none" stroke="#cccccc" stroke-width="6"/>\n'
        f'<g fill="#1f6f8b" fill-opacity="0.7">\n{dots}\n</g>\n</svg>\n'
    )


def main() -> None:
    """Train, sample, draw, print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of some seconds")
    parser.add_argument("--out", type=Path, default=Path("diffusion_2d.svg"), help="the picture")
    options = parser.parse_args()
    size = SMALL if options.small else Size()
    torch.manual_seed(0)
    network = Network(size)
    loss = train(network, size)
    points = sample(network.eval(), 500)
    draw(points, options.out)
    print(f"{options.out}: 500 samples, at {distance_to_spiral(points):.3f} of the curve on average")
    print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
