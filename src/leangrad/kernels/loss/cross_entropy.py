"""Cross entropy over rows of logits in Triton; all formulas are in `ops/linear_cross_entropy.py`.

A program processes one row. It reads the row once for the maximum and the sum of exponentials. If a gradient is needed,
it reads the row again and writes `du` over it. If elements of `du` have half the size of logits, `du` is in the first
half of the row's memory: column v is written at byte 2v, after everything up to byte 4v has been read. There are no
atomics, so results do not depend on timing.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Rows", "cross_entropy"]

BLOCK = 4096


class Rows(NamedTuple):
    """What n rows are computed with, and where results are written.

    target, nll, logsumexp and dscale are (n,); bias and class_weight are (V,).
    """

    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    class_sum: Tensor | float
    scale: Tensor | None
    z_loss: Tensor | None
    softcap: float | None
    label_smoothing: float
    ignore_index: int
    nll: Tensor
    logsumexp: Tensor
    dscale: Tensor | None


@triton.jit
def _tanh(x):
    """Exact to a unit or two in the last place: near 0 by its series, because 1 − exp(−2x) would cancel there."""
    square = x * x
    series = 62 / 2835 + square * (-1382 / 155925 + square * (21844 / 6081075))
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * series)))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.4, x * series, tl.where(x < 0, -far, far))


@triton.jit
def _transform(
    raw, bias, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """x Wᵀ + b, y, and tanh(u/cap), from x Wᵀ."""
    raw = raw.to(tl.float32)
    if HAS_BIAS:
        raw += bias.to(tl.float32)
    y = raw
    if HAS_SCALE:
        y = raw * scale
    tanh = y
    if HAS_CAP:
        tanh = _tanh(y / softcap)
        y = tanh * softcap
    return raw, y, tanh


@triton.jit(do_not_specialize=["V", "ignore_index"])
def _rows_kernel(
    z_ptr, du_ptr, target_ptr, bias_ptr, class_ptr, class_sum_ptr, scale_ptr, z_loss_ptr, factor_ptr,
    nll_ptr, logsumexp_ptr, dscale_ptr,
    softcap, epsilon, ignore_index, V, width, z_stride, du_stride,
    HAS_BIAS: tl.constexpr, HAS_CLASS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_Z_LOSS: tl.constexpr, NEEDS_GRAD: tl.constexpr, NEEDS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    du_ptr += row * du_stride
    column = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        tl.store(nll_ptr + row, 0.0)
        tl.store(logsumexp_ptr + row, 0.0)
        if NEEDS_GRAD:
            for start in range(0, V, BLOCK):
                v = start + column
                tl.store(du_ptr + v, tl.zeros((BLOCK,), du_ptr.dtype.element_ty), mask=v < width)
        if NEEDS_SCALE:
            tl.store(dscale_ptr + row, 0.0)
    else:
        inside = (target >= 0) & (target < V)
        at = tl.where(inside, target, 0)
        scale = 1.0
        if HAS_SCALE:
            scale = tl.load(scale_ptr).to(tl.float32)
        of_target = 1.0
        class_sum = V.to(tl.float32)
        if HAS_CLASS:
            of_target = tl.load(class_ptr + at).to(tl.float32)
            if HAS_SMOOTHING:
                class_sum = tl.load(class_sum_ptr).to(tl.float32)
        raw_target = tl.load(z_ptr + at)
        bias = raw_target
        if HAS_BIAS:
            bias = tl.load(bias_ptr + at)
        raw_target, y_target, _tanh_target = _transform(raw_target, bias, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_CAP)

        # Each lane has its own maximum and sum until the end, so that the loop needs no reduction across lanes.
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        totals = tl.zeros((BLOCK,), tl.float32)
        weighted = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            v = start + column
            raw = tl.load(z_ptr + v, mask=v < width, other=0.0)
            b = raw
            if HAS_BIAS:
                b = tl.load(bias_ptr + v, mask=v < V, other=0.0)
            raw, y, tanh = _transform(raw, b, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_CAP)
            if HAS_SMOOTHING:
                if HAS_CLASS:
                    w = tl.load(class_ptr + v, mask=v < V, other=0.0).to(tl.float32)
                    weighted += tl.where(v < V, y * w, 0.0)
                else:
                    weighted += tl.where(v < V, y, 0.0)
            y = tl.where(v < V, y, float("-inf"))
            higher = tl.maximum(highest, y)
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # while all values are −inf
            totals = totals * tl.exp(highest - shift) + tl.exp(y - shift)
            highest = higher
        shift = tl.max(highest, 0)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
        total = tl.sum(totals * tl.exp(highest - shift), 0)
        logsumexp = shift + tl.log(total)

        nll = (1.0 - epsilon) * of_target * (logsumexp - y_target)
        if HAS_SMOOTHING:
            nll += epsilon / V * (class_sum * logsumexp - tl.sum(weighted, 0))
        tl.store(nll_ptr + row, tl.where(inside, nll, float("nan")))
        tl.store(logsumexp_ptr + row, logsumexp)

        if NEEDS_GRAD:
            factor = tl.load(factor_ptr + row).to(tl.float32)
            share = (1.0 - epsilon) * of_target
            if HAS_SMOOTHING:
                share += epsilon / V * class_sum
            if HAS_Z_LOSS:
                share += 2.0 * tl.load(z_loss_ptr).to(tl.float32) * logsumexp
            share /= total
            dscale = 0.0
            for start in range(0, V, BLOCK):
                v = start + column
                raw = tl.load(z_ptr + v, mask=v < width, other=0.0)
                b = raw
                if HAS_BIAS:
                    b = tl.load(bias_ptr + v, mask=v < V, other=0.0)
                raw, y, tanh = _transform(raw, b, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_CAP)
                du = share * tl.exp(y - shift)
                if HAS_SMOOTHING:
                    if HAS_CLASS:
                        du -= epsilon / V * tl.load(class_ptr + v, mask=v < V, other=0.0).to(tl.float32)
                    else:
                        du -= epsilon / V
                du = factor * tl.where(v == target, du - (1.0 - epsilon) * of_target, du)
                if HAS_CAP:
                    du *= 1.0 - tanh * tanh
                du = tl.where(v < V, du, 0.0)
                if NEEDS_SCALE:
                    dscale += tl.sum(tl.where(v < V, du * raw, 0.0), 0)
                tl.debug_barrier()  # all threads have read this block: `du` is written over parts of it
                tl.store(du_ptr + v, du.to(du_ptr.dtype.element_ty), mask=v < width)
            if NEEDS_SCALE:
                tl.store(dscale_ptr + row, dscale)


def cross_entropy(rows: Rows, z: Tensor, factors: Tensor | None = None, du: Tensor | None = None) -> None:
    """Write nll and logsumexp of the rows of z = x Wᵀ, (n, V); and `du`, (n, V), which may be in z's memory, if given.

    Rows of z may have up to 31 columns of padding, which belong to z: these hold any values before and afterwards.
    """
    n, V = z.shape
    block = min(BLOCK, max(16, triton.next_power_of_2(V)))
    # The padding of a row is read and written too: a mask that ends at a multiple of 16 lets Triton load vectors.
    in_place = du is None or du.data_ptr() == z.data_ptr()
    width = z.stride(0) if in_place and z.stride(0) - V < 32 and n > 0 else V
    class_sum = rows.class_sum if isinstance(rows.class_sum, Tensor) else z
    with torch.cuda.device(z.device) if z.is_cuda else nullcontext():
        _rows_kernel[(n,)](
            z, z if du is None else du, rows.target,
            *(z if given is None else given for given in (rows.bias, rows.class_weight, class_sum, rows.scale)),
            *(z if given is None else given for given in (rows.z_loss, factors)),
            rows.nll, rows.logsumexp, z if rows.dscale is None else rows.dscale,
            float(rows.softcap or 1.0), float(rows.label_smoothing), rows.ignore_index, V, width,
            z.stride(0), z.stride(0) if du is None else du.stride(0),
            rows.bias is not None, rows.class_weight is not None, rows.scale is not None, rows.softcap is not None,
            rows.label_smoothing > 0, rows.z_loss is not None, du is not None,
            du is not None and rows.dscale is not None, block, num_warps=max(1, min(8, block // 256)),
        )  # fmt: skip
