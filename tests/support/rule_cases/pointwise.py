"""Ops on each element, casts and copies."""

import math
import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.ledger.origins.rules.pointwise import UNARY, node_name
from tests.support.rule_cases.case import FLOATS, WIDE, Case, table

aten = torch.ops.aten
NO_BFLOAT16 = ()


def unit(h: Tensor) -> Tensor:
    """Into (0.1, 0.9), where every op is defined."""
    return h.sigmoid() * 0.8 + 0.1


def pair(h: Tensor) -> Tensor:
    """As complex numbers."""
    return torch.view_as_complex(h.unflatten(-1, (-1, 2)))


def unary() -> list[Case]:
    cases = []
    for op in UNARY.split():
        function = getattr(torch, op, None) or getattr(aten, op)
        inplace = getattr(torch.Tensor, op + "_", None) or getattr(aten, op + "_", None)
        wide = WIDE if op == "conj_physical" else FLOATS
        if op == "conj_physical":
            cases.append(Case(node_name(op), "complex", lambda h, t, f=function: f(pair(h)), WIDE))
            continue
        shift: Callable[[Tensor], Tensor] = (lambda h: 1.5 + unit(h)) if op == "acosh" else unit
        cases.append(Case(node_name(op), "", lambda h, t, f=function, s=shift: f(s(h)), wide))
        cases.append(Case(node_name(op), "signed", lambda h, t, f=function: f(h), wide))
        cases.append(Case(node_name(op), "of-rebuilt", lambda h, t, f=function: f(f(h.cos())), wide))
        if inplace is not None and op not in ("acosh", "asinh", "atanh"):  # these have no derivative in place
            cases.append(Case(node_name(op), "inplace", lambda h, t, f=inplace, s=shift: f(s(h)), wide))
    return cases


