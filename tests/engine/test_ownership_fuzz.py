"""Random graphs in which every gradient that `owned` calls ours is ruined: nobody else may ever notice.

A graph is built from a seed, twice. In one run the probes only look; in the other each probe that is told that it owns
its gradient fills it with NaN after use. Everything that can be seen afterwards (leaf gradients, captured and retained
ones, whatever hooks held on to: tensors, views, storages, numpy arrays) must be the same in both runs.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leangrad._torch import called_through_c
from leangrad.engine import ownership
from leangrad.engine.ownership import owned
from tests.support import same_bits
from tests.support.fuzz import fuzz_settings

SHAPES = [(4, 6), (24,), (2, 12), (1, 24), (2, 3, 4)]


class Run:
    """One run of one graph: its own randomness, what it holds, and what the probes answered."""

    def __init__(self, seed: int, *, ruin: bool):
        self.choose, self.ruin = random.Random(seed), ruin
        self.generator = torch.Generator().manual_seed(seed)
        self.held: list[object] = []
        self.answers: list[bool] = []

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)


class Ruin(torch.autograd.Function):
    """`scale * x`, whose backward ruins the gradient it owns."""

    @staticmethod
    def forward(ctx, x, run, scale):
        ctx.run, ctx.scale = run, scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        ours, result = owned(grad), grad * ctx.scale
        ctx.run.answers.append(ours)
        if ours and ctx.run.ruin:
            grad.fill_(float("nan"))
        return result, None, None


class RuinInPlace(torch.autograd.Function):
    """`scale * x`, whose backward returns the very gradient it got where it owns it."""

    @staticmethod
    def forward(ctx, x, run, scale):
        ctx.run, ctx.scale = run, scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        ours = owned(grad)
        ctx.run.answers.append(ours)
        return (grad.mul_(ctx.scale) if ours and ctx.run.ruin else grad * ctx.scale), None, None


class Fork(torch.autograd.Function):
    """Two outputs, one gradient handed on, sometimes as an alias, sometimes kept."""

    @staticmethod
    def forward(ctx, a, b, run, how):
        ctx.run, ctx.how = run, how
        return a + b

    @staticmethod
    def backward(ctx, grad):
        if ctx.how == 0:
            return grad, grad, None, None
        if ctx.how == 1:
            return grad, grad.view_as(grad), None, None
        if ctx.how == 2:
            ctx.run.held.append(grad)
            return grad, grad.detach(), None, None
        array = np.ascontiguousarray(grad.numpy() * 2)
        ctx.run.held.append(array)
        return torch.from_numpy(array), grad, None, None


def hold(run: Run, grad: torch.Tensor):
    kind = run.choose.randrange(9)
    if kind < 6:
        run.held.append(
            [
                lambda: grad,
                grad.detach,
                lambda: grad.reshape(-1)[:3],
                grad.untyped_storage,
                lambda: grad.detach().numpy(),
                lambda: grad.t() if grad.dim() == 2 else grad.view(-1),
            ][kind]()
        )
    return grad * 1.5 if kind == 7 else None


def grow(run: Run, pool: list[torch.Tensor]) -> torch.Tensor:
    """One more random node on top of random earlier ones."""
    choose = run.choose
    a, b = choose.choice(pool), choose.choice(pool)
    b = b.reshape(a.shape)
    kind = choose.randrange(16)
    if kind < 4:
        return Ruin.apply(a, run, choose.choice([0.5, 2.0, -1.0]))
    if kind < 6:
        return RuinInPlace.apply(a, run, choose.choice([0.5, 2.0, -1.0]))
    if kind == 6:
        return a + b
    if kind == 7:
        return a * b.tanh()
    if kind == 8:
        return a.reshape(choose.choice(SHAPES))
    if kind == 9:
        return (a.t() if a.dim() == 2 else a).contiguous().view(a.shape)
    if kind == 10:
        # Not on leaves: PyTorch itself stores aliases that reach two leaves as two `.grad`s in one memory, and adds a
        # second backward to both.
        return Fork.apply(a * 1, b * 1, run, choose.randrange(4))
    if kind == 11:
        return torch.cat([a.reshape(-1)[:12], b.reshape(-1)[12:]]).view(a.shape)
    if kind == 12:
        first, second = a.reshape(-1).chunk(2)
        return torch.stack([second, first]).view(a.shape)
    if kind == 13:
        return a - a.mean()
    if kind == 14:
        return a.sum(0, keepdim=True).expand(a.shape)
    return torch.nn.functional.relu(a) if choose.random() < 0.5 else a.reshape(4, 6) @ run.tensor(6, 6)


def observe(seed: int, *, ruin: bool) -> tuple[list[torch.Tensor], list[bool]]:
    """Build and run the graph of `seed`; return everything that can be seen afterwards, and the answers."""
    run = Run(seed, ruin=ruin)
    choose = run.choose
    leaves = [run.tensor(4, 6).requires_grad_() for _ in range(choose.randint(1, 3))]
    pool = list(leaves)
    retained = []
    for _ in range(choose.randint(1, 10)):
        node = grow(run, pool)
        what = choose.randrange(10)
        if what == 0:
            node.retain_grad()
            retained.append(node)
        elif what == 1:
            node.register_hook(lambda grad: hold(run, grad))
        elif what == 2 and node.grad_fn is not None:
            node.grad_fn.register_hook(lambda inputs, outputs: None)
        elif what == 3 and node.grad_fn is not None:
            node.grad_fn.register_prehook(lambda grads: None)
        pool.append(node)

    roots = [pool[-1], *choose.sample(pool[len(leaves) :], choose.randint(0, min(2, len(pool) - len(leaves))))]
    seeds = [run.tensor(*root.shape) for root in roots]
    for times in reversed(range(choose.choice([1, 1, 2]))):
        keep_graph = times > 0
        if choose.random() < 0.3:
            inputs = [*leaves, *choose.sample(pool, choose.randint(0, 2))]
            run.held += torch.autograd.grad(roots, inputs, seeds, retain_graph=keep_graph, allow_unused=True)
        else:
            torch.autograd.backward(roots, seeds, retain_graph=keep_graph)

    seen = [*seeds, *(leaf.grad for leaf in leaves), *(node.grad for node in retained), *run.held]
    return [plain(thing) for thing in seen if thing is not None], run.answers


def plain(thing) -> torch.Tensor:
    if isinstance(thing, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.float64).set_(thing).clone()
    return torch.as_tensor(thing).detach().clone()


@pytest.mark.fuzz
def test_ruining_what_is_owned_is_never_noticed():
    answers: list[bool] = []

    @fuzz_settings(small=400, large=30_000)
    @given(st.integers(0, 2**48))
    def check(seed):
        expected, looked = observe(seed, ruin=False)
        found, answered = observe(seed, ruin=True)
        assert answered == looked
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert same_bits(one, other), f"a gradient that somebody sees was called owned; seed {seed}"
        answers.extend(answered)

    check()
    # The fuzz says nothing if nothing, or everything, is owned.
    assert 0.2 < sum(answers) / len(answers) < 0.9


@pytest.mark.fuzz
def test_the_fuzz_can_fail(monkeypatch):
    """A test of ownership that forgets the storage's counts is caught by the same graphs."""
    ownership._calibrate()  # who calls a backward is measured with the rest, and is not forgotten here
    complete = ownership.reference_counts
    monkeypatch.setattr(ownership, "reference_counts", lambda tensor: complete(tensor)[:3])
    monkeypatch.setattr(ownership, "_exclusive", frozenset({row_without_storage()}))
    wrong = 0
    for seed in range(400):
        expected, _ = observe(seed, ruin=False)
        found, _ = observe(seed, ruin=True)
        wrong += not all(map(same_bits, found, expected))
    assert wrong > 0


def row_without_storage():
    """The exclusive row as the patched, one call deeper counts give it."""
    rows = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            rows.append(look(grad))
            return grad.clone()

    @called_through_c
    def look(grad):
        return signature(grad)

    @called_through_c
    def signature(grad):
        return ownership.reference_counts(grad)

    (Look.apply(torch.ones(3, requires_grad=True)) * 2).sum().backward()
    return rows[0]
