"""The largest batch that fits: rows of a batch, the search, and whole models."""

import copy
import json
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import leangrad
from leangrad.frontier import fit as fit_module
from leangrad.frontier import ways
from leangrad.frontier.fit import Fit, Fitted, fit
from leangrad.frontier.fit.rows import count_rows, with_rows
from leangrad.frontier.fit.search import Trial, largest_fit
from leangrad.frontier.meter import Meter, Reading, Step
from leangrad.frontier.repeated import checkpoint_each, repeated_modules
from leangrad.lean import lean
from tests.support import same_bits
from tests.support.budgets import lean_down_to
from tests.support.small_models import stack

# Rows

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Sample:
    x: Tensor
    name: str


def test_rows_of_every_tensor_in_a_nest() -> None:
    x = torch.arange(6.0).view(2, 3)
    batch = {"x": x, "more": [Pair(x, torch.tensor(7.0)), (Sample(x, "name"), 5)]}
    assert count_rows(batch) == 2
    for rows, order in ((1, [0]), (2, [0, 1]), (5, [0, 1, 0, 1, 0])):
        found = with_rows(batch, rows)
        pair, (sample, five) = found["more"]
        assert type(pair) is Pair
        assert (sample.name, five, pair.b.item()) == ("name", 5, 7.0)
        assert all(same_bits(one, x[order]) for one in (found["x"], pair.a, sample.x))
    assert count_rows(batch) == 2


def test_rows_keep_what_a_tensor_is() -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    assert with_rows(x, 2) is x
    for rows in (1, 4):
        made = with_rows(x, rows)
        assert made.is_leaf
        assert made.requires_grad
        assert made.dtype == x.dtype


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "which has none"),
        ({"x": 5}, "which has none"),
        (torch.tensor(1.0), "which has none"),
        ((torch.ones(2, 3), torch.ones(4)), r"same dimension 0.*float32\[2, 3\] and float32\[4\]"),
        (torch.ones(0, 3), "at least one row"),
    ],
)
def test_batches_without_rows(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_rows(batch)


# The search


def searched(needs: Callable[[int], int], memory: int, start: int, most: int, tells: bool = True) -> tuple[int, int]:
    """The answer, and how many trials it took; no size is tried twice."""
    tried: list[int] = []

    def attempt(rows: int) -> Trial:
        assert 1 <= rows <= most
        assert rows not in tried
        tried.append(rows)
        return Trial(rows, needs(rows) <= memory, needs(rows) if tells else None)

    found = largest_fit(attempt, memory, start, most)
    assert found == 0 or found in tried
    return found, len(tried)


@settings(deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(1, 10**7),
    st.integers(1, 10**10),
    st.integers(1, 1000),
    st.integers(1, 100_000),
    st.integers(1, 5000),
    st.booleans(),
)
def test_the_search_finds_the_largest(
    base: int, slope: int, memory: int, start: int, most: int, grain: int, tells: bool
) -> None:
    """A line in blocks, as an allocator makes it."""

    def needs(rows: int) -> int:
        return base + -(-slope * rows // grain) * grain

    best = max((memory - base) // grain * grain // slope, 0) if memory >= base else 0
    found, trials = searched(needs, memory, min(start, most), most, tells)
    assert needs(found) <= memory or found == 0
    assert min(best, most) * 127 // 128 - 1 <= found <= min(best, most)
    if min(best, most) <= 128:
        assert found == min(best, most)
    assert trials <= 40


@pytest.mark.parametrize("best", [1, 7, 100, 1000, 60_000])
def test_a_line_needs_few_trials(best: int) -> None:
    assert searched(lambda rows: 10_000 + 700 * rows, 10_000 + 700 * best, start=8, most=65_536)[1] <= 9


def test_a_flat_need_is_no_line() -> None:
    assert searched(lambda rows: 5, 10, start=3, most=500)[0] == 500
    assert searched(lambda rows: 50, 10, start=3, most=500)[0] == 0


# Whole models


class Quick(Meter):
    """Counts 1000 bytes for any step: measuring takes time."""

    def read(self, step: Step) -> Reading:
        step(lambda: None)
        return Reading(1000, 0)


@pytest.fixture
def quick_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "meter_for", lambda model, batch: Quick())
    monkeypatch.setattr(ways, "lean", lean_down_to(1))


def peak(model: nn.Module, rows: int, batch: Tensor, steps: int = 3) -> int:
    x = with_rows(batch, rows)
    peaks = []
    for _ in range(steps):
        model.zero_grad()
        peaks.append(leangrad.measure(lambda: model(x).square().mean().backward(), timed_runs=0).peak_bytes)
    return max(peaks)


def checkpointed(model: nn.Module) -> nn.Module:
    checkpoint_each(repeated_modules(model))
    return model


@pytest.mark.slow
def test_one_row_more_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "lean", lean_down_to(1))
    model, batch, memory = stack(6, 64), torch.randn(60, 64), 1_200_000
    found = {fitted.way: fitted for fitted in fit(model, batch, memory=memory).ways}
    assert list(found) == ["plain", "checkpoint", "lean", "lean, budget"]
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain": lambda m: m,
        "checkpoint": checkpointed,
        "lean": lean,
    }
    for way, make in makers.items():
        rows = found[way].rows
        assert 1 < rows < 128  # where the answer is exact
        assert peak(make(copy.deepcopy(model)), rows, batch) == found[way].peak_bytes <= memory
        assert peak(make(copy.deepcopy(model)), rows + 1, batch) > memory
        assert found[way].trials <= 8
    assert found["plain"].rows < found["lean"].rows
    assert found["plain"].rows < found["checkpoint"].rows
    assert found["lean, budget"].rows == found["lean"].rows


