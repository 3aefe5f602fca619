"""The attention context: the formulas of spec and autograd, whatever moves the context between forward and backward."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import leangrad
from leangrad import workspace
from leangrad.nn.context import AttentionContext, apply_context, update_context
from leangrad.ops import context as ops
from tests.support import same_bits
from tests.support.context import TOLERANCE, close, plain
from tests.support.error_rule import assert_error_rule, named
from tests.support.fuzz import fuzz_settings

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")


def inputs(shape=(6, 8), dtype=torch.float64, strength=0.7):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    s = torch.tensor([strength], dtype=dtype, requires_grad=True)
    return x, torch.rand(shape[-1], shape[-1], dtype=dtype) - 0.3, s


# Update


def correlations(x, y):
    """The formula, one pair of channels at a time, in float64."""
    x, y = (t.detach().double().reshape(-1, t.shape[-1]) for t in (x, y))
    n = min(len(x), 32)
    rows = torch.arange(n) * max(1, len(x) // n)
    x, y = (torch.where(t[rows].isfinite(), t[rows], 0.0) for t in (x, y))
    x, y = x - x.mean(0), y - y.mean(0)
    corr = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for i, j in itertools.product(range(x.shape[1]), repeat=2):
        denominator = x[:, i].norm() * y[:, j].norm()
        if denominator > 1e-12:
            corr[i, j] = (x[:, i] * y[:, j]).sum() / denominator
    return corr


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 63, 64, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_update_is_the_formula(rows, dtype):
    x, y = torch.randn(rows, 5).to(dtype), torch.randn(rows, 5).to(dtype)
    before = torch.randn(5, 5, dtype=torch.promote_types(dtype, torch.float32))
    expected = 0.9 * before.double() + 0.1 * torch.tanh(correlations(x, y))
    found = update_context(x, y, 0.1, before)
    assert found is before
    assert (found.double() - expected).abs().max() < (1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.randn(3, 25, 4),
        lambda: torch.randn(25, 3, 4).transpose(0, 1),
        lambda: torch.randn(4, 75).t(),
        lambda: torch.randn(2, 5, 7, 4),
        lambda: torch.randn(4),
        lambda: torch.randn(1, 4).expand(40, 4),
        lambda: torch.randn(150, 8)[::2, ::2],
    ],
)
def test_update_takes_rows_of_any_layout(build):
    x, y = build(), build()
    found = update_context(x, y, 1.0)
    assert (found.double() - torch.tanh(correlations(x, y))).abs().max() < 1e-6


@pytest.mark.parametrize("rows", [5, 32, 50, 64, 100])
def test_only_the_sampled_rows_are_read(rows):
    x, y = torch.randn(rows, 3), torch.randn(rows, 3)
    n = min(rows, 32)
    sampled = {i * max(1, rows // n) for i in range(n)}
    expected = update_context(x, y, 1.0)
    for row in range(rows):
        other = x.clone()
        other[row] += torch.randn(3)
        assert same_bits(update_context(other, y, 1.0), expected) == (row not in sampled)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_counts_as_zero(bad):
    x, y = torch.randn(40, 4), torch.randn(40, 4)
    x[::3, 1], y[::5, 2] = bad, bad
    found = update_context(x, y, 1.0)
    assert found.isfinite().all()
    zeroed = [torch.where(t.isfinite(), t, 0.0) for t in (x, y)]
    assert same_bits(found, update_context(*zeroed, 1.0))
    assert update_context(torch.full((40, 4), bad), y, 1.0).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", ["max", "tiny"])
def test_extreme_values_neither_overflow_nor_vanish(scale, dtype):
    """Correlations do not depend on the scale, as long as the denominator is above its limit."""
    x, y = torch.randn(40, 4, dtype=dtype).clamp(-3, 3), torch.randn(40, 4, dtype=dtype)
    expected = update_context(x, y, 1.0)
    factor = torch.finfo(dtype).max / 4 if scale == "max" else 1e-6
    found = update_context(x * factor, y, 1.0)
    assert (found - expected).abs().max() < 1e-6
    assert found.isfinite().all()


def test_denominators_that_are_too_small_give_zero():
    x, y = torch.randn(32, 3, dtype=torch.float64), torch.randn(32, 3, dtype=torch.float64)
    x[:, 0] = 0.1  # constant: no variance at all
    x[:, 1] *= 1e-14  # the product of the norms is below 1e-12 ...
    y[:, 2] *= 1e12  # ... but not with this one
    found = update_context(x, y, 1.0)
    assert found[0].eq(0).all()
    assert found[1, :2].eq(0).all()
    assert found[1, 2] != 0
    assert found[2].ne(0).all()


@pytest.mark.parametrize(("rate", "clamped"), [(-1.0, 0.0), (0.0, 0.0), (0.3, 0.3), (1.0, 1.0), (7.0, 1.0)])
def test_the_rate_is_clamped(rate, clamped):
    x, y, before = torch.randn(20, 4), torch.randn(20, 4), torch.randn(4, 4)
    expected = before * (1 - clamped) + clamped * torch.tanh(correlations(x, y)).float()
    assert (update_context(x, y, rate, before) - expected).abs().max() < 1e-6
    assert AttentionContext(4, rate).rate == clamped


def test_a_fitting_context_is_overwritten_and_any_other_left_alone():
    x, y = torch.randn(20, 4), torch.randn(20, 4)
    context = update_context(x, y, 0.5)
    address = context.data_ptr()
    assert update_context(x, y, 0.5, context).data_ptr() == address
    for other in (torch.ones(3, 3), torch.ones(4, 5), torch.ones(4), torch.ones(1, 4, 4)):
        found = update_context(x, y, 0.5, other)
        assert found.shape == (4, 4)
        assert same_bits(found, update_context(x, y, 0.5))
        assert other.eq(1).all()


def test_no_rows_leave_the_context_as_it_is():
    x, context = torch.randn(0, 4), torch.randn(4, 4)
    before = context.clone()
    assert update_context(x, x, 0.5, context) is context
    assert same_bits(context, before)
    assert update_context(x, x, 0.5).eq(0).all()


def test_small_steps_are_not_lost_in_low_precision():
    """A thousand steps of 0.01 reach the correlations; in bfloat16 they would stop on the way."""
    x = torch.randn(32, 4, dtype=torch.bfloat16)
    context = None
    for _ in range(1000):
        context = update_context(x, x, 0.01, context)
    assert context.dtype == torch.float32
    assert (context.double() - torch.tanh(correlations(x, x))).abs().max() < 1e-4


def test_an_update_is_no_part_of_a_graph():
    x = torch.randn(8, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = update_context(x, x * 2, 0.5)
    assert not context.requires_grad
    assert same_bits(context, update_context(x.detach(), x.detach() * 2, 0.5))


def test_an_update_with_stale_scratch_and_no_new_memory():
    x, y = torch.randn(64, 128), torch.randn(64, 128)
    context = update_context(x, y, 0.5)
    expected = update_context(x, y, 0.5, context.clone())
    for name in ("context.correlation", "context.denominator"):
        with workspace.default.borrow(name, (128, 128)) as borrowed:
            borrowed.tensor.fill_(NAN)
    allocations = workspace.default.allocations
    assert same_bits(update_context(x, y, 0.5, context), expected)
    assert workspace.default.allocations == allocations


# Apply


@pytest.mark.parametrize("shape", [(6, 8), (1, 1), (2, 3, 8), (0, 8), (8,), (2, 2, 3, 5), (64, 33)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_output_and_gradients_are_plains(shape, dtype):
    x, context, s = inputs(shape, dtype)
    grad = torch.randn(shape, dtype=dtype)
    expected = plain(x, context, s)
    found = apply_context(x, context, s)
    assert found.shape == expected.shape
    if found.numel():
        close(found, expected, dtype)
    for one, other in zip(
        torch.autograd.grad(found, (x, s), grad), torch.autograd.grad(expected, (x, s), grad), strict=True
    ):
        assert one.shape == other.shape
        if one.numel() and other.abs().max() > 0:
            close(one, other, dtype)


@pytest.mark.parametrize("strength", [0.0, 0.7, -3.0])
@pytest.mark.parametrize("scalar", [(), (1,)], ids=["no dimension", "one"])
def test_gradcheck(strength, scalar):
    x, context, s = inputs((2, 3, 5), strength=strength)
    s = s.detach().reshape(scalar).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, s: apply_context(x, context, s), (x, s))
    assert torch.autograd.gradgradcheck(lambda x, s: apply_context(x, context, s), (x, s))


@pytest.mark.parametrize(("needs_x", "needs_s"), [(True, True), (True, False), (False, True), (False, False)])
def test_every_combination_of_gradients(needs_x, needs_s):
    x, context, s = inputs()
    x, s = x.detach().requires_grad_(needs_x), s.detach().requires_grad_(needs_s)
    y = apply_context(x, context, s)
    close(y, plain(x, context, s), torch.float64)
    assert y.requires_grad == (needs_x or needs_s)
    if y.requires_grad:
        y.backward(torch.randn_like(y))
        assert ((x.grad is not None), (s.grad is not None)) == (needs_x, needs_s)
        assert context.grad is None


@pytest.mark.parametrize("context", [None, torch.ones(3, 3), torch.ones(8), torch.ones(8, 9)], ids=str)
def test_what_does_not_fit_gives_the_input_itself(context):
    x, _, s = inputs((4, 8))
    assert apply_context(x, context, s) is x


def test_at_strength_zero_the_output_is_the_input_and_the_strength_still_learns():
    x, context, s = inputs(strength=0.0)
    grad = torch.randn_like(x)
    y = apply_context(x, context, s)
    assert same_bits(y, x)
    dx, ds = torch.autograd.grad(y, (x, s), grad)
    assert same_bits(dx, grad)
    expected = (grad * (x @ context)).sum() / x.shape[1]
    assert (ds - expected).abs().max() < 1e-12
    assert ds.abs().max() > 0.1


def test_the_gradient_of_the_strength_is_summed_in_float64():
    """Products that are exact in float32, and whose sum is not: 2²⁵ and 1 cannot be added there."""
    rows, width = 40_001, 2
    x = torch.ones(rows, width)
    grad = torch.ones(rows, width)
    grad[0] = 2.0**25
    s = torch.zeros(1, requires_grad=True)
    (ds,) = torch.autograd.grad(apply_context(x, torch.eye(width), s), s, grad)
    assert ds.item() == 2.0**25 + 40_000
    grad[rows // 2] = -(2.0**25)
    (ds,) = torch.autograd.grad(apply_context(x, torch.eye(width), s), s, grad)
    assert ds.item() == 39_999


@pytest.mark.parametrize(("dtype", "autocast"), [*((dtype, False) for dtype in DTYPES), (torch.float32, True)], ids=str)
@pytest.mark.sampled(3)
def test_error_rule(dtype, autocast):
    """Over many draws: one strength's gradient is one number, which anybody may hit by luck."""
    context, s = torch.rand(48, 48) - 0.3, torch.tensor([0.9]).to(dtype)

    def run(f, to, x, grad):
        a, b = x.to(to).requires_grad_(), s.to(to).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast and to != torch.float64):
            y = f(a, context.to(to) if f is plain else context, b)
        assert y.dtype == to
        return y, *torch.autograd.grad(y, (a, b), grad.to(to))

    def draw():
        x, grad = torch.randn(2, 32, 48).to(dtype)
        ways = ((apply_context, dtype), (plain, dtype), (plain, torch.float64))
        return named(*(run(f, to, x, grad) for f, to in ways))

    assert_error_rule(draw, seeds=64)


