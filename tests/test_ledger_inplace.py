"""Changes in place: recorded by autograd or hidden from it, they never make a recipe wrong.

Each program runs plain and through a ledger. Where plain gives gradients the ledger gives the same bits; where plain
refuses, the ledger refuses too.
"""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leangrad.lean import saving
from tests.ledger_programs import assert_raises_like_plain, assert_same_as_plain, backward, leaf

SAME = []  # programs that must give plain's bits
SAME_OR_CHANGED = []  # nobody can see the change in time: plain's bits, or a ChangedError


def same(program):
    SAME.append(program)
    return program


def same_or_changed(program):
    SAME_OR_CHANGED.append(program)
    return program


def named(program):
    return program.__name__


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
def in_place_over_its_own_memory(region):
    """The first row changes first, and the others add what it has become: no replay out of place gives that."""
    w = leaf(8, 8)
    with region:
        y = w * 2
        y.add_(y[:1].expand(8, 8), alpha=0.5)
        z = y.sigmoid_().cos()
    backward(z)
    return [w.grad]


@same
def shape_in_place(region):
    w = leaf(8, 8)
    with region:
        y = w * 3
        y.unsqueeze_(0)
        a = (y + 1).sin()
        y.squeeze_(0).t_()
        b = (y * 2).exp()
    backward(a, b)
    return [w.grad]


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
def dirty_then_rebuilt(region):
    w = leaf(8, 8)
    with region:
        y = Double.apply(w * 3)
        z = (y + 1).sin()
    backward(z)
    return [w.grad]


# ------------------------------------------------------------------------------------ changes that it does not


def hidden(change):
    """A program that changes an activation which nobody has saved yet, and then builds on it."""

    def program(region):
        w = leaf(8, 8)
        with region:
            y = w * 3
            change(y)
            a = (y + 1).sin()
            b = y.exp()
        backward(a, b)
        return [w.grad]

    program.__name__ = change.__name__
    SAME.append(program)
    return change


@hidden
def no_grad_in_place(y):
    with torch.no_grad():
        y.mul_(0.5)


@hidden
def no_grad_operator(y):
    with torch.no_grad():
        y **= 2
        y /= 3
        y += 1


@hidden
def no_grad_item(y):
    with torch.no_grad():
        y[2:4] = 0.25


@hidden
def no_grad_view_of_view(y):
    with torch.no_grad():
        y[2:5].t().mul_(1.5)


@hidden
def no_grad_flat_slice(y):
    with torch.no_grad():
        y.view(-1)[3:7] = 0.5


@hidden
def through_data(y):
    y.data.mul_(0.5)


@hidden
def through_view_of_data(y):
    y.data.view(-1)[4:].mul_(0.5)


@hidden
def through_detach(y):
    y.detach().mul_(0.5)


@hidden
def through_view_of_detach(y):
    y.detach()[1:3].fill_(0.25)


@hidden
def through_out(y):
    with torch.no_grad():
        torch.mul(y, 0.5, out=y)


@hidden
def through_out_of_noted_function(y):
    with torch.no_grad():
        torch.add(y, 0.5, out=y)


@hidden
def through_out_of_product(y):
    with torch.no_grad():
        torch.mm(y.clone(), y.clone(), out=y)


@hidden
def through_out_of_detach(y):
    torch.sub(torch.ones(8, 8), 0.25, out=y.detach())


@hidden
def through_aten(y):
    with torch.no_grad():
        torch.ops.aten.mul_.Tensor(y, torch.tensor(0.5))
        torch.ops.aten.add_(y, 1)


@hidden
def through_foreach(y):
    with torch.no_grad():
        torch._foreach_mul_([y], 0.5)


@hidden
def through_numpy(y):
    y.detach().numpy()[:] = 0.25


@hidden
def through_array(y):
    np.asarray(y.detach())[2] = 0.25


@hidden
def through_dlpack(y):
    torch.from_dlpack(y.detach()).fill_(0.25)


