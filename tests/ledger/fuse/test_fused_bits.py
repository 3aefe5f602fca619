"""Every fused op gives the bits of ATen: on all inputs where they can be counted, on random bits where they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
    "abs": torch.abs,
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "relu": torch.relu,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
WITH_SCALARS: dict[str, tuple[tuple[float, ...], Callable[[Tensor], Tensor]]] = {
    "add": ((0.1,), lambda x: x + 0.1),
    "sub": ((-2.7,), lambda x: x - -2.7),
    "mul": ((0.7978845608028654,), lambda x: x * 0.7978845608028654),
    "leaky_relu": ((0.01,), F.leaky_relu),
    "clamp": ((0.0, 6.0), lambda x: F.hardtanh(x, 0.0, 6.0)),
    "clamp_min": ((-0.3,), lambda x: x.clamp_min(-0.3)),
    "clamp_max": ((0.3,), lambda x: x.clamp_max(0.3)),
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


def fused(
    op: str,
    inputs: list[Tensor],
    scalars: tuple[float, ...] = (),
    dtype: torch.dtype | None = None,
    terms: list[Any] | None = None,
) -> Tensor:
    """One op as a program of its own."""
    from leangrad.kernels.pointwise import Input, Program, Step, compiled

    dtype = dtype or inputs[0].dtype
    kinds = tuple(Input(t.dtype, terms[k] if terms else None) for k, t in enumerate(inputs))
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
def test_an_op_of_other_bits_is_found_out(dtype: torch.dtype) -> None:
    """erf is not the same in every CUDA: where GELU differs on a single input, no program has it."""
    from leangrad.ledger.fuse.bit_exactness import is_exact
    from leangrad.ledger.fuse.builder import Builder
    from leangrad.ledger.fuse.chain import TABLE
    from leangrad.ledger.values.value import Value

    same = all(not different(fused("gelu", [x]), F.gelu(x)).any() for x in every(dtype))
    assert same or not torch.version.cuda.startswith("13.")  # the one whose erf is written out
    x = torch.randn(8, device="cuda").to(dtype)
    value = Value("GeluBackward0")
    value.function, value.kwargs = F.gelu, {"approximate": "none"}
    builder = Builder([x])
    assert is_exact(value, [builder.leaf(0)], [], builder) == same
    assert F.gelu in TABLE  # until a chain finds it out


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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [64, 1023, 1024, 4096])
def test_norms_from_their_statistics(width: int, dtype: torch.dtype) -> None:
    """Layer norm and RMS norm, in ATen's vectorized kernels and in the others."""
    x = (torch.randn(300, width, device="cuda") * 3 + 1).to(dtype)
    w, b = (torch.randn(width, device="cuda").to(dtype) for _ in range(2))
    rows, columns = ((width, 0, 1),), ((1, width, 1),)
    for weight, bias, op in ((w, b, "layer_norm"), (w, None, "layer_norm_no_bias"), (None, None, "layer_norm_bare")):
        y, mean, rstd = torch.native_layer_norm(x, [width], weight, bias, 1e-5)
        vectors = [t for t in (weight, bias) if t is not None]
        mine = fused(op, [x, mean, rstd, *vectors], terms=[None, rows, rows, columns, columns])
        assert_same(mine.view(-1), y.view(-1))
    for weight, op in ((w, "rms_norm"), (None, "rms_norm_bare")):
        y, rstd = torch.ops.aten._fused_rms_norm(x, [width], weight, 1e-5)
        vectors = [] if weight is None else [weight]
        mine = fused(op, [x, rstd, *vectors], terms=[None, rows, columns])
        assert_same(mine.view(-1), y.view(-1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64, 256, 14, 14), (8, 63, 13, 11), (2, 2048, 7, 7), (500, 8, 5, 5)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm_from_its_statistics(channels_last: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = (torch.randn(shape, device="cuda") * 3 + 1).to(dtype, memory_format=memory_format)
    w, b = torch.randn(shape[1], device="cuda"), torch.randn(shape[1], device="cuda")
    y, mean, rstd = torch.native_batch_norm(x, w, b, None, None, True, 0.0, 1e-5)
    channels = ((1 if channels_last else shape[2] * shape[3], shape[1], 1),)
    mine = fused("batch_norm", [x, mean, rstd, w, b], terms=[None, *[channels] * 4])
    assert mine.stride() == y.stride()
    assert_same(mine.as_strided((mine.numel(),), (1,)), y.as_strided((y.numel(),), (1,)))
