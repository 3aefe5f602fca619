"""The scans: a step-by-step loop's numbers and gradients, states kept at chunk boundaries only."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from leangrad.nn.scan import selective_scan
from leangrad.ops import scan as ops
from tests.support import same_bits
from tests.support.error_rule import assert_error_rule, named
from tests.support.fuzz import fuzz_settings
from tests.support.scan import FUNCTIONS, INPUTS, loop, make, outputs_and_grads, random_grads

# The same numbers


@pytest.mark.parametrize("chunk", [1, 4, 16, None])
@pytest.mark.parametrize("T", [1, 4, 11, 33])
@pytest.mark.parametrize("form", FUNCTIONS)
def test_equals_the_loop_in_float64(form, T, chunk):
    inputs, grads = make(form, T=T), random_grads(form, T=T)
    found = outputs_and_grads(lambda *xs: FUNCTIONS[form](*xs, chunk=chunk), inputs, grads)
    expected = outputs_and_grads(lambda *xs: loop(form, *xs), inputs, grads)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_gradcheck(form):
    inputs = make(form, T=5)
    function = lambda *xs: FUNCTIONS[form](*xs, chunk=2)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_a_batch_of_gradients_at_once(form):
    inputs, grads = make(form, T=5), random_grads(form, T=5)
    outputs = FUNCTIONS[form](*inputs, chunk=2)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    several = [torch.stack([g, 2 * g, -g]) for g in grads]
    found = torch.autograd.grad(outputs, leaves, several, is_grads_batched=True, retain_graph=True)
    expected = torch.autograd.grad(outputs, leaves, grads)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.stack([other, 2 * other, -other]))
        assert not one.requires_grad


@pytest.mark.parametrize("form", FUNCTIONS)
def test_second_derivatives(form):
    inputs = make(form, T=3, width=2)
    assert torch.autograd.gradgradcheck(lambda *xs: FUNCTIONS[form](*xs, chunk=2), inputs)
    # Gradients with a graph of their own are those without.
    y, last = FUNCTIONS[form](*inputs, chunk=2)
    g, h = torch.randn_like(y), torch.randn_like(last)
    plain = torch.autograd.grad([y, last], inputs, [g, h], retain_graph=True)
    with_graph = torch.autograd.grad([y, last], inputs, [g, h], create_graph=True)
    for one, other in zip(plain, with_graph, strict=True):
        torch.testing.assert_close(one, other)
        assert other.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FUNCTIONS)
@pytest.mark.sampled(3)
def test_error_rule(form, dtype):
    """Beside the loop that rounds every step to the dtype of its inputs."""
    shape = {"batch": 2, "T": 64, "width": 8}

    def draw():
        inputs, grads = make(form, dtype=dtype, **shape), random_grads(form, **shape)
        grads = [g.to(dtype).double() for g in grads]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        truth = outputs_and_grads(lambda *xs: loop(form, *xs), wide, grads)
        ours = outputs_and_grads(FUNCTIONS[form], inputs, grads)
        assert ours[0].dtype == dtype
        return named(ours, outputs_and_grads(lambda *xs: loop(form, *xs), inputs, grads), truth)

    assert_error_rule(draw)


@pytest.mark.parametrize("needs", ["u", "dt", "A", "B", "C", "D", "state"])
def test_one_gradient_alone(needs):
    inputs, grads = make("mamba"), random_grads("mamba")
    everything = dict(zip(INPUTS["mamba"], outputs_and_grads(selective_scan, inputs, grads)[2:], strict=True))
    alone = [x.detach().requires_grad_(name == needs) for name, x in zip(INPUTS["mamba"], inputs, strict=True)]
    *_, found = outputs_and_grads(selective_scan, alone, grads)
    torch.testing.assert_close(found, everything[needs])


@pytest.mark.parametrize("form", FUNCTIONS)
@pytest.mark.parametrize("which", ["outputs", "last state"])
def test_one_output_alone(form, which):
    inputs = make(form)
    grads = [g if (i == 0) == (which == "outputs") else None for i, g in enumerate(random_grads(form))]
    found = outputs_and_grads(lambda *xs: FUNCTIONS[form](*xs, chunk=4), inputs, grads)
    expected = outputs_and_grads(lambda *xs: loop(form, *xs), inputs, grads)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_strided_inputs_and_gradients(form):
    strided = [x.detach().flip(0).mT.contiguous().mT if x.dim() > 1 else x.detach() for x in make(form)]
    inputs, grads = [x.requires_grad_() for x in strided], random_grads(form)
    expected = outputs_and_grads(lambda *xs: loop(form, *xs), inputs, grads)
    for g in (grads, [x.mT.contiguous().mT if x.dim() == 3 else x for x in grads]):
        for one, other in zip(outputs_and_grads(FUNCTIONS[form], inputs, g), expected, strict=True):
            torch.testing.assert_close(one, other)
    grads = [torch.randn((), dtype=torch.float64).expand(g.shape) for g in grads]
    found, expected = (outputs_and_grads(f, inputs, grads) for f in (FUNCTIONS[form], lambda *xs: loop(form, *xs)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_softplus_of_dt(dtype):
    """The same as softplus before the scan; in a low precision dt is then not rounded to it."""
    inputs, grads = make("mamba", dtype=dtype), random_grads("mamba")
    found = outputs_and_grads(lambda *xs: selective_scan(*xs, softplus=True, chunk=4), inputs, grads)
    double = dtype == torch.float64
    expected = outputs_and_grads(
        lambda u, dt, *xs: selective_scan(u, F.softplus(dt if double else dt.float()), *xs, chunk=4), inputs, grads
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    if double:
        assert torch.autograd.gradgradcheck(lambda *xs: selective_scan(*xs, softplus=True), make("mamba", T=2, width=2))


def test_large_batches_are_worked_on_in_groups(monkeypatch):
    inputs, grads = make("mamba", batch=5), random_grads("mamba", batch=5)
    expected = outputs_and_grads(selective_scan, inputs, grads)
    monkeypatch.setattr(ops, "STEP_STATES", 12)
    assert len(ops._row_groups(ops.Scan("zoh", *inputs[:2], inputs[2].t()))) == 3
    for one, other in zip(outputs_and_grads(selective_scan, inputs, grads), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_nothing_stale_is_read(form):
    """In deterministic mode torch fills fresh memory with NaN."""
    inputs, grads = make(form), random_grads(form)
    expected = outputs_and_grads(FUNCTIONS[form], inputs, grads)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = outputs_and_grads(FUNCTIONS[form], inputs, grads)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.fuzz
@fuzz_settings(30, 2000)
@given(
    st.sampled_from(sorted(FUNCTIONS)),
    st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 5), st.integers(1, 4)),
    st.sampled_from([1, 2, 4, 8, 16, None]),
    st.sets(st.integers(0, 6)),
    st.floats(-4, 4),
    st.integers(0, 1 << 16),
)
def test_random_shapes_and_rates(form, shape, chunk, frozen, magnitude, seed):
    """Any sizes, any inputs that need no gradient, and dt·A over many magnitudes, against the loop."""
    torch.manual_seed(seed)
    inputs, grads = make(form, *shape), random_grads(form, *shape)
    if form == "mamba":
        inputs[2] = (inputs[2].detach() * 10**magnitude).requires_grad_()
    for i in frozen & set(range(len(inputs) - 1)):
        inputs[i].requires_grad_(False)
    found = outputs_and_grads(lambda *xs: FUNCTIONS[form](*xs, chunk=chunk), inputs, grads)
    expected = outputs_and_grads(lambda *xs: loop(form, *xs), inputs, grads)
    for one, other in zip(found, expected, strict=True):
        # The loop's own ∂w/∂A cancels where dt·A is small: hence relative to the largest value.
        tolerance = 1e-9 * max(1.0, other.abs().max().item()) if other.numel() else 0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


# Extreme values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("A", [0.0, 1e-30, 1e-12, 1e-4, 1e2, 1e12, -1e-12])
@pytest.mark.parametrize("dt", [0.0, 1e-30, 1e-4, 0.4999, 0.5001, 40.0, 1e12])
def test_rates_from_nothing_to_everything(A, dt, dtype):
    """Output and gradients against Python's floats; ∂w/∂A is where a plain formula cancels."""
    A, dt = torch.tensor([A, dt], dtype=dtype).tolist()  # as the dtype has them
    rate, step = (torch.full((1, 1), v, dtype=dtype, requires_grad=True) for v in (A, dt))
    one = torch.ones(1, 1, 1, dtype=dtype)
    z, _ = selective_scan(one, step.unsqueeze(0), rate, one, one, None, torch.full_like(one, 0.25))
    found = [z.item(), *(g.item() for g in torch.autograd.grad(z.sum(), (rate, step)))]
    decay, (weight, slope) = math.exp(-dt * A), exact_weight(A, dt)
    expected = [0.25 * decay + weight, slope - 0.25 * dt * decay, decay * (1 - 0.25 * A)]
    for one_found, one_expected in zip(found, expected, strict=True):
        assert one_found == pytest.approx(one_expected, rel=100 * torch.finfo(dtype).eps, abs=torch.finfo(dtype).tiny)