ONE_TENSOR = {
    "LogSigmoid0": lambda h, t: F.logsigmoid(h),
    "Gelu0": lambda h, t: F.gelu(h),
    "Gelu0 tanh": lambda h, t: F.gelu(h, approximate="tanh"),
    "Gelu0 of-rebuilt": lambda h, t: F.gelu(F.gelu(h.sin(), approximate="tanh")),
    "LeakyRelu0": lambda h, t: F.leaky_relu(h, 0.2),
    "LeakyRelu1": lambda h, t: F.leaky_relu(h * 2, 0.2, inplace=True),
    "Elu0": lambda h, t: F.elu(h, 1.3),
    "Elu0 selu": lambda h, t: F.selu(h),
    "Elu1": lambda h, t: F.elu(h * 2, 1.3, inplace=True),
    "Elu1 selu": lambda h, t: F.selu(h * 2, inplace=True),
    "Celu0": lambda h, t: F.celu(h, 0.7),
    "Celu1": lambda h, t: F.celu(h * 2, 0.7, inplace=True),
    "Softplus0": lambda h, t: F.softplus(h, 2.0, 10.0),
    "Softplus0 defaults": lambda h, t: F.softplus(h),
    "Softshrink0": lambda h, t: F.softshrink(h, 0.3),
    "Hardshrink0": lambda h, t: F.hardshrink(h, 0.3),
    "Hardtanh0": lambda h, t: F.hardtanh(h, -0.5, 0.7),
    "Hardtanh0 inplace": lambda h, t: F.hardtanh(h * 2, -0.5, 0.7, inplace=True),
    "Hardtanh0 relu6": lambda h, t: F.relu6(h * 3),
    "Hardtanh0 relu6 inplace": lambda h, t: nn.ReLU6(inplace=True)(h * 3),
    "Relu0 functional inplace": lambda h, t: F.relu(h * 2, inplace=True),
    "Silu0 functional inplace": lambda h, t: F.silu(h * 2, inplace=True),
    "Mish0 functional inplace": lambda h, t: F.mish(h * 2, inplace=True),
    "Hardswish0 functional inplace": lambda h, t: F.hardswish(h * 2, inplace=True),
    "Hardsigmoid0 functional inplace": lambda h, t: F.hardsigmoid(h * 2, inplace=True),
    "Relu0 after a sum in place": lambda h, t: nn.ReLU(inplace=True)(h.cos().add_(h)),
    "Threshold0": lambda h, t: F.threshold(h, 0.1, -20),
    "Threshold0 keywords": lambda h, t: F.threshold(h, threshold=0.1, value=-2.5),
    "Threshold1": lambda h, t: F.threshold(h * 2, 0.1, -20.0, inplace=True),
    "Glu0": lambda h, t: F.glu(h),
    "Glu0 dim": lambda h, t: F.glu(h, dim=1),
    "Clamp1": lambda h, t: h.clamp(-0.5, 0.5),
    "Clamp1 min": lambda h, t: torch.clamp(h, min=-1),
    "Clamp1 max": lambda h, t: h.clamp(max=0.25),
    "Clamp1 inplace": lambda h, t: (h * 2).clamp_(-1, 1),
    "ClampMin0": lambda h, t: h.clamp_min(0.1),
    "ClampMin0 inplace": lambda h, t: (h * 2).clamp_min_(0),
    "ClampMax0": lambda h, t: torch.clamp_max(h, 0.1),
    "NanToNum0": lambda h, t: torch.nan_to_num(h.log()),
    "NanToNum0 settings": lambda h, t: (h / 0).nan_to_num(nan=1.0, posinf=2.0, neginf=-3.0),
    "NanToNum0 places": lambda h, t: torch.nan_to_num(h.log(), 0.5, 2.0),
    "Logit0": lambda h, t: unit(h).logit(),
    "Logit0 eps": lambda h, t: torch.logit(h, eps=0.1),
    "Pow0 square": lambda h, t: h.square(),
    "Pow0 int": lambda h, t: h**3,
    "Pow0 float": lambda h, t: unit(h) ** 1.7,
    "Pow0 negative": lambda h, t: unit(h).pow(-2),
    "Pow0 inplace": lambda h, t: (h * 2).pow_(2),
    "Pow0 operator inplace": lambda h, t: operator.ipow(h * 2, 2),
    "Pow2": lambda h, t: 2**h,
    "Pow2 float": lambda h, t: torch.pow(0.3, h),
    "Rsub1": lambda h, t: 1 - h,
    "Rsub1 float": lambda h, t: 0.1 - h,
    "Rsub1 negative zero": lambda h, t: -0.0 - h,
    "Rsub1 alpha": lambda h, t: torch.rsub(h, 1.5, alpha=3),
    "Mul1": lambda h, t: aten.mul.Scalar(h, 1.7),
    "Div1": lambda h, t: aten.div.Scalar(h, 1.7),
    "Div3": lambda h, t: aten.div.Scalar_mode(h, 0.3, rounding_mode="floor") + 1,
    "Fmod0": lambda h, t: h.fmod(0.3),
    "Fmod0 inplace": lambda h, t: (h * 2).fmod_(1),
    "Remainder0": lambda h, t: h % 2,
    "Remainder0 function": lambda h, t: torch.remainder(h, 0.3),
    "Remainder0 inplace": lambda h, t: operator.imod(h * 2, 1),
    "Xlogy1": lambda h, t: torch.xlogy(2.5, unit(h)),
    "Xlogy2": lambda h, t: torch.xlogy(h, 2.5),
    "MaskedFill0": lambda h, t: h.masked_fill(t.mask(6, 8), -1e9),
    "MaskedFill0 int": lambda h, t: torch.masked_fill(h, t.mask(2, 1, 1, 8), 0),
    "MaskedFill0 lowest": lambda h, t: h.masked_fill(t.mask(2, 4, 6, 8), torch.finfo(h.dtype).min),
    "MaskedFill0 inplace": lambda h, t: (h * 2).masked_fill_(t.mask(6, 8), -5.0),
    "MaskedFill0 keywords": lambda h, t: h.masked_fill(mask=t.mask(6, 8), value=2),
    "Tril0": lambda h, t: h.tril(),
    "Triu0": lambda h, t: torch.triu(h, diagonal=-2),
    "Tril0 inplace": lambda h, t: (h * 2).tril_(1),
}

