"""What each rebuild takes, op by op; and marks of saved tensors."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad.ledger.learn import timing
from leangrad.ledger.learn.timing import Cost, SavedMarks, Timing
from leangrad.ledger.values import value as value_module
from leangrad.ledger.values.pending_save import PendingSave
from leangrad.ledger.values.rebuild import replays
from leangrad.ledger.values.rebuild.replays import timed_by
from leangrad.ledger.values.value import Value, leaf_value
from leangrad.policy import graph as policy


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def slow(self, seconds: float) -> Any:
        def function(x: Tensor) -> Tensor:
            self.now += seconds
            return x + 1

        return function


def chain(*functions: Any) -> list[Value]:
    """Values that are made of each other, from a leaf on."""
    values, last = [], leaf_value(torch.ones(4), 0)
    for n, function in enumerate(functions):
        value = Value(f"op{n}")
        value.set_recipe(function, (last,), {})
        value.readers = 1
        values.append(value)
        last = value
    return values


def items(*nbytes: int) -> list[policy.Value]:
    return [policy.Value(b, (n - 1,) if n else ()) for n, b in enumerate(nbytes)]


def timed(values: list[Value | None], read: list[Value]) -> Timing:
    watch = Timing(on_gpu=False)
    for number, value in enumerate(values):
        if value is not None:
            watch.note(value, number)
    for value in read:
        watch.unpack(value)
    return watch


def test_each_op_has_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its share in bytes of what one rebuild took."""
    clock = Clock(monkeypatch)
    values = chain(clock.slow(5.0), clock.slow(0.5), clock.slow(0.25))
    watch = timed([*values], [values[2]])
    found = watch.costs(items(100, 100, 1000), [0, 1, 2], frozenset())
    assert found == {0: Cost(5.0, 5.0), 1: Cost(0.5, 0.5), 2: Cost(0.25, 0.25)}


def test_what_was_made_on_the_way_and_is_no_item_is_part_of_what_it_was_made_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    values = chain(clock.slow(5.0), clock.slow(0.5), clock.slow(0.25))
    watch = timed([values[0], None, values[2]], [values[2]])
    assert watch.costs(items(100, 100), [0, -1, 1], frozenset()) == {0: Cost(5.0, 5.0), 1: Cost(0.75, 0.75)}


def test_what_was_undecided_when_it_was_saved_has_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that may need only a tensor's shape packs a slot, which is filled when the call has ended."""
    clock = Clock(monkeypatch)
    values = chain(clock.slow(5.0), clock.slow(0.5), clock.slow(0.25))
    slots = [PendingSave(torch.ones(4), number) for number in range(3)]
    watch = Timing(on_gpu=False)
    for slot, value in zip(slots, values, strict=True):
        watch.note(slot, slot.number)
        slot.packed = value
    watch.unpack(slots[2])
    found = watch.costs(items(100, 100, 1000), [0, 1, 2], frozenset())
    assert found == {0: Cost(5.0, 5.0), 1: Cost(0.5, 0.5), 2: Cost(0.25, 0.25)}


def test_what_is_read_again_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    values = chain(clock.slow(5.0), clock.slow(0.5))
    values[0].recipe_reads, values[0].is_product, values[0].products = 1, True, 1
    monkeypatch.setattr(value_module, "graph_task", lambda: 7)
    monkeypatch.setattr(value_module, "remember", lambda value, task: None)
    monkeypatch.setattr(Value, "_check_settings", lambda self, task: None)
    watch = timed([*values], [values[1], values[0]])
    assert watch.costs(items(8, 8), [0, 1], frozenset()) == {0: Cost(5.0, 5.0), 1: Cost(0.5, 0.5)}


