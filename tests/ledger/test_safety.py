"""What models do besides plain layers: constants that change, dtypes, layouts, frozen and shared parts.

Each program runs plain and through a ledger, three steps in a row, and must give the same bits.
"""

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from leangrad.lean import saving
from leangrad.ledger import Ledger
from leangrad.ledger.learn.entries import Totals
from tests.support import same_bits
from tests.support.autograd_thread import in_autograds_thread
from tests.support.ledger_programs import (
    assert_raises_where_plain_trains,
    assert_same,
    assert_same_as_plain,
    backward,
    grads,
    leaf,
    model,
)

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


# ------------------------------------------------------------------- what changes from step to step with one ledger


@program
def scalars_that_change(region):
    """One region after another in one step, each with other constants, so that learned decisions are in use."""
    w, results = leaf(8, 8), []
    for k in range(5):
        c = 0.3 + k / 7
        with region:
            y = (w * c + c).exp() - c
            z = (c - y).sin() + torch.where(w > 0, c, y) + y.masked_fill(w > c, c).cos()
            u = F.layer_norm(z, (8,), eps=c) + F.leaky_relu(z, c) + (z.abs() + c) ** c
            t = F.dropout(u.clamp(-c, c) / c, c / 2).sin() + F.threshold(u, c, 2 * c).cos()
        backward(t)
        results.append(w.grad.clone())
    return results


@program
def depth_that_changes(region):
    choose, results = random.Random(3), []
    blocks = [model(k) for k in range(4)]
    for k in range(8):
        with region:
            x = leaf(4, 8, seed=k)
            h = x
            for block in blocks[: choose.randint(1, 4)]:
                h = h + block(h) if choose.random() < 0.7 else block(h).relu()
            y = (h + 1).sin()
        backward(y)
        results.append(x.grad)
    return [*results, *(g for b in blocks for g in grads(b))]


@program
def shapes_that_change(region):
    choose, net, results = random.Random(4), model(), []
    for k in range(8):
        with region:
            x = leaf(choose.randint(1, 9), 8, seed=k)
            y = (net(x) + x).cumsum(0).tanh()
        backward(y)
        results.append(x.grad)
    return [*results, *grads(net)]


@program
def branch_on_data(region):
    w, results = leaf(8, 8), []
    for k in range(6):
        with region:
            y = (w * (k - 2.5)).exp()
            y = (y + 1).sin() if y.mean() > 2 else (y * 2).cos().sigmoid()
            z = y * y + 1 if y.sum() > 0 else y - 1
            z = z.tanh()
        backward(z)
        results.append(w.grad.clone())
    return results


@program
def same_signature_other_meaning(region):
    """Ops of equal names and sizes in another order: what was learned of one must not be applied to another."""
    w, v, results = leaf(8, 8), leaf(8, 8, seed=1), []
    for k in range(6):
        with region:
            a, b = (w * 2, v.exp() * 3) if k % 2 else (v.exp() * 3, w * 2)
            z = (a @ v + b).relu() * (b @ w).relu()
            y = (z + a).sin()
        backward(y)
        results.append(w.grad.clone())
    return [*results, v.grad]


# ----------------------------------------------------------------------------------------------- sharing and freezing


@program
def module_called_twice(region):
    net, x = model(), leaf(4, 8)
    with region:
        y = net(net(x) + x)
    backward(y)
    return [x.grad, *grads(net)]


@program
def tied_weights(region):
    table, x = leaf(10, 8), torch.tensor([[1, 2, 2], [9, 0, 1]])
    with region:
        h = F.gelu(F.layer_norm(F.embedding(x, table) * 3, (8,)))
        y = F.log_softmax(h @ table.t(), -1)
    backward(y)
    return [table.grad]


@program
def frozen_parts(region):
    net, x = model(), leaf(4, 8)
    net[0].weight.requires_grad_(False)
    net[1].bias.requires_grad_(False)
    net[4].requires_grad_(False)
    with region:
        y = net(x.detach()) + net(net[0](x.detach()).detach())
    backward(y)
    return grads(net)


@program
def no_grad_and_eval_inside(region):
    net, x = model(), leaf(4, 8)
    with region:
        with torch.no_grad():
            target = net(x)
            target.mul_(2)
        net.eval()
        y = net(x)
        net.train()
        z = (net(x) - target).sin() * y
        with torch.no_grad(), torch.enable_grad():
            u = (z * 2).exp()
    backward(u)
    return [x.grad, *grads(net)]


