"""TransformerBlock as one node: the plain form's numbers, at the floor of kept bytes, whatever stood in its scratch."""

import gc
import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from leangrad.engine import grad_buffer
from leangrad.errors import ConsumedError
from leangrad.nn import TransformerBlock
from leangrad.ops import norm
from leangrad.ops.activation import ACTIVATIONS
from tests.support import same_bits
from tests.support.error_rule import assert_error_rule, named
from tests.support.transformer import (
    BATCH,
    HEADS,
    KINDS,
    LENGTH,
    WIDTH,
    batch,
    close,
    is_node,
    make,
    results,
    same,
    small_blocks_are_nodes,
)

__all__ = ["small_blocks_are_nodes"]


# Numbers


@pytest.mark.parametrize("needs_dx", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_plain_form(kind, dtype, needs_dx):
    """Bit for bit with layer norms, where the same kernels run in the same order."""
    block = make(kind, dtype)
    x, g = batch(dtype, requires_grad=needs_dx)
    before = x.detach().clone(), g.clone()
    found, expected = results(block, block, x, g), results(block.plain, block, x, g)
    assert is_node(found[0])
    if KINDS[kind].get("norm") == "rms":
        close(found, expected, dtype)
        assert same_bits(found[0], expected[0])
    else:
        same(found, expected)
    same((x, g), before)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.sampled(3)
def test_error_rule(kind, dtype):
    def draw():
        block = make(kind, dtype)
        x, g = batch(dtype)
        found, eager = results(block, block, x, g), results(block.plain, block, x, g)
        wide = make(kind)
        wide.load_state_dict(block.state_dict())
        truth = results(wide.plain, wide, x.detach().double().requires_grad_(), g.double())
        return named(found, eager, truth)

    assert_error_rule(draw)


MASKS = {
    "keys": lambda: torch.arange(LENGTH) < torch.tensor([[7], [3], [1]]),
    "added keys": lambda: torch.randn(BATCH, LENGTH, dtype=torch.float64),
    "pairs": lambda: (torch.rand(BATCH, LENGTH, LENGTH) > 0.4) | torch.eye(LENGTH, dtype=torch.bool),
    "heads": lambda: torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64),
    "wide": lambda: torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", ["gpt", "encoder", "llama"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(kind, mask):
    block, (x, g) = make(kind), batch()
    args = (MASKS[mask](),)
    found = results(block, block, x, g, *args)
    assert is_node(found[0])
    close(found, results(block.plain, block, x, g, *args))


def test_a_masked_key_changes_nothing():
    block, (x, _) = make("encoder"), batch()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[:, 4:] = False
    other = x.detach().clone()
    other[:, 4:] = 100.0
    same([block(x, mask)[:, :4]], [block(other, mask)[:, :4]])
    causal = make("gpt")
    same([causal(x)[:, :4]], [causal(other)[:, :4]])
    assert not same_bits(block(x)[:, :4], block(other)[:, :4])


def test_rotary_positions_are_relative():
    """The scores depend on distances alone: a sequence that is shifted by padding attends as before."""
    block, (x, _) = make("encoder", rotary=True), batch()
    padded = torch.cat([torch.zeros(BATCH, 2, WIDTH, dtype=x.dtype), x.detach()], 1)
    mask = torch.ones(BATCH, LENGTH + 2, dtype=torch.bool)
    mask[:, :2] = False
    close([block(padded, mask)[:, 2:]], [block(x)])
    turned = x.detach().flip(1)
    assert not torch.allclose(block(turned).flip(1), block(x))  # without positions they would be equal
    unrotated = make("encoder")
    assert torch.allclose(unrotated(turned).flip(1), unrotated(x))


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout_draws_what_plain_draws(kind, p):
    block, (x, g) = make(kind, dropout=p), batch()
    found, expected = results(block, block, x, g, seed=3), results(block.plain, block, x, g, seed=3)
    close(found, expected)
    if p < 1:
        assert not same_bits(found[0], results(block, block, x, g, seed=4)[0])
    state = torch.get_rng_state()
    torch.manual_seed(3)
    block(x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    block.plain(x)
    same([after], [torch.get_rng_state()])
    torch.set_rng_state(state)
    block.eval()
    close(results(block, block, x, g), results(block.plain, block, x, g))


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradcheck_and_double_backward(kind, dropout):
    """The block has a second derivative, which plain has only where its attention is written out."""
    options = {**KINDS[kind], "kv_heads": 1}
    block = TransformerBlock(4, 2, dtype=torch.float64, hidden=5, dropout=dropout, **options)
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)

    def f(x, *_):
        torch.manual_seed(5)
        return block(x)

    assert torch.autograd.gradcheck(f, (x,))
    assert torch.autograd.gradcheck(f, (x, *block.parameters()), fast_mode=True)
    torch.manual_seed(5)
    y, g = block(x), torch.randn(1, 3, 4, dtype=torch.float64)
    parameters = list(block.parameters())
    expected_state = torch.get_rng_state()
    firsts = torch.autograd.grad(y, (x, *parameters), g, create_graph=True)
    same([torch.get_rng_state()], [expected_state])
    torch.manual_seed(5)
    with sdpa_kernel(SDPBackend.MATH):
        plain_firsts = torch.autograd.grad(block.plain(x), (x, *parameters), g, create_graph=True)
    close(firsts, plain_firsts)
    seconds, plain_seconds = (
        torch.autograd.grad(sum((t * t.detach().cos()).sum() for t in ts), (x, *parameters), allow_unused=True)
        for ts in (firsts, plain_firsts)
    )
    for one, other in zip(seconds, plain_seconds, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_double_backward_with_dropout_in_the_attention_alone():
    block, (x, g) = make(dropout=0.4), batch()
    block.dropout = 0.0
    y = block(x)
    expected = torch.autograd.grad(y, x, g, retain_graph=True)
    close(torch.autograd.grad(y, x, g, create_graph=True), expected)


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 6), (0, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("kind", ["gpt", "llama", "context"])
def test_shapes(kind, shape):
    block, (x, g) = make(kind), batch(shape=(*shape, WIDTH))
    found, expected = results(block, block, x, g), results(block.plain, block, x, g)
    assert found[0].shape == x.shape
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_strided_input_and_gradients():
    block = make()
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64).transpose(0, 1).requires_grad_()
    for g in (
        torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64).transpose(0, 1),
        torch.randn(WIDTH, dtype=torch.float64).expand(BATCH, LENGTH, WIDTH),
    ):
        close(results(block, block, x, g), results(block.plain, block, x, g))


