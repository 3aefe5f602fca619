"""`leangrad.profile`: which steps are measured, that the training stays what it is, what is said if it ends early."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad.errors import ChangedError
from leangrad.report import Report
from leangrad.timeline.categories import GRADIENTS, PARAMETERS, STATE
from tests.support import assert_same_bits

VOCABULARY = 8192


class Net(nn.Module):
    """Blocks whose norm and activation lean rebuilds, with dropout, and a head."""

    def __init__(self, out: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 16))
            for _ in range(3)
        )
        self.head = nn.Linear(16, out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.AdamW(net.parameters())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = net(torch.randn(128, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def names(report: Report) -> list[str]:
    return [step.name for step in report.steps]


def test_some_steps_are_measured_and_the_training_stays_what_it_is() -> None:
    expected = train(*make(), steps=9)
    net, optimizer = make()
    with leangrad.profile() as profile:
        found = train(net, optimizer, steps=9)
    for a, b in zip(expected, found, strict=True):
        assert_same_bits(a, b)
    report = profile.report
    assert names(report) == ["step 1", "step 3", "step 7 (lean)"]
    assert report.chosen is report.steps[1]
    assert report.lean_step is report.steps[2]
    assert not report.notes
    assert not leangrad.is_lean(net)
    assert report.steps[2].kept_bytes < 0.7 * report.steps[1].kept_bytes
    assert report.steps[2].peak_bytes < report.steps[1].peak_bytes
    assert {row["outcome"] for row in report.ledger} == {"kept", "rebuilt"}


def test_what_stands_before_a_step() -> None:
    net, optimizer = make()
    with leangrad.profile() as profile:
        train(net, optimizer, steps=3)
    parameter_bytes = sum(parameter.nbytes for parameter in net.parameters())
    first, third = profile.report.steps
    assert first.standing == {PARAMETERS: parameter_bytes, GRADIENTS: 0, STATE: 0}
    count = len(list(net.parameters()))
    assert third.standing == {
        PARAMETERS: parameter_bytes,
        GRADIENTS: parameter_bytes,
        STATE: 2 * parameter_bytes + 4 * count,
    }


def test_figures_are_those_of_measure() -> None:
    net, optimizer = make()
    with leangrad.profile(lean=False) as profile:
        train(net, optimizer, steps=3)
    measured = leangrad.measure(lambda: train(net, optimizer, steps=1), timed_runs=0)
    third = profile.report.steps[-1]
    assert third.kept_bytes == measured.kept_bytes
    assert third.peak_bytes - third.standing[PARAMETERS] - third.standing[STATE] == measured.peak_bytes


def test_lines_of_the_source_are_noted() -> None:
    net, optimizer = make()
    with leangrad.profile() as profile:
        train(net, optimizer, steps=1)
    lines = {event.line for event in profile.report.steps[0].timeline if event.module.endswith("blocks.0.2")}
    assert len(lines) == 1  # GELU's, in forward and in backward
    (line,) = lines
    assert line.startswith(f"{Path(__file__).name}:") or line.endswith(f"/{Path(__file__).name}:{line.split(':')[1]}")
    source = Path(__file__).read_text().splitlines()
    assert "x = x + block(x)" in source[int(line.split(":")[1]) - 1]


def test_fewer_steps_than_lean_needs() -> None:
    with leangrad.profile() as profile:
        train(*make(), steps=4)
    assert names(profile.report) == ["step 1", "step 3"]
    assert profile.report.notes == ("The program ended before its step 7, in which lean would have been measured.",)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_the_first_step(tmp_path: Path, where: str) -> None:
    net, optimizer = make()

    def fail(*_: object) -> None:
        raise MemoryError("no more")

    if where == "forward":
        net.blocks[1].register_forward_hook(fail)
    else:
        net.blocks[1].register_full_backward_hook(fail)
    call = nn.Module.__call__
    with pytest.raises(MemoryError), leangrad.profile(tmp_path / "report.json") as profile:
        train(net, optimizer, steps=3)
    assert names(profile.report) == ["step 1"]
    assert "The program ended in step 1 by MemoryError: no more." in profile.report.notes
    assert profile.report.steps[0].timeline
    assert json.loads((tmp_path / "report.json").read_text())["sentences"]
    assert nn.Module.__call__ is call


def test_no_step_at_all() -> None:
    with leangrad.profile() as profile:
        make()
    assert profile.report.steps == ()
    assert "nothing to measure" in str(profile)


def test_no_optimizer() -> None:
    net, _ = make()
    with leangrad.profile() as profile:
        net(torch.randn(4, 16)).sum().backward()
    assert names(profile.report) == ["step 1"]
    assert profile.report.notes == ("No optimizer has stepped: what is shown ends where the program did.",)


def test_evaluation_is_no_step() -> None:
    net, optimizer = make()
    with leangrad.profile() as profile, torch.no_grad():
        net(torch.randn(4, 16))
    assert profile.report.steps == ()
    with leangrad.profile() as profile:
        with torch.no_grad():
            net(torch.randn(4096, 16))
        train(net, optimizer, steps=1)
    assert profile.report.steps[0].peak_bytes < 4096 * 128 * 4


def test_micro_batches_are_one_step() -> None:
    net, optimizer = make()
    with leangrad.profile() as profile:
        for _ in range(7):
            for _ in range(3):
                net(torch.randn(128, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert names(profile.report) == ["step 1", "step 3", "step 7 (lean)"]
    backwards = [event.phase for event in profile.report.steps[1].timeline]
    changes = sum(a == "forward" and b == "backward" for a, b in itertools.pairwise(backwards))
    assert changes == 3


def test_two_optimizers_in_turns() -> None:
    (first, one), (second, two) = make(), make()
    with leangrad.profile() as profile:
        for _ in range(7):
            train(first, one, steps=1)
            train(second, two, steps=1)
    assert names(profile.report) == ["step 1", "step 3", "step 7 (lean)"]
    modules = {event.module.partition(".")[0] for event in profile.report.steps[1].timeline}
    assert modules == {"", "Net"}
    both = sum(p.nbytes for net in (first, second) for p in net.parameters())
    assert profile.report.steps[1].standing[PARAMETERS] == both
    assert not leangrad.is_lean(first)
    assert not leangrad.is_lean(second)


def test_a_model_that_is_lean_already() -> None:
    net, optimizer = make()
    leangrad.lean(net)
    with leangrad.profile() as profile:
        train(net, optimizer, steps=8)
    assert names(profile.report) == ["step 1 (lean)", "step 3 (lean)"]
    assert profile.report.notes == ("Net is lean already: these are the figures of a lean model.",)
    assert leangrad.is_lean(net)


def test_where_leangrad_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    with leangrad.profile() as profile:
        train(*make(), steps=8)
    assert names(profile.report) == ["step 1", "step 3"]
    assert profile.report.notes == ("LEANGRAD_DISABLE is set: no step ran lean.",)


def test_a_compiled_model_is_not_compiled_anew() -> None:
    net, optimizer = make()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    train(compiled, optimizer, steps=1)
    count = len(graphs)
    with leangrad.profile() as profile:
        train(compiled, optimizer, steps=4)
    assert len(graphs) == count
    assert names(profile.report) == ["step 1", "step 3"]
    assert 'backend="leangrad"' in profile.report.notes[0]


def test_an_error_of_leans_own_is_told_from_the_programs() -> None:
    net, optimizer = make()

    def fail_if_lean(*_: object) -> None:
        if leangrad.is_lean(net):
            raise ChangedError("changed")

    net.register_forward_pre_hook(fail_if_lean)
    with pytest.raises(ChangedError), leangrad.profile() as profile:
        train(net, optimizer, steps=8)
    assert profile.report.notes[0] == "The program ended in step 4 by ChangedError: changed."
    assert "--no-lean" in profile.report.notes[1]


def test_training_in_another_thread() -> None:
    net, optimizer = make()
    with leangrad.profile() as profile:
        thread = threading.Thread(target=train, args=(net, optimizer, 7))
        thread.start()
        thread.join()
    assert names(profile.report) == ["step 1", "step 3", "step 7 (lean)"]


def test_inside_another_profiler() -> None:
    net, optimizer = make()
    with torch.profiler.profile(), leangrad.profile() as profile:
        train(net, optimizer, steps=4)
    assert profile.report.steps == ()
    assert "Step 1 was not measured" in profile.report.notes[0]


def test_logits_are_told_of() -> None:
    torch.manual_seed(0)
    net = Net(VOCABULARY)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with leangrad.profile() as profile:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(256, 16)), torch.randint(VOCABULARY, (256,))).backward()
            optimizer.step()
    # The logits are released when log_softmax has read them; what that returns is kept.
    assert profile.report.logits_bytes in (256 * VOCABULARY * 4, 2 * 256 * VOCABULARY * 4)
    assert any("exact=False never makes them" in sentence for sentence in profile.report.sentences)
    assert any("exact=False" in advice.line for advice in profile.report.advice)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none at"), leangrad.profile(tmp_path / "nowhere" / "report.html"):
        pytest.fail("the region must not begin")


@pytest.mark.parametrize(("ending", "begins"), [("html", "<!doctype html>"), ("json", '{"title"'), ("txt", "Where")])
def test_it_is_written_as_soon_as_it_is_known(tmp_path: Path, ending: str, begins: str) -> None:
    path = tmp_path / f"report.{ending}"
    net, optimizer = make()
    sizes: list[int] = []

    def after(steps: int, check: Callable[[], None]) -> None:
        train(net, optimizer, steps)
        check()

    with leangrad.profile(path):
        after(1, lambda: sizes.append(len(path.read_text())))
        after(2, lambda: sizes.append(len(path.read_text())))
        after(4, lambda: sizes.append(len(path.read_text())))
    sizes.append(len(path.read_text()))
    assert path.read_text().startswith(begins)
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    torch.manual_seed(0)
    net = Net().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    with leangrad.profile() as profile:
        for _ in range(7):
            optimizer.zero_grad()
            net(torch.randn(4096, 16, device="cuda")).square().mean().backward()
            optimizer.step()
    assert names(profile.report) == ["step 1", "step 3", "step 7 (lean)"]
    _, plain, lean = profile.report.steps
    assert plain.device == "cuda:0"
    assert lean.kept_bytes < 0.7 * plain.kept_bytes
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(4096, 16, device="cuda")).square().mean().backward()
        optimizer.step()
    assert plain.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.02)
