"""Every activation of the table: torch's bits, written into the buffers that are given, over the gradient too."""

import pickle
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from leangrad.ops.activation import ACTIVATIONS, FRESH, OVER, Activation, resolve
from tests.support import same_bits
from tests.support.activation import PLAIN
from tests.support.fuzz import fuzz_settings

SHAPES = [(3, 8), (1, 2), (5, 4, 6), (0, 4), (7,), (2, 2**18 + 6)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def shape_for(record: Activation, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] + shape[-1] % 2) if record.gated else shape


def case(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Activation, Tensor, Tensor, Tensor, Tensor]:
    """The record, an input with large and special values, plain's output, a gradient for it, plain's answer."""
    record = ACTIVATIONS[name]
    x = (torch.randn(shape_for(record, shape)) * 4).to(dtype)
    if x.numel() > 8:
        x.view(-1)[:4] = torch.tensor([0.0, -0.0, 30.0, -30.0])
    x.requires_grad_()
    y = PLAIN[name](x)
    g = torch.randn(y.shape).to(dtype)
    (dx,) = torch.autograd.grad(y, x, g)
    return record, x.detach(), y.detach(), g, dx


def test_the_table_is_complete():
    assert set(ACTIVATIONS) == set(PLAIN)
    assert all(record.name == name for name, record in ACTIVATIONS.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_one_function_of_torch_is_the_same_as_forward(name, dtype):
    record, x, y, _, _ = case(name, (5, 37), dtype)
    fresh, over = FRESH.get(record.forward), OVER.get(record.forward)
    assert not ((fresh or over) and record.parameter_name)
    if fresh:
        before = x.clone()
        assert same_bits(fresh(x), y)
        assert same_bits(x, before)
    if over:
        assert record.in_place
        assert over(x) is x
        assert same_bits(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.sampled(4)
def test_forward_and_backward_are_torchs(name, shape, dtype):
    record, x, y, g, dx = case(name, shape, dtype)
    out = torch.full_like(y, float("nan"))
    assert same_bits(record.forward(x, record.parameter, None), y)
    assert record.forward(x, record.parameter, out) is out
    assert same_bits(out, y)
    if record.in_place:
        over = x.clone()
        assert record.forward(over, record.parameter, over) is over
        assert same_bits(over, y)

    kept = x if record.keeps == "input" else y
    untouched, g_before = kept.clone(), g.clone()
    with torch.no_grad():
        assert same_bits(record.backward(g, kept, record.parameter, None), dx)
    into = torch.full_like(dx, float("nan"))
    assert record.backward(g, kept, record.parameter, into) is into
    assert same_bits(into, dx)
    assert same_bits(g, g_before)
    if not record.gated:
        assert record.backward(g, kept, record.parameter, g) is g
        assert same_bits(g, dx)
    assert same_bits(kept, untouched)


@pytest.fixture
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_same_threads")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name, record in ACTIVATIONS.items() if not record.gated])
@fuzz_settings(6, 200)
@given(numel=st.integers(2**15, 2**20))
@example(numel=2**19 + 12)
@example(numel=3 * 2**18 + 13)
@pytest.mark.sampled(6)
def test_they_are_torchs_wherever_threads_split_a_tensor(name, threads, numel):
    """Each thread ends in a scalar loop, which may round otherwise than the vector one."""
    torch.set_num_threads(threads)
    record, x, y, g, dx = case(name, (numel,), torch.float32)
    assert same_bits(record.forward(x, record.parameter, torch.empty_like(y)), y)
    assert same_bits(record.backward(g, x if record.keeps == "input" else y, record.parameter, g), dx)


@pytest.mark.parametrize("name", [name for name, record in ACTIVATIONS.items() if record.keeps == "input"])
def test_backward_may_be_written_over_the_kept_input(name):
    record, x, _, g, dx = case(name, (300, 2048), torch.float32)
    assert record.backward(g, x, record.parameter, x) is x
    assert same_bits(x, dx)


@pytest.mark.parametrize("name", PLAIN)
def test_strided_gradients_and_buffers(name):
    """Strided memory takes torch's scalar loops, whose last bit may differ from that of the vector ones."""
    record, x, y, g, dx = case(name, (6, 8), torch.float64)
    kept = x if record.keeps == "input" else y
    strided = g.t().contiguous().t()
    into = torch.full((2 * dx.shape[1], dx.shape[0]), float("nan"), dtype=dx.dtype).t()[:, ::2]
    torch.testing.assert_close(record.backward(strided, kept, record.parameter, into), dx)
    if not record.gated:
        torch.testing.assert_close(record.backward(strided, kept, record.parameter, strided), dx)


@pytest.mark.parametrize("name", PLAIN)
def test_the_backward_that_allocates_is_differentiable(name):
    """That is what double backward runs."""
    record, x, y, g, _ = case(name, (3, 4), torch.float64)
    kept = torch.randn_like(x if record.keeps == "input" else y)
    if record.keeps == "output":
        kept = torch.where(kept < 0, kept - 0.1, kept + 0.1)  # away from the kink of relu
    with torch.enable_grad():
        assert torch.autograd.gradcheck(
            lambda g, kept: record.backward(g, kept, record.parameter, None),
            (g.requires_grad_(), kept.requires_grad_()),
        )


@pytest.mark.parametrize(
    ("name", "parameter", "plain"),
    [
        ("leaky_relu", 0.3, lambda x: F.leaky_relu(x, 0.3)),
        ("leaky_relu", 0.0, lambda x: F.leaky_relu(x, 0.0)),
        ("elu", 0.5, lambda x: F.elu(x, 0.5)),
        ("softplus", 3.0, lambda x: F.softplus(x, 3.0)),
    ],
)
def test_parameters(name, parameter, plain):
    record = resolve(name, parameter)
    x = (torch.randn(50) * 3).requires_grad_()
    y = plain(x)
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    x = x.detach()
    assert same_bits(record.forward(x, record.parameter, None), y)
    kept = x if record.keeps == "input" else y.detach()
    assert same_bits(record.backward(g, kept, record.parameter, g), dx)


def test_bad_names_and_parameters_say_what_to_choose():
    with pytest.raises(ValueError, match=r"activation: expected one of relu, leaky_relu, .*; got 'swish'"):
        resolve("swish")
    with pytest.raises(TypeError, match="activation: expected a name or an Activation, got function"):
        resolve(F.relu)
    with pytest.raises(ValueError, match="parameter: relu has none"):
        resolve("relu", 0.1)
    with pytest.raises(ValueError, match=r"leaky_relu needs negative_slope >= 0.0, got -0.1"):
        resolve("leaky_relu", -0.1)
    with pytest.raises(ValueError, match=r"leaky_relu needs negative_slope"):
        resolve("leaky_relu", float("nan"))


def test_records_travel():
    for record in ACTIVATIONS.values():
        assert pickle.loads(pickle.dumps(record)) == record == deepcopy(record)
    assert resolve(ACTIVATIONS["gelu"]) is ACTIVATIONS["gelu"]
    assert repr(resolve("elu", 0.5)) == "elu(alpha=0.5)"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_on_a_gpu(name, dtype):
    with torch.device("cuda"):
        record, x, y, g, dx = case(name, (33, 2048), dtype)
        kept = x if record.keeps == "input" else y
        assert same_bits(record.forward(x, record.parameter, torch.empty_like(y)), y)
        assert same_bits(record.backward(g, kept, record.parameter, torch.empty_like(dx) if record.gated else g), dx)
