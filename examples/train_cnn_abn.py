"""Train a small residual CNN, plain and by `convert_abn`, to tell drawn shapes apart.

python examples/train_cnn_abn.py            # some minutes on two cores
python examples/train_cnn_abn.py --small    # some seconds, as the tests run it

The pictures are drawn as it trains. It prints the losses of both, which agree within rounding, and what a step takes.
"""

import argparse
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import leangrad
from leangrad.nn import convert_abn


@dataclass(frozen=True)
class Size:
    """Of the model and of its training."""

    width: int = 32
    blocks: int = 4
    pixels: int = 64
    batch: int = 32
    steps: int = 40


SMALL = Size(width=16, blocks=2, pixels=32, batch=16, steps=40)
SHAPES = 3  # disc, square, ring


class Block(nn.Module):
    """Two convolutions with batch norm, and the input added before the last ReLU."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Maps of (B, width, H, W) to maps of the same shape."""
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


def network(size: Size) -> nn.Module:
    """A stem, some blocks, and the logits of the shapes."""
    stem = [nn.Conv2d(1, size.width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(size.width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size.width, SHAPES)]
    return nn.Sequential(*stem, *(Block(size.width) for _ in range(size.blocks)), *head)


def draw(size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy pictures of (B, 1, pixels, pixels), and which shape is on each."""
    labels = torch.randint(SHAPES, (size.batch,), generator=generator)
    centre = 0.6 * torch.rand(size.batch, 2, 1, 1, generator=generator) - 0.3
    radius = 0.3 + 0.3 * torch.rand(size.batch, 1, 1, generator=generator)
    axis = torch.linspace(-1, 1, size.pixels)
    y, x = axis[:, None] - centre[:, 0], axis - centre[:, 1]
    round_distance, square_distance = (x.square() + y.square()).sqrt(), torch.maximum(x.abs(), y.abs())
    ring = (round_distance < radius) & (round_distance > 0.6 * radius)
    shapes = torch.stack([round_distance < radius, square_distance < radius, ring])
    pictures = shapes[labels, torch.arange(size.batch)].float()
    noise = 0.3 * torch.randn(pictures.shape, generator=generator)
    return (pictures + noise)[:, None], labels


@dataclass(frozen=True)
class Result:
    """Of one training."""

    losses: list[float]
    seconds: float
    peak_bytes: int  # of one step, above what stands before it


def train(size: Size, name: str, *, is_lean: bool) -> Result:
    """Train a new network and measure one more step of it."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network(size).to(device)
    if is_lean:
        model = convert_abn(model)
        print(model.abn_conversions)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_of(pictures: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(pictures.to(device)), labels.to(device))

    losses, start = [], time.perf_counter()
    for _ in track(range(size.steps), name, console=Console(file=sys.stderr)):
        loss = loss_of(*draw(size, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    optimizer.zero_grad()
    batch = draw(size, generator)
    measured = leangrad.measure(lambda: loss_of(*batch).backward(), timed_runs=0)
    return Result(losses, seconds, measured.peak_bytes)


def main() -> None:
    """Train both and print one beside the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="some seconds instead of some minutes")
    size = SMALL if parser.parse_args().small else Size()
    plain, lean = train(size, "plain", is_lean=False), train(size, "convert_abn", is_lean=True)
    table = Table("", "first loss", "last loss", "peak of a step", "seconds")
    for name, one in (("plain", plain), ("convert_abn", lean)):
        losses = f"{one.losses[0]:.5f}", f"{one.losses[-1]:.5f}"
        table.add_row(name, *losses, f"{one.peak_bytes / 1e6:.1f} MB", f"{one.seconds:.1f}")
    Console().print(table)
    print(f"{lean.peak_bytes / plain.peak_bytes:.2f} of the memory")
    last = lean.losses[-max(len(lean.losses) // 10, 1) :]
    print(f"loss {sum(last) / len(last):.3f}")


if __name__ == "__main__":
    main()
