"""Rules for pooling, resampling, patches and dropout."""

from __future__ import annotations

import torch

from leangrad.ledger.origins.rules.rule import rule
from leangrad.ledger.origins.rules.shorter import max_pool2d, upsample_nearest2d

aten = torch.ops.aten

# -------------------------------------------------------------------------------------------------------------- pooling


# Output 0 of a max pooling is the values. Output 1 is the indices, 8 bytes each, which are rebuilt too.
_MAXIMUM = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_AVERAGE = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
for _output in (0, 1):
    rule("MaxPool2DWithIndicesBackward0", "self", max_pool2d(_output), *_MAXIMUM, output=_output)
rule("MaxPool3DWithIndicesBackward0", "self", aten.max_pool3d_with_indices.default, *_MAXIMUM, numbered=True)
rule("AdaptiveMaxPool2DBackward0", "self", aten.adaptive_max_pool2d.default, "@shape[-2:]", numbered=True)
rule("AdaptiveMaxPool3DBackward0", "self", aten.adaptive_max_pool3d.default, "@shape[-3:]", numbered=True)
rule("AvgPool2DBackward0", "self", aten.avg_pool2d.default, *_AVERAGE)
rule("AvgPool3DBackward0", "self", aten.avg_pool3d.default, *_AVERAGE)
rule("AdaptiveAvgPool2DBackward0", "self", aten._adaptive_avg_pool2d.default, "@shape[-2:]")
rule("AdaptiveAvgPool3DBackward0", "self", aten._adaptive_avg_pool3d.default, "@shape[-3:]")

# ----------------------------------------------------------------------------------------------------------- resampling

_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
for _d, _scales in _SCALES.items():
    _nearest = getattr(aten, f"upsample_nearest{_d}d").default, getattr(aten, f"_upsample_nearest_exact{_d}d").default
    _function = upsample_nearest2d if _d == 2 else _nearest[0]
    rule(f"UpsampleNearest{_d}DBackward0", "self", _function, "output_size", *_scales)
    rule(f"UpsampleNearestExact{_d}DBackward0", "self", _nearest[1], "output_size", *_scales)
_ALIGNED = ("output_size", "align_corners")
rule("UpsampleLinear1DBackward0", "self", aten.upsample_linear1d.default, *_ALIGNED, *_SCALES[1])
rule("UpsampleBilinear2DBackward0", "self", aten.upsample_bilinear2d.default, *_ALIGNED, *_SCALES[2])
rule("UpsampleBilinear2DAaBackward0", "self", aten._upsample_bilinear2d_aa.default, *_ALIGNED, *_SCALES[2])
rule("UpsampleBicubic2DBackward0", "self", aten.upsample_bicubic2d.default, *_ALIGNED, *_SCALES[2])
rule("UpsampleBicubic2DAaBackward0", "self", aten._upsample_bicubic2d_aa.default, *_ALIGNED, *_SCALES[2])
rule("UpsampleTrilinear3DBackward0", "self", aten.upsample_trilinear3d.default, *_ALIGNED, *_SCALES[3])
_GRID = ("interpolation_mode", "padding_mode", "align_corners")
rule("GridSampler2DBackward0", "input grid", aten.grid_sampler_2d.default, *_GRID)
rule("GridSampler3DBackward0", "input grid", aten.grid_sampler_3d.default, *_GRID)

# -------------------------------------------------------------------------------------------------------------- patches

_PATCH = ("kernel_size", "dilation", "padding", "stride")
rule("Im2ColBackward0", "self", aten.im2col.default, *_PATCH)
rule("Col2ImBackward0", "self", aten.col2im.default, "@shape[-2:]", *_PATCH)

# -------------------------------------------------------------------------------------------------------------- dropout

# The mask of a fused dropout is drawn again from the generator's state before the op: see ``random_ops.py``. Where ATen
# computes dropout as a multiplication with random numbers, these are drawn again, and the multiplication has its own
# rule.
rule("NativeDropoutBackward0", "input", lambda x, redraw: redraw(x), "?redraw", numbered=True)
