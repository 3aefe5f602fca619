"""A residual convolutional net with BatchNorm and ReLU, which classifies images of stripes by their angle."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.demo.case import Case

__all__ = ["residual_net"]


class Block(nn.Module):
    """`relu(x + bn(conv(relu(bn(conv(x))))))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, width, side, side) to the same shape."""
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(h)))


class ResidualNet(nn.Module):
    """A stem, `blocks` blocks, the mean over each map, and a linear head."""

    def __init__(self, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, classes)
        # Convolutions are fastest in this memory format; the images have it, too.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, side, side) to logits (B, classes)."""
        x = F.relu(self.bn(self.conv(images)))
        logits: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits


def residual_net(batch: int = 8, width: int = 16, side: int = 64, blocks: int = 4, classes: int = 4) -> Case:
    """Return the case of this model, on images (batch, 3, side, side)."""
    return Case(
        "residual conv net",
        lambda: ResidualNet(width, blocks, classes),
        lambda generator: _stripes(batch, side, classes, generator),
    )


def _stripes(batch: int, side: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images (batch, 3, side, side) of noisy stripes, and the class of each image's angle."""
    labels = torch.randint(classes, (batch,), generator=generator)
    angles = (labels * (math.pi / classes)).view(-1, 1, 1)
    shifts = torch.rand(batch, 3, 1, 1, generator=generator) * (2 * math.pi)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    waves = torch.sin((x * angles.cos() + y * angles.sin()).unsqueeze(1) + shifts)
    images = waves + 0.3 * torch.randn(batch, 3, side, side, generator=generator)
    return images.contiguous(memory_format=torch.channels_last), labels
