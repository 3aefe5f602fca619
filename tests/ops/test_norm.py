"""Layer norm and RMS norm with explicit buffers: torch's numbers, whatever was in the buffer, rows at a time."""

import pytest
import torch
import torch.nn.functional as F

from leangrad.measure import measure
from leangrad.ops import norm
from leangrad.ops.norm import NORMS
from tests.support import same_bits
from tests.support.error_rule import assert_error_rule, named

EPS = 1e-5
SHAPES = [(1, 1), (1, 7), (5, 1), (33, 12), (0, 4)]


@pytest.fixture(autouse=True, params=[8, 1 << 18], ids=["by rows", "at once"])
def _chunk(request, monkeypatch):
    monkeypatch.setattr(norm, "_CHUNK", request.param)


def plain(name, x, weight, bias):
    if name == "rms":
        return F.rms_norm(x, x.shape[1:], weight, EPS)
    return F.layer_norm(x, x.shape[1:], weight, bias, EPS)


def inputs(name, shape=(33, 12), dtype=torch.float32, affine=True, requires_grad=True):
    rows, width = shape
    x = torch.randn(rows, width, dtype=dtype)
    weight = torch.randn(width, dtype=dtype) if affine else None
    bias = torch.randn(width, dtype=dtype) if affine and name == "layer" else None
    leaves = [t for t in (x, weight, bias) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_(requires_grad)
    return x, weight, bias, leaves


def lean_gradients(name, x, weight, bias, g, into):
    record = NORMS[name]
    with torch.no_grad():
        y, statistics = record.forward(x, weight, bias, EPS, torch.full_like(x, float("nan")))
        found = record.backward(g, x, statistics, weight, bias, (weight is not None, bias is not None), into)
    return y, [grad for grad, of in zip(found, (x, weight, bias), strict=True) if of is not None]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_is_torchs_bit_for_bit_over_stale_nan(name, shape, dtype):
    x, weight, bias, _ = inputs(name, shape, dtype, requires_grad=False)
    expected = plain(name, x, weight, bias)
    out = torch.full_like(x, float("nan"))
    y, statistics = NORMS[name].forward(x, weight, bias, EPS, out)
    assert y is out
    assert same_bits(y, expected)
    assert same_bits(NORMS[name].forward(x, weight, bias, EPS, None)[0], expected)
    assert all(s.numel() == shape[0] for s in statistics)


@pytest.mark.parametrize("name", NORMS)
def test_forward_rounds_into_a_smaller_dtype(name):
    x, weight, bias, _ = inputs(name, requires_grad=False)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    NORMS[name].forward(x, weight, bias, EPS, out)
    assert same_bits(out, plain(name, x, weight, bias).bfloat16())


@pytest.mark.parametrize("into", ["new", "buffer", "over g"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_backward_is_autograds_bit_for_bit(shape, affine, into):
    x, weight, bias, leaves = inputs("layer", shape, affine=affine)
    g = torch.randn(shape)
    expected = torch.autograd.grad(plain("layer", x, weight, bias), leaves, g)
    memory = {"new": None, "buffer": torch.full(shape, float("nan")), "over g": g}[into]
    _, found = lean_gradients("layer", x, weight, bias, g, memory)
    assert memory is None or found[0] is memory
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_only_what_is_wanted_is_returned(name, needs):
    x, weight, bias, _ = inputs(name, requires_grad=False)
    _, statistics = NORMS[name].forward(x, weight, bias, EPS, None)
    _, dweight, dbias = NORMS[name].backward(x, x, statistics, weight, bias, needs, None)
    assert (dweight is not None) == needs[0]
    assert (dbias is not None) == (needs[1] and bias is not None)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("over", [False, True])
def test_gradcheck(name, affine, over):
    x, weight, bias, leaves = inputs(name, (6, 5), torch.float64, affine)

    class Normed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *_):
            ctx.y, ctx.statistics = NORMS[name].forward(x, weight, bias, EPS, None)
            return ctx.y.clone()

        @staticmethod
        def backward(ctx, g):
            into = g.clone() if over else None
            needs = (weight is not None, bias is not None)
            found = NORMS[name].backward(g if into is None else into, x, ctx.statistics, weight, bias, needs, into)
            return tuple(grad for grad, of in zip(found, (x, weight, bias), strict=True) if of is not None)

    assert torch.autograd.gradcheck(Normed.apply, leaves)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.sampled(3)
def test_error_rule(name, dtype):
    def draw():
        x, weight, bias, leaves = inputs(name, (257, 96), dtype)
        g = torch.randn(257, 96).to(dtype)
        eager = torch.autograd.grad(plain(name, x, weight, bias), leaves, g)
        wide = [t.detach().double().requires_grad_() for t in leaves]
        truth = torch.autograd.grad(plain(name, *wide, *[None] * (3 - len(wide))), wide, g.double())
        _, found = lean_gradients(name, x, weight, bias, g, torch.full_like(x, float("nan")))
        return named(found, eager, truth)

    assert_error_rule(draw)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.sampled(3)
def test_no_map_is_allocated_where_buffers_are_given(name, needs, monkeypatch):
    monkeypatch.setattr(norm, "_CHUNK", 1 << 10)
    x, weight, bias, _ = inputs(name, (1024, 64), requires_grad=False)
    g, out = torch.randn(1024, 64), torch.empty(1024, 64)

    def step():
        _, statistics = NORMS[name].forward(x, weight, bias, EPS, out)
        NORMS[name].backward(g, x, statistics, weight, bias, (needs, needs), g)

    found = measure(step, timed_runs=1)
    assert all(event.bytes < x.numel() * 4 // 4 for event in found.timeline)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_it_is_torchs(name, dtype):
    with torch.device("cuda"):
        x, weight, bias, leaves = inputs(name, (513, 256), dtype)
        g = torch.randn(513, 256, dtype=dtype)
        y = plain(name, x, weight, bias)
        expected = torch.autograd.grad(y, leaves, g)
        z, found = lean_gradients(name, x, weight, bias, g, torch.full_like(x, float("nan")))
    assert same_bits(y, z)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
