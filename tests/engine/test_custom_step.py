"""Steps of the user's own on a tape: every way to return a gradient gives autograd's, and nobody's memory is harmed."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.engine.single_node import run
from leangrad.measure import measure
from leangrad.tape import Tape
from tests.support import same_bits


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def layer_norm(tape, x, weight):
    """Keeps x and its statistics, and writes dx where it is told to."""

    def forward(x, weight):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, None, 1e-5)
        return y, mean, rstd

    def backward(turn):
        (x, weight), (mean, rstd) = turn.values, turn.kept
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            turn.grad, x, x.shape[-1:], mean, rstd, weight, None, [turn.needs[0], turn.needs[1], False]
        )
        return (turn.room(0).copy_(dx) if turn.needs[0] else None), dw

    return tape.step(forward, backward, x, weight, reads=(0, 1))


def scale(tape, x, factor):
    """Keeps nothing, and writes over the gradient where it may."""
    return tape.step(
        lambda x: (x * factor,),
        lambda turn: [turn.grad.mul_(factor) if turn.owned else turn.grad * factor],
        x,
    )


def same_grad_to_both(tape, a, b):
    return tape.step(lambda a, b: (a + b,), lambda turn: (turn.grad, turn.grad), a, b)


def halves(tape, a, b):
    """Each gets a view of one gradient."""
    rows = a.shape[0]
    return tape.step(lambda a, b: (torch.cat([a, b]),), lambda turn: (turn.grad[:rows], turn.grad[rows:]), a, b)


def flat(tape, x):
    """A view of the input: never to be overwritten."""
    return tape.step(lambda x: (x.view(-1),), lambda turn: [turn.grad.view(x.shape)], x)


def total(tape, x):
    """The gradient is expanded: it overlaps itself."""
    return tape.step(lambda x: (x.sum(0, keepdim=True),), lambda turn: [turn.grad.expand(x.shape)], x)


def product(tape, a, b):
    return tape.step(
        lambda a, b: (a * b,),
        lambda turn: (turn.grad * turn.values[1], turn.grad * turn.values[0]),
        a,
        b,
        reads=(0, 1),
    )


def exp(tape, x):
    return tape.step(lambda x: (x.exp(),), lambda turn: [turn.output * turn.grad], x, reads_output=True)


def value_as_gradient(tape, x):
    """d(x²/2) = x: with a gradient of ones the kept value itself is the answer."""
    return tape.step(lambda x: (x.square() / 2,), lambda turn: [turn.values[0]], x, reads=(0,))


PROGRAMS = {
    "norms": (
        lambda t, x, w: scale(t, layer_norm(t, t.linear(layer_norm(t, x, w), t.mul(w2(t, w), w2(t, w))), w), 3),
        lambda x, w: F.layer_norm(F.linear(F.layer_norm(x, (4,), w), outer(w) * outer(w)), (4,), w) * 3,
    ),
    "lent": (
        lambda t, x, w: same_grad_to_both(t, scale(t, x, 2), t.activate(scale(t, x, 3), "tanh")),
        lambda x, w: 2 * x + (3 * x).tanh(),
    ),
    "halves": (
        lambda t, x, w: scale(t, halves(t, scale(t, x, 2), t.activate(scale(t, x, 5), "sigmoid")), 3),
        lambda x, w: torch.cat([2 * x, (5 * x).sigmoid()]) * 3,
    ),
    "a view": (
        lambda t, x, w: t.activate(flat(t, t.activate(scale(t, x, 2), "gelu")), "relu"),
        lambda x, w: F.gelu(2 * x).view(-1).relu(),
    ),
    "a view of the input": (lambda t, x, w: t.activate(flat(t, x), "relu"), lambda x, w: x.view(-1).relu()),
    "expanded": (
        lambda t, x, w: total(t, t.activate(t.activate(scale(t, x, 2), "tanh"), "gelu")),
        lambda x, w: F.gelu((2 * x).tanh()).sum(0, keepdim=True),
    ),
    "expanded twice": (
        lambda t, x, w: t.add(total(t, x), total(t, scale(t, x, 3))),
        lambda x, w: 4 * x.sum(0, keepdim=True),
    ),
    "product": (
        lambda t, x, w: product(t, t.activate(scale(t, x, 2), "gelu"), exp(t, x)),
        lambda x, w: F.gelu(2 * x) * x.exp(),
    ),
    "squared": (lambda t, x, w: product(t, exp(t, x), exp(t, x)), lambda x, w: (2 * x).exp()),
}


def w2(tape, w):
    return tape.step(lambda w: (outer(w),), lambda turn: [turn.grad.sum(0)], w)


def outer(w):
    return w.expand(4, 4) + torch.zeros(4, 4, dtype=w.dtype)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_match_autograd(name, needs):
    program, plain = PROGRAMS[name]
    x, w = leaf(3, 4).detach().requires_grad_(needs[0]), leaf(4).detach().requires_grad_(needs[1])
    wanted = [t for t in (x, w) if t.requires_grad]
    y = plain(x, w)
    if not y.requires_grad:
        return
    g = torch.randn_like(y)
    expected = torch.autograd.grad(y, wanted, g, allow_unused=True)
    before = [t.detach().clone() for t in (x, w, g)]

    def check(found):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-12)

    for keep in (False, True):
        tape = Tape(keep=keep)
        variables = [tape.watch(t, needs_grad=t.requires_grad) for t in (x, w)]
        out = program(tape, *variables)
        for _ in range(1 + keep):
            tape.backward(out, g)
            check([v.grad for v in variables if v.needs_grad])
    once = run(program, plain, x, w)
    assert torch.allclose(once, y)
    check(torch.autograd.grad(once, wanted, g, retain_graph=True, allow_unused=True))
    check(torch.autograd.grad(once, wanted, g, allow_unused=True))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        once = run(program, plain, x, w)
    check(torch.autograd.grad(once, wanted, g, allow_unused=True))
    assert all(same_bits(now, then) for now, then in zip((x, w, g), before, strict=True))


def test_a_value_that_is_returned_as_a_gradient_is_left_alone():
    x, g = leaf(3, 4), torch.ones(3, 4, dtype=torch.float64)
    before = x.detach().clone()
    y = run(lambda t, x: value_as_gradient(t, scale(t, value_as_gradient(t, x), 1)), None, x)
    for keep in (True, False):
        (found,) = torch.autograd.grad(y, x, g, retain_graph=keep)
        assert same_bits(found, before)  # what the first step returns, whatever comes to it
        found.zero_()
    assert same_bits(x, before)


def test_empty_and_kept_inputs():
    """What forward keeps may be its input, or empty; nothing of either is overwritten."""

    def program(tape, x):
        h = tape.step(lambda x: (x * 2, x), lambda turn: [turn.grad * 2 + 0 * turn.kept[0]], scale(tape, x, 3))
        return tape.activate(h, "relu")

    for rows in (0, 3):
        x, g = leaf(rows, 4), torch.randn(rows, 4, dtype=torch.float64)
        (expected,) = torch.autograd.grad((6 * x).relu(), x, g)
        (found,) = torch.autograd.grad(run(program, None, x), x, g)
        assert same_bits(found, expected)


def test_no_map_is_allocated_by_steps_that_use_their_room():
    """After warm-up the gradients of a chain of norms take turns in the memory that is there."""
    rows, width, depth = 2048, 64, 6
    x = torch.randn(rows, width)
    weights = [torch.randn(width, width).div_(8).requires_grad_() for _ in range(depth)]
    grad = torch.randn(rows, width)

    def double(tape, x):
        return tape.step(lambda x: (x * 2,), lambda turn: [torch.mul(turn.grad, 2, out=turn.room(0))], x)

    def program(tape, x, *weights):
        for weight in weights:
            x = double(tape, tape.linear(x, weight))
        return x

    def step():
        for weight in weights:
            weight.grad = None
        run(program, None, x, *weights).backward(grad)

    found = measure(step, timed_runs=1)
    allocated = [e.bytes for e in found.timeline if e.phase == "backward" and e.bytes >= x.numel() * 4]
    assert allocated == []
    assert found.kept_bytes == depth * x.numel() * 4  # x is the caller's; one map a layer, the last one its output


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="forward: what it returns beside its output lies in the output"):
        Tape().step(lambda: (y := torch.ones(3), y.view(-1)), lambda turn: [])
    tape = Tape()
    x = tape.watch(torch.zeros(3))
    y = tape.step(lambda x, b: (x * 2,), lambda turn: [turn.grad], x, None)
    with pytest.raises(ValueError, match="backward: expected 2 gradients, one for each input, got 1"):
        tape.backward(y)
    tape = Tape()
    x = tape.watch(torch.zeros(3))
    y = tape.step(lambda x: (x * 2,), lambda turn: [turn.grad[:2]], x)
    with pytest.raises(ValueError, match=r"backward: expected a gradient of \(3,\) and torch.float32 for input 0"):
        tape.backward(y)
    tape = Tape()
    y = tape.step(lambda x, b: (x * 2,), lambda turn: [turn.room(1), None], tape.watch(torch.zeros(3)), None)
    with pytest.raises(ValueError, match="i: input 1 of this step is None"):
        tape.backward(y)