# In graphs


GRAPHS = {
    "alone": lambda f, x, w: f(x),
    "sum": lambda f, x, w: f(x).sum(),
    "between products": lambda f, x, w: f(x @ w) @ w,
    "residual": lambda f, x, w: (lambda h: h + f(h))(x @ w),
    "residual, other order": lambda f, x, w: (lambda h: f(h) + h)(x @ w),
    "twice": lambda f, x, w: (lambda h: f(h) * 2 + f(h) * 3)(x @ w),
    "two consumers": lambda f, x, w: (lambda y: y * 2 + y.exp())(f(x @ w)),
    "cat": lambda f, x, w: torch.cat([f(x @ w), f(x)], 0),
    "stacked": lambda f, x, w: f(f(f(x @ w))) * 2,
    "viewed": lambda f, x, w: f((x @ w).view(2, 3, 8)).reshape(-1) * 2,
    "transposed": lambda f, x, w: f((x.t() @ x).t()[:, :8]).t().exp(),
    "expanded": lambda f, x, w: f((x @ w)[:1].expand(5, 8)).sum(0),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_gradients_in_graphs_are_plains(graph):
    x, context, s = inputs()
    w = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    expected = GRAPHS[graph](lambda h: plain(h, context, s), x, w)
    found = GRAPHS[graph](lambda h: apply_context(h, context, s), x, w)
    grad = torch.randn_like(expected)
    pairs = zip(*(torch.autograd.grad(y, (x, w, s), grad, allow_unused=True) for y in (found, expected)), strict=True)
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other, torch.float64)


