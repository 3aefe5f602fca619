"""Activations for use in Triton kernels, in float32: value, derivative, inverse. `p` is the slope or alpha."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

__all__ = ["activate", "derivative", "invert"]


@triton.jit
def activate(y, p, ACT: tl.constexpr):
    """act(y)."""
    z = y
    if ACT == "leaky_relu":
        z = tl.where(y > 0, y, y * p)
    if ACT == "relu":
        z = tl.where(y < 0, 0.0, y)
    if ACT == "elu":
        # expm1 without libdevice, exact to the last bit or two: (e − 1)·y/log(e), with e = exp(y).
        negative = tl.where(y > 0, 0.0, y)
        e = tl.exp(negative)
        near = (e - 1.0) * negative / tl.where((e == 1.0) | (e == 0.0), 1.0, tl.log(tl.where(e == 0.0, 1.0, e)))
        z = tl.where(y > 0, y, p * tl.where(e == 1.0, negative, tl.where(e < 1e-30, -1.0, near)))
    if ACT == "silu":
        z = y / (1.0 + tl.exp(-y))
    if ACT == "gelu":
        z = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACT == "gelu_tanh":
        z = y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    return z


@triton.jit
def derivative(y, p, ACT: tl.constexpr):
    """act'(y)."""
    d = tl.full(y.shape, 1.0, tl.float32)
    if ACT == "leaky_relu":
        d = tl.where(y > 0, 1.0, p)
    if ACT == "relu":
        d = tl.where(y > 0, 1.0, 0.0)
    if ACT == "elu":
        d = tl.where(y > 0, 1.0, p * tl.exp(tl.where(y > 0, 0.0, y)))
    if ACT == "silu":
        s = 1.0 / (1.0 + tl.exp(-y))
        d = s * (1.0 + y * (1.0 - s))
    if ACT == "gelu":
        d = 0.5 * (1.0 + tl.erf(y * 0.7071067811865476)) + y * 0.3989422804014327 * tl.exp(-0.5 * y * y)
    if ACT == "gelu_tanh":
        q = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
        d = q + y * q * (1.0 - q) * 1.5957691216057308 * (1.0 + 0.134145 * y * y)
    return d


@triton.jit
def invert(z, p, ACT: tl.constexpr):
    """act⁻¹(z), and act' there."""
    y = z
    d = tl.full(z.shape, 1.0, tl.float32)
    if ACT == "leaky_relu":
        y = tl.where(z > 0, z, z / p)
        d = tl.where(z > 0, 1.0, p)
    if ACT == "elu":
        # log1p without libdevice: log(w)·u/(w − 1), with w = 1 + u; the clamp keeps z → −α finite.
        u = tl.maximum(tl.where(z > 0, 0.0, z) / p, -1.0 + 1.1920929e-07)
        w = 1.0 + u
        log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
        y = tl.where(z > 0, z, log1p)
        d = tl.where(z > 0, 1.0, z + p)
    return y, d