@program
def inference_tensors_as_operands(region):
    w = leaf(8, 8)
    with torch.inference_mode():
        m = torch.ones(8, 8) * 2
    with region:
        with torch.inference_mode():
            k = m + 1
        z = (w.exp() + m).sin() + torch.cat([w.exp(), k])[:8].cos()
    backward(z)
    return [w.grad]


# ------------------------------------------------------------------------------------------------------------- dtypes


def autocast_program(inside, backward_inside, backward_under):
    def run(region):
        net, x = model(), leaf(4, 8)
        region_outside, region_inside = (region, None) if inside else (None, region)

        def forward():
            y = net(x)
            y = y + net(y)
            with torch.autocast("cpu", enabled=False):
                y = y.float() * 2
            return (net(y) + y).sin()

        if region_outside is not None:
            with region_outside, torch.autocast("cpu", torch.bfloat16):
                y = forward()
                if backward_inside:
                    backward(y)
        else:
            with torch.autocast("cpu", torch.bfloat16), region_inside:
                y = forward()
                if backward_inside:
                    backward(y)
        if not backward_inside:
            with torch.autocast("cpu", torch.bfloat16, enabled=backward_under):
                backward(y)
        return [x.grad, *grads(net)]

    run.__name__ = f"autocast_{inside=}_{backward_inside=}_{backward_under=}".replace("=", "_")
    return program(run)


for _case in [
    (True, False, False),
    (True, False, True),
    (True, True, False),
    (False, False, False),
    (False, True, True),
]:
    autocast_program(*_case)