def test_a_context_that_moved_on_does_not_change_the_gradient():
    """Every update overwrites it, most often before the backward of the forward that applied it."""
    x, context, s = inputs()
    grad = torch.randn_like(x)
    expected = torch.autograd.grad(plain(x, context.clone(), s), (x, s), grad)
    y = apply_context(x, context, s)
    update_context(torch.randn(40, 8), torch.randn(40, 8), 1.0, context)
    for one, other in zip(torch.autograd.grad(y, (x, s), grad), expected, strict=True):
        close(one, other, torch.float64)


def test_a_strength_or_input_that_changed_is_an_error():
    x, context, s = inputs()
    for changed in (x, s):
        y = apply_context(x * 1 if changed is s else x, context, s)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_retain_graph_and_hooks():
    x, context, s = inputs()
    held = []
    y = apply_context(x, context, s)
    y.register_hook(held.append)
    loss = (y * torch.randn_like(y)).sum()
    first = torch.autograd.grad(loss, (x, s), retain_graph=True)
    copied = held[0].clone()
    second = torch.autograd.grad(loss, (x, s))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert same_bits(held[0], copied)


def test_batched_gradients():
    x, context, s = inputs()
    grads = torch.randn(3, *x.shape, dtype=x.dtype)
    found = torch.autograd.grad(apply_context(x, context, s), (x, s), grads, is_grads_batched=True)
    expected = torch.autograd.grad(plain(x, context, s), (x, s), grads, is_grads_batched=True)
    for one, other in zip(found, expected, strict=True):
        close(one, other, torch.float64)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode uses it