@pytest.mark.parametrize("trained", ["norm1", "attention.qkv", "attention.out", "norm2", "ffn.up", "ffn.down", "none"])
@pytest.mark.parametrize("needs_dx", [True, False])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_frozen_parts(kind, needs_dx, trained):
    block = make(kind, dropout=0.2).requires_grad_(False)
    x, g = batch(requires_grad=needs_dx)
    if trained == "none":
        if not needs_dx:
            assert not block(x).requires_grad
            return
    else:
        block.get_submodule(trained).requires_grad_(True)
    close(results(block, block, x, g), results(block.plain, block, x, g))


@pytest.mark.parametrize("activation", [n for n, a in ACTIVATIONS.items() if a.keeps == "input" or n == "relu"])
def test_activations(activation):
    if ACTIVATIONS[activation].float32_in_autocast:
        with pytest.raises(ValueError, match="activation: expected one of relu, elu, gelu"):
            make(activation=activation)
        return
    block, (x, g) = make(activation=activation), batch()
    close(results(block, block, x, g), results(block.plain, block, x, g))


# Stale memory


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_stale_nan_never_leaks(kind, dtype, monkeypatch):
    """Every piece of scratch and of dead memory that the block is lent is full of NaN."""
    monkeypatch.setattr(norm, "_CHUNK", 64)
    borrow, give = grad_buffer.Pool.borrow, grad_buffer.Pool.give
    lent = []

    def poisoned(method):
        def call(pool, shape, like):
            got = method(pool, shape, like)
            got.tensor.fill_(float("nan"))
            lent.append(got)
            return got

        return call

    block, (x, g) = make(kind, dtype, dropout=0.1), batch(dtype)
    expected = results(block.plain, block, x, g)
    monkeypatch.setattr(grad_buffer.Pool, "borrow", poisoned(borrow))
    monkeypatch.setattr(grad_buffer.Pool, "give", poisoned(give))
    close(results(block, block, x, g), expected, dtype)
    assert len(lent) >= 6


# Graphs around it


@pytest.mark.parametrize(
    "graph",
    [
        lambda f, x: f(x) + x,
        lambda f, x: x + f(x),
        lambda f, x: f(f(x)) * 2,
        lambda f, x: torch.cat([f(x), x]),
        lambda f, x: (lambda y: y * y + y)(f(x)),
        lambda f, x: f(x).sum(),
        lambda f, x: f(x * 2).view(-1) * 2,
    ],
    ids=["block+skip", "skip+block", "shared twice", "cat", "two consumers", "sum", "viewed"],
)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_inside_other_graphs(graph, kind):
    block, (x, _) = make(kind), batch()
    y, z = graph(block, x), graph(block.plain, x)
    g = torch.randn_like(y)
    wanted = [x, *block.parameters()]
    close(torch.autograd.grad(y, wanted, g), torch.autograd.grad(z, wanted, g))


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_consumed_once_unless_retained(kind, dropout):
    block, (x, g) = make(kind, dropout=dropout), batch()
    wanted = [x, *block.parameters()]
    expected = results(block.plain, block, x, g)[1:]
    torch.manual_seed(1)
    y = block(x)
    for keep in (True, True, False):
        close(torch.autograd.grad(y, wanted, g, retain_graph=keep), expected)
        results(block, block, x, g)  # another tape in between
    with pytest.raises(ConsumedError, match="retain_graph=True"):
        torch.autograd.grad(y, wanted, g)


@pytest.mark.parametrize("target", ["weight", "input", "mask"])
def test_a_change_in_place_before_backward_is_an_error(target):
    block, (x, g) = make("encoder"), batch(requires_grad=False)
    mask = torch.randn(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64)
    y = block(x, mask)
    with torch.no_grad():
        {"weight": block.ffn.up.weight, "input": x, "mask": mask}[target].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)


def test_the_output_may_be_changed_in_place():
    """Nothing in the block reads it again."""
    block, (x, g) = make(), batch()
    expected = torch.autograd.grad(block.plain(x) * 3, x, g)
    same(torch.autograd.grad(block(x).mul_(3), x, g), expected)


@pytest.mark.parametrize("runs_backward", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.sampled(2)
def test_no_leak_with_the_collector_off(runs_backward, dropout):
    block = make("llama", dropout=dropout)
    gc.collect()
    gc.disable()
    try:
        x, g = batch(requires_grad=False)
        y = block(x)
        if runs_backward:
            y.backward(g)
        output, alive = weakref.ref(y), weakref.ref(x)
        del y, x
        assert output() is None
        assert alive() is None
    finally:
        gc.enable()