@program
def autocast_weight_cache(region):
    """The cast of a weight is made once and used by all calls inside autocast, under the region and outside of it."""
    net, x = model(), leaf(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        a = net(x)
        with region:
            b = net(x + 1)
        c = net(x + 2)
        with region:
            d = net(x + 3).float().exp()
    backward(a, b, c, d)
    return [x.grad, *grads(net)]


@program
def casts_there_and_back(region):
    w = leaf(8, 8)
    with region:
        y = (w.bfloat16() * 1.7).float() + w.double()
        a = (y.to(torch.float32) + 1).sin()
        b = (y.to(torch.bfloat16).to(torch.float64) * 2).exp()
        c = w.to(torch.float32, copy=True).exp().sin()
        d = (w.to(torch.float32, copy=True) + 1).cos()
    before = w.detach().clone()
    backward(a, b, c, d)
    assert same_bits(before, w), "backward changed the parameter"
    return [w.grad]


@program
def casts_into_a_memory_format(region):
    w = leaf(2, 3, 4, 4)
    with region:
        y = w.exp()
        a, b = y.double(), y.double(memory_format=torch.channels_last)
        c = y.to(torch.float64, memory_format=torch.channels_last)
        d = y.contiguous(memory_format=torch.channels_last)
        e = b.permute(0, 2, 3, 1).view(2, -1)
        outputs = [a.sin(), b.softmax(1).exp(), b.sum((2, 3)).cos(), c.sin(), (d + 1).sum((2, 3)).exp(), e.exp()]
    backward(*outputs)
    return [w.grad]


@program
def no_dimensions(region):
    w, v = leaf(seed=0), leaf(seed=1)
    with region:
        y = w.bfloat16() * 2.5
        a = (y * 3.5 + 1).sin()
        b = (y.exp() + v).cos()
        c = (v.double() * w).tanh() + torch.ones(3) * w
    backward(a, b, c)
    return [w.grad, v.grad]


@program
def no_elements(region):
    w, v = leaf(0, 8), leaf(8, 8)
    with region:
        a = F.softmax((w @ v).exp() + 1, -1).sin()
        b = torch.cat([w * 2, v.exp()]).cos()
        c = F.dropout(w.exp(), 0.5).sum() + v.exp().sum()
    backward(a, b, c)
    return [w.grad, v.grad]


@program
def complex_numbers(region):
    w = leaf(8, 8)
    with region:
        y = torch.complex(w, w * 2)
        a = ((y * 1.5 + 2j).abs() + 1).sin()
        b = (y * y.conj()).real.sin() + (y.exp() + 1).imag.cos()
        c = torch.view_as_real(y * 2).exp()
        x = w * 1.5
        d = ((x * (1 + 2j) + 1).exp().abs() + 1).sin()
        e = ((x * 2) * torch.tensor(1j) + 1).sin().abs()
        f = torch.view_as_complex((w * 2).view(8, 4, 2)).angle().sin()
        g = torch.fft.fft(w.exp()).abs().sin()
        h = torch.constant_pad_nd(y * 2, (1, 1), 2.5 - 1j).abs().sin()
    backward(a, b, c, d, e, f, g, h)
    return [w.grad]


@program
def sparse_tensors(region):
    i, v, d = torch.tensor([[0, 1, 2], [2, 0, 1]]), leaf(3), leaf(3, 4, seed=2)
    with region:
        s = torch.sparse_coo_tensor(i, v * 2, (3, 3))
        a = torch.sparse.mm(s, d.exp()).sin()
        b = (d * 2).to_sparse().to_dense().cos()
        c = F.embedding(torch.tensor([1, 2, 2]), d, sparse=False).sin()
    backward(a, b, c)
    return [v.grad.to_dense(), d.grad]


@program
def sparse_gradients(region):
    w = leaf(10, 4)
    with region:
        z = (F.embedding(torch.tensor([1, 2, 2]), w, sparse=True) * 2).sin().exp()
    backward(z)
    return [w.grad.to_dense()]


@program
def layouts(region):
    """Reductions over transposed and expanded tensors: another stride would give other bits."""
    w, v = leaf(1, 33, seed=1), leaf(33, 33)
    with region:
        y = (w * 2).expand(33, 33)
        a = (y + 1).sin().sum(0)
        b = (y * v).cos().mean(1)
        c = (v.t() * 2 + v).exp().clamp(max=3).sum(0)
        d = F.softmax(v.t()[::2] * 3, 0).var(0)
    backward(a, b, c, d)
    return [w.grad, v.grad]


@program
def many_outputs(region):
    """More pieces than fit in a small table: a recurrence over 300 steps."""
    w = leaf(300, 4)
    with region:
        h = torch.zeros(4)
        for t in (w * 2).unbind(0):
            h = (h + t).tanh()
        pieces = torch.stack([p.exp() for p in (w * 0.1).split(1)]).sum(0)
    backward(h, pieces)
    return [w.grad]


@program
def numpy_scalars(region):
    x = leaf(8, 8)
    with region:
        a = ((x * np.float64(1.5) + np.float32(2)) - np.int64(3)).sin()
        b = (x.exp() + True).cos()
    backward(a, b)
    return [x.grad]


def _over_other_strides(change):
    """The sum of a tensor that is not contiguous and was changed in place, in a form whose results are contiguous."""

    def over_other_strides(region):
        w, scale = leaf(200, 300), leaf(300, 200, seed=1)
        with region:
            y = w.t() * 1.5
            change(y, torch.arange(y.numel()).reshape(y.shape) % 3 == 0)
            z = (y.mean(0) * scale).sin()
        backward(z)
        return [w.grad, scale.grad]

    return over_other_strides


ROWS = torch.arange(4) * 7
for _name, _change in {
    "masked_fill_": lambda y, mask: y.masked_fill_(mask, 0.3),
    "masked_fill_tensor": lambda y, mask: y.masked_fill_(mask, leaf(seed=3)),
    "masked_scatter_": lambda y, mask: y.masked_scatter_(mask, leaf(*y.shape, seed=2)),
    "tril_": lambda y, mask: y.tril_(),
    "triu_": lambda y, mask: y.triu_(),
    "cumsum_": lambda y, mask: y.cumsum_(1),
    "cumprod_": lambda y, mask: y.cumprod_(1),
    "index_add_": lambda y, mask: y.index_add_(0, ROWS, leaf(4, y.shape[1], seed=2)),
    "index_copy_": lambda y, mask: y.index_copy_(0, ROWS, leaf(4, y.shape[1], seed=2)),
    "scatter_": lambda y, mask: y.scatter_(0, mask.long() * 5, 0.3),
    "scatter_add_": lambda y, mask: y.scatter_add_(0, mask.long() * 5, leaf(*y.shape, seed=2)),
    "index_fill_": lambda y, mask: y.index_fill_(0, ROWS, 0.3),
    "clamp_": lambda y, mask: y.clamp_(-1, 1),
}.items():
    _program = _over_other_strides(_change)
    _program.__name__ = f"sum_after_{_name}"
    program(_program)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda p: p.__name__)
def test_the_same_bits(case):
    assert_same_as_plain(case)


