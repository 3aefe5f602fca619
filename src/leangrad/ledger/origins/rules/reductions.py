"""Rules for reductions, scans, softmax, norms and transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leangrad.ledger.origins.rules import shorter
from leangrad.ledger.origins.rules.rule import on_cpu, rule

aten = torch.ops.aten

# ----------------------------------------------------------------------------------------------------------- reductions


def _vector_norm(x: Tensor, order: float, dim: list[int] | None, keepdim: bool, dtype: torch.dtype) -> Tensor:
    # The norm of a complex tensor is real, while the argument ``dtype`` is that of the elements. So ``dtype`` is passed
    # only if the caller gave it.
    named = None if x.is_complex() or x.dtype == dtype else dtype
    return aten.linalg_vector_norm.default(x, order, dim, keepdim, dtype=named)  # type: ignore[no-any-return]


def _var_mean(x: Tensor, dim: list[int] | None, correction: float | None, keepdim: bool) -> tuple[Tensor, ...]:
    return torch.var_mean(x, dim, correction=correction, keepdim=keepdim)


def _std_mean(x: Tensor, dim: list[int] | None, correction: float | None, keepdim: bool) -> tuple[Tensor, ...]:
    return torch.std_mean(x, dim, correction=correction, keepdim=keepdim)


def _aminmax(x: Tensor, dim: int | None, keepdim: bool) -> tuple[Tensor, ...]:
    return torch.aminmax(x, dim=dim, keepdim=keepdim)


rule("SumBackward0", "self", lambda x, dtype: torch.sum(x, dtype=dtype), "@dtype")
rule("SumBackward1", "self", aten.sum.dim_IntList, "dim", "keepdim", dtype="@dtype")
rule("MeanBackward0", "self", lambda x, dtype: torch.mean(x, dtype=dtype), "@dtype")
rule("MeanBackward1", "self", aten.mean.dim, "dim", "keepdim", dtype="@dtype")
rule("ProdBackward0", "self", lambda x, dtype: torch.prod(x, dtype=dtype), "@dtype")
rule("ProdBackward1", "self", aten.prod.dim_int, "dim", "keepdim", dtype="@dtype")
rule("AmaxBackward0", "self", torch.amax, "dim", "keepdim")
rule("AminBackward0", "self", torch.amin, "dim", "keepdim")
rule("AminmaxBackward0", "self", _aminmax, "dim", "keepdim", numbered=True)
rule("MaxBackward1", "self", aten.max.default)
rule("MinBackward1", "self", aten.min.default)
rule("LogsumexpBackward0", "self", torch.logsumexp, "dim", "keepdim")
rule("VarBackward0", "self", torch.var, "dim", correction="correction", keepdim="keepdim")
rule("StdBackward0", "self", torch.std, "dim", correction="correction", keepdim="keepdim")
rule("VarMeanBackward0", "self", _var_mean, "dim", "correction", "keepdim", numbered=True)
rule("StdMeanBackward0", "self", _std_mean, "dim", "correction", "keepdim", numbered=True)
rule("LinalgVectorNormBackward0", "self", _vector_norm, "ord", "dim", "keepdim", "@dtype")


# Ops that choose elements are replayed as a gather by the indices that autograd keeps: see [Note: the same bits].


def _chosen(x: Tensor, dim: int, indices: Tensor) -> Tensor:
    return torch.gather(x, dim, indices)


def _chosen_one(x: Tensor, dim: int, keepdim: bool, indices: Tensor) -> Tensor:
    if keepdim or x.dim() == 0:
        return torch.gather(x, dim, indices)
    return torch.gather(x, dim, indices.unsqueeze(dim)).squeeze(dim)


for _op in ("Sort", "Topk", "Cummax", "Cummin"):
    rule(f"{_op}Backward0", "self", _chosen, "dim", "indices")
rule("SortBackward1", "self", _chosen, "dim", "indices")
for _node in (
    "MaxBackward0",
    "MinBackward0",
    "MedianBackward1",
    "NanmedianBackward1",
    "KthvalueBackward0",
    "ModeBackward0",
):
    rule(_node, "self", _chosen_one, "dim", "keepdim", "indices")

# ---------------------------------------------------------------------------------------------------------------- scans

rule("CumsumBackward0", "self", aten.cumsum.default, "dim", dtype="@dtype", when=on_cpu)
rule("CumprodBackward0", "self", aten.cumprod.default, "dim", dtype="@dtype", when=on_cpu)
rule("LogcumsumexpBackward0", "self", torch.logcumsumexp, "dim", when=on_cpu)

# ----------------------------------------------------------------------------------------------------------- transforms


def _fft_c2r(x: Tensor, dim: list[int], normalization: int, shape: list[int]) -> Tensor:
    return aten._fft_c2r.default(x, dim, normalization, shape[dim[-1]])  # type: ignore[no-any-return]


rule("FftR2CBackward0", "self", aten._fft_r2c.default, "dim", "normalization", "onesided", when=on_cpu)
rule("FftC2CBackward0", "self", aten._fft_c2c.default, "dim", "normalization", "forward", when=on_cpu)
rule("FftC2RBackward0", "self", _fft_c2r, "dim", "normalization", "@shape", when=on_cpu)

# -------------------------------------------------------------------------------------------------------------- softmax


def _softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return aten._softmax.default(x, dim, x.dtype != dtype)  # type: ignore[no-any-return]


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return aten._log_softmax.default(x, dim, x.dtype != dtype)  # type: ignore[no-any-return]


rule("SoftmaxBackward0", "self", _softmax, "dim", "@dtype")
rule("LogSoftmaxBackward0", "self", _log_softmax, "dim", "@dtype")
rule("SafeSoftmaxBackward0", "self", aten._safe_softmax.default, "dim", dtype="@dtype")

# ---------------------------------------------------------------------------------------------------------------- norms


# These return a norm with its statistics; rules use only the first output. The functions of rules take the statistics
# that autograd saved as their last arguments: a fused kernel applies a norm from them (``fused.py``), the norm's own
# function does not need them. Only `_batch_norm` reads them itself.


def whole_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float
) -> tuple[Tensor, ...]:
    """Layer norm: returns the output, and the mean and 1/deviation of each row."""
    return torch.native_layer_norm(x, shape, weight, bias, eps)


def whole_rms_norm(x: Tensor, weight: Tensor | None, shape: list[int], eps: float | None) -> tuple[Tensor, ...]:
    """RMS norm: returns the output, and 1/rms of each row."""
    return aten._fused_rms_norm.default(x, shape, weight, eps)  # type: ignore[no-any-return]


def whole_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """Batch norm: returns the output, and the mean and 1/deviation of each channel; no running statistics change."""
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)


def whole_cudnn_batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Batch norm by cuDNN: returns the output, and the mean and 1/deviation of each channel."""
    return torch.cudnn_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[:3]


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float, *statistics: Tensor
) -> Tensor:
    return whole_layer_norm(x, weight, bias, shape, eps)[0]


