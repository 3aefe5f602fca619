"""The peak of a compiled graph's first step: read from the allocator's counters, told by the summary."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import leangrad
from leangrad._torch import Counters
from leangrad.compiled import backend, compile_lean, summary
from leangrad.compiled.first_step import FirstStep
from leangrad.compiled.partitioner import chosen

pytestmark = pytest.mark.usefixtures("fresh_choice")
EXACT = {"leangrad.exact": True}
BASE = 1_000


class Device:
    """A device whose counters are what the test says."""

    def __init__(self) -> None:
        self.allocated = self.highest = BASE
        self.reads = 0

    def hold(self, nbytes: int, at_most: int = 0) -> None:
        self.allocated = BASE + nbytes
        self.highest = max(self.highest, BASE + max(nbytes, at_most))

    def read(self, _: object = None) -> Counters:
        self.reads += 1
        return Counters(self.allocated, self.highest)


def test_a_maximum_that_has_risen_is_the_peak() -> None:
    device = Device()
    first = FirstStep(device.read)
    first.begin()
    device.hold(30, at_most=2_000_000)
    first.end()
    assert str(first.peak) == "2.000 MB"
    assert first.peak.nbytes == 2_000_000


def test_a_maximum_that_has_not_risen_is_a_bound() -> None:
    device = Device()
    device.hold(0, at_most=5_000_000)
    first = FirstStep(device.read)
    first.begin()
    device.hold(30, at_most=2_000_000)
    first.end()
    assert str(first.peak) == "at most 5.000 MB"


def test_a_maximum_that_was_reset_tells_nothing() -> None:
    device = Device()
    device.hold(0, at_most=5_000_000)
    first = FirstStep(device.read)
    first.begin()
    device.highest = device.allocated
    first.end()
    assert first.peak is None


def test_the_inner_of_two_graphs_is_known_the_outer_is_not() -> None:
    device = Device()
    outer, inner = FirstStep(device.read), FirstStep(device.read)
    outer.begin()
    device.hold(100, at_most=700)
    inner.begin()
    device.hold(200, at_most=900)
    inner.end()
    outer.end()
    assert inner.peak.nbytes == 800
    assert outer.peak is None


def test_steps_that_overlap_are_not_known() -> None:
    device = Device()
    one, other = FirstStep(device.read), FirstStep(device.read)
    for act in (one.begin, other.begin, one.end, other.end):
        device.hold(device.allocated - BASE + 100)
        act()
    assert one.peak is None
    assert other.peak is None


def test_two_forwards_before_a_backward_are_not_known() -> None:
    device = Device()
    first = FirstStep(device.read)
    first.begin()
    device.hold(100)
    first.begin()
    device.hold(200)
    first.end()
    assert first.peak is None


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Device:
    """This CPU as a device that counts."""
    device = Device()
    monkeypatch.setattr(backend, "_counts", lambda _: True)
    monkeypatch.setattr(backend._torch, "cuda_counters", device.read)
    return device


@pytest.mark.parametrize("options", [EXACT, {"fx_graph_cache": False}], ids=["exact", "inductor"])
def test_the_summary_tells_the_peak_of_the_first_step(counted: Device, options: dict[str, object]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(64, 8)
    run = torch.compile(lambda x: model(x).square().mean(), backend=compile_lean, fullgraph=True, options=options)
    loss = run(x)
    assert counted.reads == 1
    counted.hold(10, at_most=3_000_000)
    loss.backward()
    assert counted.reads == 2
    (found,) = chosen
    text = summary()
    ratio = 3_000_000 / found.choice.outcome.peak_bytes
    assert text.splitlines()[1].endswith(f"  first step: 3.000 MB, {ratio:.3f} times the expected peak")
    assert "leangrad.measure" not in text
    counted.hold(10, at_most=9_000_000)
    run(x).backward()
    assert counted.reads == 2  # later steps are not watched
    assert summary() == text


def test_an_allocator_that_does_not_count_stops_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was put in place by ``torch.cuda.memory.change_current_allocator``."""

    def fail(_: object) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(backend, "_counts", lambda _: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", fail)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    torch.compile(model, backend=compile_lean, options=EXACT)(torch.randn(4, 8)).sum().backward()
    (found,) = chosen
    assert found.first_step is not None
    assert found.first_step.peak is None
    assert "first step" not in summary()


def test_a_forward_alone_is_not_watched(counted: Device) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    with torch.no_grad():
        torch.compile(model, backend=compile_lean, options=EXACT)(torch.randn(4, 8))
    assert counted.reads == 0


def test_a_cpu_is_not_watched() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    torch.compile(model, backend=compile_lean, options=EXACT)(torch.randn(4, 8)).sum().backward()
    (found,) = chosen
    assert found.first_step is None
    assert "first step" not in summary()
    assert "leangrad.measure(step)" in summary()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32")
@pytest.mark.parametrize("options", [EXACT, {}], ids=["exact", "inductor"])
def test_the_first_step_on_a_gpu_is_near_the_measured_one(options: dict[str, object]) -> None:
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(16384, 1024, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    run = torch.compile(
        lambda x: model(x).square().mean(), backend=compile_lean, fullgraph=True, options=options or None
    )

    def step() -> None:
        model.zero_grad()
        run(x).backward()

    step()
    (found,) = chosen
    first = found.first_step
    assert first is not None
    assert first.peak is not None
    assert re.search(r"first step: \d+\.\d+ MB, \d\.\d\d\d times the expected peak", summary())
    highest = torch.cuda.max_memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() >= highest  # nobody has reset it
    measured = leangrad.measure(step).peak_bytes
    assert 0.99 * measured <= first.peak.nbytes <= measured + 150e6  # the buffers for tuning, and cuBLAS's workspace


@pytest.mark.gpu
def test_an_older_maximum_on_a_gpu_is_a_bound() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda(), torch.randn(64, 64, device="cuda")
    hold: Tensor = torch.empty(1 << 30, device="cuda")
    del hold
    torch.compile(model, backend=compile_lean, options=EXACT)(x).sum().backward()
    (found,) = chosen
    assert found.first_step is not None
    assert found.first_step.peak is not None
    assert found.first_step.peak.is_bound
