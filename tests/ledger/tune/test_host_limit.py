"""Where the GPU waits for the host: a little more is kept than the least, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad import _torch
from leangrad.ledger import ledger as ledger_module
from leangrad.ledger.learn import timing
from leangrad.ledger.tune import host_limit
from leangrad.ledger.tune.host_limit import MAX_ATTEMPTS, RUNS, STEADY
from tests.support import assert_same_bits

MEASURED = STEADY + 2 * RUNS
SETTLED = MEASURED + 4
ROWS, FEW, WIDTH = 512, 16, 32
LARGE = 4 * ROWS * WIDTH  # bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.gelu(self.linear(self.norm(x))).sin())


class Pyramid(nn.Module):
    """Large tensors in the first layers, small ones in the others, as a convolutional net has them."""

    passes_time: Any = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = nn.Sequential(Block(), Block()), nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        self.passes_time()
        return self.small(self.large(x).reshape(FEW, -1, WIDTH).mean(1))


class Machine:
    """A GPU and its host, as far as a step sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.wait = self.forward_wait = 0.0  # of the host for the GPU: after a step of 2 seconds, and halfway
        self.waits = 0
        self.room = 10.0**9
        self.highest: Callable[[], int] = lambda: 10**9  # the peak of a step
        self.events: list[tuple[bool, int]] = []  # of a step that is listened to
        self.is_listening = False
        self.listened = 0
        self.is_capturing = False
        monkeypatch.setattr(Pyramid, "passes_time", staticmethod(self._passes))
        monkeypatch.setattr(ledger_module, "_is_on_gpu", lambda _: True)
        monkeypatch.setattr(host_limit, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(host_limit, "_wait_for_gpu", self._wait_for_gpu)
        monkeypatch.setattr(_torch, "cuda_counters", lambda: _torch.Counters(0, 0))
        monkeypatch.setattr(_torch, "start_history", self._start_history)
        monkeypatch.setattr(_torch, "mark_history", lambda moment: self.events.append((True, moment)))
        monkeypatch.setattr(_torch, "stop_history", self._stop_history)
        monkeypatch.setattr(host_limit, "_room", lambda: self.room)
        monkeypatch.setattr(_torch, "is_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(timing.Stopwatch, "__init__", lambda watch, *, on_gpu: setattr(watch, "_on_gpu", False))

    def _passes(self) -> None:
        self.now += 1.0

    def _start_history(self) -> bool:
        self.is_listening, self.events = True, []
        self.listened += 1
        return True

    def _stop_history(self) -> list[tuple[bool, int]]:
        self.is_listening = False
        start, *events = self.events
        return [start, (True, self.highest()), (False, self.highest()), *events]

    def _wait_for_gpu(self) -> None:
        self.waits += 1
        self.now += self.wait if self.is_backward else self.forward_wait

    def steps(self, model: nn.Module, x: Tensor, count: int = SETTLED, first_seed: int = 0) -> None:
        for seed in range(first_seed, first_seed + count):
            model.zero_grad()
            torch.manual_seed(seed)
            self.is_backward = False
            loss = model(x).square().mean()
            self._passes()
            self.is_backward = True
            loss.backward()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def rebuilt(model: nn.Module) -> list[int]:
    entries = leangrad.ledger_of(model).entries(planned=True)
    return [entry.nbytes for entry in entries if entry.outcome == "rebuilt"]


def peak(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        model.zero_grad()
        torch.manual_seed(0)
        model(x).square().mean().backward()

    return leangrad.measure(step, timed_runs=0).peak_bytes


def lean(**settings: Any) -> Any:
    return leangrad.lean(Pyramid(), min_bytes=0, **{"spare": 0.02, **settings})


def test_where_the_host_is_the_limit_less_is_rebuilt(machine: Machine, x: Tensor) -> None:
    plain, model, least = Pyramid(), lean(), lean(spare=0)
    for seed in range(SETTLED + 2):
        machine.steps(plain, x, 1, seed)
        machine.steps(least, x, 1, seed)
        machine.steps(model, x, 1, seed)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert_same_bits(a.grad, b.grad, f"step {seed}")
    assert machine.waits == 2 * RUNS
    assert machine.listened == 2  # a step before, and one after
    assert not machine.is_listening
    assert len(rebuilt(model)) < 0.6 * len(rebuilt(least))
    foreseen = [leangrad.ledger_of(one).peak_bytes() for one in (model, least)]  # nobody hears what a step takes here
    assert foreseen[0] <= 1.02 * foreseen[1]
    summary = leangrad.ledger_of(model).summary()
    assert "the GPU waits for the host: " in summary.splitlines()[-1]
    assert "the GPU waits for the host, and rebuilding it would save little" in summary
    assert leangrad.ledger_of(model).differences == 0
    assert "follow the trace" in summary


def test_its_plan_stands_when_it_is_known(machine: Machine, x: Tensor) -> None:
    """Who compares times asks for that first: in some steps before it the host waits for the GPU."""
    model = lean()
    settled = []
    for seed in range(SETTLED + 2):
        machine.steps(model, x, 1, seed)
        settled.append(leangrad.ledger_of(model).is_settled)
    assert settled == sorted(settled)
    assert settled.index(True) == MEASURED + 3  # the step that is timed, one that keeps more, and it is over
    waits = machine.waits
    machine.steps(model, x, 3)
    assert machine.waits == waits


def test_steps_before_it_is_known_are_as_ever(machine: Machine, x: Tensor) -> None:
    model, least = lean(), lean(spare=0)
    for _ in range(MEASURED + 1):
        machine.steps(model, x, 1)
        machine.steps(least, x, 1)
        assert leangrad.ledger_of(model)._kept_items == leangrad.ledger_of(least)._kept_items
        assert leangrad.ledger_of(model).decisions == leangrad.ledger_of(least).decisions


@pytest.mark.parametrize("busy", ["wait", "forward_wait"])
def test_a_gpu_that_has_waited_after_forward_or_at_the_end_waits_for_the_host(
    machine: Machine, x: Tensor, busy: str
) -> None:
    """A convolutional net is busy at the end: its largest kernels are the last of backward."""
    setattr(machine, busy, 0.2)
    model, least = lean(), lean(spare=0)
    machine.steps(model, x)
    machine.steps(least, x, 4)
    assert len(rebuilt(model)) < 0.6 * len(rebuilt(least))


@pytest.mark.parametrize("wait", [0.1, 1.0])
def test_where_the_gpu_is_the_limit_nothing_changes(machine: Machine, x: Tensor, wait: float) -> None:
    machine.wait = machine.forward_wait = wait
    model, least = lean(), lean(spare=0)
    machine.steps(model, x, 2 * SETTLED)
    machine.steps(least, x, 4)
    assert machine.waits == 2 * RUNS
    assert rebuilt(model) == rebuilt(least)
    assert "waits for the host" not in leangrad.ledger_of(model).summary()


@pytest.mark.parametrize("settings", [{"spare": 0}, {"budget": 10**9}, {"slowdown": 1.5}])
def test_nobody_waits_if_it_is_not_asked(machine: Machine, x: Tensor, settings: dict[str, Any]) -> None:
    model = leangrad.lean(Pyramid(), **settings)
    if "spare" in settings:
        machine.steps(model, x)
    assert leangrad.ledger_of(model)._host.is_over
    assert machine.waits == 0


def test_nobody_waits_on_a_cpu(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limit, "_wait_for_gpu", lambda: pytest.fail("waits"))
    model = lean()
    for _ in range(SETTLED):
        model(x).sum().backward()
    assert leangrad.ledger_of(model)._host.is_over


def test_a_step_that_takes_more_than_was_foreseen(machine: Machine, x: Tensor) -> None:
    model, least = lean(), lean(spare=0)
    machine.steps(least, x, 4)
    machine.steps(model, x, MEASURED + 2)
    machine.highest = lambda: 1030 * 10**6
    machine.steps(model, x, 1)
    assert len(rebuilt(model)) < len(rebuilt(least))
    machine.steps(model, x, 3)
    assert rebuilt(model) == rebuilt(least)
    assert "waits for the host" not in leangrad.ledger_of(model).summary()


def test_after_such_a_step_no_more_bytes_are_kept_than_may_be_taken(machine: Machine, x: Tensor) -> None:
    model, least = lean(), lean(spare=0)
    machine.steps(least, x, 4)
    all_large = rebuilt(least).count(LARGE)
    seen = []

    def highest() -> int:
        """Of a step that has just ended."""
        took_more = rebuilt(model).count(LARGE) < all_large
        seen.append(took_more)
        return 10**9 + took_more * 30 * 10**6

    machine.highest = highest
    machine.steps(model, x, SETTLED + 2)
    assert seen[::2] == [False, True, False]  # the step that is timed, one that kept too much, one that keeps less
    assert rebuilt(model).count(LARGE) == all_large
    assert len(rebuilt(model)) < len(rebuilt(least))
    assert "the GPU waits for the host: " in leangrad.ledger_of(model).summary().splitlines()[-1]
    assert "the GPU waits for the host, and" in leangrad.ledger_of(model).summary()


def test_a_device_that_is_full(machine: Machine, x: Tensor) -> None:
    machine.room = 0.0
    model, least = lean(), lean(spare=0)
    machine.steps(least, x, 4)
    machine.steps(model, x)
    assert rebuilt(model) == rebuilt(least)


def test_more_to_spare_is_less_to_rebuild(machine: Machine, x: Tensor) -> None:
    left = []
    for spare in (0.0, 0.02, 0.5):
        model = lean(spare=spare)
        machine.steps(model, x)
        left.append(sum(rebuilt(model)))
    assert left == sorted(left, reverse=True)
    assert left[0] > left[1] > left[2]


def test_a_step_that_differs_is_learned_from_anew(machine: Machine, x: Tensor) -> None:
    class Varied(Pyramid):
        turn = False

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h.exp().sin() if self.turn else h.tanh().cos()

    model: Any = leangrad.lean(Varied(), min_bytes=0)
    for turn in range(MAX_ATTEMPTS + 2):
        model.turn = bool(turn % 2)
        for _ in range(4):  # pauses between lessons grow
            machine.steps(model, x)
    assert leangrad.ledger_of(model).differences >= MAX_ATTEMPTS
    assert machine.waits <= 2 * MAX_ATTEMPTS * RUNS


def test_forwards_without_a_backward(machine: Machine, x: Tensor) -> None:
    model = lean()
    machine.steps(model, x, 3)
    for _ in range(STEADY + 4 * RUNS + 2):
        model(x)
    assert leangrad.ledger_of(model)._host.is_over
    assert machine.waits == RUNS  # after forward


@pytest.mark.parametrize("fails", ["no backward", "in forward", "another shape", "the model is gone"])
def test_a_step_that_is_listened_to_and_breaks_off(machine: Machine, x: Tensor, fails: str) -> None:
    model = lean()
    machine.steps(model, x, MEASURED + 1)
    if fails == "in forward":
        handle = model.small.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        assert not machine.is_listening  # who knows when the next step comes
    else:
        model(x[: ROWS // 2] if fails == "another shape" else x)
    assert machine.listened == 1
    if fails == "the model is gone":
        del model
    else:
        machine.steps(model, x, SETTLED)
    gc.collect()
    assert not machine.is_listening


def test_an_evaluation_within_a_step_that_is_listened_to(machine: Machine, x: Tensor) -> None:
    model, least = lean(), lean(spare=0)
    machine.steps(least, x, 4)
    machine.steps(model, x, MEASURED)
    for _ in range(3):
        model.zero_grad()
        loss = model(x).square().mean()
        listens = machine.is_listening
        with torch.no_grad():
            model(x)
        assert machine.is_listening == listens
        loss.backward()
        assert not machine.is_listening
    assert machine.listened == 2
    assert len(rebuilt(model)) < 0.6 * len(rebuilt(least))


def test_a_user_who_listens_himself(machine: Machine, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is foreseen has to do."""
    monkeypatch.setattr(_torch, "start_history", lambda: False)
    monkeypatch.setattr(_torch, "stop_history", lambda: pytest.fail("it is the user's"))
    model, least = lean(), lean(spare=0)
    machine.steps(model, x)
    machine.steps(least, x, 4)
    assert len(rebuilt(model)) < 0.6 * len(rebuilt(least))


def test_under_capture_nobody_waits(machine: Machine, x: Tensor) -> None:
    model = lean()
    machine.steps(model, x, STEADY + 2)
    waits = machine.waits
    machine.is_capturing = True
    machine.steps(model, x, SETTLED)
    assert machine.waits == waits
    assert leangrad.ledger_of(model)._host.is_over


def test_in_two_threads_nothing_is_measured(machine: Machine, x: Tensor) -> None:
    model = lean()
    machine.steps(model, x, 3)
    thread = threading.Thread(target=machine.steps, args=(model, x, 1))
    thread.start()
    thread.join()
    machine.steps(model, x)
    assert machine.waits == 0


def test_copies_have_the_setting_and_begin_anew(machine: Machine, x: Tensor) -> None:
    model = lean(spare=0.07)
    machine.steps(model, x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        host = leangrad.ledger_of(copied)._host
        assert host.spare == 0.07
        assert not host.is_over


@pytest.mark.parametrize("spare", [-0.1, 1, float("nan"), "2%", True])
def test_no_share(spare: Any) -> None:
    with pytest.raises(ValueError, match="spare must be a number from 0 to 1"):
        lean(spare=spare)


@pytest.mark.gpu
def test_on_a_gpu_a_model_of_many_small_kernels_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limit, "IDLE", 1.0)  # others may use this GPU
    x = torch.randn(ROWS, WIDTH, device="cuda")
    plain = Pyramid().cuda()
    model, least = lean().cuda(), lean(spare=0).cuda()
    peaks = {}
    for seed in range(SETTLED + 2):
        for one in (plain, model, least):
            one.zero_grad()
            torch.manual_seed(seed)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            one(x).square().mean().backward()
            torch.cuda.synchronize()
            peaks[one] = torch.cuda.max_memory_allocated() - before
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert_same_bits(a.grad, b.grad, f"step {seed}")
    assert "the GPU waits for the host: " in leangrad.ledger_of(model).summary()
    assert len(rebuilt(model)) < len(rebuilt(least))
    assert peaks[model] <= 1.05 * peaks[least]  # the allocator rounds up to 512 bytes: these tensors are small