def exact_weight(A: float, dt: float) -> tuple[float, float]:
    """(1 − exp(−dt·A))/A and its derivative by A, by a hundred terms of the series or directly."""
    x = dt * A
    if abs(x) < 2:
        terms = [(-x) ** k / math.factorial(k + 1) for k in range(60)]
        slopes = [-((-x) ** (k - 1)) * k / math.factorial(k + 1) for k in range(1, 60)]
        return dt * math.fsum(terms), dt * dt * math.fsum(slopes)
    weight = -math.expm1(-x) / A
    return weight, (dt * math.exp(-x) - weight) / A


@pytest.mark.parametrize("form", ["rg_lru", "rg_lru rms"])
def test_closed_and_open_gates(form):
    """Gates at 0 and 1, and λ far out: finite everywhere, and the state stands still where r is 0."""
    inputs = make(form, T=6, width=4)
    with torch.no_grad():
        inputs[1][:, 2] = 0
        inputs[1][:, 4] = 1
        inputs[2][:, 3] = 0
        inputs[3].copy_(torch.tensor([-200.0, 200.0, 40.0, 0.0]))
    h, last = FUNCTIONS[form](*inputs)
    torch.testing.assert_close(h[:, 2], h[:, 1])
    torch.testing.assert_close(h[:, :, 1], inputs[4][:, None, 1].expand(-1, 6))  # a = 1
    found = torch.autograd.grad([h, last], inputs, random_grads(form, T=6, width=4))
    assert all(g.isfinite().all() for g in found)


