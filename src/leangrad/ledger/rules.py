"""How each op replays: one line per op in one table.

A rule names a node of autograd, the node's tensor inputs in the order of its edges, the function that autograd's op is, and
the constants that the node remembers (``_saved_<name>``). Replaying calls that very function on the very inputs below
autocast, so the result has the same bits.

    rule("LeakyReluBackward0", "self", F.leaky_relu, "negative_slope")

means ``F.leaky_relu(self, node._saved_negative_slope)``. Where a node forgets a constant (``x + 1``, the eps of a layer norm)
the constant is written ``?name`` and comes from the note that ``notes.py`` left on the node; where there is no note there is
no recipe, and the tensor is kept. ``@shape`` and ``@dtype`` are those of the op's output.

Matrix products, convolutions and attention have no rule: what they compute is never computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad._torch import output_fact
from leangrad.ledger.value import COMMUTES, IN_PLACE, VIEWS

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Rule:
    """How one kind of node replays."""

    node: str
    operands: tuple[str, ...]
    function: Callable[..., Tensor]
    constants: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]
    output: int | None = None  # the output that this rule rebuilds; None: the only one, or ``function`` takes its number
    numbered: bool = False  # ``function`` takes the number of the output as its last argument
    twins: bool = False  # two such nodes over one input with the same constants are the same tensor: kept or rebuilt once
    when: Callable[[Any], bool] | None = None  # the nodes that this rule is for


RULES: dict[str, list[Rule]] = {}


def rule(
    node: str,
    operands: str,
    function: Callable[..., Tensor],
    *constants: str,
    output: int | None = 0,
    numbered: bool = False,
    twins: bool = False,
    when: Callable[[Any], bool] | None = None,
    **keywords: str,
) -> None:
    """Enter one op in the table. See the head of this file."""
    entry = Rule(
        node, tuple(operands.split()), function, constants, tuple(keywords.items()), output, numbered, twins, when
    )
    RULES.setdefault(node, []).append(entry)


# ------------------------------------------------------------------------------------------------------------- pointwise

for _name in """abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor frac lgamma log log10
    log1p log2 neg reciprocal relu round rsqrt sigmoid sign sin sinc sinh sqrt tan tanh trunc silu mish hardswish
    hardsigmoid log_sigmoid""".split():
    _node = "".join(part.capitalize() for part in _name.split("_")) + "Backward0"
    _node = {"Log1pBackward0": "Log1PBackward0", "Expm1Backward0": "Expm1Backward0"}.get(_node, _node)
    _function = {"log_sigmoid": F.logsigmoid}.get(_name) or getattr(torch, _name, None) or getattr(F, _name)
    rule(_node, "self", _function)
    if _name not in ("silu", "mish", "hardswish", "hardsigmoid", "log_sigmoid"):
        IN_PLACE[_function] = getattr(Tensor, _name + "_")

IN_PLACE |= {F.silu: aten.silu_.default, F.hardswish: aten.hardswish_.default, F.gelu: aten.gelu_.default}
IN_PLACE |= {torch.add: Tensor.add_, torch.sub: Tensor.sub_, torch.mul: Tensor.mul_, torch.div: Tensor.div_}
COMMUTES |= {torch.add, torch.mul}

def _elu(x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    return aten.elu(x, alpha, scale, input_scale)  # type: ignore[no-any-return]


rule("GeluBackward0", "self", F.gelu, approximate="approximate")
rule("LeakyReluBackward0", "self", F.leaky_relu, "negative_slope")
rule("LeakyReluBackward1", "self", F.leaky_relu, "negative_slope")
rule("EluBackward0", "self", _elu, "alpha", "scale", "input_scale")
rule("EluBackward1", "self", _elu, "alpha", "scale", "input_scale")
rule("CeluBackward0", "self", F.celu, "alpha")
rule("SoftplusBackward0", "self", F.softplus, "beta", "threshold")
rule("SoftshrinkBackward0", "self", F.softshrink, "lambd")
rule("HardshrinkBackward0", "self", F.hardshrink, "lambd")
rule("HardtanhBackward0", "self", F.hardtanh, "min_val", "max_val")
rule("ThresholdBackward0", "self", F.threshold, "threshold", "?value")
rule("ThresholdBackward1", "self", F.threshold, "threshold", "?value")
rule("PreluKernelBackward0", "self weight", aten._prelu_kernel.default)
rule("GluBackward0", "self", F.glu, "dim")
rule("ClampBackward1", "self", torch.clamp, "min", "max")
rule("ClampBackward0", "self min max", torch.clamp)
rule("ClampMinBackward0", "self", torch.clamp_min, "min")
rule("ClampMinBackward1", "self min", torch.clamp_min)
rule("ClampMaxBackward0", "self", torch.clamp_max, "max")
rule("ClampMaxBackward1", "self max", torch.clamp_max)
rule("NanToNumBackward0", "self", torch.nan_to_num, "?nan", "?posinf", "?neginf")
rule("PowBackward0", "self", torch.pow, "exponent")
rule("PowBackward1", "self exponent", torch.pow)
rule("PowBackward2", "exponent", lambda exponent, base: torch.pow(base, exponent), "self")
rule("AddBackward0", "self other", torch.add, alpha="alpha")
rule("SubBackward0", "self other", torch.sub, alpha="alpha")
rule("RsubBackward1", "self", lambda x, other, alpha: torch.rsub(x, other, alpha=alpha), "?other", "alpha")
rule("RsubBackward0", "self other", torch.rsub, alpha="alpha")
rule("MulBackward0", "self other", torch.mul)
rule("MulBackward1", "self", torch.mul, "other")
rule("DivBackward0", "self other", torch.div)
rule("DivBackward1", "self", torch.div, "other")
rule("DivBackward2", "self other", torch.div, rounding_mode="rounding_mode")
rule("DivBackward3", "self", torch.div, "other", rounding_mode="rounding_mode")
rule("FmodBackward1", "self other", torch.fmod)
rule("RemainderBackward1", "self other", torch.remainder)
rule("HypotBackward0", "self other", torch.hypot)
rule("LogaddexpBackward0", "self other", torch.logaddexp)
rule("Logaddexp2Backward0", "self other", torch.logaddexp2)
rule("XlogyBackward0", "self other", torch.xlogy)
rule("LogitBackward0", "self", torch.logit, "eps")
rule("Deg2RadBackward0", "self", torch.deg2rad)
rule("Rad2DegBackward0", "self", torch.rad2deg)
rule("Atan2Backward0", "self other", torch.atan2)
rule("MaximumBackward0", "self other", torch.maximum)
rule("MinimumBackward0", "self other", torch.minimum)
rule("FmaxBackward0", "self other", torch.fmax)
rule("FminBackward0", "self other", torch.fmin)
rule("LerpBackward0", "self end", torch.lerp, "weight")
rule("LerpBackward1", "self end weight", torch.lerp)
rule("AddcmulBackward0", "self tensor1 tensor2", torch.addcmul, value="value")
rule("AddcdivBackward0", "self tensor1 tensor2", torch.addcdiv, value="value")
rule("WhereBackward0", "self other", lambda x, other, condition: torch.where(condition, x, other), "condition")
rule("MaskedFillBackward0", "self", lambda x, mask, value: x.masked_fill(mask, value), "mask", "?value")
rule("MaskedFillBackward1", "self value", lambda x, value, mask: x.masked_fill(mask, value), "mask")
rule("TrilBackward0", "self", torch.tril, "diagonal")
rule("TriuBackward0", "self", torch.triu, "diagonal")
rule("ComplexBackward0", "real imag", torch.complex)
rule("PolarBackward0", "abs angle", torch.polar)

# ------------------------------------------------------------------------------------------------------ casts and copies

rule("ToCopyBackward0", "self", Tensor.to, "@dtype", twins=True)
rule("CloneBackward0", "self", lambda x, memory_format: x.clone(memory_format=memory_format), "?memory_format")

# ----------------------------------------------------------------------------------------------------------------- views

_BEFORE_VIEWS = set(RULES)
rule("ViewBackward0", "self", Tensor.view, "@shape")
rule("UnsafeViewBackward0", "self", Tensor.view, "@shape")
rule("ReshapeAliasBackward0", "self", Tensor.reshape, "@shape")
rule("ExpandBackward0", "self", Tensor.expand, "@shape")
rule("TBackward0", "self", Tensor.t)
rule("TransposeBackward0", "self", Tensor.transpose, "dim0", "dim1")
rule("PermuteBackward0", "self", Tensor.permute, "dims")
rule("UnsqueezeBackward0", "self", Tensor.unsqueeze, "dim")
rule("SqueezeBackward0", "self", Tensor.squeeze)
rule("SqueezeBackward1", "self", Tensor.squeeze, "dim")
rule("SqueezeBackward2", "self", Tensor.squeeze, "dim")
rule("SelectBackward0", "self", Tensor.select, "dim", "index")
rule("SliceBackward0", "self", aten.slice, "dim", "start", "end", "step")
rule("DiagonalBackward0", "self", Tensor.diagonal, "offset", "dim1", "dim2")
rule("UnfoldBackward0", "self", Tensor.unfold, "dim", "size", "step")
rule("AliasBackward0", "self", Tensor.view, "@shape")
rule("ViewAsRealBackward0", "self", torch.view_as_real)
rule("ViewAsComplexBackward0", "self", torch.view_as_complex)
rule("UnsafeSplitBackward0", "self", lambda x, size, dim, n: x.split(size, dim)[n], "split_size", "dim", numbered=True)
rule("SplitBackward0", "self", lambda x, size, dim, n: x.split(size, dim)[n], "split_size", "dim", numbered=True)
rule("SplitWithSizesBackward0", "self", lambda x, s, dim, n: x.split(s, dim)[n], "split_sizes", "dim", numbered=True)
rule("UnbindBackward0", "self", lambda x, dim, n: x.unbind(dim)[n], "dim", numbered=True)

VIEWS |= {r.function for name in RULES.keys() - _BEFORE_VIEWS for r in RULES[name]}

# -------------------------------------------------------------------------------------------------- gathering and joining


def _on_cpu(node: Any) -> bool:
    # A scan on CUDA may add in another order the next time.
    return bool(output_fact(node, "device").type == "cpu")



def _index_add(x: Tensor, source: Tensor, dim: int, index: Tensor, alpha: float) -> Tensor:
    return torch.index_add(x, dim, index, source, alpha=alpha)


rule("CatBackward0", "*", torch.cat, "dim")
rule("StackBackward0", "*", torch.stack, "dim")
rule("RepeatBackward0", "self", Tensor.repeat, "repeats")
rule("RollBackward0", "self", torch.roll, "shifts", "dims")
rule("FlipBackward0", "self", torch.flip, "dims")
rule("ConstantPadNdBackward0", "self", lambda x, pad, value: F.pad(x, pad, value=value), "pad", "?value")
for _d in "123":
    rule(f"ReflectionPad{_d}DBackward0", "self", getattr(aten, f"reflection_pad{_d}d"), "padding")
    rule(f"ReplicationPad{_d}DBackward0", "self", getattr(aten, f"replication_pad{_d}d"), "padding")
rule("IndexSelectBackward0", "self", lambda x, dim, index: torch.index_select(x, dim, index), "dim", "index")
rule("GatherBackward0", "self", lambda x, dim, index: torch.gather(x, dim, index), "dim", "index")
rule("IndexBackward0", "self", aten.index, "indices")
rule("DiagEmbedBackward0", "self", torch.diag_embed, "offset", "dim1", "dim2")
rule("ChannelShuffleBackward0", "self", torch.channel_shuffle, "groups")
rule("CumsumBackward0", "self", lambda x, dim, dtype: torch.cumsum(x, dim, dtype=dtype), "dim", "@dtype", when=_on_cpu)
rule("CumprodBackward0", "self", lambda x, dim, dtype: torch.cumprod(x, dim, dtype=dtype), "dim", "@dtype", when=_on_cpu)
rule("EmbeddingBackward0", "weight", lambda weight, indices: F.embedding(indices, weight), "indices")
rule("IndexAddBackward0", "self source", _index_add, "dim", "index", "alpha", when=_on_cpu)
rule("PixelShuffleBackward0", "self", F.pixel_shuffle, "upscale_factor")
rule("PixelUnshuffleBackward0", "self", F.pixel_unshuffle, "downscale_factor")
rule("Im2ColBackward0", "self", F.unfold, "kernel_size", "dilation", "padding", "stride")

# ------------------------------------------------------------------------------------------------------------ reductions

rule("SumBackward0", "self", lambda x, dtype: torch.sum(x, dtype=dtype), "@dtype")
rule("SumBackward1", "self", lambda x, dim, keep, dtype: torch.sum(x, dim, keep, dtype=dtype), "dim", "keepdim", "@dtype")
rule("MeanBackward0", "self", lambda x, dtype: torch.mean(x, dtype=dtype), "@dtype")
rule("MeanBackward1", "self", lambda x, dim, keep, dtype: torch.mean(x, dim, keep, dtype=dtype), "dim", "keepdim", "@dtype")
rule("AmaxBackward0", "self", torch.amax, "dim", "keepdim")
rule("AminBackward0", "self", torch.amin, "dim", "keepdim")
rule("LogsumexpBackward0", "self", torch.logsumexp, "dim", "keepdim")
rule("VarBackward0", "self", torch.var, "dim", correction="correction", keepdim="keepdim")
rule("StdBackward0", "self", torch.std, "dim", correction="correction", keepdim="keepdim")
rule("LinalgVectorNormBackward0", "self", torch.linalg.vector_norm, "ord", "dim", "keepdim", dtype="@dtype")

# -------------------------------------------------------------------------------------------------------- softmax, norms


def _softmax(function: Any) -> Callable[..., Tensor]:
    def softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return function(x, dim, x.dtype != dtype)  # type: ignore[no-any-return]

    return softmax


rule("SoftmaxBackward0", "self", _softmax(aten._softmax.default), "dim", "@dtype")
rule("LogSoftmaxBackward0", "self", _softmax(aten._log_softmax.default), "dim", "@dtype")
rule("SafeSoftmaxBackward0", "self", aten._safe_softmax.default, "dim")


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float) -> Tensor:
    return torch.native_layer_norm(x, shape, weight, bias, eps)[0]


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    # The statistics of the batch again, with no running statistics to touch: the same bits, and no state changes.
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]


def _fixed_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]


def _training(node: Any) -> bool:
    return bool(node._saved_training)


def _evaluating(node: Any) -> bool:
    return not node._saved_training


def _cudnn_batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.cudnn_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, group: int, eps: float
) -> Tensor:
    return torch.native_group_norm(x, weight, bias, n, c, hw, group, eps)[0]


def _rms_norm(x: Tensor, weight: Tensor | None, shape: list[int], eps: float | None) -> Tensor:
    return aten._fused_rms_norm.default(x, shape, weight, eps)[0]  # type: ignore[no-any-return]


rule("NativeLayerNormBackward0", "input weight bias", _layer_norm, "normalized_shape", "?eps")
rule("FusedRmsNormBackward0", "input weight", _rms_norm, "normalized_shape", "?eps")
rule("NativeBatchNormBackward0", "input weight bias", _batch_norm, "eps", when=_training)
rule(
    "NativeBatchNormBackward0", "input weight bias", _fixed_norm, "running_mean", "running_var", "eps", when=_evaluating
)
rule("CudnnBatchNormBackward0", "input weight bias", _cudnn_batch_norm, "epsilon", when=_training)
rule("NativeGroupNormBackward0", "input weight bias", _group_norm, "N", "C", "HxW", "group", "eps")

# ------------------------------------------------------------------------------------------------- pooling and resampling


def _max_pool2d(
    x: Tensor, size: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool, n: int
) -> Tensor:
    return torch.ops.aten.max_pool2d_with_indices(x, size, stride, padding, dilation, ceil)[n]  # type: ignore[no-any-return]


def _max_pool3d(
    x: Tensor, size: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool, n: int
) -> Tensor:
    return torch.ops.aten.max_pool3d_with_indices(x, size, stride, padding, dilation, ceil)[n]  # type: ignore[no-any-return]


_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
rule("MaxPool2DWithIndicesBackward0", "self", _max_pool2d, *_POOL, output=None, numbered=True)
rule("MaxPool3DWithIndicesBackward0", "self", _max_pool3d, *_POOL, output=None, numbered=True)
rule("AdaptiveMaxPool2DBackward0", "self", lambda x, s, n: aten.adaptive_max_pool2d(x, s)[n], "@shape[-2:]", numbered=True)
_AVERAGE = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
rule("AvgPool2DBackward0", "self", aten.avg_pool2d, *_AVERAGE)
rule("AvgPool3DBackward0", "self", aten.avg_pool3d, *_AVERAGE)
rule("AdaptiveAvgPool2DBackward0", "self", aten._adaptive_avg_pool2d, "@shape[-2:]")
rule("AdaptiveAvgPool3DBackward0", "self", aten._adaptive_avg_pool3d, "@shape[-3:]")
rule("UpsampleNearest1DBackward0", "self", aten.upsample_nearest1d, "output_size", "scales")
rule("UpsampleNearest2DBackward0", "self", aten.upsample_nearest2d, "output_size", "scales_h", "scales_w")
rule("UpsampleNearest3DBackward0", "self", aten.upsample_nearest3d, "output_size", "scales_d", "scales_h", "scales_w")
rule("UpsampleNearestExact1DBackward0", "self", aten._upsample_nearest_exact1d, "output_size", "scales")
rule("UpsampleNearestExact2DBackward0", "self", aten._upsample_nearest_exact2d, "output_size", "scales_h", "scales_w")
rule("UpsampleLinear1DBackward0", "self", aten.upsample_linear1d, "output_size", "align_corners", "scales")
_RESAMPLE = ("output_size", "align_corners", "scales_h", "scales_w")
rule("UpsampleBilinear2DBackward0", "self", aten.upsample_bilinear2d, *_RESAMPLE)
rule("UpsampleBicubic2DBackward0", "self", aten.upsample_bicubic2d, *_RESAMPLE)

# ------------------------------------------------------------------------------------------------------------ randomness

# The mask of dropout is drawn again from the generator's state before the op: see ``notes.py``.
rule("NativeDropoutBackward0", "input", lambda x, redraw, n: redraw(x)[n], "?redraw", output=None, numbered=True)