@hidden
def through_storage(y):
    y.untyped_storage().fill_(0)


@hidden
def through_new_data(y):
    y.data = torch.full((8, 8), 0.25)


@hidden
def through_copy(y):
    with torch.no_grad():
        y.copy_(torch.full((8, 8), 0.25))


@hidden
def through_random_fill(y):
    with torch.no_grad():
        y.uniform_()


@hidden
def through_dropout(y):
    with torch.no_grad():
        F.dropout(y, 0.5, inplace=True)


@hidden
def through_init(y):
    nn.init.constant_(y, 0.25)


@same
def new_data_after_it_was_kept(region):
    w = leaf(8, 8)
    with region:
        y = w @ w
        y.sin()
        y.data = torch.full((8, 8), 0.25)
        z = y.cos()
    backward(z)
    return [w.grad]


@same
def kept_then_changed_and_read_again(region):
    """The first reader of the old value takes no part in backward, so plain does not mind the change."""
    w = leaf(8, 8)
    with region:
        y = w @ w
        y.sin()
        with torch.no_grad():
            y.mul_(2)
        z = (y + 1).cos()
    backward(z)
    return [w.grad]


@same
def leaf_changed_after_use(region):
    w, b = leaf(8, 8), leaf(8, seed=1)
    with region:
        y = w * 2
        s = w + b
        with torch.no_grad():
            w.add_(1)
            b.mul_(2)
        z, u = y.sin(), s.cos()
    backward(z, u)
    return [w.grad, b.grad]


@same
def leaf_given_new_data_after_use(region):
    w, b = leaf(8, 8), leaf(8, seed=1)
    with region:
        y = w + b
        b.data = torch.zeros(8)
        z = y.sin()
    backward(z)
    return [w.grad, b.grad]


@same
def changed_before_the_region(region):
    """Nobody watched the nodes that are older than the region."""
    w, v = leaf(8, 8), leaf(8, 8, seed=1)
    y, s, t = w * 2, w * v.detach(), v * 3
    with torch.no_grad():
        w.add_(1)
    t.detach().mul_(0.5)
    with region:
        a, b, c = y.sin(), (s * 1).sin(), t.cos()
    backward(a, c)
    del b
    return [w.grad, v.grad]


@same
def changed_between_two_regions(region):
    w = leaf(8, 8)
    with region:
        y = w * 2
        a = y.sin()
    y.data.mul_(0.5)
    with region:
        b = (y + 1).cos()
    g = torch.autograd.grad(b.square().sum(), w, retain_graph=True)
    del a
    return [*g]


# ------------------------------------------------------------------- operands that need no gradient, parameters


@same
def operand_changed_before_it_was_asked_for(region):
    w, m = leaf(8, 8), torch.ones(8, 8)
    flat = m.view(64)
    with region:
        y = w.exp() + m
        flat.mul_(3)
        a = y.sin()
        z = w.exp() - m
        m.data.mul_(3)
        b = z.cos()
    backward(a, b)
    return [w.grad]


@same
def running_mean_changed_in_the_region(region):
    """A buffer that is subtracted, then updated: plain does not keep it."""
    w, mean = leaf(8, 8), torch.full((8,), 0.5)
    with region:
        y = w.exp() - mean
        a = y.sin()
        mean.lerp_(y.detach().mean(0), 0.1)
        b = (y + mean).cos()
        mean.add_(1)
    backward(a, b)
    return [w.grad]


@same
def running_mean_changed_through_data(region):
    w, mean = leaf(8, 8), torch.full((8,), 0.5)
    with region:
        y = w.exp() - mean
        a = y.sin()
        mean.data.mul_(3)
    backward(a)
    return [w.grad]


@same
def running_mean_changed_by_its_own_norm(region):
    """Batch norm changes its statistics below every version counter."""
    norm, x = nn.BatchNorm1d(8), leaf(4, 8)
    with region:
        y = x.exp() - norm.running_mean
        a = y.sin()
        b = norm(x * 3 + 1)
        c = (x.exp() + norm.running_var).cos()
        norm(x * 5 + 2)
    backward(a, b, c)
    return [x.grad]