@pytest.mark.usefixtures("quick_meter")
def test_a_budget_that_is_refused_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to 1000 bytes a row, which is less than any other way needs."""

    def stand_in(model: nn.Module, *, budget: int | None = None) -> nn.Module:
        def check(module: nn.Module, args: Any) -> None:
            if budget is not None and len(args[0]) * 1000 > budget:
                raise leangrad.errors.BudgetError("too small", len(args[0]) * 1000)

        model.register_forward_pre_hook(check)
        return model

    monkeypatch.setattr(ways, "lean", stand_in)
    found = fit(nn.Linear(4, 4), torch.randn(2, 4), memory=6_500).ways
    assert [(fitted.way, fitted.rows) for fitted in found if fitted.way == "lean, budget"] == [("lean, budget", 6)]


@pytest.mark.extended
def test_a_real_budget_fits_no_less_than_the_floor() -> None:
    found = {fitted.way: fitted for fitted in fit(stack(4, 32), torch.randn(64, 32), memory=2_000_000).ways}
    assert found["lean, budget"].rows >= found["lean"].rows > found["plain"].rows
    assert found["lean, budget"].peak_bytes <= 2_000_000


@pytest.mark.usefixtures("quick_meter")
def test_memory_for_nothing_and_for_all() -> None:
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    none = fit(model, batch, memory=10)
    assert [fitted.rows for fitted in none.ways] == [0, None, 0, 0]
    assert none.ways[0].note == "one row takes 1,000 B"
    every = fit(model, batch, memory="1GB", most=10)
    assert [fitted.rows for fitted in every.ways] == [10, None, 10, 10]
    assert every.ways[0].note == "no more were tried"
    assert [fitted.rows for fitted in fit(model, batch, memory="1GB", most=2).ways] == [2, None, 2, 2]


@pytest.mark.usefixtures("quick_meter")
def test_running_out_of_memory_does_not_fit() -> None:
    class Small(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 5:
                raise torch.OutOfMemoryError("out of memory, by a test")
            return super().forward(x)

    assert [fitted.rows for fitted in fit(Small(4, 4), torch.randn(2, 4), memory="1GB").ways] == [5, None, 5, 5]


@pytest.mark.usefixtures("quick_meter")
def test_a_way_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: nn.Module, budget: int | None = None) -> nn.Module:
        raise KeyError("by a test")

    monkeypatch.setattr(ways, "lean", broken)
    found = fit(nn.Linear(4, 4), torch.randn(2, 4), memory=5000, most=4).ways
    assert found[0].rows == 4
    assert found[1] == Fitted("checkpoint", None, note="found no repeated modules to put it around")
    assert found[2] == Fitted("lean", None, None, 1, "the floor; failed with KeyError: 'by a test'")
    assert found[3].rows is None


@pytest.mark.usefixtures("quick_meter")
def test_a_loss_of_fixed_rows_is_told() -> None:
    targets = torch.randn(2, 4)
    with pytest.raises(RuntimeError) as raised:
        fit(nn.Linear(4, 4), torch.randn(2, 4), lambda out: (out - targets).square().mean(), memory="1MB")
    assert any("the loss has to take any number of rows" in note for note in raised.value.__notes__)


@pytest.mark.usefixtures("quick_meter")
def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    batch = torch.randn(8, 4)
    model(batch).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    state = torch.get_rng_state()
    fit(model, batch, memory=50_000, most=16, optimizer=torch.optim.SGD)
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    for parameter, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is grad
        assert same_bits(grad, value)
    assert same_bits(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("named", "kind", "message"),
    [
        ({"memory": "20 gigs"}, ValueError, "memory must be a number of bytes above 0.*got '20 gigs'"),
        ({"memory": 0}, ValueError, "got 0"),
        ({"memory": -1}, ValueError, "got -1"),
        ({"memory": float("nan")}, ValueError, "got nan"),
        ({"memory": None}, TypeError, "got None"),
        ({"most": 0}, ValueError, "most to be a positive integer, got 0"),
        ({"batch": ()}, ValueError, "which has none"),
        ({"model": nn.Linear(4, 4).requires_grad_(False)}, ValueError, "requires a gradient"),
    ],
)
def test_bad_input(named: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fit(**{"model": nn.Linear(4, 4), "batch": torch.randn(2, 4), "memory": "1MB", **named})


def test_how_it_reads() -> None:
    found = Fit(10_000_000, "cpu", (Fitted("plain", 8, 9_000_000, 4), Fitted("lean", 20, 9_900_000, 5, "the floor")))
    assert str(found).splitlines() == [
        "the largest batch within 10.00 MB on cpu",
        "way    largest batch  × plain     peak  trials  note",
        "plain              8     1.00  9.00 MB       4",
        "lean              20     2.50  9.90 MB       5  the floor",
    ]
    assert json.loads(found.to_json())["ways"][1]["rows"] == 20


@pytest.mark.gpu
def test_fit_on_a_gpu() -> None:
    batch, memory = torch.randn(64, 256, device="cuda"), 200_000_000
    stack(6, 256).cuda()(batch).sum().backward()  # from here on the library's workspaces stand
    stood = torch.cuda.memory_allocated()
    model = stack(6, 256).cuda()
    ballast = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    found = {fitted.way: fitted for fitted in fit(model, batch, memory=memory).ways}
    del ballast
    assert found["plain"].rows < found["lean"].rows < found["checkpoint"].rows
    for way in ("plain", "lean", "checkpoint"):
        assert 0.97 * memory < found[way].peak_bytes <= memory
    x = with_rows(batch, found["plain"].rows)
    for _ in range(3):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
    assert found["plain"].peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - stood, rel=0.1)