def test_transforms_and_forward_mode_run_plain():
    x, context, s = inputs()
    x, s = x.detach(), s.detach()

    def f(x, s):
        return apply_context(x, context, s).square().sum()

    def g(x, s):
        return plain(x, context, s).square().sum()

    for one, other in zip(torch.func.grad(f, (0, 1))(x, s), torch.func.grad(g, (0, 1))(x, s), strict=True):
        close(one, other, torch.float64)
    close(torch.func.vmap(f, (0, None))(x, s), torch.func.vmap(g, (0, None))(x, s), torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: apply_context(x, context, s), (x.requires_grad_(),), check_forward_ad=True
    )


@pytest.mark.parametrize("needs_s", [True, False])
def test_kept_and_allocated_bytes(needs_s):
    """A copy of the context is kept, and the caller's x. Backward allocates no map where it owns the gradient."""
    rows, width = 1024, 256
    x, context = torch.randn(rows, width, requires_grad=True), torch.rand(width, width)
    s = torch.ones(1, requires_grad=needs_s)
    grad = torch.randn(rows, width)
    map_bytes, context_bytes = rows * width * 4, width * width * 4

    def step():
        x.grad = s.grad = None
        h = x.neg()
        y = apply_context(h, context, s)
        del h
        z = y.neg()
        del y
        z.backward(grad)

    step()
    found = leangrad.measure(step, timed_runs=0)
    # Alive when backward begins: z, the copy of the context, and h where the strength needs it.
    assert found.kept_bytes == map_bytes + context_bytes + (map_bytes if needs_s else 0)
    ours = [e for e in found.timeline if e.phase == "backward" and e.op.startswith("_ApplyContext")]
    # oneDNN's product, where it is used, reorders the context into a temporary of its own; plain's does the same.
    assert max(e.bytes for e in ours if not e.op.endswith("aten::mm")) < 1024