def test_an_anchor_that_changes_twice():
    """First as autograd records it, then unseen: a copy that is made in between is not what recipes have read."""

    def twice(region, changes):
        p = leaf(8, 8)
        with region:
            y = p + 1
            other = p * 2
            other.detach().mul_(0.5)  # what was made so far is rebuilt no more
            beside = y.sin()  # keeps it, and gets no gradient
            z = y.double().sin()
            if changes:
                y[:1] = 2.0
                with torch.no_grad():
                    y.mul_(1.5)
        backward(z)
        return [p.grad, beside.detach()]

    assert_raises_where_plain_trains(twice, "AddBackward0")


def test_the_default_size_below_which_tensors_are_kept():
    """The same with the default ``min_bytes``, on tensors large enough to be looked into."""

    def run(region):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(0.2), nn.Linear(128, 64))
        x, results = leaf(96, 64), []
        for k in range(3):
            with region:
                y = (net(x * (k + 1)) + x).relu().log_softmax(-1)
            backward(y)
            results.append(x.grad.clone())
        return [*results, *grads(net)]

    plain = run(saving(min_bytes=1 << 40))
    ledger = saving()
    mine = run(ledger)
    # The input, the noise of the dropout, and the outputs of GELU, dropout and log_softmax are rebuilt; the first
    # product and the ReLU are kept.
    rebuilt_bytes = 96 * (64 + 128 + 128 + 128 + 64) * 4
    assert ledger.totals() == Totals(kept_bytes=96 * (128 + 64) * 4, rebuilt_bytes=rebuilt_bytes, shared_bytes=0)
    assert_same(mine, plain, "min_bytes")


def test_a_backward_that_failed_teaches_nothing():
    """Its record ends where it failed; the next step is recorded anew."""
    ledger = saving(min_bytes=0)
    for fails in (True, True, False, False):
        w = leaf(8, 8)
        with ledger:
            y = (w @ w).sigmoid().sin()
        if fails:
            y.register_hook(lambda g: g.new_zeros(3))
            with pytest.raises(RuntimeError):
                backward(y)
        else:
            backward(y)
        if fails:
            assert ledger.decisions is None
    assert ledger.decisions is not None


@pytest.mark.parametrize("device", ["cpu", "cpu in a thread", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("products", [0, 8])
def test_weights_that_autocast_has_cast_before_they_changed(device, products):
    """One autocast around several steps of an optimizer: forward goes on with the weights of the first step.

    Whoever writes that trains nothing; but gradients are those of the forward that has run, as plain's are, and what
    autocast has cast stays cast.
    """
    device, in_thread = device.partition(" ")[0], "thread" in device

    def run(region):
        torch.manual_seed(0)
        layers = (nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32))
        net = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(device)
        found = []
        with torch.autocast(device, torch.bfloat16):
            for _ in range(5):
                with region:
                    y = net(x)
                loss = y.float().square().mean()
                in_autograds_thread(loss.backward) if in_thread else loss.backward()
                found.append([p.grad.clone() for p in net.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        return found

    plain = run(contextlib.nullcontext())
    lean = run(Ledger(residual_depth=0, min_bytes=0, products=products))
    for n, (a, b) in enumerate(zip(lean, plain, strict=True)):
        assert_same(a, b, n)


@pytest.mark.parametrize("device", ["cpu", "cpu in a thread", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_that_autocast_has_cast_before_they_changed_under_a_checkpoint(device, reentrant):
    """A segment that runs again finds in autocast's cache what forward has cast, in another thread on a GPU."""
    device, in_thread = device.partition(" ")[0], "thread" in device

    def run(region):
        torch.manual_seed(0)
        layers = (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU())
        net, inner = nn.Linear(32, 32).to(device), nn.Sequential(*layers).to(device)
        parameters = [*net.parameters(), *inner.parameters()]
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(device)
        found = []
        for _ in range(4):
            with torch.autocast(device, torch.bfloat16):
                net(inner(x))
                with torch.no_grad():
                    torch._foreach_mul_(parameters, 1.5)
                with region:
                    y = checkpoint(inner, net(x), use_reentrant=reentrant)
                loss = y.float().square().mean()
                in_autograds_thread(loss.backward) if in_thread else loss.backward()
            found.append([p.grad.clone() for p in parameters])
            for p in parameters:
                p.grad = None
        return found

    plain = run(contextlib.nullcontext())
    lean = run(Ledger(residual_depth=0, min_bytes=0))
    for n, (a, b) in enumerate(zip(lean, plain, strict=True)):
        assert_same(a, b, n)