TWO_TENSORS = {
    "Add0": lambda h, t: h + t.leaf(2, 4, 6, 8),
    "Add0 itself": lambda h, t: h + h,
    "Add0 scalar": lambda h, t: h + 1,
    "Add0 scalar before": lambda h, t: 0.3 + h,
    "Add0 negative zero": lambda h, t: h * 0 + -0.0,
    "Add0 true": lambda h, t: h + True,
    "Add0 alpha": lambda h, t: torch.add(h, t.leaf(8), alpha=-3),
    "Add0 alpha scalar": lambda h, t: torch.add(h, 2, alpha=0.3),
    "Add0 alpha of-rebuilt": lambda h, t: torch.add(h.cos(), h.sin(), alpha=0.3),
    "Add0 bias": lambda h, t: h + t.leaf(8),
    "Add0 broadcast up": lambda h, t: t.leaf(6, 1) + h[:, :1],
    "Add0 zero-dim": lambda h, t: h + t.leaf(),
    "Add0 zero-dim const": lambda h, t: h + t.hold(torch.tensor(0.3, dtype=torch.float64)),
    "Add0 zero-dim int": lambda h, t: h + t.hold(torch.tensor(3)),
    "Add0 const": lambda h, t: h + t.const(4, 6, 8),
    "Add0 const before": lambda h, t: t.const(4, 6, 8) + h,
    "Add0 const dead later": lambda h, t: h + t.random(4, 6, 8) * t.leaf(8),
    "Add0 inplace": lambda h, t: (h * 2).add_(t.leaf(8)),
    "Add0 inplace const": lambda h, t: (h * 2).add_(t.const(8), alpha=2),
    "Add0 inplace operator": lambda h, t: operator.iadd(h.cos(), h.sin()),
    "Add0 inplace scalar": lambda h, t: operator.iadd(h * 2, 0.5),
    "Add0 mixed dtypes": lambda h, t: h + t.leaf(6, 8, dtype=torch.float64),
    "Add0 strided": lambda h, t: h.transpose(1, 2) + t.leaf(2, 6, 4, 8),
    "Add0 channels last": lambda h, t: h.contiguous(memory_format=torch.channels_last) + t.leaf(4, 1, 1),
    "Sub0": lambda h, t: h - t.leaf(4, 6, 8),
    "Sub0 broadcast": lambda h, t: t.leaf(2, 2, 1, 1, 1) - h,
    "Sub0 scalar": lambda h, t: h - 1.5,
    "Sub0 alpha": lambda h, t: h.sub(t.leaf(8), alpha=2),
    "Sub0 const": lambda h, t: h - t.const(8),
    "Sub0 const before": lambda h, t: t.const(8) - h,
    "Sub0 inplace": lambda h, t: operator.isub(h * 2, t.leaf(8)),
    "Sub0 inplace scalar": lambda h, t: (h * 2).sub_(0.1, alpha=2),
    "Sub0 mean": lambda h, t: h.cos() - h.mean(-1, keepdim=True),
    "Rsub0": lambda h, t: torch.rsub(h, t.leaf(8)),
    "Rsub0 const": lambda h, t: torch.rsub(h, t.const(8), alpha=2),
    "Mul0": lambda h, t: h * t.leaf(4, 1, 8),
    "Mul0 itself": lambda h, t: h * h,
    "Mul0 itself rebuilt": lambda h, t: h.cos() * h.cos(),
    "Mul0 scalar": lambda h, t: h * 0.1,
    "Mul0 scalar before": lambda h, t: 3 * h,
    "Mul0 negative zero": lambda h, t: h * -0.0,
    "Mul0 infinity": lambda h, t: h * float("inf"),
    "Mul0 zero-dim": lambda h, t: h * t.leaf(),
    "Mul0 zero-dim double": lambda h, t: h * torch.tensor(0.1, dtype=torch.float64),
    "Mul0 chain of scalars": lambda h, t: h.cos() * (h.mean() * 0.1 + 0.3) * 0.7,
    "Mul0 const": lambda h, t: h * t.const(2, 4, 1, 1),
    "Mul0 const before": lambda h, t: t.const(2, 4, 1, 1) * h,
    "Mul0 const dead": lambda h, t: h * t.random(6, 8),
    "Mul0 mask": lambda h, t: h * t.mask(6, 8),
    "Mul0 inplace": lambda h, t: (h + 1).mul_(t.const(8)),
    "Mul0 inplace scalar": lambda h, t: operator.imul(h + 1, 0.3),
    "Mul0 gate": lambda h, t: h.sigmoid() * h,
    "Div0": lambda h, t: h / (t.leaf(8).abs() + 1),
    "Div0 scalar": lambda h, t: h / 3,
    "Reciprocal0 scalar before": lambda h, t: 2.0 / unit(h),
    "Div0 const": lambda h, t: h / t.const(6, 8),
    "Div0 const before": lambda h, t: t.const(6, 8) / unit(h),
    "Div0 inplace": lambda h, t: (h * 2).div_(1.7),
    "Div0 root": lambda h, t: h.cos() / math.sqrt(7),
    "Div2 floor": lambda h, t: torch.div(h, 0.3, rounding_mode="floor") + h,
    "Div2 trunc": lambda h, t: torch.div(h, unit(h), rounding_mode="trunc") + h,
    "Div2 none": lambda h, t: h.div(t.const(8), rounding_mode=None),
    "Pow1": lambda h, t: unit(h) ** t.leaf(8),
    "Pow1 const": lambda h, t: unit(h).pow(t.const(8)),
    "Pow1 const base": lambda h, t: t.const(8).abs() ** h,
    "Fmod1": lambda h, t: torch.fmod(h, unit(t.leaf(8))),
    "Fmod1 const": lambda h, t: h.fmod(t.const(8)),
    "Remainder1": lambda h, t: h % unit(t.leaf(8)),
    "Remainder1 const": lambda h, t: torch.remainder(h, t.const(8)),
    "Atan20": lambda h, t: torch.atan2(h, t.leaf(8)),
    "Hypot0": lambda h, t: torch.hypot(h, t.leaf(8)),
    "Logaddexp0": lambda h, t: torch.logaddexp(h, t.const(8)),
    "Logaddexp20": lambda h, t: torch.logaddexp2(h, t.leaf(8)),
    "Xlogy0": lambda h, t: torch.xlogy(h, unit(t.leaf(8))),
    "Xlogy0 const": lambda h, t: torch.xlogy(h, unit(t.const(8))),
    "Copysign0": lambda h, t: torch.copysign(h, t.leaf(8)),
    "Maximum0": lambda h, t: torch.maximum(h, t.leaf(8)),
    "Maximum0 const": lambda h, t: torch.max(h, t.const(8)),
    "Minimum0": lambda h, t: torch.minimum(h, t.const(4, 1, 1)),
    "Fmax0": lambda h, t: torch.fmax(h, t.const(8)),
    "Fmin0": lambda h, t: torch.fmin(h, t.leaf(8)),
    "Clamp0": lambda h, t: h.clamp(t.const(8) - 1, t.const(8) + 1),
    "Clamp0 one": lambda h, t: torch.clamp(h, min=t.leaf(8)),
    "ClampMin1": lambda h, t: h.clamp_min(t.const(8)),
    "ClampMax1": lambda h, t: h.clamp_max(t.leaf(8)),
    "PreluKernel0": lambda h, t: F.prelu(h, t.leaf(4)),
    "PreluKernel0 one": lambda h, t: F.prelu(h, t.leaf(1)),
    "PreluKernel0 frozen": lambda h, t: F.prelu(h, t.const(4)),
    "Lerp0": lambda h, t: torch.lerp(h, t.leaf(8), 0.3),
    "Lerp0 const": lambda h, t: h.lerp(t.const(8), 0.3),
    "Lerp1": lambda h, t: torch.lerp(h, t.leaf(2, 4, 6, 8), t.leaf(8).sigmoid()),
    "Lerp1 consts": lambda h, t: torch.lerp(h, t.const(6, 1), t.const(8)),
    "Lerp1 const start": lambda h, t: torch.lerp(t.const(8), h, t.const(6, 1)),
    "Lerp0 inplace": lambda h, t: (h * 2).lerp_(t.const(6, 8), 0.3),
    "Addcmul0": lambda h, t: torch.addcmul(h, t.leaf(8), t.leaf(6, 1), value=0.3),
    "Addcmul0 consts": lambda h, t: h.addcmul(t.const(8), t.const(6, 1), value=2),
    "Addcmul0 inplace": lambda h, t: (h * 2).addcmul_(t.const(8), h, value=-1),
    "Addcdiv0": lambda h, t: torch.addcdiv(h, t.leaf(8), unit(t.leaf(6, 1)), value=-2),
    "Addcdiv0 consts": lambda h, t: h.addcdiv(t.const(8), t.const(6, 1)),
    "Where0": lambda h, t: torch.where(t.mask(6, 8), h, t.leaf(8)),
    "Where0 scalar": lambda h, t: torch.where(h > 0, h, -1e4),
    "Where0 scalar before": lambda h, t: torch.where(h > 0, 0.1, h),
    "Where0 method": lambda h, t: h.where(t.mask(2, 1, 6, 8), t.const(1)),
    "Where0 method scalar": lambda h, t: h.where(t.mask(2, 1, 6, 8), 0),
    "Where0 const before": lambda h, t: torch.where(t.mask(6, 8), t.const(8), h),
    "MaskedFill1": lambda h, t: h.masked_fill(t.mask(6, 8), t.leaf()),
    "MaskedFill1 const": lambda h, t: h.masked_fill(t.mask(6, 8), t.const()),
    "MseLoss0": lambda h, t: F.mse_loss(h, t.const(2, 4, 6, 8), reduction="none"),
    "SmoothL1Loss0": lambda h, t: F.smooth_l1_loss(h, t.leaf(2, 4, 6, 8), reduction="none", beta=0.3),
    "HuberLoss0": lambda h, t: F.huber_loss(h, t.const(2, 4, 6, 8), reduction="none", delta=0.3),
    "LinalgCross0": lambda h, t: torch.linalg.cross(h[..., :3], t.leaf(1, 4, 6, 3)),
    "LinalgCross0 const": lambda h, t: torch.cross(h[:, :3], t.const(2, 3, 6, 8), dim=1),
}