@same
def fixed_statistics_changed_later(region):
    """The output of a norm in eval mode; then the same norm trains."""
    norm, w, x = nn.BatchNorm1d(8), leaf(8, 8, seed=1), leaf(4, 8)
    with region:
        norm.eval()
        y = norm(x.detach() + norm.weight)
        a = y @ w
        norm.train()
        norm(x * 3 + 1)
    backward(a)
    return [w.grad]


@same
def operand_changed_through_numpy(region):
    w, m = leaf(8, 8), torch.ones(8, 8)
    with region:
        y = w.exp() + m
        a = y.sin()
        m.numpy()[:] = 5
    backward(a)
    return [w.grad]


@same
def parameter_changed_through_data_in_the_region(region):
    w, b = leaf(8, 8), leaf(8, seed=1)
    with region:
        y = w + b
        z = y.sin()
        b.data.mul_(2)
    backward(z)
    return [w.grad]


@same_or_changed
def operand_changed_after_the_region(region):
    w, m = leaf(8, 8), torch.ones(8, 8)
    with region:
        z = (w.exp() + m).sin()
    m.mul_(3)
    backward(z)
    return [w.grad]


@same_or_changed
def caught_and_changed_after_the_region(region):
    w = leaf(8, 8)
    with region:
        y = w @ w
        z = (torch.cat([y, y]) + 1).sin()
    y.mul_(3)
    backward(z)
    return [w.grad]


@same_or_changed
def bias_changed_after_the_region(region):
    w, b = leaf(8, 8), leaf(8, seed=1)
    with region:
        z = (w + b).sin()
    with torch.no_grad():
        b.mul_(2)
    backward(z)
    return [w.grad]


@same
def product_seen_through_a_view_then_changed(region):
    """Sigmoid keeps its output and clamp keeps a clone: plain needs the product no more."""
    w = leaf(8, 8)
    with region:
        y = (w[None] @ w[None]).reshape(4, 16)
        a = y.sigmoid()
        y.clamp_(-1.5, 1.5)
        b = (y + 1).sin()
    backward(a, b)
    return [w.grad]


@same
def caught_then_changed_by_out(region):
    w = leaf(8, 8)
    with region:
        y = w @ w
        z = (torch.cat([y, y]) + 1).sin()
        with torch.no_grad():
            torch.mul(y, 2, out=y)
    backward(z)
    return [w.grad]


@same
def caught_then_changed_through_detach(region):
    w = leaf(8, 8)
    with region:
        y = w @ w
        z = (torch.cat([y, y]) + 1).sin()
        y.detach().mul_(3)
    backward(z)
    return [w.grad]


@same
def embedding_with_max_norm_twice(region):
    """Each lookup first shrinks the rows it reads, in place and unrecorded."""
    w = leaf(8, 8)
    with region:
        a = F.embedding(torch.tensor([0, 1, 2]), w, max_norm=1.0)
        z = a.sin()
        u = F.embedding(torch.tensor([3, 4, 1]), w, max_norm=0.5).cos()
    backward(z, u)
    return [w.grad]


@pytest.mark.parametrize("program", SAME, ids=named)
def test_the_same_bits(program):
    assert_same_as_plain(program)


@pytest.mark.parametrize("program", SAME_OR_CHANGED, ids=named)
def test_the_same_bits_or_an_error(program):
    assert_same_as_plain(program, or_changed=True)


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
            x = w * 2
            v, u = x.view(-1), x[1:]
            change[1](x, v)
            t = x * 3
            s = u * 2
            named = {"x": x, "v": v, "t": t, "u": u, "s": s}
            nodes = {name: tensor.grad_fn for name, tensor in named.items()}
        return sorted(nodes, key=lambda name: nodes[name]._sequence_nr())

    assert order(saving(min_bytes=0)) == order(contextlib.nullcontext())