def test_a_kernel_that_replays_a_chain_has_what_it_takes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads was made inside of its call, and has a cost of its own; what it computes inside shares its own."""
    clock = Clock(monkeypatch)
    first, inner, last = chain(clock.slow(5.0), clock.slow(0.5), clock.slow(0.25))

    def replay(value: Value, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        tensor, _ = first._take(made, task)
        clock.now += 1.0
        return tensor + 2, True

    monkeypatch.setitem(replays.replayers, last.function, replay)
    watch = timed([first, inner, last], [last])
    found = watch.costs(items(100, 300, 100), [0, 1, 2], frozenset())
    assert found == {0: Cost(5.0, 5.0), 1: Cost(0.75, 0.75), 2: Cost(0.25, 0.25)}


def test_a_kernel_that_declines_leaves_each_op_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    values = chain(clock.slow(5.0), clock.slow(0.5))
    monkeypatch.setitem(replays.replayers, values[1].function, lambda value, made, task: None)
    watch = timed([*values], [values[1]])
    assert watch.costs(items(8, 8), [0, 1], frozenset()) == {0: Cost(5.0, 5.0), 1: Cost(0.5, 0.5)}


def test_what_another_thread_rebuilds_meanwhile_is_not_timed() -> None:
    values, others = chain(torch.sin), chain(torch.cos)
    watch = Timing(on_gpu=False)
    watch.note(values[0], 0)

    def meanwhile(x: Tensor) -> Tensor:
        thread = threading.Thread(target=others[0].unpack)
        thread.start()
        thread.join(60)
        assert [*replays.op_timers.values()] == [watch]
        return x.sin()

    values[0].function = meanwhile
    watch.unpack(values[0])
    assert len(watch._reads[0].ops) == 1
    assert not replays.op_timers


def test_nobody_watches_after_an_error() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("no")

    watch = Timing(on_gpu=False)
    with pytest.raises(ValueError, match="no"):
        watch.unpack(chain(fail)[0])
    assert not replays.op_timers
    with timed_by(watch):
        assert [*replays.op_timers] == [threading.get_ident()]


def test_marks_have_the_numbers_of_saved_tensors_that_share_a_value() -> None:
    marked: list[str] = []
    marks = SavedMarks(lambda: marked.append("save"), lambda: marked.append("read"))
    (value,) = chain(torch.sin)
    other = Value("kept")
    other.keep(torch.ones(2))
    for number, packed in ((3, value), (4, other), (7, value)):
        marks.note(packed, number)
    for packed in (value, other, value, value):
        marks.unpack(packed)
    assert marks.saves == [3, 4, 7]
    assert marks.reads == [7, 4, 3, -1]
    assert marked == ["save"] * 3 + ["read"] * 4


class Unit(nn.Module):
    """A dear product, and cheap ops on what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.leaky_relu(F.hardswish(F.leaky_relu(self.wide(x), 0.3)), 0.1)


def test_below_the_floor_products_are_kept_before_what_is_made_of_them() -> None:
    """A budget with room for some: what spares the most time for its bytes is a product, not an activation."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Unit() for _ in range(6))), torch.randn(256, 512)

    def peak(model: nn.Module) -> int:
        return leangrad.measure(lambda: (model.zero_grad(), model(x).sum().backward()), timed_runs=0).peak_bytes

    floor = leangrad.lean(copy.deepcopy(net), min_bytes=0)
    least = min(peak(floor) for _ in range(3))
    lean = leangrad.lean(copy.deepcopy(net), budget=least - 2 * x.nbytes, min_bytes=0)
    for _ in range(28):
        last = peak(lean)
    assert last <= least - 2 * x.nbytes
    ledger: Any = leangrad.ledger_of(lean)
    search = ledger._tuner.search
    products = {n for n, item in enumerate(search.step.items) if item.products}
    others = {n for n, item in enumerate(search.step.items) if not item.products and not item.is_fixed}
    assert len(products) == 6
    assert min(search.replay.costs[n] for n in products) > max(search.replay.costs[n] for n in others)
    assert len(products & ledger._kept_items) >= 5
