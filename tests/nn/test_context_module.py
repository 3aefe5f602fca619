"""`AttentionContext`: its state, its modes, and blocks that train with it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.errors import ChangedError
from leangrad.nn.context import AttentionContext
from tests.support import same_bits
from tests.support.context import close, plain


def trained(width=8, steps=1, **kwargs):
    module = AttentionContext(width, **kwargs)
    for _ in range(steps):
        module.update(torch.randn(16, width), torch.randn(16, width))
    return module


def test_there_is_no_context_until_the_first_update():
    module, x = AttentionContext(8), torch.randn(2, 5, 8)
    assert module.context is None
    assert module(x) is x
    assert list(module.state_dict()) == ["strength"]
    context = module.update(x, x.tanh())
    assert context is module.context
    address = context.data_ptr()
    assert module.update(x, x.tanh()).data_ptr() == address
    assert module(x) is not x
    module.reset()
    assert module.context is None


def test_an_incoming_context_is_used_and_overwritten():
    first, second = trained(), AttentionContext(8)
    with torch.no_grad():
        second.strength.fill_(2)
    x = torch.randn(5, 8)
    incoming = first.context
    close(second(x, incoming), plain(x, incoming, second.strength), torch.float32)
    assert second.update(x, x.tanh(), incoming) is incoming
    assert second.context is incoming
    other = second.update(x, x.tanh(), torch.ones(3, 3))
    assert other.shape == (8, 8)
    assert other is second.context is not incoming


def test_eval_mode_does_not_update():
    module = trained().eval()
    before = module.context.clone()
    assert module.update(torch.randn(4, 8), torch.randn(4, 8)) is module.context
    assert same_bits(module.context, before)
    assert AttentionContext(8).eval().update(torch.randn(4, 8), torch.randn(4, 8)) is None


def test_state_dict_round_trip():
    module = trained(steps=3)
    state = copy.deepcopy(module.state_dict())
    for fresh in (AttentionContext(8), trained(steps=1)):
        fresh.load_state_dict(state)
        assert same_bits(fresh.context, module.context)
        assert fresh.context.data_ptr() != state["context"].data_ptr()
    unused = AttentionContext(8).state_dict()
    module.load_state_dict(unused)
    assert module.context is None
    parent = nn.Sequential(trained(), nn.Linear(8, 8))
    parent.load_state_dict({"1.weight": torch.ones(8, 8)}, strict=False)
    assert parent[0].context is not None
    assigned = AttentionContext(8)
    assigned.load_state_dict(state, assign=True)
    assert same_bits(assigned.context, state["context"])


def test_the_context_stays_in_float32_when_the_module_does_not():
    module = trained().to(torch.bfloat16)
    assert module.strength.dtype == torch.bfloat16
    assert module.context.dtype == torch.float32
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    y = module(x)
    assert y.dtype == torch.bfloat16
    y.backward(torch.randn_like(y))
    assert module.strength.grad.dtype == torch.bfloat16
    address = module.context.data_ptr()
    assert module.update(x, y).data_ptr() == address
    assert trained().double().context.dtype == torch.float64


def test_a_context_of_inference_mode_trains_on():
    module, x = AttentionContext(8), torch.randn(4, 8)
    with torch.inference_mode():
        module.update(x + 1, x * 2)
        module(x * 1)
    address = module.context.data_ptr()
    y = module(x)
    assert module.update(x, y).data_ptr() == address
    y.backward(torch.randn_like(y))
    assert module.strength.grad.abs() > 0


def test_copies_are_apart():
    module = trained()
    other = copy.deepcopy(module)
    other.update(torch.randn(4, 8), torch.randn(4, 8))
    assert not same_bits(other.context, module.context)


class Block(nn.Module):
    """A residual mixer with a context, and the same in plain PyTorch."""

    def __init__(self, width, lean):
        super().__init__()
        self.mix, self.lean = nn.Linear(width, width), lean
        self.context = AttentionContext(width, rate=0.3)

    def forward(self, x):
        if self.lean:
            x = self.context(x)
        elif self.context.context is not None:
            x = plain(x, self.context.context.clone(), self.context.strength)
        y = self.mix(x).tanh()
        self.context.update(x, y)
        return x + y


def train(model, steps=6):
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 9, 8, dtype=torch.float64)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("lean", [False, True], ids=["plain ledger", "lean ledger"])
def test_training_follows_plain(lean):
    torch.manual_seed(2)
    ours = nn.Sequential(Block(8, True), Block(8, True)).double()
    theirs = copy.deepcopy(ours)
    for block in theirs:
        block.lean = False
    if lean:
        ours = leangrad.lean(ours, min_bytes=0)
    (losses, parameters), (expected, others) = train(ours), train(theirs)
    assert losses == pytest.approx(expected, rel=1e-12)
    for one, other in zip(parameters, others, strict=True):
        close(one, other, torch.float64)
    assert ours[0].context.strength.abs() > 1e-6


def test_packed_gradients_take_the_strength_too():
    torch.manual_seed(2)
    ours = nn.Sequential(Block(8, True), Block(8, True)).double()
    theirs = copy.deepcopy(ours)
    packed = leangrad.pack_gradients(ours)
    for _ in range(2):  # the second with a context
        x, grad = torch.randn(2, 4, 8, dtype=torch.float64)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).backward(grad)
    gradients = [p.grad for p in theirs.parameters()]
    for one, other in zip(ours.parameters(), gradients, strict=True):
        assert same_bits(one.grad, other)
    assert packed.norm().item() == pytest.approx(torch.stack([g.norm() for g in gradients]).norm().item())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_a_context_that_moves_raises(reentrant):
    """The second run would apply the context of after the update: a silently wrong gradient."""
    block, x = Block(8, True), torch.randn(4, 8, requires_grad=True)
    for _ in range(2):  # without a context at first, then with one
        y = checkpoint(block, x, use_reentrant=reentrant)
        with pytest.raises(ChangedError, match=r"torch\.utils\.checkpoint"):
            y.sum().backward()
    block.eval()
    frozen = block.context.context.clone()
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert same_bits(block.context.context, frozen)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_follow_eager_ones(backend):
    """In one graph, with the context that appears, moves and is applied in it."""
    torch.manual_seed(3)
    ours = Block(8, True).double()
    theirs = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for _ in range(3):
        x, grad = torch.randn(2, 4, 8, dtype=torch.float64)
        for block, f in ((ours, compiled), (theirs, theirs)):
            block.zero_grad()
            f(x).backward(grad)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                close(one.grad, other.grad, torch.float64)
        close(ours.context.context, theirs.context.context, torch.float64)


def test_bad_input():
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 6\), got \(4, 8\)"):
        AttentionContext(6).update(x, x)
    with pytest.raises(ValueError, match=r"width: expected 1 or more"):
        AttentionContext(0)
    with pytest.raises(ValueError, match=r"rate: expected a number, got nan"):
        AttentionContext(4, float("nan"))
