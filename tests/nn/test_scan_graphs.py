"""The scans among other things: kept graphs, changed inputs, transforms, bytes, and bad input."""

import pytest
import torch

from leangrad.measure import measure
from leangrad.nn.scan import _Kind, _plain, rg_lru, selective_scan
from leangrad.ops import scan as ops
from tests.support import same_bits
from tests.support.autograd_thread import in_autograds_thread
from tests.support.scan import FUNCTIONS, INPUTS, make, outputs_and_grads, random_grads, rg_lru_loop

# Graphs around it


@pytest.mark.parametrize("form", FUNCTIONS)
def test_backward_runs_again_over_a_kept_graph(form):
    inputs = make(form)
    outputs, grads = FUNCTIONS[form](*inputs, chunk=4), random_grads(form)
    first = torch.autograd.grad(outputs, inputs, grads, retain_graph=True)
    second = torch.autograd.grad(outputs, inputs, grads)
    assert all(same_bits(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, inputs, grads)


def test_backward_leaves_what_autocast_has_cast():
    """On a GPU it runs in another thread than forward; autocast's cache is everybody's."""
    inputs = [x.detach().float().requires_grad_() for x in make("mamba")]
    linear, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = linear(x)
        z, _ = selective_scan(*inputs, chunk=4)
        in_autograds_thread(z.sum().backward)
        with torch.no_grad():
            linear.weight.mul_(2)
        assert same_bits(linear(x), before)
    assert not same_bits(linear(x), before)
    assert inputs[0].grad is not None


@pytest.mark.parametrize("name", INPUTS["mamba"])
def test_a_changed_input_raises(name):
    inputs = make("mamba")
    copies = [x.clone() for x in inputs]
    z, _ = selective_scan(*copies)
    copies[INPUTS["mamba"].index(name)].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(z, inputs, torch.randn_like(z))


def test_the_last_state_may_be_changed():
    inputs = make("rg_lru")
    h, last = rg_lru(*inputs, chunk=4)
    expected = torch.autograd.grad(h, inputs, g := torch.randn_like(h), retain_graph=True)
    with torch.no_grad():
        last.zero_()
        h.zero_()
    for one, other in zip(torch.autograd.grad(h, inputs, g), expected, strict=True):
        assert same_bits(one, other)


def test_one_tensor_in_two_places():
    x, g = torch.rand(2, 7, 3, dtype=torch.float64, requires_grad=True), torch.randn(2, 7, 3, dtype=torch.float64)
    lam, state = torch.randn(3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad(rg_lru_loop(x, x, x, lam, state, rms=False)[0], x, g)
    h, _ = rg_lru(x, x, x, lam, chunk=2)
    torch.testing.assert_close(torch.autograd.grad(h, x, g, retain_graph=True)[0], expected)
    torch.testing.assert_close(torch.autograd.grad(h, x, g, create_graph=True)[0], expected)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_the_plain_form_is_the_same(form, monkeypatch):
    inputs, grads = make(form), random_grads(form)
    expected = outputs_and_grads(FUNCTIONS[form], inputs, grads)
    with monkeypatch.context() as patched:
        patched.setattr("leangrad.nn.scan.runs_plain", lambda *tensors: True)
        found = outputs_and_grads(FUNCTIONS[form], inputs, grads)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_plain_form_of_no_steps():
    *inputs, state = make("mamba", T=0)
    for start, expected in ((state, state), (None, torch.zeros_like(state))):
        z, last = _plain(_Kind("zoh"), *inputs, None, start)
        assert z.shape == (2, 0, 3)
        assert same_bits(last, expected)


def test_under_func_transforms():
    u, dt, A, B, C, D, state = make("mamba")
    args = (u.detach(), dt.detach(), A.detach(), B.detach(), C.detach(), D.detach(), state.detach())
    g = torch.randn_like(u)
    expected = torch.autograd.grad(selective_scan(u, dt, A, B, C, D, state)[0], (u, A), g)
    found = torch.func.grad(lambda u, A: (selective_scan(u, args[1], A, *args[3:])[0] * g).sum(), (0, 1))(u, A)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    by_row = torch.func.vmap(lambda u, dt, B, C: selective_scan(u[None], dt[None], args[2], B[None], C[None])[0][0])
    torch.testing.assert_close(by_row(args[0], args[1], args[3], args[4]), selective_scan(*args[:5])[0])


def test_under_compile():
    inputs, grads = make("mamba", T=5, dtype=torch.float32), random_grads("mamba", T=5)
    compiled = torch.compile(selective_scan, backend="aot_eager", fullgraph=True)
    for one, other in zip(
        outputs_and_grads(compiled, inputs, grads), outputs_and_grads(selective_scan, inputs, grads), strict=True
    ):
        torch.testing.assert_close(one, other)


# Kept bytes


@pytest.mark.parametrize(("T", "chunks"), [(16, 1), (100, 7), (1100, 35)])
def test_kept_bytes(T, chunks):
    """Nothing but the output and one state a chunk, whatever N is."""
    batch, width, N = 2, 24, 8
    inputs = make("mamba", batch, T, width, N, torch.float32)
    g = torch.randn(batch, T, width)
    found = measure(lambda: torch.autograd.grad(selective_scan(*inputs)[0], inputs, g), timed_runs=0)
    state_bytes = 4 * batch * width * N
    output_bytes = 4 * batch * T * width
    assert found.kept_bytes == output_bytes + (chunks + 1) * state_bytes


def test_kept_bytes_of_rg_lru():
    batch, T, width = 2, 500, 24
    inputs = make("rg_lru", batch, T, width, dtype=torch.float32)
    g = torch.randn(batch, T, width)
    found = measure(lambda: torch.autograd.grad(rg_lru(*inputs)[0], inputs, g), timed_runs=0)
    rate_bytes = 3 * 4 * width  # −λ, softplus(−λ), and eight times that
    assert found.kept_bytes <= 4 * batch * width * (T + 32 + 1) + rate_bytes


def test_peak_bytes_do_not_grow_with_the_states():
    """Backward holds six buffers of one chunk, the gradients, and little else."""
    batch, T, width, N = 1, 512, 32, 16
    inputs = make("mamba", batch, T, width, N, torch.float32)
    g = torch.randn(batch, T, width)
    found = measure(lambda: torch.autograd.grad(selective_scan(*inputs)[0], inputs, g), timed_runs=0)
    state_bytes, map_bytes, chunk = 4 * width * N, 4 * T * width, ops.chunk_length(T)
    gradients_bytes = sum(x.numel() * 4 for x in inputs)
    boundaries_bytes = (T // chunk + 1) * state_bytes
    assert found.peak_bytes < boundaries_bytes + 7 * chunk * state_bytes + gradients_bytes + 3 * map_bytes
    assert found.peak_bytes < T * state_bytes


# Bad input


@pytest.mark.parametrize("name", INPUTS["mamba"])
def test_a_wrong_argument_is_named(name):
    inputs = dict(zip(INPUTS["mamba"], make("mamba"), strict=True))
    wrong = {"u": "dt"}.get(name, name)  # everything is compared with u
    with pytest.raises(ValueError, match=f"^{wrong}: expected"):
        selective_scan(
            **{**inputs, name: torch.randn(2, 12, 3) if name == "u" else torch.randn(7, dtype=torch.float64)}
        )
    with pytest.raises(TypeError, match=f"^{name}: expected a floating dtype"):
        selective_scan(**{**inputs, name: inputs[name].detach().long()})


@pytest.mark.parametrize("name", INPUTS["rg_lru"])
def test_a_wrong_argument_of_rg_lru_is_named(name):
    inputs = dict(zip(INPUTS["rg_lru"], make("rg_lru"), strict=True))
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        rg_lru(**{**inputs, name: torch.randn(7, dtype=torch.float64)})
    with pytest.raises(TypeError, match=f"^{name}: expected a floating dtype"):
        rg_lru(**{**inputs, name: inputs[name].detach().long()})


@pytest.mark.parametrize("chunk", [0, 3, -4, 2.0])
def test_a_chunk_is_a_power_of_two(chunk):
    with pytest.raises(ValueError, match=r"^chunk: expected a power of two"):
        rg_lru(*make("rg_lru"), chunk=chunk)


def test_devices_must_agree():
    inputs = make("rg_lru")
    with pytest.raises(ValueError, match=r"^r: expected the device of the input, cpu, got meta"):
        rg_lru(inputs[0], inputs[1].to("meta"), *inputs[2:])
