"""Small models with blocks, for tests of what is measured of a whole model."""

import torch
from torch import Tensor, nn

__all__ = ["Block", "ConvBlock", "ConvNet", "stack"]


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def stack(blocks: int = 4, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), *(Block(width) for _ in range(blocks)))


class ConvBlock(nn.Module):
    """A convolution with batch norm, whose running statistics are buffers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Two stages of blocks, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(ConvBlock(), ConvBlock())
        self.stage2 = nn.Sequential(ConvBlock(), ConvBlock())

    def forward(self, x: Tensor) -> Tensor:
        return self.stage2(self.stage1(x))
