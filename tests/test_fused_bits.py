"""Every fused op gives the bits of ATen: on all inputs where they can be counted, on random bits where they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
CHUNK = 1 << 27

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "relu": torch.relu,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
WITH_SCALARS: dict[str, tuple[tuple[float, ...], Callable[[Tensor], Tensor]]] = {
    "add": ((0.1,), lambda x: x + 0.1),
    "sub": ((-2.7,), lambda x: x - -2.7),
    "mul": ((0.7978845608028654,), lambda x: x * 0.7978845608028654),
    "leaky_relu": ((0.01,), F.leaky_relu),
    "clamp": ((0.0, 6.0), lambda x: F.hardtanh(x, 0.0, 6.0)),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


def every(dtype: torch.dtype) -> Iterator[Tensor]:
    """Every number of ``dtype``, in chunks."""
    if dtype is not torch.float32:
        yield torch.arange(-(1 << 15), 1 << 15, device="cuda", dtype=torch.int32).to(torch.int16).view(dtype)
        return
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        yield torch.arange(start, start + CHUNK, device="cuda", dtype=torch.int64).to(torch.int32).view(dtype)


def random_bits(dtype: torch.dtype, n: int = 1 << 26) -> Tensor:
    """Numbers of every exponent alike: denormals, infinities and NaN among them."""
    kind = BITS[dtype]
    limits = torch.iinfo(kind)
    return torch.randint(limits.min, limits.max, (n,), device="cuda", dtype=torch.int64).to(kind).view(dtype)


def fused(op: str, inputs: list[Tensor], scalars: tuple[float, ...] = (), dtype: torch.dtype | None = None) -> Tensor:
    from leangrad.kernels.pointwise import Input, Program, Step, compiled

    dtype = dtype or inputs[0].dtype
    kinds = tuple(Input(t.dtype) for t in inputs)
    step = Step(op, tuple(range(len(inputs) + len(scalars))), dtype)
    out = torch.empty_like(inputs[0], dtype=dtype)
    compiled(Program(kinds, len(scalars), (step,), (0,))).launch(inputs, list(scalars), [out], out.numel())
    return out


def different(mine: Tensor, plain: Tensor) -> Tensor:
    """Where bits differ; NaN is NaN."""
    kind = BITS[plain.dtype]
    assert mine.dtype == plain.dtype
    return (mine.view(kind) != plain.view(kind)) & ~(mine.isnan() & plain.isnan())


def assert_same(mine: Tensor, plain: Tensor, *inputs: Tensor) -> None:
    wrong = different(mine, plain)
    if wrong.any():
        at = wrong.nonzero()[0].item()
        raise AssertionError(
            f"{wrong.sum().item()} of {wrong.numel()} differ: at {[x[at].item() for x in inputs]} "
            f"fused {mine[at].item()!r}, plain {plain[at].item()!r}"
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", UNARY)
def test_every_input(op: str, dtype: torch.dtype) -> None:
    for x in every(dtype):
        assert_same(fused(op, [x]), UNARY[op](x), x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", WITH_SCALARS)
def test_every_input_with_a_scalar(op: str, dtype: torch.dtype) -> None:
    """A Python scalar is rounded to float32 and no further, whatever the dtype of the tensor."""
    scalars, function = WITH_SCALARS[op]
    for x in every(dtype):
        assert_same(fused(op, [x], scalars), function(x), x)


@pytest.mark.parametrize(("a", "b"), [(d, d) for d in FLOATS] + [(torch.float32, h) for h in HALVES])
@pytest.mark.parametrize("op", BINARY)
def test_random_bits(op: str, a: torch.dtype, b: torch.dtype) -> None:
    x, y = random_bits(a), random_bits(b)
    assert_same(fused(op, [x, y]), BINARY[op](x, y), x, y)


@pytest.mark.parametrize("half", HALVES)
def test_casts(half: torch.dtype) -> None:
    for x in every(torch.float32):
        assert_same(fused("cast", [x], dtype=half), x.to(half), x)
    for x in every(half):
        assert_same(fused("cast", [x], dtype=torch.float32), x.float(), x)
