"""The history of one step: when it begins and ends, whatever becomes of the step, and whose it is."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leangrad
from leangrad import _torch
from leangrad._torch import Counters
from leangrad._torch import cuda as cuda_module
from leangrad.ledger.tune import budget_search
from leangrad.ledger.tune.budget_search import MEASURED_STEPS
from leangrad.ledger.tune.history import BACKWARD_END, BACKWARD_START, FORWARD_END, STEP_START, History, Parts, add_up
from leangrad.ledger.tune.peaks import Peaks
from tests.support.allocator import FakeAllocator

MARKS = {STEP_START: "start", FORWARD_END: "end", BACKWARD_START: "turn", BACKWARD_END: "after"}


class Recorder:
    """What torch's allocator would be asked to note, of one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        self.starts = 0
        self.marks: list[str] = []
        monkeypatch.setattr(_torch, "start_history", self._start)
        monkeypatch.setattr(_torch, "mark_history", self._mark)
        monkeypatch.setattr(_torch, "stop_history", self._stop)

    def _start(self) -> bool:
        if self.is_on:
            return False
        self.is_on, self.marks = True, []
        self.starts += 1
        return True

    def _mark(self, size: int) -> None:
        if size in MARKS:  # and is none of a saved tensor's
            self.marks.append(MARKS[size])

    def _stop(self) -> list[tuple[bool, int]]:
        self.is_on = False
        sizes = {name: size for size, name in MARKS.items()}
        return [(True, sizes[name]) for name in self.marks]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    FakeAllocator(monkeypatch, Counters(10**6, 10**8))
    return Recorder(monkeypatch)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        if self.fails:
            raise ValueError("of the user")
        return x


