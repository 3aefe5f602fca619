"""Rules for elementwise ops, casts and copies."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.ledger.origins.rules.rule import rule
from leangrad.ledger.values.rebuild.inplace_variants import COMMUTES, IN_PLACE

aten = torch.ops.aten

# -------------------------------------------------------------------------------------------------------- of one tensor

UNARY = """
    abs acos acosh angle asin asinh atan atanh ceil conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2
    expm1 floor frac hardsigmoid hardswish i0 lgamma log log10 log1p log2 mish neg rad2deg reciprocal relu round rsqrt
    sgn sigmoid sign silu sin sinc sinh sqrt tan tanh trunc
"""
MAY_CHANGE_DTYPE = ("abs", "angle")  # real for a complex tensor, so they cannot write over their input


def node_name(op: str) -> str:
    """Returns the type name of the node of ``op``.

    Autograd capitalizes the first letter and each letter after an underscore or a digit.

    >>> node_name("log_sigmoid"), node_name("log1p"), node_name("expm1")
    ('LogSigmoidBackward0', 'Log1PBackward0', 'Expm1Backward0')
    """
    return re.sub(r"(^|_|\d)([a-z])", lambda m: m[1].strip("_") + m[2].upper(), op) + "Backward0"


for _op in UNARY.split():
    # The functions in ``torch`` are the ATen ops themselves, a little quicker to call; some ops are only in ``aten``.
    _function = getattr(torch, _op, None) or getattr(aten, _op).default
    rule(node_name(_op), "self", _function)
    if hasattr(aten, _op + "_") and _op not in MAY_CHANGE_DTYPE:
        IN_PLACE[_function] = getattr(Tensor, _op + "_", None) or getattr(aten, _op + "_").default

# Output 1 is a buffer that backward reads, as large as the output on a CPU.
rule("LogSigmoidBackward0", "self", aten.log_sigmoid_forward.default, numbered=True)
rule("GeluBackward0", "self", F.gelu, approximate="approximate")
rule("LeakyReluBackward0", "self", F.leaky_relu, "negative_slope")
rule("LeakyReluBackward1", "self", F.leaky_relu, "negative_slope")
rule("EluBackward0", "self", aten.elu.default, "alpha", "scale", "input_scale")
rule("EluBackward1", "self", aten.elu.default, "alpha", "scale", "input_scale")
rule("CeluBackward0", "self", F.celu, "alpha")
rule("CeluBackward1", "self", F.celu, "alpha")
rule("SoftplusBackward0", "self", F.softplus, "beta", "threshold")
rule("SoftshrinkBackward0", "self", F.softshrink, "lambd")
rule("HardshrinkBackward0", "self", F.hardshrink, "lambd")
rule("HardtanhBackward0", "self", F.hardtanh, "min_val", "max_val")
rule("ThresholdBackward0", "self", F.threshold, "threshold", "?value")
rule("ThresholdBackward1", "self", F.threshold, "threshold", "?value")
rule("GluBackward0", "self", F.glu, "dim")
rule("ClampBackward1", "self", torch.clamp, "min", "max")
rule("ClampMinBackward0", "self", torch.clamp_min, "min")
rule("ClampMaxBackward0", "self", torch.clamp_max, "max")
rule("NanToNumBackward0", "self", torch.nan_to_num, "?nan", "?posinf", "?neginf")
rule("LogitBackward0", "self", torch.logit, "eps")
rule("PowBackward0", "self", torch.pow, "exponent")
rule("PowBackward2", "exponent", lambda exponent, base: torch.pow(base, exponent), "self")
rule("RsubBackward1", "self", lambda x, other, alpha: torch.rsub(x, other, alpha=alpha), "?other", alpha="alpha")
rule("MulBackward1", "self", torch.mul, "other")
rule("DivBackward1", "self", torch.div, "other")
rule("DivBackward3", "self", torch.div, "other", rounding_mode="rounding_mode")
rule("FmodBackward0", "self", torch.fmod, "?other")
rule("RemainderBackward0", "self", torch.remainder, "?other")
rule("XlogyBackward1", "other", lambda other, x: torch.xlogy(x, other), "self")
rule("XlogyBackward2", "self", torch.xlogy, "other")
rule("MaskedFillBackward0", "self", lambda x, mask, value: x.masked_fill(mask, value), "mask", "?value")
rule("TrilBackward0", "self", torch.tril, "diagonal")
rule("TriuBackward0", "self", torch.triu, "diagonal")

# --------------------------------------------------------------------------------------------------- of several tensors

rule("AddBackward0", "self other", torch.add, alpha="alpha")
rule("SubBackward0", "self other", torch.sub, alpha="alpha")
rule("RsubBackward0", "self ?other", torch.rsub, alpha="alpha")
rule("MulBackward0", "self other", torch.mul)
rule("DivBackward0", "self other", torch.div)
rule("DivBackward2", "self other", torch.div, rounding_mode="rounding_mode")
rule("PowBackward1", "self exponent", torch.pow)
rule("FmodBackward1", "self ?other", torch.fmod)
rule("RemainderBackward1", "self ?other", torch.remainder)
rule("Atan2Backward0", "self other", torch.atan2)
rule("HypotBackward0", "?self ?other", torch.hypot)
rule("LogaddexpBackward0", "self other", torch.logaddexp)
rule("Logaddexp2Backward0", "self other", torch.logaddexp2)
rule("XlogyBackward0", "self other", torch.xlogy)
rule("CopysignBackward0", "?self ?other", torch.copysign)
rule("MaximumBackward0", "self other", torch.maximum)
rule("MinimumBackward0", "self other", torch.minimum)
rule("FmaxBackward0", "self other", torch.fmax)
rule("FminBackward0", "self other", torch.fmin)
rule("ClampBackward0", "self min max", torch.clamp)
rule("ClampMinBackward1", "self min", torch.clamp_min)
rule("ClampMaxBackward1", "self max", torch.clamp_max)
rule("PreluKernelBackward0", "self weight", aten._prelu_kernel.default)
rule("LerpBackward0", "self end", torch.lerp, "weight")
rule("LerpBackward1", "?self ?end ?weight", torch.lerp)
rule("AddcmulBackward0", "self ?tensor1 ?tensor2", torch.addcmul, value="value")
rule("AddcdivBackward0", "self ?tensor1 ?tensor2", torch.addcdiv, value="value")
rule("WhereBackward0", "self other", lambda x, other, condition: torch.where(condition, x, other), "condition")
rule("MaskedFillBackward1", "self value", lambda x, value, mask: x.masked_fill(mask, value), "mask")
rule("ComplexBackward0", "?real ?imag", torch.complex)
rule("PolarBackward0", "?abs ?angle", torch.polar)
rule("LinalgCrossBackward0", "self other", lambda x, other, dim: torch.linalg.cross(x, other, dim=dim), "dim")

# Losses that are not reduced, because the caller weights them. Reduced ones are too small to matter.
rule("MseLossBackward0", "self target", aten.mse_loss.default, "reduction")
rule("SmoothL1LossBackward0", "self target", aten.smooth_l1_loss.default, "reduction", "beta")
rule("HuberLossBackward0", "self target", aten.huber_loss.default, "reduction", "delta")

# ----------------------------------------------------------------------------------------------------- casts and copies

# ``copy=True``: otherwise a tensor that has the dtype already is returned itself, and the next op might overwrite it.
rule("ToCopyBackward0", "self", lambda x, dtype: x.to(dtype, copy=True), "@dtype", twins=True)
rule("CloneBackward0", "self", lambda x, memory_format: x.clone(memory_format=memory_format), "?memory_format")

# ------------------------------------------------------------------------------------------------------------- in place

IN_PLACE |= {F.gelu: aten.gelu_.default}
IN_PLACE |= {torch.add: Tensor.add_, torch.sub: Tensor.sub_, torch.mul: Tensor.mul_, torch.div: Tensor.div_}
COMMUTES |= {torch.add, torch.mul}
