"""Products, in the forms in which users write them: `tests/ledger/origins/test_products.py` runs them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.rule_cases.case import FLOATS, WIDE, Tensors, table


def flat(h: Tensor) -> Tensor:
    return h.reshape(16, 24)


def batches(h: Tensor) -> Tensor:
    return h.reshape(4, 8, 12)


def last(h: Tensor) -> Tensor:
    return h.contiguous(memory_format=torch.channels_last)


def spare(h: Tensor) -> Tensor:
    """Every second column of a larger tensor."""
    return torch.cat([flat(h), flat(h)], 1)[:, ::2]


def heads(h: Tensor) -> Tensor:
    return h.sin().reshape(2, 4, 6, 8)


MATRICES = {
    "Mm0": lambda h, t: flat(h) @ t.leaf(24, 9),
    "Mm0 of a transposed": lambda h, t: flat(h).t() @ t.leaf(16, 9),
    "Mm0 by a transposed": lambda h, t: F.linear(flat(h), t.leaf(9, 24)),
    "Mm0 of three dimensions": lambda h, t: F.linear(batches(h).transpose(0, 1), t.leaf(9, 12)),
    "Mm0 of an expanded row": lambda h, t: flat(h)[:1].expand(5, 24) @ t.leaf(24, 9),
    "Mm0 of columns": lambda h, t: spare(h) @ t.leaf(24, 9),
    "Mm0 one row": lambda h, t: flat(h)[:1] @ t.leaf(24, 9),
    "Mm0 one column": lambda h, t: flat(h) @ t.leaf(24, 1),
    "Mm0 frozen": lambda h, t: flat(h).sin() @ t.const(24, 9),
    "Mm0 frozen transposed": lambda h, t: flat(h).sin().t() @ t.const(16, 9),
    "Mm0 frozen first": lambda h, t: t.const(9, 16) @ flat(h).cos(),
    "Mm0 of two": lambda h, t: flat(h) @ flat(h).t(),
    "Mm0 chain": lambda h, t: (flat(h) @ t.leaf(24, 24)).relu() @ t.leaf(24, 5),
    "Addmm0": lambda h, t: F.linear(flat(h), t.leaf(9, 24), t.leaf(9)),
    "Addmm0 three dimensions": lambda h, t: F.linear(batches(h), t.leaf(9, 12), t.leaf(9)),
    "Addmm0 scaled": lambda h, t: torch.addmm(t.leaf(16, 9), flat(h), t.leaf(24, 9), beta=0.5, alpha=-2),
    "Addmm0 frozen weight": lambda h, t: F.linear(flat(h).exp(), t.const(9, 24), t.leaf(9)),
    "Addmm0 frozen bias": lambda h, t: F.linear(flat(h), t.leaf(9, 24), t.const(9)),
    "Addmm0 frozen three dimensions": lambda h, t: F.linear(batches(h).exp(), t.const(9, 12), bias=t.const(9)),
    "Bmm0": lambda h, t: torch.bmm(batches(h), t.leaf(4, 12, 5)),
    "Bmm0 transposed": lambda h, t: batches(h) @ batches(h).transpose(1, 2),
    "Bmm0 four dimensions": lambda h, t: h @ h.transpose(-1, -2),
    "Bmm0 einsum": lambda h, t: torch.einsum("bhqd,bhkd->bhqk", h, t.leaf(2, 4, 5, 8)),
    "Bmm0 expanded": lambda h, t: batches(h) @ t.leaf(12, 5).expand(4, 12, 5),
    "Bmm0 frozen": lambda h, t: batches(h) @ t.const(4, 12, 5),
    "Baddbmm0": lambda h, t: torch.baddbmm(t.leaf(4, 8, 5), batches(h), t.leaf(4, 12, 5), beta=0.5, alpha=3),
    "Addbmm0": lambda h, t: torch.addbmm(t.leaf(8, 5), batches(h), t.leaf(4, 12, 5), beta=2, alpha=0.5),
    "Mv0": lambda h, t: flat(h) @ t.leaf(24),
    "Mv0 strided": lambda h, t: flat(h) @ t.leaf(48)[::2],
    "Mv0 transposed": lambda h, t: torch.mv(flat(h).t(), t.leaf(16)),
    "Addmv0": lambda h, t: torch.addmv(t.leaf(16), flat(h), t.leaf(24), beta=0.5, alpha=2),
}


CONVOLUTIONS = {
    "Convolution0": lambda h, t: F.conv2d(h, t.leaf(5, 4, 3, 3)),
    "Convolution0 bias": lambda h, t: F.conv2d(h, t.leaf(5, 4, 3, 3), t.leaf(5)),
    "Convolution0 frozen bias": lambda h, t: F.conv2d(h, t.leaf(5, 4, 3, 3), bias=t.const(5)),
    "Convolution0 settings": lambda h, t: F.conv2d(h, t.leaf(5, 4, 3, 2), t.leaf(5), (2, 1), (1, 2), (1, 2)),
    "Convolution0 grouped": lambda h, t: F.conv2d(h, t.leaf(6, 2, 3, 3), padding=1, groups=2),
    "Convolution0 depthwise": lambda h, t: F.conv2d(h, t.leaf(8, 1, 3, 3), t.leaf(8), padding=1, groups=4),
    "Convolution0 channels last": lambda h, t: F.conv2d(last(h), t.leaf(5, 4, 3, 3), t.leaf(5)),
    "Convolution0 channels last grouped": lambda h, t: F.conv2d(last(h), t.leaf(4, 1, 3, 3), groups=4),
    "Convolution0 weight channels last": lambda h, t: F.conv2d(h, last(t.leaf(5, 4, 3, 3))),
    "Convolution0 pointwise": lambda h, t: F.conv2d(h, t.leaf(5, 4, 1, 1)),
    "Convolution0 one sample": lambda h, t: F.conv2d(h[0], t.leaf(5, 4, 3, 3)),
    "Convolution0 expanded": lambda h, t: F.conv2d(h[:1].expand(3, 4, 6, 8), t.leaf(5, 4, 3, 3)),
    "Convolution0 permuted": lambda h, t: F.conv2d(h.permute(0, 3, 1, 2), t.leaf(5, 8, 3, 3)),
    "Convolution0 frozen": lambda h, t: F.conv2d(h.sin(), t.const(4, 1, 3, 3), groups=4),
    "Convolution0 reflected": lambda h, t: F.conv2d(F.pad(h, (1, 1, 1, 1), "reflect"), t.leaf(5, 4, 3, 3)),
    "Convolution0 1d": lambda h, t: F.conv1d(batches(h), t.leaf(5, 8, 3), t.leaf(5), 2, 1),
    "Convolution0 1d grouped": lambda h, t: F.conv1d(batches(h), t.leaf(8, 1, 3), groups=8),
    "Convolution0 3d": lambda h, t: F.conv3d(h.view(1, 2, 4, 6, 8), t.leaf(3, 2, 2, 3, 3), t.leaf(3), padding=1),
    "Convolution0 transposed": lambda h, t: F.conv_transpose2d(h, t.leaf(4, 5, 3, 3), t.leaf(5), 2, 1, 1),
    "Convolution0 transposed grouped": lambda h, t: F.conv_transpose2d(h, t.leaf(4, 3, 2, 2), stride=2, groups=2),
    "Convolution0 transposed 1d": lambda h, t: F.conv_transpose1d(batches(h), t.leaf(8, 3, 4), None, 2),
    "Convolution0 transposed channels last": lambda h, t: F.conv_transpose2d(last(h), t.leaf(4, 5, 3, 3), dilation=2),
}

ATTENTION = {
    "ScaledDotProductFlashAttentionForCpu0": lambda h, t: F.scaled_dot_product_attention(h, heads(h), h),
    "ScaledDotProductFlashAttentionForCpu0 causal": lambda h, t: F.scaled_dot_product_attention(
        h, t.leaf(2, 4, 6, 8), t.leaf(2, 4, 6, 8), is_causal=True, scale=0.3
    ),
    "ScaledDotProductFlashAttentionForCpu0 masked": lambda h, t: F.scaled_dot_product_attention(
        h, heads(h), heads(h), attn_mask=t.mask(6, 6) | torch.eye(6, dtype=torch.bool)
    ),
    "ScaledDotProductFlashAttentionForCpu0 mask of numbers": lambda h, t: F.scaled_dot_product_attention(
        h, heads(h), heads(h), attn_mask=t.const(2, 1, 6, 6)
    ),
    "ScaledDotProductFlashAttentionForCpu0 transposed": lambda h, t: F.scaled_dot_product_attention(
        *(x.reshape(2, 6, 4, 8).transpose(1, 2) for x in (h, heads(h), h))
    ),
    "ScaledDotProductFlashAttentionForCpu0 other length": lambda h, t: F.scaled_dot_product_attention(
        h, t.leaf(2, 4, 9, 8), t.leaf(2, 4, 9, 8)
    ),
    "ScaledDotProductFlashAttentionForCpu0 grouped": lambda h, t: F.scaled_dot_product_attention(
        h, t.leaf(2, 2, 6, 8), t.leaf(2, 2, 6, 8), enable_gqa=True
    ),
    "Bmm0 written by the mask": lambda h, t: F.scaled_dot_product_attention(h, h, h, attn_mask=t.leaf(6, 6)),
}

UNDER_AUTOCAST = {
    "Addmm0 autocast": lambda h, t: nn.GELU()(F.linear(flat(h), t.leaf(9, 24), t.leaf(9))),
    "Mm0 autocast": lambda h, t: flat(h) @ t.leaf(24, 9),
    "Bmm0 autocast": lambda h, t: h @ h.transpose(-1, -2),
    "Baddbmm0 autocast": lambda h, t: torch.baddbmm(t.leaf(4, 8, 5), batches(h), t.leaf(4, 12, 5)),
    "Convolution0 autocast": lambda h, t: F.conv2d(last(h), t.leaf(5, 4, 3, 3), t.leaf(5)),
    "Convolution0 autocast grouped": lambda h, t: F.conv2d(h, t.leaf(4, 1, 3, 3), groups=4),
    "ScaledDotProductFlashAttentionForCpu0 autocast": lambda h, t: F.scaled_dot_product_attention(h, heads(h), h),
}


def wide_heads(t: Tensors) -> Tensor:
    return t.leaf(2, 4, 128, 64)


def attend(backend: str, h: Tensor, t: Tensors, **options: object) -> Tensor:
    with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, backend)):
        q = (h.mean() + 1) * wide_heads(t)
        return F.scaled_dot_product_attention(q, q.sin(), wide_heads(t), **options)  # type: ignore[arg-type]


ON_CUDA = {
    "Mm0 cuda": lambda h, t: flat(h) @ t.leaf(24, 16),
    "Addmm0 cuda": lambda h, t: F.linear(flat(h), t.leaf(16, 24), t.leaf(16)),
    "Bmm0 cuda": lambda h, t: batches(h) @ t.leaf(4, 12, 8),
    "Baddbmm0 cuda": lambda h, t: torch.baddbmm(t.leaf(4, 8, 8), batches(h), t.leaf(4, 12, 8), beta=0.5),
    "Convolution0 cuda": lambda h, t: F.conv2d(h, t.leaf(8, 4, 3, 3), t.leaf(8)),
    "Convolution0 cuda channels last": lambda h, t: F.conv2d(last(h), t.leaf(8, 4, 3, 3)),
    "Convolution0 cuda depthwise": lambda h, t: F.conv2d(h, t.leaf(4, 1, 3, 3), groups=4),
    "ScaledDotProductEfficientAttention0": lambda h, t: attend("EFFICIENT_ATTENTION", h, t, is_causal=True),
    "ScaledDotProductEfficientAttention0 mask": lambda h, t: attend(
        "EFFICIENT_ATTENTION", h, t, attn_mask=t.const(128, 128)
    ),
    "ScaledDotProductEfficientAttention0 learned": lambda h, t: attend(
        "EFFICIENT_ATTENTION", h, t, attn_mask=t.leaf(128, 128)
    ),
    "ScaledDotProductEfficientAttention0 dropout": lambda h, t: attend(
        "EFFICIENT_ATTENTION", h, t, is_causal=True, dropout_p=0.1
    ),
    "ScaledDotProductEfficientAttention0 dropout mask": lambda h, t: attend(
        "EFFICIENT_ATTENTION", h, t, attn_mask=t.const(128, 128), dropout_p=0.1
    ),
    "ScaledDotProductEfficientAttention0 dropout learned": lambda h, t: attend(
        "EFFICIENT_ATTENTION", h, t, attn_mask=t.leaf(128, 128), dropout_p=0.1
    ),
}
ON_CUDA_IN_HALF = {
    "ScaledDotProductFlashAttention0": lambda h, t: attend("FLASH_ATTENTION", h, t, is_causal=True),
    "ScaledDotProductCudnnAttention0": lambda h, t: attend("CUDNN_ATTENTION", h, t, is_causal=True),
    "ScaledDotProductFlashAttention0 dropout": lambda h, t: attend("FLASH_ATTENTION", h, t, dropout_p=0.1),
    "ScaledDotProductCudnnAttention0 dropout": lambda h, t: attend("CUDNN_ATTENTION", h, t, dropout_p=0.1),
}
BF16, FLOAT = (torch.bfloat16,), (torch.float32,)
PRODUCT_CASES = (
    *table(MATRICES, dtypes=FLOATS, products=8),
    *table(CONVOLUTIONS, dtypes=WIDE, products=8),
    *table(ATTENTION, dtypes=FLOATS, products=8),
    *table(UNDER_AUTOCAST, dtypes=FLOAT, products=8, autocast=True),
    *table(ON_CUDA, dtypes=FLOAT, products=8, gpu=True),
    *table(ON_CUDA_IN_HALF, dtypes=BF16, products=8, gpu=True),
)