def listened(recorder: Recorder, model: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """Steps until one is listened to; what that one's forward hands out."""
    for _ in range(6):
        starts, out = recorder.starts, run()
        if recorder.starts > starts:
            return out
        out.sum().backward()
    raise AssertionError("no step was listened to")


@pytest.fixture
def model() -> Any:
    return leangrad.lean(Net(), budget=10**8, min_bytes=0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 16)


def test_one_backward_pass_ends_it(recorder: Recorder, model: Any, x: Tensor) -> None:
    out = listened(recorder, model, lambda: model(x))
    assert recorder.is_on
    out.sum().backward()
    assert recorder.marks == ["start", "end", "turn", "after"]
    assert not recorder.is_on


def test_a_backward_pass_that_keeps_the_graph_may_be_followed_by_another(
    recorder: Recorder, model: Any, x: Tensor
) -> None:
    """Which finds gradients that stand, and takes more."""
    out = listened(recorder, model, lambda: model(x))
    out.sum().backward(retain_graph=True)
    assert recorder.is_on
    out.square().sum().backward()
    assert recorder.marks == ["start", "end", "turn", "after", "after"]
    assert not recorder.is_on


def test_a_forward_that_fails_ends_it(recorder: Recorder, model: Any, x: Tensor) -> None:
    listened(recorder, model, lambda: model(x)).sum().backward()
    model.fails = True
    starts = recorder.starts
    with pytest.raises(ValueError, match="of the user"):
        model(x)
    assert recorder.starts == starts + 1
    assert not recorder.is_on


def test_a_call_without_gradients_between_forward_and_backward_does_not(
    recorder: Recorder, model: Any, x: Tensor
) -> None:
    out = listened(recorder, model, lambda: model(x))
    with torch.no_grad():
        model(x)
    assert recorder.is_on
    out.sum().backward()
    assert recorder.marks == ["start", "end", "turn", "after"]


def test_a_step_that_differs_ends_it(recorder: Recorder, model: Any, x: Tensor) -> None:
    out = listened(recorder, model, lambda: model(x))
    leangrad.ledger_of(model).note_difference("a test says so")
    assert not recorder.is_on
    out.sum().backward()
    assert not recorder.is_on


def test_a_batch_of_other_shapes_ends_it(recorder: Recorder, model: Any, x: Tensor) -> None:
    listened(recorder, model, lambda: model(x))
    model(torch.randn(9, 16))
    assert not recorder.is_on


def test_a_model_that_is_gone_leaves_none_behind(recorder: Recorder, x: Tensor) -> None:
    """Else no other model of this process could ever be listened to."""
    model = leangrad.lean(Net(), budget=10**8, min_bytes=0)
    listened(recorder, model, partial(model, x))
    copy.deepcopy(model)
    assert recorder.is_on
    del model
    gc.collect()
    assert not recorder.is_on


def test_a_step_whose_backward_nobody_ran_says_nothing_of_what_can_be_heard(
    recorder: Recorder, model: Any, x: Tensor
) -> None:
    """A loss that is not finite is left out by many: what was measured before counts, and the next step tells."""
    listened(recorder, model, lambda: model(x)).sum().backward()
    tuner: Any = leangrad.ledger_of(model)._tuner
    model(x).sum().backward()
    assert tuner.peaks.can_see(0)
    model(x)
    assert recorder.is_on
    model(x).sum().backward()
    assert tuner.peaks.can_see(0)


@pytest.mark.parametrize("skipped", [0, 5])
def test_a_plan_whose_first_step_told_nothing_is_listened_to_again(
    recorder: Recorder, model: Any, x: Tensor, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for ever."""
    monkeypatch.setattr(budget_search, "CLEARLY_FASTER", 0.0)
    tuner: Any = leangrad.ledger_of(model)._tuner
    while not tuner.peaks.is_settled:
        out = model(x)
        if not tuner.peaks.is_settled:
            out.sum().backward()
    starts = recorder.starts
    for _ in range(skipped):
        model(x)
    model(x).sum().backward()
    assert recorder.starts - starts == min(skipped + 1, MEASURED_STEPS - 1)
    starts = recorder.starts
    for _ in range(3):
        model(x).sum().backward()
    assert recorder.starts == starts


# --------------------------------------------------------------------------------------------- what torch is asked for


class Torch:
    """torch's history of allocations, as far as it is asked: its own rules, on a CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = self.has_context = self.is_global = self.is_full = False
        self.events: list[dict[str, Any]] = []
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.is_on, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", self._snapshot, raising=False)
        monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", self._allocate)
        monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda size: self.note("free_requested", size))
        monkeypatch.setattr(cuda_module, "is_capturing", lambda: False)
        monkeypatch.setattr(cuda_module, "current_device", lambda: 0)

    def record(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = 10**9,
        global_record_annotations: bool = False,
    ) -> None:
        self.is_on, self.has_context = enabled is not None, context is not None
        self.is_global = global_record_annotations
        if not self.is_on:
            self.events = []

    def note(self, action: str, size: int) -> None:
        if self.is_on:
            self.events.append({"action": action, "size": size, **({"frames": [{}]} if self.has_context else {})})

    def _allocate(self, size: int) -> int:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.note("alloc", size)
        return size

    def _snapshot(self, _: object) -> dict[str, Any]:
        return {"device_traces": [self.events]}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


def test_a_history_that_the_user_begins_meanwhile_is_his(allocator: Torch) -> None:
    history = History.begin(0)
    assert history is not None
    allocator.note("alloc", 100)
    allocator.record()
    for moment in (FORWARD_END, BACKWARD_START, BACKWARD_END):
        history.mark(moment)
    assert history.stop(Counters(100, 100), Counters(100, 100)) == Parts(100, 100, 100, (100,), (100,))
    assert allocator.is_on
    assert allocator.events
    assert History.begin(0) is None


def test_ours_ends_in_whatever_thread(allocator: Torch) -> None:
    """Backward ends in a thread of autograd's: what torch calls for annotations in one thread alone would stay."""
    history = History.begin(0)
    assert history is not None
    assert allocator.is_global
    assert history.stop(None, None) is None
    assert not allocator.is_on
    assert not allocator.events


def test_a_device_without_room_for_a_mark_breaks_no_step(allocator: Torch) -> None:
    allocator.is_full = True
    history = History.begin(0)
    assert history is not None
    history.mark(FORWARD_END)
    assert history.stop(Counters(0, 0), Counters(0, 0)) is None
    assert not allocator.is_on


def test_without_its_beginning_nothing_is_known() -> None:
    """Where somebody has begun a history of his own in the middle of the step."""
    rest = [
        (True, 40),
        (True, FORWARD_END),
        (False, FORWARD_END),
        (True, BACKWARD_START),
        (False, BACKWARD_START),
        (True, BACKWARD_END),
        (False, BACKWARD_END),
    ]
    assert add_up(rest) is None
    assert add_up([(True, STEP_START), (False, STEP_START), *rest]) is not None


def test_a_tensor_of_the_size_of_a_mark_is_no_second_beginning() -> None:
    marks = [
        (True, FORWARD_END),
        (False, FORWARD_END),
        (True, BACKWARD_START),
        (False, BACKWARD_START),
        (True, BACKWARD_END),
        (False, BACKWARD_END),
    ]
    begins = [(True, STEP_START), (False, STEP_START)]
    found = add_up([*begins, (True, 50), (False, 50), (True, STEP_START), (True, 10), *marks])
    assert found == (Parts(50, 10, 10, (50,), (10,)), (10, 10))


@pytest.mark.parametrize("by_whom", ["another model", "the user"])
def test_who_listens_already(recorder: Recorder, by_whom: str) -> None:
    """Another model does so for a step: what was measured before it still counts. A user may do so for good."""
    peaks, below = Peaks(), 10**7  # the allocator's peak is far above it
    peaks.begin(None, on_gpu=True)
    peaks.measure_step()
    assert peaks.can_see(below)
    peaks.begin(None, on_gpu=True)  # that step has ended
    other = History.begin(0) if by_whom == "another model" else None
    recorder.is_on = True
    peaks.measure_step()
    assert recorder.starts == (2 if other else 1)
    assert peaks.can_see(below) == (other is not None)


def test_it_is_told_whether_one_is_open(recorder: Recorder) -> None:
    assert not History.is_one_open()
    history = History.begin(0)
    assert history is not None
    assert History.is_one_open()
    history.stop(None, None)
    assert not History.is_one_open()
    history = History.begin(0)
    assert History.is_one_open()
    del history
    assert not History.is_one_open()