COMPLEX = {
    "Complex0": lambda h, t: torch.complex(h, t.leaf(2, 4, 6, 8)),
    "Complex0 const": lambda h, t: torch.complex(h, t.const(2, 4, 6, 8)),
    "Polar0": lambda h, t: torch.polar(h.abs(), t.leaf(2, 4, 6, 8)),
    "Abs0 complex": lambda h, t: (pair(h) * 2).abs(),
    "Angle0 complex": lambda h, t: (pair(h) * 2).angle(),
    "Mul0 complex": lambda h, t: pair(h) * t.leaf(4, dtype=torch.promote_types(h.dtype, torch.complex32)),
    "Exp0 complex": lambda h, t: torch.exp(1j * h),
    "Sgn0 complex": lambda h, t: torch.sgn(pair(h)),
    "Add0 complex scalar": lambda h, t: pair(h) * 2 + 1j,
}

CASTS = {
    "ToCopy0": lambda h, t: h.to(torch.float16),
    "ToCopy0 up and down": lambda h, t: h.double().cos().float().sin().to(h.dtype),
    "ToCopy0 copy": lambda h, t: h.to(h.dtype, copy=True) * 2,
    "ToCopy0 copy of a parameter": lambda h, t: t.leaf(8).to(h.dtype, copy=True).mul(2) * h,
    "ToCopy0 channels last": lambda h, t: h.contiguous(memory_format=torch.channels_last).half(),
    "ToCopy0 type as": lambda h, t: h.type_as(torch.empty(0, dtype=torch.float16)),
    "Clone0": lambda h, t: h.clone(),
    "Clone0 channels last": lambda h, t: h.clone(memory_format=torch.channels_last),
    "Clone0 contiguous": lambda h, t: h.transpose(1, 2).contiguous(),
    "Clone0 preserve": lambda h, t: h.transpose(1, 2).clone().sum(1),
    "Clone0 reshape": lambda h, t: h.transpose(1, 2).reshape(2, 6, 32),
}

AUTOCAST = {
    "Mul0 autocast": lambda h, t: h.bfloat16() * F.layer_norm(h.bfloat16(), (8,)),
    "ToCopy0 autocast": lambda h, t: F.softmax(h.bfloat16(), -1).cos(),
}

POINTWISE = (
    *unary(),
    *table(ONE_TENSOR),
    *table({k: f for k, f in TWO_TENSORS.items() if k.split()[0] not in NO_BFLOAT16}),
    *table({k: f for k, f in TWO_TENSORS.items() if k.split()[0] in NO_BFLOAT16}, dtypes=WIDE),
    *table(COMPLEX, dtypes=WIDE),
    *table(CASTS),
    *table(AUTOCAST, dtypes=(torch.float32,), autocast=True),
)
