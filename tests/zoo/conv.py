"""Convolutional nets: residual in place and not, U-Net, ConvNeXt, depthwise."""

# A module's call returns Any.
# mypy: disable-error-code="no-any-return"

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, cross_entropy, images, mean_square


class InPlaceBlock(nn.Module):
    """A basic residual block with everything in place, as torchvision writes it."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False),
                nn.BatchNorm2d(width),
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class InPlaceResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stage1 = nn.Sequential(*(InPlaceBlock(16, 16, 1) for _ in range(3)))
        self.stage2 = nn.Sequential(InPlaceBlock(16, 32, 2), InPlaceBlock(32, 32, 1), InPlaceBlock(32, 32, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.stage1(self.stem(x)))
        return self.fc(torch.flatten(self.pool(x), 1))


class Bottleneck(nn.Module):
    """A bottleneck block with nothing in place."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        inner = width // 2
        self.conv1 = nn.Conv2d(width_in, inner, 1, bias=False)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(inner), nn.BatchNorm2d(inner), nn.BatchNorm2d(width)
        same = stride == 1 and width_in == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return F.relu(h + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(24)
        self.stage1 = nn.ModuleList([Bottleneck(24, 48), Bottleneck(48, 48), Bottleneck(48, 48)])
        self.stage2 = nn.ModuleList([Bottleneck(48, 64, 2), Bottleneck(64, 64), Bottleneck(64, 64)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        for block in self.stage1:
            x = block(x)
        for block in self.stage2:
            x = block(x)
        return self.head(x.mean((2, 3)))


class UNetBlock(nn.Module):
    """GroupNorm, SiLU, conv, twice, with a residual."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width_in), nn.GroupNorm(4, width)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.norm2(h)
        h = self.conv2(h * torch.sigmoid(h))
        return self.skip(x) + h


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down1, self.down2 = UNetBlock(16, 16), UNetBlock(16, 32)
        self.shrink1, self.shrink2 = nn.Conv2d(16, 16, 3, 2, 1), nn.AvgPool2d(2)
        self.middle = UNetBlock(32, 32)
        self.up2, self.up1 = UNetBlock(64, 16), UNetBlock(32, 16)
        self.norm = nn.GroupNorm(4, 16)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(self.stem(x))
        b = self.down2(self.shrink1(a))
        h = self.middle(self.shrink2(b))
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.up2(torch.cat([h, b], dim=1))
        h = F.interpolate(h, size=a.shape[-2:], mode="nearest")
        h = self.up1(torch.cat((h, a), 1))
        return self.out(F.silu(self.norm(h)))


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of (N, C, H, W), written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, drop_path: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.contract = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = self.contract(self.act(self.expand(self.norm(h))))
        h = (self.gamma * h).permute(0, 3, 1, 2)
        if self.training and self.drop_path:
            keep = 1 - self.drop_path
            h = h * h.new_empty(len(h), 1, 1, 1).bernoulli_(keep).div_(keep)
        return x + h


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 2, 2), ChannelNorm(32))
        self.stage1 = nn.Sequential(ConvNeXtBlock(32, 0.0), ConvNeXtBlock(32, 0.1))
        self.down = nn.Sequential(ChannelNorm(32), nn.Conv2d(32, 64, 2, 2))
        self.stage2 = nn.Sequential(ConvNeXtBlock(64, 0.1), ConvNeXtBlock(64, 0.2))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


class InvertedResidual(nn.Module):
    """1x1 up, depthwise, squeeze and excite, 1x1 down."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        inner = 3 * width_in
        self.expand = nn.Sequential(nn.Conv2d(width_in, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish())
        self.depthwise = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.norm = nn.BatchNorm2d(inner)
        self.squeeze, self.excite = nn.Conv2d(inner, inner // 4, 1), nn.Conv2d(inner // 4, inner, 1)
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))
        self.residual = stride == 1 and width_in == width

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu6(self.norm(self.depthwise(self.expand(x))))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(h, 1))))
        h = self.project(h * F.hardsigmoid(gate))
        return x + h if self.residual else h


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True))
        widths = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 1)]
        self.blocks = nn.Sequential(*(InvertedResidual(*row) for row in widths))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.blocks(self.stem(x)), 0.1)
        return self.head(F.avg_pool2d(x, x.shape[-1]).flatten(1))


CASES = (
    Case(
        "resnet_inplace",
        InPlaceResNet,
        images(8, 3, 96, 96),
        cross_entropy,
        frozenset({"conv", "batchnorm", "inplace"}),
    ),
    Case("resnet", ResNet, images(4, 3, 64, 64), cross_entropy, frozenset({"conv", "batchnorm"})),
    Case("unet", UNet, images(4, 3, 48, 48), mean_square, frozenset({"conv"})),
    Case("convnext", ConvNeXt, images(4, 3, 48, 48), cross_entropy, frozenset({"conv", "dropout"})),
    Case("depthwise", MobileNet, images(8, 3, 64, 64), cross_entropy, frozenset({"conv", "batchnorm", "inplace"})),
)
