"""An activation rebuilt and run backward in one pass: h = act(z) again, and dz = g act'(z).

    h, dz = act(z), g · act'(z)

One launch instead of two, and z is read once. The C++ for one element says what torch's own kernels compute, rounding
by rounding, and is compiled by torch (`torch.cuda.jiterator`) as those were, so the bits are theirs.

[Note: proof] That is not taken on trust. Before its first use on a device a kernel is compared with torch's two ops on
every value that z can have, each with 16 gradients, and a single bit that differs means that it is never used there.
A float32 has too many values for that; it is left to the two ops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leangrad._torch import compile_elementwise

if TYPE_CHECKING:
    from leangrad.ops.activation import Activation

__all__ = ["rebuild_and_backward"]

Fused = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor]"]

_CODE = {
    "gelu": """
        const T twice_cdf = T(1) + ::erf(z * T(0.70710678118654752440));
        const T pdf = ::exp(T(-0.5) * z * z) * T(0.39894228040143267794);
        h = z * T(0.5) * twice_cdf;
        dz = g * (T(0.5) * twice_cdf + z * pdf);
    """,
    "gelu_tanh": """
        const T beta = T(0.79788456080286535588), kappa = T(0.044715);
        const T tanh = ::tanh(beta * (z + kappa * (z * z * z)));
        const T half = T(0.5) * z;
        h = half * (T(1) + tanh);
        dz = g * (T(0.5) * (T(1) + tanh)
                  + half * (T(1) - tanh * tanh) * (beta * (T(1) + T(3) * kappa * (z * z))));
    """,
    "silu": """
        const T down = T(1) + ::exp(-z);
        const T sigmoid = T(1) / down;
        h = z / down;
        dz = g * sigmoid * (T(1) + z * (T(1) - sigmoid));
    """,
}
_DTYPES = (torch.bfloat16, torch.float16)
_proven: dict[tuple[str, torch.dtype, int], Fused | None] = {}
_lock = threading.Lock()


def rebuild_and_backward(record: Activation, z: Tensor) -> Fused | None:
    """The kernel `(g, z) -> (dz, h)` for this activation, dtype and device; None where there is none that is proven.

    >>> from leangrad.ops.activation import ACTIVATIONS
    >>> print(rebuild_and_backward(ACTIVATIONS["gelu"], torch.ones(1)))  # not on the CPU
    None
    """
    if not z.is_cuda or z.dtype not in _DTYPES or record.name not in _CODE:
        return None
    key = (record.name, z.dtype, z.device.index)
    if key not in _proven:
        if torch.cuda.is_current_stream_capturing():  # no proof can be read inside a CUDA graph: ask again later
            return None
        with _lock:
            if key not in _proven:
                _proven[key] = _prove(record, z)
    return _proven[key]


@torch.no_grad()
def _prove(record: Activation, z: Tensor) -> Fused | None:
    """Compile the kernel and compare it with torch's ops; see [Note: proof]."""
    name = f"{record.name}_again"
    code = f"template <typename T> void {name}(T g, T z, T& dz, T& h) {{{_CODE[record.name]}}}"
    fused = compile_elementwise(code, name, outputs=2)
    if fused is None:
        return None
    every_z = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=z.device).repeat(16).view(z.dtype)
    generator = torch.Generator(z.device).manual_seed(0)  # the caller's random state is not touched
    g = torch.randn(every_z.shape, device=z.device, generator=generator).mul_(4).to(z.dtype)
    try:
        dz, h = fused(g, every_z)
    except RuntimeError:  # this machine has no compiler at run time
        return None
    expected_h = record.forward(every_z, record.parameter, None)
    expected_dz = record.backward(g, every_z, record.parameter, None)
    return fused if _same_bits(dz, expected_dz) and _same_bits(h, expected_h) else None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    different = a.view(torch.int16) != b.view(torch.int16)
    return not bool((different & ~(a.isnan() & b.isnan())).any())
