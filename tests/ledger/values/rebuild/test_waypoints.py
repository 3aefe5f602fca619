"""Recipes longer than Python's stack is deep, under plans that keep little: see [Note: waypoints]."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from leangrad.errors import ChangedError
from leangrad.ledger import Ledger
from leangrad.ledger.decision import SavedKind
from leangrad.ledger.values.rebuild import rebuilt_cache
from leangrad.ledger.values.rebuild.waypoints import LONGEST_RECIPE
from leangrad.ledger.values.value import Value
from tests.support.ledger_programs import assert_same, backward, leaf

ROWS, WIDTH, WIDE = 64, 16, 4096
BLOCKS = 150  # four ops each: with 60 there are more sums than a recipe may run through without products
STEPS = 3


class Net:
    """A residual stream, and a head so wide that the lowest peak keeps next to nothing of the stream."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.x = leaf(ROWS, WIDTH, seed=1000)
        self.weights = [leaf(WIDTH, WIDTH, seed=n) for n in range(blocks)]
        self.head = leaf(WIDTH, WIDE, seed=1001)

    def stream(self) -> Tensor:
        y = self.x @ self.weights[0]
        for w in self.weights:
            y = y + (y @ w).mul(0.1).tanh().sin()
        return y

    def __call__(self) -> Tensor:
        return (self.stream() @ self.head).log_softmax(-1).exp()

    def gradients(self) -> list[Tensor | None]:
        leaves = [self.x, self.head, *self.weights]
        found = [t.grad for t in leaves]
        for t in leaves:
            t.grad = None
        return found


def ledger_with_products(products: int = 8) -> Ledger:
    return Ledger(residual_depth="auto", min_bytes=0, products=products)


def step(net: Net, region: Any, **options: Any) -> list[Tensor | None]:
    with region:
        y = net()
    backward(y, **options)
    return net.gradients()


def learned(net: Net) -> Ledger:
    """A ledger that has recorded a step of ``net``; the next one follows the plan."""
    ledger = ledger_with_products()
    step(net, ledger)
    return ledger


def values() -> list[Value]:
    gc.collect()
    return [v for v in gc.get_objects() if type(v) is Value]