def _rms_norm(x: Tensor, weight: Tensor | None, shape: list[int], eps: float | None, *statistics: Tensor) -> Tensor:
    return whole_rms_norm(x, weight, shape, eps)[0]


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, mean: Tensor | None, inverse: Tensor | None
) -> Tensor:
    # If the saved statistics cannot be applied, those of the batch are computed again without running statistics: this
    # gives the same bits and changes no state.
    applied = shorter.batch_norm(x, weight, bias, mean, inverse)
    if applied is not None:
        return applied
    if weight is None and bias is None and mean is not None and mean.dtype != x.dtype and x.is_cpu:
        # ATen computed in float32 only because there were running statistics in float32: pass others in their place.
        unused = torch.zeros_like(mean)
        return torch.native_batch_norm(x, None, None, unused, unused.clone(), True, 0.0, eps)[0]
    return whole_batch_norm(x, weight, bias, eps)[0]


def _cudnn_batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *statistics: Tensor) -> Tensor:
    return whole_cudnn_batch_norm(x, weight, bias, eps)[0]


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, group: int, eps: float
) -> Tensor:
    return torch.native_group_norm(x, weight, bias, n, c, hw, group, eps)[0]


def _fixed_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]


def _weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    return aten._weight_norm_interface.default(v, g, dim)[0]  # type: ignore[no-any-return]


def _training(node: Any) -> bool:
    return bool(node._saved_training)


def _evaluating(node: Any) -> bool:
    return not node._saved_training


_STATISTICS = ("?fixed_mean", "?fixed_var", "eps")  # copies: later training steps change the originals unseen
rule("NativeLayerNormBackward0", "input weight bias", _layer_norm, "normalized_shape", "?eps", "~result1", "~result2")
rule("FusedRmsNormBackward0", "input weight", _rms_norm, "normalized_shape", "?eps", "~result1")
rule("NativeGroupNormBackward0", "input weight bias", _group_norm, "N", "C", "HxW", "group", "eps")
rule("NativeBatchNormBackward0", "input weight bias", _batch_norm, "eps", "=result1", "=result2", when=_training)
rule("NativeBatchNormBackward0", "input weight bias", _fixed_norm, *_STATISTICS, when=_evaluating)
rule(
    "CudnnBatchNormBackward0", "input weight bias", _cudnn_batch_norm, "epsilon", "~result1", "~result2", when=_training
)
rule("WeightNormInterfaceBackward0", "v g", _weight_norm, "dim")
