"""Reductions, scans, softmax, norms and transforms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.rule_cases.case import WIDE, Case, Tensors, table
from tests.support.rule_cases.pointwise import pair, unit

REDUCTIONS = {
    "Sum0": lambda h, t: h.sum() * h,
    "Sum1": lambda h, t: h.sum(-1),
    "Sum1 keepdim": lambda h, t: h.sum((1, -1), keepdim=True) - h,
    "Sum1 dtype": lambda h, t: h.sum(2, dtype=torch.float64),
    "Sum1 none": lambda h, t: h.sum(dim=None, keepdim=True) + h,
    "Sum1 channels last": lambda h, t: h.contiguous(memory_format=torch.channels_last).sum(1),
    "Mean0": lambda h, t: h.mean() + h,
    "Mean1": lambda h, t: h.mean((2, 3)),
    "Mean1 written rms": lambda h, t: (
        t.leaf(8) * (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6))
    ),
    "Mean1 dtype": lambda h, t: torch.mean(h, -1, True, dtype=torch.float32),
    "Prod0": lambda h, t: h * unit(h)[0, 0, 0].prod(),
    "Prod1": lambda h, t: h.prod(-1, keepdim=True),
    "Amax0": lambda h, t: h - h.amax((-1, 1), keepdim=True),
    "Amin0": lambda h, t: torch.amin(h, 1),
    "Aminmax0": lambda h, t: tuple(torch.aminmax(h, dim=-1)),
    "Max1": lambda h, t: h / h.max(),
    "Min1": lambda h, t: h - h.min(),
    "Logsumexp0": lambda h, t: h.logsumexp((-1, 1)),
    "Logsumexp0 keepdim": lambda h, t: h - torch.logsumexp(h, -1, keepdim=True),
    "Var0": lambda h, t: h.var(-1),
    "Var0 all": lambda h, t: h.var() + h,
    "Var0 biased": lambda h, t: torch.var(h, (1, -1), unbiased=False, keepdim=True),
    "Var0 written norm": lambda h, t: (h - h.mean(1, True)) / torch.sqrt(h.var(1, correction=0, keepdim=True) + 1e-5),
    "Std0": lambda h, t: h.std(dim=1, correction=2),
    "VarMean0": lambda h, t: torch.var_mean(h, (1, -1), keepdim=True),
    "StdMean0": lambda h, t: torch.std_mean(h, 1, correction=0),
    "LinalgVectorNorm0": lambda h, t: h.norm(dim=-1),
    "LinalgVectorNorm0 normalize": lambda h, t: F.normalize(h, dim=1),
    "LinalgVectorNorm0 l1": lambda h, t: torch.linalg.vector_norm(h, 1, (-1, 1), keepdim=True, dtype=torch.float64),
    "Sort0": lambda h, t: h.sort(-1, descending=True)[0],
    "Sort1": lambda h, t: torch.sort(h, dim=1, stable=True).values,
    "Topk0": lambda h, t: h.topk(3, dim=-1).values,
    "Topk0 smallest": lambda h, t: torch.topk(h, 2, dim=1, largest=False)[0],
    "Cummax0": lambda h, t: h.cummax(-1).values,
    "Cummin0": lambda h, t: h.cummin(1).values,
    "Max0": lambda h, t: h.max(-1).values,
    "Max0 keepdim": lambda h, t: h - h.max(dim=1, keepdim=True)[0],
    "Min0": lambda h, t: h.min(1)[0],
    "Median1": lambda h, t: h.median(-1).values,
    "Nanmedian1": lambda h, t: h.nanmedian(-1, keepdim=True).values,
    "Kthvalue0": lambda h, t: h.kthvalue(3, -1).values,
    "Mode0": lambda h, t: h.mode(-1).values,
    "Cumsum0": lambda h, t: h.cumsum(-1),
    "Cumsum0 dtype": lambda h, t: torch.cumsum(h, 1, dtype=torch.float64),
    "Cumprod0": lambda h, t: unit(h).cumprod(-1),
    "Logcumsumexp0": lambda h, t: h.logcumsumexp(-1),
}

TRANSFORMS = {
    "FftR2C0": lambda h, t: torch.fft.rfft2(h),
    "FftR2C0 norm": lambda h, t: torch.fft.rfft(h, dim=1, norm="ortho"),
    "FftC2C0": lambda h, t: torch.fft.fft2(pair(h), norm="ortho"),
    "FftC2C0 inverse": lambda h, t: torch.fft.ifft(pair(h), dim=1),
    "FftC2R0": lambda h, t: torch.fft.irfft2(pair(h) * 2, s=(6, 7)),
    "FftC2R0 mix": lambda h, t: torch.fft.irfft(torch.fft.rfft(h) * 2, n=8),
    "LinalgVectorNorm0 complex": lambda h, t: torch.linalg.vector_norm(pair(h), dim=-1),
}

SOFTMAX = {
    "Softmax0": lambda h, t: h.softmax(-1),
    "Softmax0 dim": lambda h, t: F.softmax(h, dim=1),
    "Softmax0 dtype": lambda h, t: F.softmax(h, dim=-1, dtype=torch.float32).to(h.dtype),
    "Softmax0 double": lambda h, t: torch.softmax(h, -1, dtype=torch.float64),
    "Softmax0 masked": lambda h, t: (h / 3).masked_fill(torch.triu(t.mask(6, 8)), float("-inf")).softmax(-1),
    "Softmax0 softmin": lambda h, t: F.softmin(h, dim=-1),
    "LogSoftmax0": lambda h, t: F.log_softmax(h, -1),
    "LogSoftmax0 dtype": lambda h, t: h.log_softmax(1, dtype=torch.float32),
    "SafeSoftmax0": lambda h, t: torch.ops.aten._safe_softmax(h, -1),
}


def batch_norm(weight: str | None, bias: str | None, *, training: bool, **layout: torch.memory_format):
    """`nn.BatchNorm2d` on a map: `weight` and `bias` are leaf, const or None."""

    def function(h: Tensor, t: Tensors) -> Tensor:
        norm = nn.BatchNorm2d(4, eps=1e-3, affine=False, dtype=t.dtype).train(training)
        norm.running_mean, norm.running_var = t.const(4), t.const(4).abs() + 0.1
        w, b = (None if kind is None else getattr(t, kind)(4) for kind in (weight, bias))
        x = h.contiguous(**layout)
        return F.batch_norm(x, norm.running_mean, norm.running_var, w, b, training, 0.1, norm.eps)

    return function


NORMS = {
    "NativeLayerNorm0": lambda h, t: F.layer_norm(h, (8,), t.leaf(8), t.leaf(8)),
    "NativeLayerNorm0 eps": lambda h, t: F.layer_norm(h, (6, 8), eps=0.1),
    "NativeLayerNorm0 frozen": lambda h, t: F.layer_norm(h, (8,), t.const(8), t.const(8), 1e-6),
    "NativeLayerNorm0 no bias": lambda h, t: torch.layer_norm(h, (8,), t.leaf(8)),
    "NativeLayerNorm0 module": lambda h, t: nn.LayerNorm(8, eps=1e-2, elementwise_affine=False)(h),
    "NativeLayerNorm0 strided": lambda h, t: F.layer_norm(h.transpose(-1, -2), (6,), t.leaf(6)),
    "Mul0 rms norm": lambda h, t: F.rms_norm(h, (8,), t.leaf(8), 1e-3),
    "Mul0 rms norm default eps": lambda h, t: F.rms_norm(h, (8,)),
    "NativeGroupNorm0": lambda h, t: F.group_norm(h, 2, t.leaf(4), t.leaf(4), 1e-2),
    "NativeGroupNorm0 plain": lambda h, t: F.group_norm(h, 4),
    "NativeGroupNorm0 frozen": lambda h, t: F.group_norm(h, 2, t.const(4), t.const(4)),
    "NativeGroupNorm0 channels last": lambda h, t: F.group_norm(
        h.contiguous(memory_format=torch.channels_last), 2, t.leaf(4), t.leaf(4)
    ),
    "NativeGroupNorm0 part of channels last": lambda h, t: F.group_norm(
        h.contiguous(memory_format=torch.channels_last)[..., ::2], 2, t.leaf(4), t.leaf(4)
    ),
    "NativeBatchNorm0 instance": lambda h, t: F.instance_norm(h),
    "NativeBatchNorm0 instance affine": lambda h, t: F.instance_norm(h, weight=t.leaf(4), bias=t.leaf(4), eps=1e-2),
    "NativeBatchNorm0 training": batch_norm("leaf", "leaf", training=True),
    "NativeBatchNorm0 training plain": batch_norm(None, None, training=True),
    "NativeBatchNorm0 training frozen": batch_norm("const", "const", training=True),
    "NativeBatchNorm0 training frozen weight": batch_norm("const", "leaf", training=True),
    "NativeBatchNorm0 training frozen bias": batch_norm("leaf", "const", training=True),
    "NativeBatchNorm0 training channels last": batch_norm(
        "leaf", "leaf", training=True, memory_format=torch.channels_last
    ),
    "NativeBatchNorm0 eval": batch_norm("leaf", "leaf", training=False),
    "NativeBatchNorm0 eval plain": batch_norm(None, None, training=False),
    "NativeBatchNorm0 eval frozen": batch_norm("const", "const", training=False),
    "NativeBatchNorm0 of torch": lambda h, t: torch.batch_norm(
        h, t.leaf(4), t.const(4), t.const(4), t.const(4).abs(), True, 0.1, 1e-2, False
    ),
    "NativeBatchNorm0 of torch by name": lambda h, t: torch.batch_norm(
        h,
        bias=None,
        weight=t.leaf(4),
        running_var=t.const(4).abs(),
        running_mean=t.const(4),
        training=False,
        momentum=0.1,
        eps=1e-2,
        cudnn_enabled=False,
    ),
    "NativeBatchNorm0 rows": lambda h, t: F.batch_norm(
        h.flatten(0, 2), None, None, t.leaf(8), t.leaf(8), training=True
    ),
    "NativeBatchNorm0 sequence": lambda h, t: F.batch_norm(h[0], None, None, t.leaf(6), t.leaf(6), training=True),
    "WeightNormInterface0": lambda h, t: torch._weight_norm(t.leaf(6, 8), t.leaf(6, 1), 0) * h,
}

REDUCING = (
    *table(REDUCTIONS),
    *table(TRANSFORMS, dtypes=WIDE),
    *table(SOFTMAX),
    *table(NORMS),
    *table({"FusedRmsNorm0": lambda h, t: F.rms_norm(h, (8,), t.leaf(8), 1e-3)}, gpu=True),
    *table({"CudnnBatchNorm0": batch_norm("leaf", "leaf", training=True)}, dtypes=(torch.float32,), gpu=True),
)
assert all(isinstance(c, Case) for c in REDUCING)
