"""Rebuilds an activation and runs its backward in one pass, in place: h = act(z) again, and dz = g act'(z).

    g, z = g · act'(z), act(z)

This takes one launch instead of two, reads z once, and allocates no memory: h is written over z, and dz over g. The C++
code for one element computes what torch's own kernels compute, with the same roundings, and is compiled at run time by
the compiler that built those kernels, so the bits are the same.

[Note: proof] The sameness of the bits is checked. Before its first use on a device a kernel is compared with torch's
two ops on every value that z can have. dz is a product with g, and a power of two in g changes only the exponent: so
each z is tried with every mantissa that g can have, and with 16 more gradients of random bits. If a single bit differs,
the kernel is never used on that device. float32 has too many values for this check; it is left to the two ops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leangrad._torch import compile_kernel, dispatch_modes_active, raw_stream

if TYPE_CHECKING:
    from leangrad.ops.activation import Activation

__all__ = ["rebuild_and_backward"]

OnePass = Callable[[Tensor, Tensor], None]
Launch = Callable[..., None]

# C++ for one element, in float32: h and dz from z and g.
_CODE = {
    "gelu": """
        const float twice_cdf = 1.0f + erff(z * 0.70710678118654752440f);
        const float pdf = expf(-0.5f * z * z) * 0.39894228040143267794f;
        h = z * 0.5f * twice_cdf;
        dz = g * (0.5f * twice_cdf + z * pdf);
    """,
    "gelu_tanh": """
        const float beta = 0.79788456080286535588f, kappa = 0.044715f;
        const float tanh = tanhf(beta * (z + kappa * (z * z * z)));
        const float half = 0.5f * z;
        h = half * (1.0f + tanh);
        dz = g * (0.5f * (1.0f + tanh)
                  + half * (1.0f - tanh * tanh) * (beta * (1.0f + 3.0f * kappa * (z * z))));
    """,
    "silu": """
        const float down = 1.0f + expf(-z);
        const float sigmoid = 1.0f / down;
        h = z / down;
        dz = g * sigmoid * (1.0f + z * (1.0f - sigmoid));
    """,
}
_ROUND = {torch.bfloat16: "cvt.rn.bf16.f32", torch.float16: "cvt.rn.f16.f32"}
_WIDEN = {
    torch.bfloat16: "return __uint_as_float((unsigned int)bits << 16);",
    torch.float16: 'float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x;',
}

_ELEMENTS, _WARPS = 8, 4  # per thread: 16 bytes of each map; per block
_SOURCE = """
typedef unsigned short half_t;
union Eight { uint4 all; half_t each[8]; };

__device__ __forceinline__ float widen(half_t bits) { WIDEN }
__device__ __forceinline__ half_t narrow(float x) {
    half_t bits;
    asm("ROUND %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ void element(half_t& g_dz, half_t& z_h) {
    const float g = widen(g_dz), z = widen(z_h);
    float dz, h;
    CODE
    g_dz = narrow(dz);
    z_h = narrow(h);
}

extern "C" __global__ void again(half_t* g_dz, half_t* z_h, long long n) {
    const long long i = 8 * (blockIdx.x * (long long)blockDim.x + threadIdx.x);
    const bool aligned = (((size_t)g_dz | (size_t)z_h) & 15) == 0;
    if (aligned && i + 8 <= n) {
        Eight a, b;
        a.all = __ldcs((const uint4*)(g_dz + i));  // read once, and said so: 70 us instead of 74 for 64 MiB on an H200
        b.all = __ldcs((const uint4*)(z_h + i));
        #pragma unroll
        for (int k = 0; k < 8; ++k) element(a.each[k], b.each[k]);
        *(uint4*)(g_dz + i) = a.all;
        *(uint4*)(z_h + i) = b.all;
    } else {
        for (long long k = i; k < n && k < i + 8; ++k) element(g_dz[k], z_h[k]);
    }
}
"""

_proven: dict[tuple[object, ...], Launch | None] = {}
_lock = threading.Lock()


def rebuild_and_backward(record: Activation, z: Tensor) -> OnePass | None:
    """The pass `(g, z) -> None` for this activation and maps like z, on the current stream; None if none is proven.

    g and z must be contiguous, in memory that nothing else uses: afterwards g holds dz, and z holds h.

    >>> from leangrad.ops.activation import ACTIVATIONS
    >>> print(rebuild_and_backward(ACTIVATIONS["gelu"], torch.ones(1)))  # not on the CPU
    None
    """
    if not z.is_cuda or z.dtype not in _ROUND or record.name not in _CODE:
        return None
    device = z.device
    if torch.cuda.current_device() != device.index or dispatch_modes_active():
        return None
    launch = _launch_of(record, z.dtype, device)
    return None if launch is None else partial(_run, launch, raw_stream(device))


def _run(launch: Launch, stream: int, g: Tensor, z: Tensor) -> None:
    assert g.is_contiguous()
    assert z.is_contiguous()
    n = z.numel()
    if n:
        launch(-(-n // (32 * _WARPS * _ELEMENTS)), stream, g.data_ptr(), z.data_ptr(), n)


def _launch_of(record: Activation, dtype: torch.dtype, device: torch.device) -> Launch | None:
    key = (record.name, record.forward, record.backward, dtype, device.index)
    if key not in _proven:
        if torch.cuda.is_current_stream_capturing():  # results cannot be read during graph capture: try again later
            return None
        with _lock:
            if key not in _proven:
                _proven[key] = _prove(record, dtype, device)
    return _proven[key]


@torch.no_grad()
def _prove(record: Activation, dtype: torch.dtype, device: torch.device) -> Launch | None:
    """Compile the kernel and compare it with torch's ops; see [Note: proof]."""
    source = _SOURCE.replace("WIDEN", _WIDEN[dtype]).replace("ROUND", _ROUND[dtype]).replace("CODE", _CODE[record.name])
    launch = compile_kernel(source, "again", "OOl", _WARPS)
    try:
        return launch if launch is not None and _agrees(launch, record, dtype, device) else None
    except (RuntimeError, TypeError):  # this torch release starts kernels in another way
        return None


def _agrees(launch: Launch, record: Activation, dtype: torch.dtype, device: torch.device) -> bool:
    generator = torch.Generator(device).manual_seed(0)  # the caller's random state is not touched
    random = torch.randint(-(1 << 15), 1 << 15, (16, 1 << 16), dtype=torch.int16, device=device, generator=generator)
    eps = torch.finfo(dtype).eps
    mantissas = 1 + eps * torch.arange(round(1 / eps), device=device)
    every_z = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=device).view(dtype).repeat(16, 1)
    different = torch.zeros((), dtype=torch.bool, device=device)
    for g in (random.view(dtype), *mantissas.to(dtype).view(-1, 16, 1).expand(-1, 16, 1 << 16)):
        g = g.contiguous()
        dz, h = g.clone(), every_z.clone()
        _run(launch, raw_stream(device), dz, h)
        different |= _differ(h, record.forward(every_z, record.parameter, None))
        different |= _differ(dz, record.backward(g, every_z, record.parameter, None))
    return not bool(different)


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Whether any bit differs, except in elements that are NaN in both."""
    return ((a.view(torch.int16) != b.view(torch.int16)) & ~(a.isnan() & b.isnan())).any()
