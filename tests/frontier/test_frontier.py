"""The frontier of whole models: its figures, its failures, and that the model is left as it was."""

import copy
import functools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.frontier import Frontier, Point, comparison, frontier, training, ways
from leangrad.frontier.repeated import checkpoint_each, repeated_modules
from leangrad.lean import lean
from tests.support import same_bits
from tests.support.budgets import lean_down_to
from tests.support.small_models import ConvNet, stack


def by_way(found: Frontier) -> dict[str, Point]:
    return {point.way: point for point in found.points}


def peak_of(model: nn.Module, x: Tensor, steps: int = 4) -> tuple[int, int]:
    for _ in range(steps):
        model.zero_grad()
        model(x).square().mean().backward()
    model.zero_grad()
    found = leangrad.measure(lambda: model(x).square().mean().backward(), timed_runs=0)
    return found.peak_bytes, found.kept_bytes


# Figures


def test_figures_are_those_of_a_loop_by_hand() -> None:
    model, x = stack(), torch.randn(64, 16)
    found = by_way(frontier(model, x, points=0, steps=3))
    assert list(found) == ["plain", "lean", "checkpoint"]
    for way, by_hand in (("plain", copy.deepcopy(model)), ("lean", lean(copy.deepcopy(model)))):
        assert (found[way].peak_bytes, found[way].kept_bytes) == peak_of(by_hand, x)
    assert found["lean"].kept_bytes < found["plain"].kept_bytes
    assert found["checkpoint"].kept_bytes < 0.4 * found["plain"].kept_bytes
    assert found["checkpoint"].note == "around 4 × Block, from 1 on"
    assert found["lean"].note == "the floor"
    assert found["plain"].ratio == 1.0
    assert all(point.seconds > 0 and point.ratio > 0 for point in found.values())
    assert [point.bitwise for point in found.values()] == [None, True, True]
    assert all(point.budget is None for point in found.values())


def test_a_batch_of_names_a_loss_and_autocast() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack(2)

        def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
            assert torch.is_autocast_enabled("cpu")
            return {"out": self.layers(x) * scale}

    def loss(out: dict[str, Tensor]) -> Tensor:
        return out["out"].float().sum()

    batch = {"x": torch.randn(8, 16, requires_grad=True), "scale": 2.0}
    found = by_way(frontier(Named(), batch, loss, autocast=torch.bfloat16, points=0, steps=1))
    assert found["lean"].bitwise
    assert found["checkpoint"].bitwise


