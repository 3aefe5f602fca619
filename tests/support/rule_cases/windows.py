"""Pooling, resampling, patches and dropout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.rule_cases.case import WIDE, Tensors, table


def video(h: Tensor) -> Tensor:
    return h.view(1, 2, 4, 6, 8)


def last(h: Tensor) -> Tensor:
    return h.contiguous(memory_format=torch.channels_last)


POOLS = {
    "MaxPool2DWithIndices0": lambda h, t: F.max_pool2d(h, 2),
    "MaxPool2DWithIndices0 settings": lambda h, t: F.max_pool2d(h, (3, 2), stride=1, padding=1, dilation=(1, 2)),
    "MaxPool2DWithIndices0 ceil": lambda h, t: F.max_pool2d(h, 3, 2, ceil_mode=True),
    "MaxPool2DWithIndices0 channels last": lambda h, t: nn.MaxPool2d(3, 2, 1)(last(h)),
    "MaxPool2DWithIndices0 with indices": lambda h, t: F.max_pool2d(h, 2, return_indices=True)[0],
    "MaxPool2DWithIndices0 1d": lambda h, t: F.max_pool1d(h[0], 2),
    "MaxPool3DWithIndices0": lambda h, t: F.max_pool3d(video(h), 2),
    "AdaptiveMaxPool2D0": lambda h, t: F.adaptive_max_pool2d(h, (2, 3)),
    "AdaptiveMaxPool2D0 1d": lambda h, t: F.adaptive_max_pool1d(h[0], 3),
    "AdaptiveMaxPool3D0": lambda h, t: F.adaptive_max_pool3d(video(h), (2, 2, 3)),
    "AvgPool2D0": lambda h, t: F.avg_pool2d(h, 3, 2, 1, count_include_pad=False),
    "AvgPool2D0 divisor": lambda h, t: F.avg_pool2d(last(h), 2, ceil_mode=True, divisor_override=3),
    "AvgPool2D0 1d": lambda h, t: F.avg_pool1d(h[0], 2),
    "AdaptiveAvgPool2D0": lambda h, t: F.adaptive_avg_pool2d(h, (3, 2)),
    "Mean1 global pool": lambda h, t: F.adaptive_avg_pool2d(h, 1),
    "AdaptiveAvgPool3D0": lambda h, t: F.adaptive_avg_pool3d(video(h), (2, 3, 2)),
}

RESAMPLING = {
    "UpsampleNearest1D0": lambda h, t: F.interpolate(h[0], scale_factor=2),
    "UpsampleNearest2D0": lambda h, t: F.interpolate(h, scale_factor=2, mode="nearest"),
    "UpsampleNearest2D0 size": lambda h, t: nn.Upsample(size=(5, 9))(last(h)),
    "UpsampleNearest3D0": lambda h, t: F.interpolate(video(h), scale_factor=(2, 1, 1.5)),
    "UpsampleNearestExact1D0": lambda h, t: F.interpolate(h[0], scale_factor=1.5, mode="nearest-exact"),
    "UpsampleNearestExact2D0": lambda h, t: F.interpolate(h, size=(5, 9), mode="nearest-exact"),
    "UpsampleNearestExact3D0": lambda h, t: F.interpolate(video(h), scale_factor=2, mode="nearest-exact"),
    "UpsampleLinear1D0": lambda h, t: F.interpolate(h[0], size=13, mode="linear"),
    "UpsampleBilinear2D0": lambda h, t: F.interpolate(h, scale_factor=1.5, mode="bilinear"),
    "UpsampleBilinear2D0 aligned": lambda h, t: F.interpolate(
        last(h), size=(5, 9), mode="bilinear", align_corners=True
    ),
    "UpsampleBilinear2D0 recompute": lambda h, t: F.interpolate(
        h, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True
    ),
    "UpsampleBicubic2D0": lambda h, t: F.interpolate(h, scale_factor=2, mode="bicubic"),
    "UpsampleTrilinear3D0": lambda h, t: F.interpolate(video(h), scale_factor=2, mode="trilinear"),
    "Mean1 area": lambda h, t: F.interpolate(h, size=1, mode="area"),
    "AdaptiveAvgPool2D0 area": lambda h, t: F.interpolate(h, size=(3, 2), mode="area"),
    "Im2Col0": lambda h, t: F.unfold(h, 3, padding=1, stride=2),
    "Col2Im0": lambda h, t: F.fold(h.reshape(2, 8, 24), (5, 7), 2),
}

WIDE_ONLY = {
    "AvgPool3D0": lambda h, t: F.avg_pool3d(video(h), 2, 1),
    "UpsampleBilinear2DAa0": lambda h, t: F.interpolate(h, size=(3, 5), mode="bilinear", antialias=True),
    "UpsampleBicubic2DAa0": lambda h, t: F.interpolate(h, size=(3, 5), mode="bicubic", antialias=True),
    "GridSampler2D0": lambda h, t: F.grid_sample(h, t.leaf(2, 3, 3, 2), align_corners=False),
    "GridSampler2D0 const": lambda h, t: F.grid_sample(h, t.const(2, 3, 3, 2), "nearest", "border", True),
    "GridSampler3D0": lambda h, t: F.grid_sample(video(h), t.leaf(1, 2, 2, 2, 3), align_corners=True),
}


def attention(h: Tensor, t: Tensors, p: float) -> Tensor:
    q, k, v = h, t.leaf(2, 4, 6, 8), t.leaf(2, 4, 6, 8)
    weights = F.dropout((q @ k.transpose(-1, -2) / 3).softmax(-1), p)
    return weights.cos() + v.sum()


DROPOUT = {
    "Mul0 dropout": lambda h, t: F.dropout(h, 0.3),
    "Mul0 dropout module": lambda h, t: nn.Dropout(0.9)(h.cos()),
    "Mul0 dropout inplace": lambda h, t: F.dropout(h * 2, 0.3, inplace=True),
    "Mul0 dropout channels last": lambda h, t: F.dropout(last(h), 0.3),
    "Mul0 dropout strided": lambda h, t: F.dropout(h.transpose(1, 2), 0.3),
    "Mul0 dropout twice": lambda h, t: F.dropout(F.dropout(h, 0.5).cos(), 0.1),
    "Mul0 dropout residual": lambda h, t: h + F.dropout(F.gelu(h), 0.1),
    "Mul0 dropout p=1": lambda h, t: F.dropout(h, 1.0).cos() + h.cos() * 2,
    "Cos0 dropout p=0": lambda h, t: F.dropout(h.cos(), 0.0),
    "Cos0 dropout eval": lambda h, t: F.dropout(h.cos(), 0.5, training=False),
    "Mul0 dropout1d": lambda h, t: F.dropout1d(h[0], 0.5),
    "Mul0 dropout2d": lambda h, t: F.dropout2d(h, 0.5),
    "Mul0 dropout2d inplace": lambda h, t: F.dropout2d(h * 2, 0.5, inplace=True),
    "Mul0 dropout3d": lambda h, t: nn.Dropout3d(0.5)(video(h)),
    "Add0 alpha dropout": lambda h, t: F.alpha_dropout(h, 0.3, training=True),
    "Add0 alpha dropout inplace": lambda h, t: F.alpha_dropout(h * 2, 0.3, training=True, inplace=True),
    "Add0 feature alpha dropout": lambda h, t: F.feature_alpha_dropout(h, 0.3, training=True),
    "Cos0 alpha dropout eval": lambda h, t: F.alpha_dropout(h.cos(), 0.3),
}

WINDOWS = (
    *table(POOLS),
    *table(RESAMPLING),
    *table(WIDE_ONLY, dtypes=WIDE),
    *table(DROPOUT),
    *table({"NativeDropout0": lambda h, t: F.dropout(h, 0.3)}, gpu=True),
)
