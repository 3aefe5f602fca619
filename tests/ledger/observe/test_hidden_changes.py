"""Changes in place that autograd does not record: hidden from it, they never make a recipe wrong."""

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from tests.support import assert_same_bits
from tests.support.ledger_programs import WITNESS_BYTES, assert_same_as_plain, backward, leaf, rebuilds, witness

SAME = []  # programs that must give plain's bits


def same(program):
    SAME.append(program)
    return program


# ------------------------------------------------------------------------------------------------- of activations


def hidden(change, rebuilt_bytes=WITNESS_BYTES):
    """A program that changes an activation which nobody has saved yet, and then builds on it."""

    def program(region):
        w = leaf(8, 8)
        with region:
            own, seen = witness()
            y = w * 3
            change(y)
            a = (y + 1).sin()
            b = y.exp()
        backward(a, b, seen)
        return [w.grad, own.grad]

    program.__name__ = change.__name__
    SAME.append(rebuilds(rebuilt_bytes)(program))
    return change


def left_as_it_is(y):
    """Nothing: then both tensors that are built on it are rebuilt."""


hidden(left_as_it_is, rebuilt_bytes=3 * WITNESS_BYTES)


@hidden
def part_of_an_unsafe_split(y):
    y.unsafe_chunk(2)[0].mul_(0.5)


@hidden
def part_of_an_unsafe_split_in_rows(y):
    torch.unsafe_split(y, 4, 1)[1].neg_()


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


@same
@rebuilds(WITNESS_BYTES)
def through_an_array_that_is_written_to_later(region):
    """Another change comes between, one that autograd does not record either: what left torch stays untrusted."""
    w, buffer = leaf(8, 8), torch.zeros(8)
    with region:
        own, seen = witness()
        y = w @ w  # not made again, so recipes read it
        array, part = y.detach().numpy(), buffer.detach()
        with torch.no_grad():
            part.add_(1)
        a, b = y.sin(), F.gelu(y * 2)
        array += 1
    backward(a, b, seen)
    return [w.grad, own.grad]


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
@rebuilds(WITNESS_BYTES)
def new_data_after_it_was_kept(region):
    w = leaf(8, 8)
    with region:
        own, seen = witness()
        y = w @ w
        y.sin()
        y.data = torch.full((8, 8), 0.25)
        z = y.cos()
    backward(z, seen)
    return [w.grad, own.grad]


@same
@rebuilds(WITNESS_BYTES)
def part_of_a_split_anchor(region):
    """The product that was split is an anchor, and nothing saves it."""
    w, v = leaf(8, 8), leaf(8, 8)
    with region:
        own, seen = witness()
        y = w @ v
        z = (y + v).sin()
        first, other = y.unsafe_chunk(2, 1)
        joined = torch.cat([first.mul_(0.5), other], 1).exp()
    backward(z, joined, seen)
    return [w.grad, v.grad, own.grad]


@same
@rebuilds(WITNESS_BYTES)
def kept_then_changed_and_read_again(region):
    """The first reader of the old value takes no part in backward, so plain does not mind the change."""
    w = leaf(8, 8)
    with region:
        own, seen = witness()
        y = w @ w
        y.sin()
        with torch.no_grad():
            y.mul_(2)
        z = (y + 1).cos()
    backward(z, seen)
    return [w.grad, own.grad]


@same
@rebuilds(WITNESS_BYTES)
def leaf_changed_after_use(region):
    w, b = leaf(8, 8), leaf(8, seed=1)
    with region:
        own, seen = witness()
        y = w * 2
        s = w + b
        with torch.no_grad():
            w.add_(1)
            b.mul_(2)
        z, u = y.sin(), s.cos()
    backward(z, u, seen)
    return [w.grad, b.grad, own.grad]


@same
@rebuilds(WITNESS_BYTES)
def leaf_given_new_data_after_use(region):
    w, b = leaf(8, 8), leaf(8, seed=1)
    with region:
        own, seen = witness()
        y = w + b
        b.data = torch.zeros(8)
        z = y.sin()
    backward(z, seen)
    return [w.grad, b.grad, own.grad]


