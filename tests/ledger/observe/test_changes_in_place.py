"""Changes in place that autograd records: plain's bits, plain's errors, and plain's order of nodes."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leangrad.lean import saving
from tests.support.ledger_programs import (
    WITNESS_BYTES,
    assert_raises_like_plain,
    assert_same_as_plain,
    backward,
    leaf,
    rebuilds,
    witness,
)

SAME = []  # programs that must give plain's bits


def same(program):
    SAME.append(program)
    return program


# -------------------------------------------------------------------------------- changes that autograd records


@same
def in_place_chain(region):
    w = leaf(8, 8)
    with region:
        y = w @ w
        y += 1
        y.sub_(w)
        F.leaky_relu(y, 0.2, inplace=True)
        a = (y * 2).sin()
        y = F.silu(y * 1.5, inplace=True).mul_(2)
        y.sigmoid_()
        b = (y + 1).cos()
    backward(a, b)
    return [w.grad]


@same
def inside_vmap(region):
    """What a transform has wrapped has no memory that one could ask for."""
    w = leaf(8, 8)
    with region:
        y = (w * 3).sin()
        z = torch.func.vmap(lambda t: torch.zeros_like(t).add_(t).mul_(2))(torch.ones(8, 8))
        a = (y * z).cos()
    backward(a)
    return [w.grad]


@same
def under_inference_mode(region):
    """A parameter that recipes read changes there, and the copy of it has to have a version."""
    w, v = leaf(8, 8), leaf(8, 8, seed=1)
    with region:
        y = (w + v).sin()
        with torch.inference_mode():
            v.mul_(0.5)
        a = (y * v).cos()
    backward(a)
    return [w.grad, v.grad]


@same
def views_of_views(region):
    w = leaf(8, 8)
    with region:
        y = w * 3
        rows = y[2:5]
        columns = rows.t()
        columns.mul_(1.5)
        a = (y + 1).sin()
        rows.add_(w[2:5])
        b = (columns * 1.1).exp()
        y[0] = 1.0
        c = (rows * columns.t() + y[2:5]).cos()
    backward(a, b, c)
    return [w.grad]


@same
def in_place_keeps_the_dtype(region):
    """bf16 += float32 rounds to bf16; out of place it would not."""
    w, v = leaf(8, 8), leaf(8, 8, seed=1)
    with region:
        y = w.bfloat16() * 1.5
        y += v * 1.1
        a = (y * 2 + 1).sin()
        y = y.clone()
        y *= v.detach()
        y.div_(v.exp() + 1)
        b = (y + 1).cos()
        z = v * 1.0
        z.sub_(w.double())
        c = (z + 1).tanh()
    backward(a, b, c)
    return [w.grad, v.grad]


@same
@rebuilds(WITNESS_BYTES)
def in_place_over_its_own_memory(region):
    """The first row changes first, and the others add what it has become: no replay out of place gives that."""
    w = leaf(8, 8)
    with region:
        own, seen = witness()
        y = w * 2
        y.add_(y[:1].expand(8, 8), alpha=0.5)
        z = y.sigmoid_().cos()
    backward(z, seen)
    return [w.grad, own.grad]


@same
@rebuilds(WITNESS_BYTES)
def shape_in_place(region):
    w = leaf(8, 8)
    with region:
        own, seen = witness()
        y = w * 3
        y.unsqueeze_(0)
        a = (y + 1).sin()
        y.squeeze_(0).t_()
        b = (y * 2).exp()
    backward(a, b, seen)
    return [w.grad, own.grad]


@same
def split_then_in_place(region):
    w = leaf(8, 8)
    with region:
        a, b = (w * 2).unsafe_chunk(2, 1)
        c = (a.sigmoid_() * b.tanh() + 1).sin()
        p, q = (w @ w)[:4], (w @ w)[4:]
        p.relu_()
        d = (p.sigmoid() * q + 1).cos()
    backward(c, d)
    return [w.grad]


@same
def caught_then_in_place(region):
    """The ledger may keep the small product instead of the large join; then the product changes."""
    w = leaf(8, 8)
    with region:
        y = w @ w
        z = (torch.cat([y, y]) + 1).sin()
        y.mul_(2)
        u = (y + 1).cos()
        q = w @ w
        v = (torch.cat([q, q]) + 1).sin()
        q.view(-1)[3:].mul_(3)
        p = w @ w
        t = (torch.cat([p, p]) + 1).sin()
        F.dropout(p, 0.5, inplace=True)
    backward(z, u, v, t)
    return [w.grad]


class Double(torch.autograd.Function):
    """``x * 2``, in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@same
