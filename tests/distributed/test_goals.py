"""A budget and a bound on the time beside FSDP2 and DDP: plain's bits, no collective more, and the budget is met."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import leangrad
from leangrad.errors import BudgetError
from leangrad.lean import lean, ledger_of
from leangrad.ledger.tune import budget_search
from tests.support import same_bits
from tests.support.ranks import Transformer, loss_of, run_ranks
from tests.support.sharded import assert_same_run, sharded, state

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

SETTLED = 30
SHAPE = {"depth": 4, "width": 64}


@pytest.fixture(autouse=True)
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models as small as these take as long with any plan: none is to be dropped for the noise of a busy machine."""
    monkeypatch.setattr(budget_search, "CLEARLY_FASTER", 0.0)


def one_step(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    loss_of(model, seed).backward()


def steps(model: nn.Module, count: int = SETTLED) -> None:
    for seed in range(count):
        one_step(model, seed)


def peak(model: nn.Module, seed: int = 0) -> int:
    return leangrad.measure(lambda: one_step(model, seed), timed_runs=0).peak_bytes


def settled_peak(model: nn.Module) -> int:
    steps(model, 5)
    return min(peak(model) for _ in range(2))  # a late buffer of a collective may stand there once


def make(**settings: Any) -> Any:
    net = Transformer(**SHAPE)  # type: ignore[arg-type]
    return sharded(lean(net, min_bytes=0, **settings) if settings else net)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_budget_between_the_floor_and_plain_under_fsdp2(share: float) -> None:
    plain, floor = settled_peak(make()), settled_peak(make(spare=0))
    assert floor < 0.8 * plain
    budget = int(floor + (0.02 + 0.98 * share) * (plain - floor))
    model = make(budget=budget)

    def run(model: Any) -> None:
        for seed in range(SETTLED // 2):
            one_step(model, seed)
            if leangrad.is_lean(model):
                peak(model, seed)
            one_step(model, seed)

    assert_same_run(run, make(), model)
    assert min(peak(model) for _ in range(2)) <= 1.01 * budget
    assert ledger_of(model).differences == 0


def _fsdp2(rank: int) -> None:
    counts: Counter[str] = Counter()
    # What FSDP2 calls has another name in each release.
    for name in [name for name in dir(dist) if name.startswith(("all_gather", "reduce_scatter", "all_reduce"))]:
        setattr(dist, name, partial(_counted, counts, name, getattr(dist, name)))
    floor = settled_peak(make(spare=0))
    goals: list[dict[str, Any]] = [{"slowdown": 1.5}, {"slowdown": 1.0001}, {"budget": 10**9}]
    for settings in (*goals, {"budget": int(0.95 * floor)}):
        plain, model = make(), make(**settings)
        budget_search.CLEARLY_FASTER = 0.0
        try:
            for seed in range(SETTLED):
                found = []
                for one in (plain, model):
                    counts.clear()
                    one_step(one, 10 * seed + rank)
                    found.append(counts.copy())
                assert found[0] == found[1], (settings, seed)
                assert found[0].total() > 2 * SHAPE["depth"]
                for n, (a, b) in enumerate(zip(state(plain), state(model), strict=True)):
                    assert same_bits(a, b), (settings, seed, n)
        except BudgetError as error:  # on both ranks, whose plans of the least memory are alike
            least = error.smallest or 0
        else:
            continue
        assert settings["budget"] < least < 1.1 * floor


def _counted(counts: Counter[str], name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    counts[name] += 1
    return call(*args, **kwargs)


def test_the_same_bits_and_no_collective_more_under_fsdp2(tmp_path: Path) -> None:
    """Below the floor products run again, if what they read is gathered then; or an error says that it cannot be."""
    run_ranks(_fsdp2, 2, tmp_path, copies=True)


def _ddp(rank: int) -> None:
    """Ranks with batches of their own, and a budget each: plans need not be alike."""
    nets = [Transformer(**SHAPE) for _ in range(2)]  # type: ignore[arg-type]
    most = settled_peak(nets[0])
    plain = DistributedDataParallel(nets[0])
    for settings in ({"budget": int((0.6 + 0.3 * rank) * most)}, {"slowdown": 1.2}):
        model = DistributedDataParallel(lean(Transformer(**SHAPE), min_bytes=0, **settings))  # type: ignore[arg-type]
        for seed in range(SETTLED):
            for one in (plain, model):
                one_step(one, 10 * seed + rank)
            for n, (a, b) in enumerate(zip(plain.parameters(), model.parameters(), strict=True)):
                assert same_bits(a.grad, b.grad), (seed, n)


def test_ranks_of_ddp_with_budgets_of_their_own(tmp_path: Path) -> None:
    run_ranks(_ddp, 2, tmp_path, copies=True)
