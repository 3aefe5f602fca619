"""Training a small classifier on data that it makes itself: the same loss as BatchNorm + LeakyReLU, over five seeds."""

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.nn.abn import InPlaceABN
from leangrad.nn.convert import convert_abn


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy stripes; the class is their direction."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(4, (count,), generator=generator)
    angle = target * torch.pi / 4
    grid = torch.linspace(-1, 1, 8)
    across = angle.cos()[:, None, None] * grid + angle.sin()[:, None, None] * grid[:, None]
    phase = torch.rand(count, 1, 1, generator=generator) * 6.3
    x = (8 * across + phase).sin() + 0.7 * torch.randn(count, 8, 8, generator=generator)
    return x[:, None], target


def net(kind: str) -> nn.Module:
    def norm() -> list[nn.Module]:
        if kind == "inverted":
            return [InPlaceABN(12, activation_param=0.1)]
        return [nn.BatchNorm2d(12), nn.LeakyReLU(0.1)]

    layers: list[nn.Module] = [nn.Conv2d(1, 12, 3, bias=False), *norm(), nn.Conv2d(12, 12, 3, bias=False), *norm()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))
    return convert_abn(model) if kind == "converted" else model


def trained_loss(kind: str, seed: int) -> float:
    torch.manual_seed(seed)
    model = net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, target = data(512, seed)
    for step in range(48):
        part = slice(64 * (step % 8), 64 * (step % 8) + 64)
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), target[part]).backward()
        optimizer.step()
    with torch.no_grad():
        x, target = data(512, 1000 + seed)
        return F.cross_entropy(model.eval()(x), target).item()


@pytest.mark.slow
@pytest.mark.extended
def test_trains_to_the_same_loss() -> None:
    losses = {kind: [trained_loss(kind, seed) for seed in range(5)] for kind in ("plain", "inverted", "converted")}
    spread = statistics.stdev(losses["plain"])
    middle = statistics.mean(losses["plain"])
    assert middle < 0.7 < torch.log(torch.tensor(4.0)), "plain did not learn: the comparison would say nothing"
    for kind in ("inverted", "converted"):
        assert abs(statistics.mean(losses[kind]) - middle) <= spread, losses
