"""`activate` inside autograd: plain's gradients in every graph, in place where ours, copied where not."""

import pytest
import torch
import torch.nn.functional as F

from leangrad.functional import activate
from leangrad.measure import measure
from leangrad.ops.activation import ACTIVATIONS
from tests.support import same_bits
from tests.support.activation import PLAIN

SHAPE = (5, 8)


def grads(f, build, dtype=torch.float64):
    """The output and the gradients of a graph around the activation `f`, with a random grad_output."""
    torch.manual_seed(1)
    x = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
    w = torch.randn(SHAPE[1], SHAPE[1], dtype=dtype, requires_grad=True)
    y = build(f, x, w)
    return y, *torch.autograd.grad(y, (x, w), torch.randn_like(y), allow_unused=True)


def back(y, h):
    """Gated activations halve the width: bring it back, to close a residual."""
    return y if y.shape == h.shape else torch.cat([y, y], -1)


GRAPHS = {
    "alone": lambda f, x, w: f(x),
    "sum": lambda f, x, w: f(x).sum(),
    "between products": lambda f, x, w: (lambda y: y @ w[: y.shape[-1]])(f(x @ w)),
    "residual": lambda f, x, w: (lambda h: h + back(f(h), h))(x @ w),
    "residual, other order": lambda f, x, w: (lambda h: back(f(h), h) + h)(x @ w),
    "twice": lambda f, x, w: (lambda h: back(f(h), h) * 2 + back(f(h), h) * 3)(x @ w),
    "two consumers": lambda f, x, w: (lambda y: y * 2 + y.exp())(f(x @ w)),
    "cat": lambda f, x, w: torch.cat([f(x @ w), f(x)], 0),
    "stacked": lambda f, x, w: back(f(back(f(x @ w), x)), x) * 2,
    "viewed": lambda f, x, w: f((x @ w).view(2, 5, 4)).reshape(-1) * 2,
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", PLAIN)
def test_gradients_are_plains(name, graph):
    found = grads(lambda x: activate(x, name), GRAPHS[graph])
    expected = grads(PLAIN[name], GRAPHS[graph])
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert same_bits(one, other)


@pytest.mark.parametrize("name", PLAIN)
def test_double_backward(name):
    x = (torch.randn(3, 4, dtype=torch.float64) + 0.05).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: activate(x, name), (x,))
    assert torch.autograd.gradgradcheck(lambda x: activate(x, name), (x,))


@pytest.mark.parametrize("name", ["relu", "gelu", "tanh", "swiglu"])
def test_retain_graph(name):
    x = torch.randn(SHAPE, requires_grad=True)
    y = activate(x, name)
    loss = (y * torch.randn_like(y)).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert same_bits(first, second)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_batch_of_gradients_at_once(name):
    x = torch.randn(3, 8, requires_grad=True)
    ours, theirs = activate(x, name), PLAIN[name](x)
    several = torch.randn(4, *ours.shape)
    found, expected = (torch.autograd.grad(y, x, several, is_grads_batched=True)[0] for y in (ours, theirs))
    torch.testing.assert_close(found, expected)


def test_what_a_hook_holds_is_not_overwritten():
    x = torch.randn(SHAPE, requires_grad=True)
    held = []
    y = activate(x, "gelu")
    y.register_hook(lambda grad: held.append(grad))
    z = y * 2
    z.backward(torch.ones_like(z))
    assert same_bits(held[0], torch.full_like(y, 2))


def test_an_output_changed_in_place_is_an_error():
    x = torch.randn(SHAPE, requires_grad=True)
    y = activate(x, "relu")
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", PLAIN)
def test_kept_and_allocated_bytes(name):
    """One map is kept; backward allocates none where it owns the gradient (twice the output for gated ones)."""
    record = ACTIVATIONS[name]
    x = torch.randn(512, 1024, requires_grad=True)
    y_bytes = x.numel() * 4 // (2 if record.gated else 1)
    grad = torch.randn(512, 1024 // (2 if record.gated else 1))

    def step():
        x.grad = None
        h = x.neg()
        y = activate(h, name)
        del h
        z = y.neg()
        del y
        z.backward(grad)

    found = measure(step, timed_runs=1)
    # Alive when backward begins: z, and what the activation keeps: its output, or its input.
    assert found.kept_bytes == y_bytes + (y_bytes if record.keeps == "output" else x.numel() * 4)
    node = [e for e in found.timeline if e.phase == "backward" and e.bytes > 0 and e.op.startswith("_Activate")]
    largest = max((e.bytes for e in node), default=0)
    if record.gated:
        assert largest == x.numel() * 4
    elif name == "softmax" or (name == "mish" and torch.get_num_threads() > 1):
        assert largest == y_bytes  # softmax needs whole rows; mish in chunks would give other bits with more threads
    else:
        assert largest <= 4 * 2**18


def test_without_grad_it_is_plain():
    x = torch.randn(SHAPE)
    assert activate(x, "gelu").grad_fn is None
    with torch.no_grad():
        assert activate(x.requires_grad_(), "gelu").grad_fn is None
    with torch.inference_mode():
        assert same_bits(activate(x, "relu"), F.relu(x))


@pytest.mark.parametrize("name", PLAIN)
def test_under_autocast(name):
    x = torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = activate(x, name), PLAIN[name](x)
    assert y.dtype == z.dtype
    g = torch.randn_like(y)
    assert same_bits(*torch.autograd.grad(y, x, g), *torch.autograd.grad(z, x, g))


def test_transforms_and_subclasses_run_plain():
    x = torch.randn(SHAPE)
    per_row = torch.func.vmap(torch.func.grad(lambda row: activate(row, "gelu").square().sum()))(x)
    plain = torch.func.vmap(torch.func.grad(lambda row: F.gelu(row).square().sum()))(x)
    assert same_bits(per_row, plain)

    class Tagged(torch.Tensor):
        pass

    y = activate(x.as_subclass(Tagged).requires_grad_(), "relu")
    assert type(y) is Tagged
    assert "_Activate" not in str(y.grad_fn) + str(y.grad_fn.next_functions)


def test_compiled():
    x = torch.randn(SHAPE, requires_grad=True)
    compiled = torch.compile(lambda x: activate(x * 2, "gelu") * 2, backend="aot_eager", fullgraph=True)
    y, z = compiled(x), F.gelu(x * 2) * 2
    g = torch.randn_like(y)
    assert same_bits(*torch.autograd.grad(y, x, g), *torch.autograd.grad(z, x, g))


def test_bad_input_names_the_argument():
    with pytest.raises(TypeError, match="x: expected a tensor, got list"):
        activate([1.0], "relu")
    with pytest.raises(TypeError, match=r"x: expected a floating dtype, got torch.int64"):
        activate(torch.ones(2, dtype=torch.int64), "relu")
    with pytest.raises(ValueError, match=r"x: swiglu needs an even last dimension .*\(2, 3\)"):
        activate(torch.ones(2, 3), "swiglu")
    with pytest.raises(ValueError, match="activation: expected one of"):
        activate(torch.ones(2, 3), "rélu")