def test_a_long_silence_decays_to_nothing_rather_than_to_noise():
    u, dt = torch.zeros(1, 3000, 2), torch.full((1, 3000, 2), 0.5)
    u[:, 0] = 1
    column = torch.ones(1, 3000, 1)
    z, last = selective_scan(u, dt, torch.ones(2, 1), column, column)
    torch.testing.assert_close(z[0, 100, 0].item(), -math.expm1(-0.5) * math.exp(-50), rtol=1e-4, atol=0)
    assert last.abs().max() < 1e-40


# No steps, and one


@pytest.mark.parametrize("form", FUNCTIONS)
def test_no_steps(form):
    inputs = make(form, T=0)
    y, last = FUNCTIONS[form](*inputs)
    assert y.shape == (2, 0, 3)
    torch.testing.assert_close(last, inputs[-1])
    g = torch.randn_like(last)
    *others, state = torch.autograd.grad([y, last], inputs, [torch.zeros_like(y), g])
    torch.testing.assert_close(state, g)
    assert all(not x.any() for x in others)
    without = FUNCTIONS[form](*inputs[:-1])
    assert without[0].shape == (2, 0, 3)
    assert not without[1].any()


@pytest.mark.parametrize("form", FUNCTIONS)
def test_step_by_step_is_all_at_once(form):
    inputs = make(form, dtype=torch.float32)
    whole, end = FUNCTIONS[form](*inputs)
    state, steps = inputs[-1], []
    for t in range(11):
        y, state = FUNCTIONS[form](*(x[:, t : t + 1] if x.dim() == 3 else x for x in inputs[:-1]), state)
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize("T", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("form", FUNCTIONS)
def test_without_gradients(form, T):
    """Few steps take a way of their own then."""
    inputs = make(form, T=T)
    with torch.no_grad():
        if form == "mamba":
            inputs[2][0, 0] = 0  # A
        inputs[1][:, :1] = 0
        expected = FUNCTIONS[form](*inputs) if T == 0 else loop(form, *inputs)
        found, bare = FUNCTIONS[form](*inputs), FUNCTIONS[form](*inputs[:-1])
        low = [x.bfloat16() for x in inputs]
        assert FUNCTIONS[form](*low)[0].dtype == torch.bfloat16
        assert FUNCTIONS[form](*low)[1].dtype == torch.float32
    torch.testing.assert_close(found, tuple(expected))
    inputs[-1].requires_grad_(False).zero_()
    torch.testing.assert_close(bare, tuple(x.detach() for x in FUNCTIONS[form](*inputs)))
    found[1].zero_()
    assert T == 0 or not same_bits(found[0], torch.zeros_like(found[0]))


def test_an_empty_batch():
    inputs = make("mamba", batch=0)
    z, last = selective_scan(*inputs)
    assert z.shape == (0, 11, 3)
    assert last.shape == (0, 3, 2)
    found = torch.autograd.grad([z, last], inputs, [torch.zeros_like(z), torch.zeros_like(last)])
    assert all(not g.any() for g in found)
