"""Chains of pointwise ops, replayed as one kernel and op by op: time, bytes and bitwise equality.

    python -m benchmarks.ledger.fused [--scale 64] [--write fused_h200]

The recipes are those that the ledger makes for common chains. A row holds the device time of a rebuild as one kernel
and op by op, the bytes that the kernel has to move, in total and per second, and whether the results are bitwise equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import write_rows
from leangrad.ledger.fuse import fused
from leangrad.ledger.fuse.fused_plan import PROOFS
from leangrad.ledger.origins.rules import RULES
from leangrad.ledger.values.value import Value

ROUNDS = 20
bf16, f32 = torch.bfloat16, torch.float32


def kept(tensor: Tensor) -> Value:
    value = Value("kept")
    value.keep(tensor)
    return value


def made(node: str, *args: Any, like: Tensor | None = None, dtype: torch.dtype = f32, **kwargs: Any) -> Value:
    """Return a value with the recipe of the autograd node ``node``.

    like: a tensor with the shape and strides of the value, which then has a reader in backward.
    """
    value = Value(node)
    value.set_recipe(RULES[node][0].function, args, kwargs)
    if like is not None:
        value.layout, value.readers = (like.shape, like.stride()), 1
        value.nbytes = like.numel() * dtype.itemsize
    return value


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def tanh_gelu(scale: int, readers: bool = False) -> tuple[Value, list[Value]]:
    """GELU in its tanh form, written out, under autocast; with ``readers``, also all values that its backward reads."""
    x = torch.randn(16 // min(16, scale), 1024, 4096, device="cuda").to(bf16)
    like = x if readers else None
    h = kept(x)
    wide = made("ToCopyBackward0", h, f32, like=like)
    inner = made("AddBackward0", h, made("MulBackward0", made("PowBackward0", wide, 3.0), number(0.044715)), alpha=1)
    inner.dtype = f32
    tanh = made("TanhBackward0", made("MulBackward0", inner, number(0.7978845608028654)), like=like)
    one = made("AddBackward0", tanh, 1.0, alpha=1, like=like)
    half = made("MulBackward0", h, number(0.5), like=like, dtype=bf16)
    product = made("MulBackward0", half, one)
    product.dtype = f32
    root = made("ToCopyBackward0", product, bf16, like=x, dtype=bf16)
    return root, [wide, tanh, one, half] if readers else []


def layer_norm(scale: int) -> tuple[Value, list[Value]]:
    """Layer norm of the residual stream, cast for a product."""
    x = torch.randn(max(1, 64 // scale), 197, 1024, device="cuda")
    w, b = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")
    _, mean, rstd = torch.native_layer_norm(x, [1024], w, b, 1e-5)
    args = kept(x), kept(w), kept(b), (1024,), 1e-5, kept(mean), kept(rstd)
    return made("ToCopyBackward0", made("NativeLayerNormBackward0", *args), bf16, like=x, dtype=bf16), []


def rms_norm(scale: int) -> tuple[Value, list[Value]]:
    """RMS norm, written out, from the kept 1/rms of each row."""
    x = torch.randn(max(1, 4 // scale), 2048, 2048, device="cuda").to(bf16)
    rstd = kept(x.float().pow(2).mean(-1, keepdim=True).rsqrt())
    wide = made("ToCopyBackward0", kept(x), f32)
    small = made("ToCopyBackward0", made("MulBackward0", wide, rstd), bf16)
    return made("MulBackward0", kept(torch.randn(2048, device="cuda").to(bf16)), small, like=x, dtype=bf16), []


def swiglu(scale: int) -> tuple[Value, list[Value]]:
    gate, up = (torch.randn(max(1, 4 // scale), 2048, 8192, device="cuda").to(bf16) for _ in range(2))
    return made("MulBackward0", made("SiluBackward0", kept(gate)), kept(up), like=up, dtype=bf16), []


def batch_norm(scale: int) -> tuple[Value, list[Value]]:
    """Batch norm and relu over channels_last maps."""
    x = torch.randn(max(1, 192 // scale), 256, 56, 56, device="cuda").to(bf16, memory_format=torch.channels_last)
    w, b = torch.rand(256, device="cuda"), torch.randn(256, device="cuda")
    _, mean, rstd = torch.native_batch_norm(x, w, b, None, None, True, 0.0, 1e-5)
    args = kept(x), kept(w), kept(b), 1e-5, kept(mean), kept(rstd)
    return made("ReluBackward0", made("NativeBatchNormBackward0", *args), like=x, dtype=bf16), []


def mixed_sum(scale: int) -> tuple[Value, list[Value]]:
    """One op alone: the output of attention is added to the residual stream under autocast."""
    x = torch.randn(max(1, 64 // scale), 197, 1024, device="cuda")
    root = made("AddBackward0", kept(x), kept(torch.randn_like(x).to(bf16)), alpha=1, like=x)
    root.dtype = f32
    return root, []


def cast_up(scale: int) -> tuple[Value, list[Value]]:
    x = torch.randn(max(1, 64 // scale), 197, 1024, device="cuda").to(bf16)
    return made("ToCopyBackward0", kept(x), f32, like=x), []


def links(scale: int) -> tuple[Value, list[Value]]:
    """Four additions to a residual stream; a norm will read each sum."""
    x = torch.randn(16 // min(16, scale), 1024, 1024, device="cuda")
    stream = [kept(x)]
    for _ in range(4):
        link = made("AddBackward0", stream[-1], kept(torch.randn_like(x).to(bf16)), alpha=1, like=x)
        link.dtype = f32
        stream.append(link)
    return stream[-1], stream[1:-1]


CASES: dict[str, Callable[[int], tuple[Value, list[Value]]]] = {
    "tanh-GELU written out, 16 x 1024 x 4096": tanh_gelu,
    "the same, with all that its backward reads": lambda scale: tanh_gelu(scale, readers=True),
    "layer norm and cast, 64 x 197 x 1024": layer_norm,
    "RMS norm written out, 4 x 2048 x 2048": rms_norm,
    "SwiGLU, 4 x 2048 x 8192": swiglu,
    "batch norm and relu, 192 x 256 x 56 x 56 channels_last": batch_norm,
    "float32 + bfloat16 alone, 64 x 197 x 1024": mixed_sum,
    "bfloat16 to float32 alone, 64 x 197 x 1024": cast_up,
    "four links of a residual stream, 16 x 1024 x 1024": links,
}


def measure(name: str, scale: int) -> dict[str, Any]:
    root, others = CASES[name](scale)
    plain = op_by_op(root, others)
    for _ in range(PROOFS):
        rebuild(root, others)
    before = fused.report()["launches"]
    mine = rebuild(root, others)
    is_fused = fused.report()["launches"] == before + 1
    same = all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    nbytes = sum(v.nbytes for v in anchors(root)) + sum(t.nbytes for t in mine)
    del mine, plain
    fused_us, host_us = timed(lambda: rebuild(root, others))
    plain_us, _ = timed(lambda: op_by_op(root, others))
    return {
        "chain": name,
        "fused": is_fused,
        "bitwise": same,
        "fused_us": round(fused_us, 1),
        "op_by_op_us": round(plain_us, 1),
        "ratio": round(plain_us / fused_us, 2),
        "megabytes": round(nbytes / 1e6, 1),
        "terabytes_per_second": round(nbytes / fused_us / 1e6, 2),
        "host_us": round(host_us, 1),
    }


def rebuild(root: Value, others: list[Value]) -> list[Tensor]:
    """Rebuild ``root`` as backward does; return it and those of ``others`` that it rebuilds too, for later readers."""
    tensor, _ = root._rebuild({}, 0)
    tensors = [tensor, *(v.memo for v in others if v.memo is not None)]
    for v in others:
        v.memo = None
    return tensors


def op_by_op(root: Value, others: list[Value]) -> list[Tensor]:
    with fused.off():
        return rebuild(root, others)


def anchors(value: Value) -> list[Value]:
    found = [value] if value.tensor is not None else [a for v in value.inputs for a in anchors(v)]
    return list({id(v): v for v in found}.values())


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the microseconds of a call on the device and on the host.

    The device is kept busy until calls are queued, so that its time does not include waiting for the host.
    """
    for _ in range(3):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    start.record()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        call()
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / ROUNDS, host * 1e6 / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for name in CASES:
        rows.append(measure(name, arguments.scale))
        print(rows[-1], flush=True)
    if arguments.write:
        write_rows(arguments.write, "cuda", rows)


if __name__ == "__main__":
    main()