def test_an_optimizer_is_part_of_the_step() -> None:
    calls: list[int] = []

    class Counted(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            calls.append(1)
            super().step(closure)

    model, x = stack(2), torch.randn(8, 16)
    found = frontier(model, x, points=0, steps=2, optimizer=Counted)
    warm_up = sum(way.warm_up_steps for way in (ways.plain_way(), ways.lean_way(), ways.plain_way()))
    assert len(calls) == warm_up + 3 * (1 + 3)  # and for each way one measured step, one before the timed ones, and two
    assert all(point.bitwise for point in found.points[1:])


class Varied(nn.Module):
    """Its steps differ again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layers(x)
        return y.exp().sin() if self.calls % 2 else y.tanh().cos()


class Sum(nn.Module):
    """Saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@pytest.mark.parametrize("make", [Varied, Sum, lambda: stack(2)], ids=["varied", "sum", "disabled"])
def test_no_plan_is_waited_for_that_never_stands(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "disabled" in request.node.name:
        monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    calls: list[int] = []

    def loss(y: Tensor) -> Tensor:
        calls.append(1)
        return y.sum()

    frontier(make(), torch.randn(8, 16), loss, points=0, steps=1)
    assert len(calls) <= 60  # of all ways: less than the most steps that are waited for


# Budgets


def test_budgets_are_even_and_go_down_to_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(), torch.randn(64, 16)
    monkeypatch.setattr(ways, "lean", lean_down_to(20_000))
    found = frontier(model, x, points=6, steps=1)
    assert [point.way for point in found.points] == [
        "plain",
        *["lean, budget"] * 4,
        "lean",
        *["lean, budget"] * 2,
        "checkpoint",
    ]
    plain, floor = found.points[0].peak_bytes, found.points[5].peak_bytes
    budgets = [point.budget for point in found.points if point.budget is not None]
    above = [plain - (plain - floor) * n // 4 for n in range(4)]
    assert budgets == [*above, floor - (floor - 20_000) // 2, 20_000]
    assert found.points[7].note == "the smallest"
    assert all(point.bitwise and point.seconds and point.peak_bytes for point in found.points[1:])


def test_no_budgets_below_a_floor_that_is_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(), torch.randn(64, 16)
    floor = peak_of(lean(copy.deepcopy(model)), x)[0]
    monkeypatch.setattr(ways, "lean", lean_down_to(floor))
    found = frontier(model, x, points=3, steps=1)
    assert [point.way for point in found.points] == ["plain", *["lean, budget"] * 3, "lean", "checkpoint"]
    assert min(point.budget for point in found.points if point.budget) > floor


def test_another_smallest_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "lean", lean_down_to(20_000, then=23_000))
    found = frontier(stack(), torch.randn(64, 16), points=1, steps=1)
    assert [(point.budget, point.note) for point in found.points if point.budget] == [(23_000, "the smallest")]


def test_a_lean_that_goes_below_the_floor_and_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(), torch.randn(64, 16)
    floor = peak_of(lean(copy.deepcopy(model)), x)[0]

    def stand_in(model: nn.Module, *, budget: int | None = None) -> nn.Module:
        if budget is None or budget >= floor:
            return lean(model)
        checkpoint_each(repeated_modules(model))
        return model

    monkeypatch.setattr(ways, "lean", stand_in)
    found = frontier(model, x, points=2, steps=1)
    smallest = by_way(found)["checkpoint"].peak_bytes
    assert smallest < floor
    assert [(point.budget, point.note) for point in found.points if point.budget][1:] == [(smallest, "the smallest")]


def test_real_budgets_are_kept_and_bitwise() -> None:
    model, x = stack(6, 32), torch.randn(256, 32)
    found = frontier(model, x, points=4, steps=2)
    budgets = [point for point in found.points if point.budget is not None]
    assert budgets
    assert all(point.peak_bytes is not None and point.peak_bytes <= point.budget for point in budgets), str(found)
    assert all(point.bitwise for point in found.points[1:]), str(found)


# Failures


def out_of_memory_in_forward(model: nn.Module, **_: Any) -> nn.Module:
    def raise_it(module: nn.Module, args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory, by a test")

    model.register_forward_pre_hook(raise_it)
    return model


def test_a_way_that_runs_out_of_memory_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "lean", out_of_memory_in_forward)
    found = by_way(frontier(stack(2), torch.randn(8, 16), points=2, steps=1))
    assert found["lean"] == Point("lean", note="the floor; ran out of memory")
    assert found["checkpoint"].bitwise
    assert found["plain"].seconds


def test_a_plain_that_does_not_fit_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ways.Way("plain", out_of_memory_in_forward, 2)
    monkeypatch.setattr(comparison, "plain_way", lambda: plain)
    monkeypatch.setattr(ways, "lean", lean_down_to(20_000))
    found = frontier(stack(), torch.randn(64, 16), points=2, steps=1)
    assert found.points[0] == Point("plain", note="ran out of memory")
    assert [point.way for point in found.points] == ["plain", "lean", "lean, budget", "checkpoint"]
    for point in found.points[1:]:
        assert point.seconds
        assert point.peak_bytes
        assert point.ratio is None
        assert point.bitwise is None
    assert "time, ms" in found.svg()


def test_running_out_of_memory_while_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def soon(model: nn.Module) -> nn.Module:
        calls: list[int] = []

        def raise_it(module: nn.Module, args: Any) -> None:
            calls.append(1)
            if len(calls) > ways.lean_way().warm_up_steps + 4:
                raise torch.OutOfMemoryError("out of memory, by a test")

        lean(model).register_forward_pre_hook(raise_it)
        return model

    monkeypatch.setattr(ways, "lean", soon)
    found = by_way(frontier(stack(2), torch.randn(8, 16), points=0, steps=4))
    assert found["lean"].note == "the floor; ran out of memory"
    assert found["lean"].peak_bytes
    assert found["lean"].seconds is None
    assert found["checkpoint"].ratio


def test_a_way_that_fails_is_a_row() -> None:
    class Counts(nn.Module):
        """Its forward keeps another number of tensors each time, which a checkpoint refuses."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for _ in range(self.calls % 2):
                x = x.exp() * 1.0
            return self.layer(x)

    found = by_way(frontier(nn.Sequential(Counts(), Counts()), torch.randn(2, 4), points=0, steps=1))
    assert "failed with CheckpointError" in found["checkpoint"].note
    assert found["checkpoint"].seconds is None
    assert found["lean"].seconds


def test_a_model_without_blocks_has_no_checkpoint() -> None:
    found = by_way(frontier(nn.Linear(4, 4), torch.randn(2, 4), points=0, steps=1))
    assert found["checkpoint"] == Point("checkpoint", note="found no repeated modules to put it around")


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_a_plan_for_a_budget_stands_when_the_way_is_warm(share: float) -> None:
    """In the steps before, plans take turns: neither their peak nor their time is that of the budget."""
    model, x = stack(width=64), torch.randn(512, 64)
    peak = by_way(frontier(model, x, points=0, steps=1))["plain"].peak_bytes
    assert peak is not None
    way = ways.budget_way(int(share * peak), int(share * peak))
    assert way.prepare is not None
    way.prepare(model)
    for _ in range(way.warm_up_steps):
        model.zero_grad()
        model(x).sum().backward()
    tuner: Any = leangrad.ledger_of(model)._tuner
    assert tuner.peaks.is_settled


class Switched(nn.Module):
    """Checkpoints by a switch of its own, as timm's models have them; or a switch that refuses."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(3))
        self.refuses, self.is_on = refuses, False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        assert not (enable and self.refuses), "gradient checkpointing not supported"
        self.is_on = enable

    def forward(self, x: Tensor) -> Tensor:
        features = [x]  # one list that grows: a checkpoint from outside would read more than forward did
        for layer in self.layers:
            run: Any = functools.partial(checkpoint, layer, use_reentrant=False) if self.is_on else layer
            features.append(run(sum(features)))
        return features[-1]


def test_a_model_with_a_switch_for_checkpoints_is_checkpointed_by_it() -> None:
    model = nn.Sequential(Switched())
    found = by_way(frontier(model, torch.randn(64, 4), points=0, steps=1))
    assert "set_grad_checkpointing()" in found["checkpoint"].note
    assert found["checkpoint"].peak_bytes < found["plain"].peak_bytes  # type: ignore[operator]
    assert not model[0].is_on
    found = by_way(frontier(nn.Sequential(Switched(refuses=True)), torch.randn(64, 4), points=0, steps=1))
    assert "around 3 × Sequential" in found["checkpoint"].note


class Pair(nn.Module):
    """Two models with a switch each, in one that has none."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(x) for part in self.parts)  # type: ignore[return-value]


def test_all_parts_of_a_model_with_a_switch_are_switched_on() -> None:
    way, model = ways.checkpoint_way(Pair(Switched(), Switched())), Pair(Switched(), Switched())
    assert way is not None
    assert way.prepare is not None
    way.prepare(model)
    assert [part.is_on for part in model.parts] == [True, True]


def test_looking_for_a_switch_leaves_the_model_as_it_is() -> None:
    model = Switched()
    model.set_grad_checkpointing()
    assert ways.checkpoint_way(model) is not None
    assert model.is_on


@pytest.mark.parametrize("error", [TypeError, NotImplementedError, AttributeError])
def test_a_switch_that_cannot_be_used_is_none(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def refuses(model: Switched, enable: bool = True) -> None:
        raise error("no")

    monkeypatch.setattr(Switched, "set_grad_checkpointing", refuses)
    way = ways.checkpoint_way(Switched())
    assert way is not None
    assert "around 3 × Sequential" in way.note


def test_an_error_of_the_model_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes") as raised:
        frontier(stack(), torch.randn(2, 3))
    assert any("leangrad.frontier called Sequential with the batch float32[2, 3]" in n for n in raised.value.__notes__)


# Bits


class Skewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.25


def test_a_gradient_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def skewed(model: nn.Module) -> nn.Module:
        model.register_forward_hook(lambda module, args, output: Skewed.apply(output))
        return model

    monkeypatch.setattr(ways, "lean", skewed)
    found = frontier(nn.Linear(4, 4), torch.randn(2, 4), points=0, steps=1)
    assert found.points[1].bitwise is False
    assert re.search(r"2 of loss and gradients differ, gradient (weight|bias) by 0\.25$", found.points[1].note)
    assert "DIFFER" in str(found)


def test_a_difference_that_comes_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(model: nn.Module) -> nn.Module:
        calls: list[int] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            calls.append(1)
            return Skewed.apply(output) if len(calls) == ways.lean_way().warm_up_steps else None

        model.register_forward_hook(hook)
        return model

    monkeypatch.setattr(ways, "lean", late)
    assert frontier(nn.Linear(4, 4), torch.randn(2, 4), points=0, steps=1).points[1].bitwise is False


def test_checkpoints_update_running_statistics_twice() -> None:
    found = by_way(frontier(ConvNet(), torch.randn(2, 4, 6, 6), points=0, steps=1))
    assert found["checkpoint"].bitwise
    assert "leaves another buffer than plain: stage1.0.norm.running_mean and " in found["checkpoint"].note
    assert found["lean"].bitwise
    assert found["lean"].note == "the floor"


class Growing(nn.Linear):
    calls: tuple[float, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        Growing.calls = (*Growing.calls, 1.0)
        return super().forward(x * len(Growing.calls))


def test_a_plain_that_differs_from_itself_shows_no_bits() -> None:
    found = frontier(Growing(4, 4), torch.randn(2, 4), points=0, steps=1)
    assert all(point.bitwise is None for point in found.points)
    assert "plain differs from itself" in str(found)


# What is left


def state_of(model: nn.Module) -> list[Any]:
    hooks = [
        list(hooks.items())
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ]
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    grads = [(tensor.grad, None if tensor.grad is None else tensor.grad.clone()) for tensor in tensors]
    flags = [(tensor, tensor.requires_grad, tensor.data_ptr(), tensor._version) for tensor in tensors]
    modes = [module.training for module in model.modules()]
    return [hooks, values, grads, flags, modes, torch.get_rng_state(), random.getstate()]


def assert_same_state(before: list[Any], after: list[Any]) -> None:
    assert before[0] == after[0]
    assert all(same_bits(a, b) for a, b in zip(before[1], after[1], strict=True))
    for (grad, value), (grad_after, value_after) in zip(before[2], after[2], strict=True):
        assert grad is grad_after
        assert value is None or same_bits(value, value_after)
    for a, b in zip(before[3], after[3], strict=True):
        assert a[0] is b[0]
        assert a[1:] == b[1:]
    assert before[4] == after[4]
    assert same_bits(before[5], after[5])
    assert before[6] == after[6]


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
@pytest.mark.parametrize("make_lean", [False, True])
def test_the_model_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, optimizer: Callable[..., Any] | None, make_lean: bool
) -> None:
    monkeypatch.setattr(ways, "lean", lean_down_to(1))
    model, x = nn.Sequential(ConvNet(), nn.Dropout(0.5)), torch.randn(2, 4, 6, 6)
    model[0].stage1[0].norm.eval()
    model[0].stage2[0].conv.weight.requires_grad_(False)
    model(x).sum().backward()
    model[0].register_forward_hook(lambda module, args, output: None)
    if make_lean:
        leangrad.lean(model)
    before = state_of(model)
    frontier(model, x, points=1, steps=1, optimizer=optimizer)
    assert_same_state(before, state_of(model))


def test_the_model_is_left_as_it_was_if_it_raises() -> None:
    class Fails(ConvNet):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            Fails.calls += 1
            if Fails.calls == 2:
                raise KeyError("by a test")
            return out + torch.rand(()) + random.random()

    model, x = Fails(), torch.randn(2, 4, 6, 6)
    before = state_of(model)
    with pytest.raises(KeyError, match="by a test"):
        frontier(model, x, optimizer=torch.optim.SGD)
    assert_same_state(before, state_of(model))


# Progress and bad input


@pytest.mark.parametrize("steps", [0, 12], ids=["", "a plan that stands late"])
def test_progress_only_grows_and_ends(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr(ways, "lean", lean_down_to(20_000))
    if steps:
        monkeypatch.setattr(training, "_MOST_STEPS", steps)
        monkeypatch.setattr(training.Training, "_is_settled", lambda self: False)
    told: list[tuple[str, int, int]] = []
    frontier(stack(), torch.randn(64, 16), points=2, steps=3, progress=lambda *args: told.append(args))
    done = [entry[1] for entry in told]
    assert done == sorted(done)
    assert all(0 <= entry[1] <= entry[2] for entry in told)
    assert told[-1][1] == told[-1][2]
    words = " ".join(entry[0] for entry in told)
    assert all(
        word in words for word in ("plain", "lean, budget", "the smallest", "checkpoint", "timing, round 2 of 2")
    )


@pytest.mark.parametrize(
    ("named", "kind", "message"),
    [
        ({"points": -1}, ValueError, "points to be 0 or a positive integer, got -1"),
        ({"points": 1.5}, ValueError, "got 1.5"),
        ({"steps": 0}, ValueError, "steps to be a positive integer, got 0"),
        ({"optimizer": lambda parameters: 7}, TypeError, "got one that gives int"),
        ({"batch": 7}, TypeError, "expected batch to be a tensor"),
        ({"model": 7}, TypeError, r"got int; call frontier\(model, batch, loss\)"),
        ({"model": nn.Linear(16, 2).requires_grad_(False)}, ValueError, "with a parameter that requires a gradient"),
        ({"loss": 7}, TypeError, "expected loss to be a function"),
        ({"autocast": "bf16"}, TypeError, "expected autocast to be a dtype"),
    ],
)
def test_bad_input(named: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        frontier(**{"model": stack(2), "batch": torch.randn(2, 16), **named})


def test_inside_a_region_it_refuses() -> None:
    with leangrad.saving(), pytest.raises(ValueError, match=r"outside of `with leangrad.saving\(\)`"):
        frontier(stack(2), torch.randn(2, 16))


def test_a_disabled_leangrad_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    found = frontier(stack(2), torch.randn(64, 16), points=3, steps=1)
    assert "LEANGRAD_DISABLE is set" in str(found)
    assert found.points[0].kept_bytes == found.points[1].kept_bytes


# On a GPU


@pytest.mark.gpu
def test_figures_on_a_gpu() -> None:
    x = torch.randn(1024, 256, device="cuda")
    torch.manual_seed(0)
    stack(6, 256).cuda()(x).sum().backward()  # from here on the library's workspaces stand
    stood = torch.cuda.memory_allocated() - x.nbytes
    model = stack(6, 256).cuda()
    ballast = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    found = by_way(frontier(model, x, points=0, steps=4, optimizer=torch.optim.AdamW))
    del ballast
    assert all(point.bitwise for way, point in found.items() if way != "plain")
    assert found["checkpoint"].peak_bytes < found["lean"].peak_bytes < found["plain"].peak_bytes
    by_hand = copy.deepcopy(model)
    del model
    optimizer = torch.optim.AdamW(by_hand.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        by_hand(x).square().mean().backward()
        optimizer.step()
    assert found["plain"].peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - stood, rel=0.05)


@pytest.mark.gpu
def test_real_budgets_on_a_gpu_are_kept_and_bitwise() -> None:
    model, x = stack(8, 512).cuda(), torch.randn(4096, 512, device="cuda")
    found = frontier(model, x, points=6, steps=4)
    budgets = [point for point in found.points if point.budget is not None]
    assert budgets
    assert all(point.peak_bytes is not None and point.peak_bytes <= point.budget for point in budgets), str(found)
    assert all(point.bitwise for point in found.points[1:]), str(found)
