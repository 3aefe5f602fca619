"""Backward in every manner: again, twice over, in part, batched, through hooks. The same bits as plain each time."""

import pytest
import torch
import torch.nn.functional as F

from leangrad.lean import saving
from tests.support.ledger_programs import STEPS, assert_same_as_plain, backward, grads, leaf, model

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


@program
def retained_three_times(region):
    w = leaf(8, 8)
    with region:
        z = F.dropout((w * 2).exp() + w, 0.4).sin()
    for k in range(3):
        backward(z, retain_graph=k < 2)
    return [w.grad]


@program
def twice_with_other_gradients(region):
    net, x = model(), leaf(4, 8)
    with region:
        y = net(x)
    g1 = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    g2 = torch.autograd.grad(y, x, torch.full_like(y, 2.0))
    return [*g1, *g2]


@program
def gradient_penalty(region):
    w, x = leaf(8, 8), leaf(8, 8, seed=1)
    with region:
        z = F.layer_norm(F.gelu(x @ w) + x, (8,)).tanh() @ w
    (g,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    ((g.norm() - 1) ** 2 + z.mean()).backward()
    return [w.grad, x.grad]


@program
def gradient_penalty_inside_the_region(region):
    net, x = model(), leaf(4, 8)
    with region:
        y = (net(x * 2) + 1).sin()
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        loss = ((g.norm(dim=1) - 1) ** 2).mean() + y.mean()
    loss.backward()
    return [x.grad, *grads(net)]


@program
def third_derivative(region):
    x = leaf(8)
    with region:
        y = (x.sin() * 2 + 1).exp().tanh().sum()
    for _ in range(3):
        (y,) = torch.autograd.grad(y.square().sum() if y.dim() else y, x, create_graph=True)
    return [y.detach()]


@program
def grad_without_graph_inside_the_region(region):
    """The gradient of a part steers the rest of the forward."""
    w = leaf(8, 8)
    with region:
        y = (w * 2).exp()
        (g,) = torch.autograd.grad((y + 1).sin().sum(), w, retain_graph=True)
        z = (y * g).cos()
    backward(z)
    return [w.grad]


@program
def backward_inside_the_region(region):
    net, x = model(), leaf(4, 8)
    with region:
        backward(net(x))
        backward(net(x + 1))
    return [x.grad, *grads(net)]


@program
def losses_on_a_shared_trunk(region):
    net, x, u, v = model(), leaf(4, 8), leaf(8, 8, seed=1), leaf(8, 8, seed=2)
    with region:
        trunk = net(x)
        a, b = (trunk @ u).sin(), ((trunk + 1) * 2 @ v).exp()
    a.mean().backward(retain_graph=True)
    b.mean().backward(retain_graph=True)
    (a.mean() * b.mean()).backward()
    return [x.grad, u.grad, v.grad, *grads(net)]


@program
def in_part_and_then_whole(region):
    w, x = leaf(8, 8), leaf(8, 8, seed=1)
    with region:
        t = (w * 2).exp() + 1
        a, b = t.sin(), (t * x).cos()
    backward(a, retain_graph=True)
    backward(b, inputs=[x], retain_graph=True)
    backward(b)
    return [w.grad, x.grad]


@program
def inputs_of_any_depth(region):
    net, x = model(), leaf(4, 8)
    with region:
        h = net[1](net[0](x))
        y = net[4](net[2](h)).exp()
    backward(y, inputs=[net[4].bias], retain_graph=True)
    backward(y, inputs=[h, net[0].weight], retain_graph=True)
    (g,) = torch.autograd.grad(y.square().sum(), h)
    return [g, h.grad, *grads(net)]


@program
def batched_gradients(region):
    w = leaf(8, 8)
    with region:
        z = (F.softmax(w.exp() * 2 + 1, -1) + w).sin()
    return [*torch.autograd.grad(z, w, torch.eye(64).view(64, 8, 8), is_grads_batched=True)]


@program
def batched_gradients_through_dropout(region):
    w = leaf(8, 8)
    with region:
        z = F.dropout(w.exp(), 0.5).sin()
    return [*torch.autograd.grad(z, w, torch.eye(64).view(64, 8, 8)[:5], is_grads_batched=True)]


@program
def hooks_on_tensors(region):
    w = leaf(8, 8)
    with region:
        y = (w * 2).exp()
        y.register_hook(lambda g: g * 2)
        y.retain_grad()
        z = (y + 1).sin()
        z.grad_fn.register_hook(lambda after, before: tuple(g * 3 for g in after))
        z.grad_fn.register_prehook(lambda before: tuple(g + 1 for g in before))
    backward(z)
    return [w.grad, y.grad]


@program
def hooks_on_modules(region):
    net, x = model(), leaf(4, 8)
    seen = []
    net[2].register_full_backward_hook(lambda m, after, before: (after[0] * 2,))
    net[1].register_full_backward_pre_hook(lambda m, before: (before[0] * 3,))
    net[0].register_forward_hook(lambda m, args, out: out + 1)
    net[4].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    net.register_full_backward_hook(lambda m, after, before: seen.append(after[0].clone()))
    with region:
        y = net(x)
    backward(y)
    return [x.grad, *grads(net), *seen]


@program
def accumulated_over_micro_batches(region):
    net = model()
    for k in range(4):
        with region:
            y = net(leaf(4, 8, seed=k))
        backward(y)
    return grads(net)


@program
def graphs_that_overlap(region):
    """The second forward runs before the first backward."""
    net, losses = model(), []
    for k in range(3):
        with region:
            losses.append(net(leaf(4, 8, seed=k)).square().mean())
    for k in (1, 0, 2):
        losses[k].backward()
    return grads(net)


@program
def optimizer_step_inside_backward(region):
    net = model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

    def update(p):
        optimizers[p].step()
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    for k in range(3):
        with region:
            y = net(leaf(4, 8, seed=k)) + net[0](leaf(4, 8, seed=9))
        backward(y)
    return [p.detach().clone() for p in net.parameters()]


@program
def saved_tensors_read_by_hand(region):
    w = leaf(8, 8)
    with region:
        y = (w * 2).exp() + 1
        z = y.sin()
    saved = z.grad_fn._saved_self.detach().clone()
    backward(z)
    return [w.grad, saved]


@program
def anomaly_mode(region):
    w = leaf(8, 8)
    with torch.autograd.detect_anomaly(check_nan=True), region:
        z = ((w * 2).exp() + 1).sin()
        backward(z)
    return [w.grad]


@program
def forward_over_reverse(region):
    w = leaf(8, 8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w.detach().requires_grad_(), torch.ones(8, 8))
        with region:
            z = ((dual * 2).exp() + 1).sin() * dual
        value, tangent = torch.autograd.forward_ad.unpack_dual(z)
        (g,) = torch.autograd.grad(tangent.square().sum(), dual)
    return [value.detach(), tangent.detach(), torch.autograd.forward_ad.unpack_dual(g)[0].detach()]


@program
def a_loop_longer_than_pythons_stack(region):
    """One op on the other, and no sum of two lineages: each that is saved is rebuilt from the one saved before it."""
    w = leaf(8, 8)
    with region:
        h = w * 2
        z = h.sin()
        for t in range(1200):
            h = h * 0.99 + 0.01
            if t % 20 == 19:
                z = z + h.sin()
    backward(z)
    return [w.grad]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own rules for forward mode
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda p: p.__name__)
def test_the_same_bits(case):
    assert_same_as_plain(case)


def test_a_second_backward_without_retain_graph_raises_as_plain_does():
    ledger = saving(min_bytes=0)
    for _ in range(STEPS):
        w = leaf(8, 8)
        with ledger:
            z = ((w * 2).exp() + 1).sin()
        backward(z)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            backward(z)
    assert ledger.totals().rebuilt_bytes == 2 * 8 * 8 * 4  # what exp gave, and the sum


def test_a_recipe_that_branches_is_replayed_once():
    """``y + roll(y)`` n times over: 2**n paths lead to the parameter, but there are only n sums to replay."""
    calls = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal calls
            calls += 1
            return func(*args, **(kwargs or {}))

    w = leaf(8, 8)
    with saving(residual_depth=2, min_bytes=0):
        y = w * 1
        for _ in range(12):
            y = y + y.roll(1)
        z = y.sin()
    with Count():
        z.backward(torch.ones_like(z))
    assert 12 * 2 <= calls < 200, calls