def test_stale_scratch_does_not_leak():
    x, context, s = inputs((16, 8), torch.float32)
    grad = torch.randn_like(x)

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = apply_context(x, context, s)
        return [low, *(g for y in (low, apply_context(x, context, s)) for g in torch.autograd.grad(y, (x, s), grad))]

    first = run()
    for buffer in list(workspace.default._buffers()):
        buffer.memory.fill_(NAN)
    for one, other in zip(run(), first, strict=True):
        assert same_bits(one, other)


@pytest.mark.fuzz
@fuzz_settings(60, 3000)
@given(
    st.lists(st.integers(0, 5), max_size=3), st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 1 << 16)
)
def test_random_shapes_and_layouts(batch, width, transposed, strided, seed):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        if transposed:
            return torch.randn(*shape[::-1], generator=generator, dtype=torch.float64).permute(*range(len(shape))[::-1])
        if strided:
            return torch.randn(*shape[:-1], shape[-1] * 2, generator=generator, dtype=torch.float64)[..., ::2]
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, context, grad = make(*batch, width), make(width, width), make(*batch, width)
    x.requires_grad_()
    s = torch.randn(1, generator=generator, dtype=torch.float64).requires_grad_()
    before = grad.clone()
    found, expected = apply_context(x, context, s), plain(x, context, s)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    pairs = zip(*(torch.autograd.grad(y, (x, s), grad) for y in (found, expected)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-11)
    assert same_bits(grad, before)


# The ops on buffers


def test_ops_write_into_what_they_are_given():
    x, context, s = (t.detach() for t in inputs())
    out = torch.full_like(x, NAN)
    assert ops.apply_context(x, context, s, out=out) is out
    close(out, plain(x, context, s), torch.float64)
    g = torch.randn_like(x)
    dx, ds = ops.apply_context_backward(g, x, context, s)
    into = torch.full_like(x, NAN)
    assert ops.apply_context_backward(g, x, context, s, into=into)[0] is into
    assert same_bits(into, dx)
    none, again = ops.apply_context_backward(g, x, context, s, needs_input=False)
    assert none is None
    assert same_bits(ds, again)
    assert ds.dtype == torch.float64
    over, _ = ops.apply_context_backward(g, None, context, s, into=g)
    assert over is g
    assert same_bits(g, dx)


# Bad input


def test_bad_input():
    x, context, s = inputs((4, 8))
    with pytest.raises(TypeError, match=r"x: expected a floating dtype, got torch\.int64"):
        apply_context(torch.ones(4, 8, dtype=torch.int64), context, s)
    with pytest.raises(ValueError, match=r"strength: expected one element, got \(2,\)"):
        apply_context(x, context, torch.ones(2))
    with pytest.raises(ValueError, match=r"one device, got cpu, meta and cpu"):
        apply_context(x, context.to("meta"), s)
    with pytest.raises(ValueError, match=r"one shape \(\.\.\., D\), got \(4, 8\) and \(4, 7\)"):
        update_context(x, x[:, 1:], 0.1)
    with pytest.raises(TypeError, match=r"expected floating dtypes"):
        update_context(x.long(), x.long(), 0.1)
