"""One way on one model, measured in this process."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leangrad
from leangrad.bench import turnstile, worker
from leangrad.bench.job import Job, Row
from leangrad.bench.turnstile import alone, split_processors
from leangrad.bench.ways import WAYS, Choice
from leangrad.errors import BudgetError
from leangrad.frontier.ways import Way
from tests.support.small_models import stack

HERE = "tests.bench.test_worker"


class Sized(nn.Module):
    """A stack with its loss, which takes any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack(3, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class Small(Sized):
    """It fails as torch does where there is no memory."""

    def forward(self, x: Tensor) -> Tensor:
        if not leangrad.is_lean(self):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


class Noisy(Sized):
    """Its gradients are others in every step, whatever the seed."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        Noisy.count += 1
        return super().forward(x) * Noisy.count


def sized(rows: int = 64) -> Any:
    return Sized(), torch.randn(rows, 32)


def exact() -> Any:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)), torch.randn(8, 16), torch.mean


def small() -> Any:
    return Small(), torch.randn(64, 32)


def noisy() -> Any:
    return Noisy(), torch.randn(64, 32)


def broken() -> Any:
    raise KeyError("no such data")


def frozen() -> Any:
    return nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2)


def measured(way: str, factory: str = "sized", **named: Any) -> Row:
    row = worker.measure_way(Job(f"{HERE}:{factory}", way, **{"rounds": 0, **named}))
    assert json.loads(json.dumps(row.as_dict()))["way"] == way
    return row


def test_plain_and_lean_by_the_bytes_that_measure_and_floor_count() -> None:
    plain = measured("plain", floor=True, options={"rows": 32})
    torch.manual_seed(0)
    model, batch = sized(32)
    found = leangrad.measure(lambda: model(batch).backward(), timed_runs=0)
    assert (plain.peak_bytes, plain.kept_bytes) == (found.peak_bytes, found.kept_bytes)
    assert plain.floor_bytes == leangrad.floor(model, batch).bytes
    assert (plain.outcome, plain.rows, plain.bitwise, plain.gradient_error) == ("measured", 32, True, 0.0)
    assert plain.machine["torch"] == torch.__version__
    assert plain.ratio is None
    assert plain.float64_error is None  # it has dropout, whose masks are others in float64
    lean = measured("lean", options={"rows": 32})
    assert lean.bitwise
    assert lean.kept_bytes is not None
    assert plain.floor_bytes <= lean.kept_bytes < plain.kept_bytes  # type: ignore[operator]


def test_plains_own_error_is_told() -> None:
    """Against float64, of a model that draws nothing."""
    found = measured("plain", "exact", floor=True).float64_error
    torch.manual_seed(0)
    model, batch, loss = exact()
    loss(model(batch)).backward()
    single = [parameter.grad for parameter in model.parameters()]
    model.double().zero_grad()
    loss(model(batch.double())).backward()
    double = [parameter.grad for parameter in model.parameters()]
    pairs = zip(single, double, strict=True)
    expected = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)  # type: ignore[operator, union-attr]
    assert found is not None
    assert 0 < expected <= found < 1e-5
    assert measured("lean", "exact").float64_error is None


def test_times_are_ratios_of_steps_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts steps: a turn of the way's takes twice as long, and plain's are the same."""
    order: list[str] = []
    real = worker.Training.step

    def step(self: Any, *args: Any) -> Any:
        order.append(self.way.name)
        return real(self, *args)

    monkeypatch.setattr(worker.Training, "step", step)
    clock = lambda: sum({"plain": 1, "checkpoint": 2}[name] for name in order)  # noqa: E731
    monkeypatch.setattr(worker.time, "process_time", clock)
    monkeypatch.setattr(worker.time, "perf_counter", clock)
    row = measured("checkpoint", rounds=2, steps=3)
    assert (row.ratio, row.seconds) == (2.0, 2.0)
    assert order[-16:] == [*["checkpoint"] * 4, *["plain"] * 8, *["checkpoint"] * 4]


def test_turns_end_when_their_seconds_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    turn = worker._Measuring._turn
    monkeypatch.setattr(worker._Measuring, "_turn", lambda self, way: taken.append(1) or turn(self, way))
    measured("checkpoint", rounds=9, steps=1, seconds=0.0)
    assert len(taken) == 2 * 2  # of plain and of the way
    measured("checkpoint", rounds=3, steps=1)
    assert len(taken) == 2 * 2 + 2 * 3


@pytest.mark.skipif(sys.platform == "win32", reason="no file locks there")
@pytest.mark.parametrize("way", ["lean", "plain"])
def test_processes_that_share_a_device_use_it_one_at_a_time(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another holds the turnstile, a job waits; and it lets others in before it ends."""
    path = str(tmp_path / "turnstile")
    asked, began = threading.Event(), threading.Event()
    train = worker._Measuring._train_plain
    monkeypatch.setattr(worker, "alone", lambda of: asked.set() or alone(of))
    monkeypatch.setattr(worker._Measuring, "_train_plain", lambda self, *of: began.set() or train(self, *of))
    thread = threading.Thread(target=measured, args=(way,), kwargs={"rounds": 2, "turnstile": path})
    with alone(path):
        thread.start()
        assert asked.wait(60)
        assert not began.wait(0.5)
    thread.join(120)
    assert began.is_set()
    assert not thread.is_alive()
    with alone(path):
        pass


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be told where to run there")
def test_who_has_the_device_has_processors_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its threads move there while it has the device, and the others never do."""
    before = os.sched_getaffinity(0)
    spared = {min(before)}
    monkeypatch.setattr(turnstile, "_SPARED", spared)
    end, where = threading.Event(), []
    thread = threading.Thread(target=lambda: end.wait(60) and where.append(os.sched_getaffinity(0)))
    thread.start()
    try:
        with alone(str(tmp_path / "turnstile")):
            assert os.sched_getaffinity(0) == spared
            end.set()
            thread.join(60)
        assert where == [spared]
        assert os.sched_getaffinity(0) == before
        if len(before) > 1:
            turnstile.make_room()
            assert os.sched_getaffinity(0) == before - spared
    finally:
        end.set()
        for one in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(one), before)


@pytest.mark.parametrize("fails_alone", [False, True])
def test_what_compiles_and_finds_no_memory_beside_others_begins_again_alone(
    fails_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, when it has the device for itself: what finds none then has failed."""
    is_alone = False
    steps: list[bool] = []

    @contextmanager
    def enter(path: str) -> Iterator[None]:
        nonlocal is_alone
        assert not is_alone
        is_alone = bool(path)
        try:
            yield
        finally:
            is_alone = False

    def run(module: nn.Module, args: Any) -> None:
        steps.append(is_alone)
        if fails_alone or not is_alone:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def change(model: nn.Module) -> None:
        model.register_forward_pre_hook(run)

    monkeypatch.setattr(worker, "alone", enter)
    monkeypatch.setitem(WAYS, "compile", Choice("compile", "", lambda given: Way("compile", change, 3), compiles=True))
    row = measured("compile", turnstile="shared")
    assert steps[:2] == [False, True]
    if fails_alone:
        assert (row.outcome, row.note, len(steps)) == ("failed", "ran out of memory", 2)
    else:
        assert (row.outcome, row.bitwise) == ("measured", True)
        assert steps.count(False) == 2  # it draws, so it is compiled once more to be compared
    steps.clear()
    assert measured("compile").note == "ran out of memory"  # it never had to share
    assert steps == [False]


def test_processors_that_are_one_core_are_spared_together() -> None:
    pairs = {n: {n % 8, n % 8 + 8} for n in range(16)}
    assert split_processors(set(range(16)), pairs) == {0, 1, 8, 9}
    assert split_processors(set(range(4, 16)), pairs) == {4, 5, 12, 13}  # 0 to 3 are others'
    assert split_processors(set(range(16)), {}) == {0, 1, 2, 3}
    assert split_processors(set(range(7)), {}) == set()


def test_a_budget_that_cannot_be_met_is_the_smallest() -> None:
    least = measured("lean_budget", budget=1)
    assert least.budget is not None
    assert least.peak_bytes is not None
    assert least.note.startswith("1 B cannot be met; the smallest")
    assert ("is above its budget" in least.note) == (least.peak_bytes > least.budget)
    assert least.plan.startswith("budget ")
    assert least.bitwise
    assert 1 < least.budget < measured("plain").peak_bytes  # type: ignore[operator]
    assert measured("lean_budget").note == "no budget was given, and no other way has shown one"


def test_a_budget_that_is_raised_again_and_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def make(given: Any) -> Way:
        asked.append(given.told)

        def refuse(model: nn.Module) -> None:
            raise BudgetError("no", given.told + 1)

        return Way("lean_budget", refuse, 3, given.budget)

    monkeypatch.setitem(WAYS, "lean_budget", Choice("lean_budget", "", make))
    row = measured("lean_budget", budget=10)
    assert asked == [10, 10, 11, 12]  # the first only asks whether there is such a way
    assert (row.outcome, row.note) == ("failed", "refused: named a larger budget 3 times")


def test_the_largest_batch_in_a_memory() -> None:
    plain = measured("plain")
    assert plain.peak_bytes is not None
    rows = {way: measured(way, memory=plain.peak_bytes).largest_batch for way in ("plain", "lean", "packed")}
    assert rows["plain"] == 64
    assert rows["lean"] > 70  # type: ignore[operator]
    assert rows["packed"] is not None


def test_where_plain_does_not_fit_lean_has_its_row_all_the_same() -> None:
    row = measured("lean", "small", rounds=1)
    assert row.outcome == "measured"
    assert row.note.startswith("plain ran out of memory: no gradients and no times to compare with")
    assert row.peak_bytes is not None
    assert row.seconds is not None
    assert (row.ratio, row.bitwise, row.gradient_error) == (None, None, None)
    assert measured("plain", "small").note == "ran out of memory"


def test_where_plain_differs_from_itself_no_bits_are_told() -> None:
    row = measured("lean", "noisy")
    assert row.bitwise is None
    assert row.gradient_error is not None
    assert row.gradient_error > 0
    assert "plain differs from itself by up to" in row.note


def test_other_gradients_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: nn.Module) -> None:
        model.body[0].register_forward_hook(lambda module, args, out: out * 1.5)  # type: ignore[index, union-attr]

    monkeypatch.setitem(WAYS, "lean", Choice("lean", "", lambda given: Way("lean", change, 3)))
    row = measured("lean")
    assert row.bitwise is False
    assert row.gradient_error is not None
    assert row.gradient_error > 1e-3


def test_gradients_that_are_rounding_alone_do_not_count_as_errors() -> None:
    plain: Any = {("loss", ""): torch.tensor(1.0), ("gradient", "w"): torch.tensor([2.0, 1.0])}
    plain["gradient", "b"] = torch.tensor([1e-9])
    other = {**plain, ("gradient", "b"): torch.tensor([3e-9])}

    def error(plain: Any, other: Any) -> float:
        return worker._largest_error(plain, worker._compared(plain, other))

    assert error(plain, other) == 0.0
    assert error(plain, {**other, ("gradient", "w"): torch.tensor([2.0, 1.5])}) == 0.25
    assert error(plain, {**other, ("loss", ""): torch.tensor(1.5)}) == 0.5
    assert error(plain, {**other, ("gradient", "w"): None}) == float("inf")
    assert error(plain, {**plain, ("gradient", "b"): None}) == float("inf")
    assert error(plain, {**plain, ("gradient", "b"): torch.tensor([float("nan")])}) == float("inf")
    large = {**plain, ("gradient", "b"): torch.tensor([1e-3])}
    assert error(large, {**large, ("gradient", "b"): torch.tensor([2e-3])}) == pytest.approx(1.0)


def test_a_compiled_way_is_compared_by_a_model_that_draws_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack has dropout: the first model draws numbers of its own, as Inductor's does."""

    def make(given: Any) -> Way:
        def change(model: nn.Module) -> None:
            if not given.draws_as_eager:
                model.register_forward_pre_hook(lambda module, args: (torch.rand(()), None)[1])

        return Way("compile", change, 3)

    monkeypatch.setitem(WAYS, "compile", Choice("compile", "", make, compiles=True))
    row = measured("compile")
    assert row.bitwise
    assert "second compilation" in row.note
    monkeypatch.setitem(WAYS, "compile", Choice("compile", "", make))
    assert measured("compile").bitwise is False


def test_a_way_for_the_whole_process_is_timed_after_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []
    turns: list[tuple[str, bool]] = []
    real = worker._Measuring._turn

    def turn(self: Any, training: Any) -> float:
        turns.append((training.way.name, bool(applied)))
        return real(self, training)

    monkeypatch.setattr(worker._Measuring, "_turn", turn)
    choice = Choice("liger", "", lambda given: Way("liger", lambda model: applied.append("now"), 3), is_global=True)
    monkeypatch.setitem(WAYS, "liger", choice)
    assert measured("liger", rounds=2, steps=1).ratio is not None
    assert turns == [("plain", False)] * 2 + [("liger", True)] * 2


def test_what_is_not_for_a_model_is_told_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.Training, "step", None)
    monkeypatch.setattr(worker.Training, "_run", None)
    assert [measured(way).outcome for way in ("save_on_cpu", "no_logits", "cce")] == ["not for this"] * 3
    assert measured("plain").outcome == "failed"


def test_plain_tells_which_other_ways_are_none_for_a_model() -> None:
    row = measured("plain", others=["lean", "lean_budget", "selective", "save_on_cpu", "no_logits", "cce"])
    assert row.not_for_this.keys() == {"save_on_cpu", "no_logits", "cce"}
    for way, why in row.not_for_this.items():
        assert measured(way).note == why


@pytest.mark.parametrize(
    ("factory", "note"),
    [
        ("broken", "failed with KeyError: 'no such data'"),
        ("frozen", "failed with ValueError: expected a model with a parameter that requires a gradient"),
        ("missing", "failed with TargetError: expected a function 'missing'"),
    ],
)
def test_errors_of_the_user_are_told(factory: str, note: str) -> None:
    row = measured("lean", factory)
    assert row.outcome == "failed"
    assert row.note.startswith(note)
    whole = measured("lean", factory, whole_traceback=True)
    assert "bench/worker.py" in whole.traceback
    assert "leangrad/bench/worker.py" not in row.traceback
    assert ("no such data" in row.traceback) == (factory == "broken")


def test_a_job_as_json_on_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    job = Job(f"{HERE}:sized", "save_on_cpu", {"rows": 3})
    monkeypatch.setattr("sys.stdin", io.StringIO(job.to_json()))
    monkeypatch.setattr("sys.argv", ["worker", str(tmp_path / "answer")])
    worker.main()
    row = Row(**json.loads((tmp_path / "answer").read_text()))
    assert row.outcome == "not for this"
    assert row.process_seconds is not None
    assert row.process_seconds > 0


def on_gpu(rows: int = 512) -> Any:
    return Sized().cuda(), torch.randn(rows, 32, device="cuda")


@pytest.mark.gpu
def test_on_a_gpu_peaks_are_above_what_stands() -> None:
    plain = measured("plain", "on_gpu", rounds=1)
    model, batch = on_gpu()
    model(batch).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(batch).backward()
    assert plain.peak_bytes == torch.cuda.max_memory_allocated() - before
    rows = {way: measured(way, "on_gpu", budget=plain.peak_bytes) for way in ("checkpoint", "save_on_cpu", "lean")}
    assert all(row.peak_bytes < plain.peak_bytes for row in rows.values())  # type: ignore[operator]
    assert rows["checkpoint"].bitwise
    assert rows["lean"].bitwise
    assert rows["save_on_cpu"].gradient_error < 1e-6  # type: ignore[operator]  # other layouts, other products
    budget = measured("lean_budget", "on_gpu", budget=plain.peak_bytes)
    assert budget.bitwise
    assert budget.peak_bytes <= plain.peak_bytes  # type: ignore[operator]
    assert measured("lean", "on_gpu", memory=plain.peak_bytes + plain.standing_bytes).largest_batch > 512  # type: ignore[operator]