def caught_then_dirty(region):
    w = leaf(8, 8)
    with region:
        y = w @ w
        z = (torch.cat([y, y]) + 1).sin()
        y = Double.apply(y)
        u = y.cos()
    backward(z, u)
    return [w.grad]


@same
@rebuilds(WITNESS_BYTES)
def dirty_is_never_run_twice(region):
    w = leaf(8, 8)
    with region:
        own, seen = witness()
        y = Double.apply(w * 3)
        z = (y + 1).sin()
    backward(z, seen)
    return [w.grad, own.grad]


@pytest.mark.parametrize("program", SAME, ids=lambda p: p.__name__)
def test_the_same_bits(program):
    assert_same_as_plain(program)


# ------------------------------------------------------------------------------------------- where plain raises


def test_a_kept_anchor_that_is_changed_names_the_op():
    def program(region):
        w = leaf(8, 8)
        with region:
            y = w @ w
            z = y.sin()
            y.mul_(2)
        backward(z, y)

    assert_raises_like_plain(program, "MmBackward0")


def test_a_kept_anchor_that_is_changed_after_the_region_names_the_op():
    def program(region):
        w = leaf(8, 8)
        with region:
            y = w @ w
            z = y.sin()
        with torch.no_grad():
            y[1:3].mul_(2)
        backward(z)

    assert_raises_like_plain(program, "MmBackward0")


def test_an_anchor_under_a_recipe_that_is_changed_names_the_op():
    def program(region):
        w = leaf(8, 8)
        with region:
            y = w @ w
            z = y.sigmoid().sin()
            u = y.exp()
        y.detach().mul_(2)
        u.detach().mul_(2)  # what exp keeps in plain
        backward(z, u)

    assert_raises_like_plain(program, "MmBackward0")


def test_a_parameter_that_is_changed_before_backward_is_detected():
    def program(region):
        w = leaf(8, 8)
        with region:
            z = ((w * 2).exp() + w).sin() * w
        with torch.no_grad():
            w.add_(1)
        backward(z)

    assert_raises_like_plain(program, "parameter")


def test_an_optimizer_step_before_backward_is_detected():
    def program(region):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = leaf(4, 8)
        with region:
            a, b = model(x).square().mean(), model(x + 1).square().mean()
        a.backward()
        optimizer.step()
        b.backward()

    assert_raises_like_plain(program, "parameter")


def test_an_index_that_is_changed_is_detected():
    def program(region):
        w, index = leaf(8, 8), torch.tensor([0, 3, 3])
        with region:
            z = (w.exp()[index] + 1).sin()
            index.add_(1)
        backward(z)

    assert_raises_like_plain(program, "int64")


# --------------------------------------------------------------------------------------------------- the engine's order


def no_grad_(change):
    def changed(x, v):
        with torch.no_grad():
            change(x, v)

    return changed


@pytest.mark.parametrize(
    "change",
    {
        "item": lambda x, v: v.__setitem__(0, 0.5),
        "item of the base": lambda x, v: x.__setitem__(0, 0.5),
        "view": lambda x, v: v.mul_(2),
        "base": lambda x, v: x.add_(2),
        "another view": lambda x, v: x.t().mul_(2),
        "view, unrecorded": no_grad_(lambda x, v: v.mul_(2)),
        "base, unrecorded": no_grad_(lambda x, v: x.mul_(2)),
        "detached": lambda x, v: v.detach().mul_(2),
        "data": lambda x, v: v.data.mul_(2),
        "out": no_grad_(lambda x, v: torch.add(v, 1, out=v)),
        "read": lambda x, v: v.detach().numpy(),
    }.items(),
    ids=lambda item: item[0].replace(" ", "_"),
)
def test_views_get_their_nodes_when_plain_makes_them(change):
    """Autograd renews the node of a view when somebody asks for it, and the engine runs younger nodes first.

    Whoever asks early changes the order in which gradients are summed, and so their last bits.
    """

    def order(region):
        w = leaf(4, 4)
        with region:
            witness()
            x = w * 2
            v, u = x.view(-1), x[1:]
            change[1](x, v)
            t = x * 3
            s = u * 2
            named = {"x": x, "v": v, "t": t, "u": u, "s": s}
            nodes = {name: tensor.grad_fn for name, tensor in named.items()}
        return sorted(nodes, key=lambda name: nodes[name]._sequence_nr())

    ledger = saving(min_bytes=0)
    assert order(ledger) == order(contextlib.nullcontext())
    assert ledger.totals().rebuilt_bytes == WITNESS_BYTES