@same
@rebuilds(WITNESS_BYTES)
def changed_before_the_region(region):
    """Nobody watched the nodes that are older than the region."""
    w, v = leaf(8, 8), leaf(8, 8, seed=1)
    y, s, t = w * 2, w * v.detach(), v * 3
    with torch.no_grad():
        w.add_(1)
    t.detach().mul_(0.5)
    with region:
        own, seen = witness()
        a, b, c = y.sin(), (s * 1).sin(), t.cos()
    backward(a, c, seen)
    del b
    return [w.grad, v.grad, own.grad]


@same
@rebuilds(WITNESS_BYTES)
def changed_between_two_regions(region):
    w = leaf(8, 8)
    with region:
        y = w * 2
        a = y.sin()
    y.data.mul_(0.5)
    with region:
        own, seen = witness()
        b = (y + 1).cos()
    g = torch.autograd.grad(b.square().sum() + seen.sum(), (w, own), retain_graph=True)
    del a
    return [*g]


# -------------------------------------------------- of what recipes read already: they keep what it was, readers do not


@same
def anchor_changed_through_data(region):
    """Plain gives GELU's backward what has become of its input, and the product GELU's output as it was."""
    x, w = leaf(8, 8), leaf(8, 8, seed=1)
    with region:
        h = x @ w
        y = F.gelu(h) @ w
        h.data[:3] = 1
        t = (h + 1).sin() @ w
        h.data.add_(1)
        v = h.t().exp() @ w
    backward(y, t, v)
    return [x.grad, w.grad]


@same
def factor_changed_through_data(region):
    x, factor = leaf(8, 8), leaf(8, 8, seed=1).detach()
    with region:
        y = x * factor
        z = y.sin()
        factor.data.mul_(0.5)
        u = y.cos() + (x * factor).sin()
    backward(z, u)
    return [x.grad]


@same
def expanded_factor_changed_through_data(region):
    x, row = leaf(33, 33), leaf(33, seed=1).detach()
    with region:
        z = (x * row.expand(33, 33)).sin() * row[::2].sum() + (x.t()[::3] * row).exp().sum(0)
        row.data.mul_(0.5)
    backward(z)
    return [x.grad]


@same
def factor_changed_by_batch_norm(region):
    """Running statistics change below every version counter."""
    x, mean, var = leaf(8, 8), torch.randn(8), torch.rand(8) + 1
    with region:
        y, z = x * mean, x * var
        a = y.sin()
        u = F.batch_norm(x, mean, var, training=True)
        b = z.sin() + (x * mean).cos()
    backward(a, b, u)
    return [x.grad]


@same
def parameter_changed_through_an_older_alias(region):
    """The flat memory of all parameters, which has no version in common with them."""
    flat = leaf(128).detach()
    a, b, x = nn.Parameter(flat[:64].view(8, 8)), nn.Parameter(flat[64:].view(8, 8)), leaf(8, 8, seed=1)
    with torch.autocast("cpu", torch.bfloat16), region:
        h = F.gelu(F.linear(x, a)) * (a * 2).sin()
        flat.mul_(0.5)
        y = F.gelu(F.linear(h, b))
    backward(y)
    return [a.grad, b.grad, x.grad]


@same
def caught_changed_and_read_again(region):
    """What was kept in the stead of a larger tensor has moved, and is not what the tensor is now."""
    x, w = leaf(8, 8), leaf(8, 8, seed=1)
    with region:
        h = x @ w
        r = h.unsqueeze(0).expand(4, 8, 8).reshape(32, 8)
        a = r * r.sigmoid()
        h.data.mul_(0.5)
        b = h.sin() * a[:8]
    backward(a, b)
    return [x.grad, w.grad]


@pytest.mark.parametrize("program", SAME, ids=lambda p: p.__name__)
def test_the_same_bits(program):
    assert_same_as_plain(program)


def test_running_statistics_while_another_thread_opens_a_region() -> None:
    """What a region has noted is its own: a region that begins elsewhere takes nothing of it away."""
    channels = 20_000  # too many for a copy

    def elsewhere() -> None:
        with leangrad.saving():
            pass

    def gradients(region: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(8, channels, requires_grad=True), torch.randn(channels, requires_grad=True)
        mean, var = torch.randn(channels), torch.ones(channels)
        with region:
            h = x * w + mean
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            F.batch_norm(x, mean, var, training=True)
            out = h.sin().exp()
        out.sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return [x.grad, w.grad]

    for a, b in zip(gradients(nullcontext()), gradients(leangrad.saving()), strict=True):
        assert_same_bits(a, b)
