"""The scratch of a convolution's backward: measured on this machine, once, in the recorded step and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import leangrad
from leangrad.ledger.learn import scratch
from tests.support import same_bits

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((4, 8, 20, 20), (8, 8, 3, 3), {"padding": 1}),
    "1x1": ((4, 8, 20, 20), (8, 8, 1, 1), {}),
    "strided": ((4, 8, 20, 20), (8, 8, 3, 3), {"stride": 2}),
    "depthwise": ((4, 8, 20, 20), (8, 1, 3, 3), {"groups": 8}),
    "dilated": ((4, 8, 20, 20), (8, 8, 3, 3), {"dilation": 2}),
    "1d": ((4, 8, 50), (8, 8, 5), {}),
    "3d": ((2, 4, 6, 6, 6), (4, 4, 3, 3, 3), {}),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_known", {})


def taken_by_backward(y: Tensor, leaves: tuple[Tensor, ...]) -> int:
    """The peak of a backward that returns its gradients, less these."""
    g = torch.zeros_like(y)
    measured = leangrad.measure(lambda: torch.autograd.grad(y, leaves, g, retain_graph=True), timed_runs=0)
    return measured.peak_bytes - sum(t.nbytes for t in leaves)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sampled(3)
def test_it_is_what_backward_takes(name: str, memory_format: torch.memory_format, dtype: torch.dtype) -> None:
    shape, weight_shape, options = CASES[name]
    if memory_format is torch.channels_last and len(shape) != 4:
        pytest.skip("channels_last has four dimensions")
    x = torch.randn(shape, dtype=dtype).to(memory_format=memory_format).requires_grad_()
    w = torch.randn(weight_shape, dtype=dtype, requires_grad=True)
    y = getattr(torch, f"conv{len(shape) - 2}d")(x, w, **options)
    convolution = scratch.convolution_of(y, (x, w))
    assert convolution is not None
    assert scratch.measure([convolution]) == {convolution: taken_by_backward(y, (x, w))}


def test_transposed_and_autocast() -> None:
    """Autocast's operands have the dtype of its output; a transposed convolution is another op."""
    x, w = torch.randn(4, 8, 20, 20, requires_grad=True), torch.randn(8, 8, 3, 3, requires_grad=True)
    y = torch.conv_transpose2d(x, w, stride=2)
    convolution = scratch.convolution_of(y, (x, w))
    assert convolution is not None
    assert scratch.measure([convolution]) == {convolution: taken_by_backward(y, (x, w))}
    with torch.autocast("cpu", torch.bfloat16):
        low = torch.conv2d(x, w)
    found = scratch.convolution_of(low, (x, w))
    assert found is not None
    assert found.dtype is torch.bfloat16
    a, b = (t.detach().bfloat16().requires_grad_() for t in (x, w))
    assert scratch.measure([found]) == {found: taken_by_backward(torch.conv2d(a, b), (a, b))}


def test_what_cannot_be_measured_counts_nothing() -> None:
    x, w = torch.randn(1, 8, 20, 20, requires_grad=True), torch.randn(8, 8, 3, 3, requires_grad=True)
    assert scratch.convolution_of(torch.conv2d(x[0], w), (x[0], w)) is None  # torch adds a dimension below
    assert scratch.convolution_of(torch.conv2d(x.detach(), w.detach()), (x, w)) is None  # no backward
    assert scratch.convolution_of(x.sin(), (x, w)) is None
    even = torch.randn(8, 8, 2, 2, requires_grad=True)  # torch pads the images below, on one side more
    with pytest.warns(UserWarning, match="padding='same'"):
        padded = torch.conv2d(x, even, padding="same")
    found = scratch.convolution_of(padded, (x, even))
    assert found is not None
    assert scratch.measure([found]) == {found: 0}


class Residual(nn.Module):
    """Two links of a residual chain, which a plan may keep or rebuild."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        """Each link is read by the next convolution."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)) + x)
        return x


def given(model: nn.Module, x: Tensor) -> list[int]:
    """What the recorded step counts for each reader."""
    lean = leangrad.lean(model, min_bytes=0)
    lean(x).square().sum().backward()
    recorder = leangrad.ledger_of(lean)._recorded
    assert recorder is not None
    return [op.scratch for op in recorder.graph().values if op.is_backward]


def test_the_recorded_step_counts_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8, 12, 12)
    monkeypatch.setattr(scratch, "_measured", lambda convolution: 1_000_000)
    counted = given(Residual(), x)
    assert sum(n > 1_000_000 for n in counted) == 2  # the input of the model is kept by its caller anyway
    assert len(scratch._known) == 1  # both are alike
    monkeypatch.setattr(scratch, "_measured", lambda convolution: pytest.fail("measured twice"))
    assert given(Residual(), x) == counted


def test_nothing_is_measured_where_nothing_is_to_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_measured", lambda convolution: pytest.fail("measured"))
    given(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(2, 8, 12, 12))


def test_a_profiler_that_is_on_stays_on() -> None:
    """Nothing is measured under it, and the next recorded step measures."""
    x = torch.randn(2, 8, 12, 12)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        given(Residual(), x)
        torch.ones(3).cosh_()
    assert "aten::cosh_" in {event.key for event in profiler.key_averages()}
    assert not scratch._known
    given(Residual(), x)
    assert scratch._known


def test_measuring_leaves_no_trace() -> None:
    """Neither in the random state nor in the gradients, nor on stderr."""
    x, model = torch.randn(2, 8, 12, 12), Residual()
    state = torch.get_rng_state()
    given(model, x)
    assert same_bits(torch.get_rng_state(), state)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plain = Residual()
    plain.load_state_dict(model.state_dict())
    for norm in plain.norms:
        norm.reset_running_stats()
    plain(x).square().sum().backward()
    for one, other in zip(found, plain.parameters(), strict=True):
        assert same_bits(one, other.grad)