@pytest.fixture
def deepest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many replays were one inside the other, at most."""
    rebuild, found, now = Value._rebuild, [0], 0

    def counted(self: Value, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        nonlocal now
        now += 1
        found[0] = max(found[0], now)
        try:
            return rebuild(self, made, task)
        finally:
            now -= 1

    monkeypatch.setattr(Value, "_rebuild", counted)
    return found


# ------------------------------------------------------------------------------------------------------- what is kept


def by_autograd(ledger: Ledger) -> int:
    """Bytes of what the plan keeps and no recipe reads, which autograd saves without a hook: at the loss."""
    learned, step = ledger.learned, ledger._recorder.step
    kinds = zip(step.saved, learned.saved_kinds, strict=False)
    bare = {saved.item for saved, kind in kinds if kind is SavedKind.BARE and saved.item in learned.kept}
    return sum(step.items[n].nbytes for n in bare if not step.items[n].is_fixed)


@pytest.mark.parametrize("blocks", [60, BLOCKS])
def test_a_step_keeps_what_its_plan_keeps(blocks: int, deepest: list[int]) -> None:
    """However many sums, products and ops lie between what is kept and what is read."""
    net = Net(blocks)
    plain = step(net, nullcontext())
    ledger = learned(net)
    for n in range(STEPS):
        with ledger:
            y = net()
        kept = {id(v): v.nbytes for v in values() if v.tensor is not None and not v.free}
        assert ledger._kept_items is not None
        planned = ledger._replay.play(ledger._kept_items).kept_bytes
        assert sum(kept.values()) == planned - by_autograd(ledger) < ROWS * WIDTH * 4 * 4
        backward(y)
        del y
        assert_same(net.gradients(), plain, n)
    assert ledger.differences == 0
    assert 20 < deepest[0] <= LONGEST_RECIPE  # a sum is rebuilt from the sum before it first: a frame for each


def test_a_chain_of_thousands_of_ops_needs_no_deep_stack(deepest: list[int]) -> None:
    """In the recorded step too, if it may run so many products."""

    def run(region: Any) -> list[Tensor | None]:
        x, w = leaf(2, 4), leaf(4, 4, seed=1)
        with region:
            y = x
            for _ in range(1000):
                y = (y @ w).tanh()
        backward(y)
        return [x.grad, w.grad]

    plain, ledger = run(nullcontext()), ledger_with_products(10_000)
    assert_same(run(ledger), plain, "recorded")
    assert ledger.totals().kept_bytes == 0
    assert 50 < deepest[0] <= LONGEST_RECIPE


def test_what_no_product_was_run_for_is_still_kept_after_so_many_ops(deepest: list[int]) -> None:
    """It is not held once it is rebuilt, so that it is no waypoint."""

    def run(region: Any) -> list[Tensor | None]:
        x = leaf(8, 8)
        with region:
            y = x
            for _ in range(300):
                y = (y * 0.99).tanh()
        backward(y)
        return [x.grad]

    plain, ledger = run(nullcontext()), Ledger(residual_depth=0, min_bytes=0, products=8)
    assert_same(run(ledger), plain, "recorded")
    assert f"{LONGEST_RECIPE} ops" in ledger.summary()
    assert 50 < deepest[0] <= LONGEST_RECIPE


# ------------------------------------------------------------------------------------------------------------ backward


def twice(net: Net, y: Tensor) -> None:
    backward(y, retain_graph=True)
    backward(y)


def in_pieces(net: Net, y: Tensor) -> None:
    backward(y, retain_graph=True, inputs=net.weights[:3])
    backward(y, retain_graph=True, inputs=[net.weights[40], net.head])
    backward(y)


@pytest.mark.parametrize("passes", [twice, in_pieces])
def test_several_backward_passes(passes: Callable[[Net, Tensor], None]) -> None:
    def run(region: Any) -> list[Tensor | None]:
        with region:
            y = net()
        passes(net, y)
        return net.gradients()

    net = Net()
    plain, ledger = run(nullcontext()), learned(net)
    for n in range(2):
        assert_same(run(ledger), plain, n)


def test_a_second_backward_is_refused_as_ever() -> None:
    net = Net()
    ledger = learned(net)
    with ledger:
        y = net()
    backward(y)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        backward(y)


def test_nothing_is_left_when_backward_has_ended() -> None:
    """No garbage collector runs: each value goes with its last reader."""
    net = Net()
    ledger = learned(net)
    before = set(rebuilt_cache.memos)  # of backward passes of other tests that were meant to fail
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with ledger:
                y = net()
            found = [weakref.ref(v) for v in gc.get_objects() if type(v) is Value and v.is_waypoint]
            assert len(found) > 2
            backward(y)
            del y
            assert [ref for ref in found if ref() is not None] == []
            assert set(rebuilt_cache.memos) == before
    finally:
        gc.enable()


def test_a_waypoint_is_rebuilt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it all that lies on the way: as many replays as there are tensors that are not kept."""
    rebuild, runs = Value._rebuild, list[int]()

    def counted(self: Value, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        runs.append(id(self))
        return rebuild(self, made, task)

    net = Net()
    ledger = learned(net)
    with ledger:
        y = net()
    monkeypatch.setattr(Value, "_rebuild", counted)
    backward(y)
    assert len(runs) == len(set(runs)) >= 4 * BLOCKS


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_rebuild_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it fails: what was held by then serves the next backward pass, or is made again."""
    rebuild, left = Value._rebuild, 0

    def failing(self: Value, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        nonlocal left
        left -= 1
        if left == 0:
            raise torch.OutOfMemoryError("no memory")
        return rebuild(self, made, task)

    net = Net()
    plain, ledger = step(net, nullcontext()), learned(net)
    monkeypatch.setattr(Value, "_rebuild", failing)
    for after in (1, 2, 30, 101, 102, 250, 400, 600):
        with ledger:
            y = net()
        left = after
        with pytest.raises(torch.OutOfMemoryError):
            backward(y, retain_graph=True)
        net.gradients()
        backward(y, retain_graph=True)
        assert_same(net.gradients(), plain, after)
        del y
        assert_same(step(net, ledger), plain, after)


def test_a_weight_that_changed_is_refused() -> None:
    net = Net()
    ledger = learned(net)
    with ledger:
        y = net()
    with torch.no_grad():
        net.weights[5].add_(1)
    with pytest.raises(ChangedError, match="modified by an inplace operation"):
        backward(y)
