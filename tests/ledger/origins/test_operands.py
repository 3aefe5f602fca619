"""Operands and anchors that only a recipe needs: plain has let go of them, so they may change, and nothing is wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.ledger_programs import (
    WITNESS_BYTES,
    assert_raises_where_plain_trains,
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


REFUSED = []  # nobody can see the change in time, and what the error names


def refused(names):
    def mark(program):
        REFUSED.append(pytest.param(program, names, id=program.__name__))
        return program

    return mark


# ------------------------------------------------------------------- operands that need no gradient, parameters


@same
def running_statistics_that_are_not_contiguous(region):
    """ATen has another formula for them, in training too, and a replay does not pass them: the output is kept."""
    norm, w = nn.BatchNorm2d(6), leaf(6, 6, 3, 3)
    for name in ("running_mean", "running_var"):
        setattr(norm, name, torch.stack([getattr(norm, name)] * 2, dim=1)[:, 0])
    x = leaf(4, 6, 9, 9, seed=1)
    with region:
        y = F.conv2d(norm(x * 3 + 7), w)
    backward(y)
    return [x.grad, w.grad]


@same
def one_operand_of_two_needs_no_gradient(region):
    """Nodes save an operand for the gradient of the other one, or only for its own: then it has to be noted."""
    w, m = leaf(8, 8), leaf(8, 8, seed=1).detach().abs() + 0.5
    made = []
    with region:
        for function in (torch.hypot, torch.copysign, torch.atan2, torch.fmod, torch.remainder, torch.maximum):
            made += [(function(w * 1.5, m) * 2).sin(), (function(m, w * 1.5) * 2).sin()]
    backward(*made)
    return [w.grad]


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


@same
def small_operand_changed_after_the_region(region):
    """It was copied."""
    w, m = leaf(8, 8), torch.ones(8, 8)
    with region:
        z = (w.exp() + m).sin()
    m.mul_(3)
    backward(z)
    return [w.grad]


@refused("the output of operand, torch.float32 [1, 16640]")
def operand_changed_after_the_region(region, change):
    """Above 64 KiB it is not copied."""
    w, m = leaf(2, 16640), torch.ones(1, 16640)
    with region:
        z = (w.exp() + m).sin()
    if change:
        m.mul_(3)
    backward(z)
    return [w.grad]


@refused("MmBackward0")
def caught_and_changed_after_the_region(region, change):
    w = leaf(8, 8)
    with region:
        y = w @ w
        z = (torch.cat([y, y]) + 1).sin()
    if change:
        y.mul_(3)
    backward(z)
    return [w.grad]


@refused("a parameter or input, torch.float32 [8]")
def bias_changed_after_the_region(region, change):
    w, b = leaf(8, 8), leaf(8, seed=1)
    with region:
        z = (w + b).sin()
    if change:
        with torch.no_grad():
            b.mul_(2)
    backward(z)
    return [w.grad]


@same
@rebuilds(WITNESS_BYTES)
def product_seen_through_a_view_then_changed(region):
    """Sigmoid keeps its output and clamp keeps a clone: plain needs the product no more."""
    w = leaf(8, 8)
    with region:
        own, seen = witness()
        y = (w[None] @ w[None]).reshape(4, 16)
        a = y.sigmoid()
        y.clamp_(-1.5, 1.5)
        b = (y + 1).sin()
    backward(a, b, seen)
    return [w.grad, own.grad]


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
@rebuilds(WITNESS_BYTES)
def embedding_with_max_norm_twice(region):
    """Each lookup first shrinks the rows it reads, in place and unrecorded."""
    w = leaf(8, 8)
    with region:
        own, seen = witness()
        a = F.embedding(torch.tensor([0, 1, 2]), w, max_norm=1.0)
        z = a.sin()
        u = F.embedding(torch.tensor([3, 4, 1]), w, max_norm=0.5).cos()
    backward(z, u, seen)
    return [w.grad, own.grad]


@pytest.mark.parametrize("program", SAME, ids=lambda p: p.__name__)
def test_the_same_bits(program):
    assert_same_as_plain(program)


@pytest.mark.parametrize(("program", "names"), REFUSED)
def test_a_change_that_nobody_sees_in_time_is_refused(program, names):
    assert_raises_where_plain_trains(program, names)
