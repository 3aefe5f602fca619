"""`leangrad.measure` against bytes that are worked out by hand."""

import contextlib
import functools
import gc
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from leangrad import _torch
from leangrad.errors import LeangradError
from leangrad.measure import Allocation, Measurement, instrument, measure
from leangrad.measure.trace import read_trace


def size_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class TwoLayers:
    """A step of an MLP, and its bytes by hand.

    x (B, I) → z = x W0ᵀ + b0 (B, H) → h = relu(z) → y = h W1ᵀ + b1 (B, O) → loss = Σ y⊙c
    """

    def __init__(self, batch: int, inputs: int, hidden: int, outputs: int, dtype: torch.dtype) -> None:
        self.model = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)).to(dtype)
        self.x = torch.randn(batch, inputs, dtype=dtype)
        self.c = torch.randn(batch, outputs, dtype=dtype)
        item = dtype.itemsize
        self.loss_bytes = item
        self.hidden_bytes = batch * hidden * item
        self.output_bytes = batch * outputs * item
        self.parameter_bytes = size_of(*self.model.parameters())
        self.parameters = len(list(self.model.parameters()))
        self.top_bytes = size_of(self.model[2].weight, self.model[2].bias)

    def loss(self) -> torch.Tensor:
        return (self.model(self.x) * self.c).sum()

    def peak_bytes(self) -> int:
        standing = self.loss_bytes + self.loss_bytes  # the loss and the gradient of ones that backward starts from
        forward = max(
            2 * self.hidden_bytes,  # z and h
            self.hidden_bytes + 2 * self.output_bytes,  # h, y and y⊙c
            self.hidden_bytes + self.output_bytes + self.loss_bytes,  # h, y⊙c and the sum
        )
        top = (
            standing + self.hidden_bytes + self.output_bytes + self.hidden_bytes + self.top_bytes
        )  # h, dy, dh, dW1, db1
        relu = standing + 3 * self.hidden_bytes + self.top_bytes  # h, dh, dz and the gradients so far
        bottom = standing + self.hidden_bytes + self.parameter_bytes  # dz and all gradients
        return max(forward, top, relu, bottom)


SHAPES = [
    pytest.param(32, 8, 16, 4, torch.float32, id="wide-batch"),
    pytest.param(1, 1, 1, 1, torch.float32, id="ones"),
    pytest.param(3, 129, 7, 65, torch.float32, id="wide-layers"),
    pytest.param(5, 7, 11, 13, torch.float64, id="float64"),
    pytest.param(17, 5, 3, 31, torch.bfloat16, id="bfloat16"),
]


@pytest.mark.parametrize(("batch", "inputs", "hidden", "outputs", "dtype"), SHAPES)
def test_mlp_to_the_byte(batch: int, inputs: int, hidden: int, outputs: int, dtype: torch.dtype) -> None:
    mlp = TwoLayers(batch, inputs, hidden, outputs, dtype)

    def step() -> None:
        mlp.model.zero_grad()
        mlp.loss().backward()

    step()
    mlp.model.zero_grad()
    result = measure(step, timed_runs=0)
    assert result.device == "cpu"
    assert result.kept_bytes == mlp.hidden_bytes + mlp.loss_bytes
    assert result.live_bytes_after("forward") == result.kept_bytes
    assert result.peak_bytes == mlp.peak_bytes()
    assert result.live_bytes_after("backward") == mlp.parameter_bytes + mlp.loss_bytes
    assert result.live_bytes_after("other") == mlp.parameter_bytes
    assert result.timeline[-1].live_bytes == mlp.parameter_bytes


@pytest.mark.parametrize("optimizer_name", ["SGD", "AdamW"])
def test_first_optimizer_step_to_the_byte(optimizer_name: str) -> None:
    mlp = TwoLayers(32, 8, 16, 4, torch.float32)
    if optimizer_name == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(mlp.model.parameters(), lr=0.1, momentum=0.9)
        state_bytes = mlp.parameter_bytes
    else:
        optimizer = torch.optim.AdamW(mlp.model.parameters())
        state_bytes = 2 * mlp.parameter_bytes + 4 * mlp.parameters  # two moments, and a step count for each parameter

    def step() -> None:
        mlp.loss().backward()
        optimizer.step()

    result = measure(step, timed_runs=0)
    assert result.kept_bytes == mlp.hidden_bytes + mlp.loss_bytes
    assert result.peak_bytes == mlp.peak_bytes()
    assert result.live_bytes_after("backward") == mlp.parameter_bytes + mlp.loss_bytes
    assert result.live_bytes_after("other") == mlp.parameter_bytes + state_bytes
    left = result.alive_at(-1)
    assert sum(block.bytes for block in left) == mlp.parameter_bytes + state_bytes
    assert {block.phase for block in left} == {"backward", "other"}


@pytest.mark.parametrize("where", ["first", "before backward", "last"])
def test_peak_and_kept_are_the_same_wherever_zero_grad_stands(where: str) -> None:
    """Old gradients of more bytes than the step keeps: counted against it, kept would be above the peak."""
    mlp = TwoLayers(4, 8, 16, 4, torch.float32)
    assert mlp.parameter_bytes > mlp.hidden_bytes + mlp.loss_bytes

    def step() -> None:
        if where == "first":
            mlp.model.zero_grad()
        loss = mlp.loss()
        if where == "before backward":
            mlp.model.zero_grad()
        loss.backward()
        if where == "last":
            mlp.model.zero_grad()

    result = measure(step, timed_runs=2)
    assert (min(event.live_bytes for event in result.timeline) < 0) == (where != "last")
    assert result.kept_bytes == mlp.hidden_bytes + mlp.loss_bytes
    assert result.peak_bytes == mlp.peak_bytes() >= result.kept_bytes
    assert sum(block.bytes for block in result.alive_at_peak()) == result.peak_bytes
    assert result.live_bytes_after("other") == 0


def test_gradients_of_before_are_not_counted() -> None:
    mlp = TwoLayers(32, 8, 16, 4, torch.float32)
    accumulate = measure(lambda: mlp.loss().backward(), timed_runs=1)
    assert accumulate.live_bytes_after("backward") == mlp.loss_bytes
    assert accumulate.timeline[-1].live_bytes == 0
    assert not accumulate.alive_at(-1)


def test_a_released_block_of_before_is_counted_once_for_all_its_views() -> None:
    held = [torch.zeros(100), None]
    held[1] = held[0][10:]

    def step() -> None:
        held.clear()
        torch.empty(50)

    result = measure(step, timed_runs=0)
    assert [event.live_bytes for event in result.timeline] == [-400, -200, -400]
    assert [event.block for event in result.timeline] == [-1, 0, 0]
    assert result.peak_bytes == 200


def test_scratch_inside_an_op_counts() -> None:
    x = torch.randn(10, 100)
    result = measure(lambda: x.sum(0, dtype=torch.float64), timed_runs=0)
    assert result.peak_bytes == 100 * 8 + 10 * 100 * 8  # the sum, and x cast to float64
    assert result.kept_bytes == 0
    assert result.temporaries[0] == Allocation("aten::sum", "", 8000, "forward")


def test_views_and_in_place_ops_count_nothing() -> None:
    x = torch.randn(6, 4)

    def step() -> torch.Tensor:
        return x.t()[1:].relu_().mul_(x.t()[0]).unflatten(1, (2, 3)).expand(5, 3, 2, 3)

    result = measure(step, timed_runs=0)
    assert result.peak_bytes == 0
    assert result.timeline == ()
    assert result.alive_at_peak() == ()


def test_a_tensor_freed_in_forward_is_not_kept() -> None:
    x = torch.randn(10, 10, requires_grad=True)

    def step() -> None:
        x.grad = None
        (x + 1).neg().exp().sum().backward()

    result = measure(step, timed_runs=0)
    assert result.kept_bytes == 400 + 4  # exp's output and the sum, neither x + 1 nor its negative
    freed = [block for block in result.temporaries if block.phase == "forward"]
    assert [(block.op, block.bytes) for block in freed[:2]] == [("aten::add", 400), ("aten::neg", 400)]


def test_ops_modules_and_phases_are_named() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](torch.tanh(self.layers[0](x)))

    block = Block()
    x = torch.randn(2, 4)
    optimizer = torch.optim.SGD(block.parameters(), momentum=0.9)

    def step() -> None:
        F.mse_loss(block(x), x).backward()
        optimizer.step()

    result = measure(step, timed_runs=0)
    made = [(event.op, event.module, event.bytes, event.phase) for event in result.timeline if event.bytes > 0]
    assert made[:3] == [
        ("aten::linear", "Block.layers.0", 64, "forward"),
        ("aten::tanh", "Block", 64, "forward"),
        ("aten::linear", "Block.layers.1", 32, "forward"),
    ]
    assert ("AddmmBackward0: aten::mm", "Block.layers.1", 128, "backward") in made
    assert ("TanhBackward0: aten::tanh_backward", "Block", 64, "backward") in made
    assert made[-1][2:] == (16, "other")  # the momentum of the last bias
    phases = [event.phase for event in result.timeline]
    assert phases == sorted(phases, key=["forward", "backward", "other"].index)


def test_replays_in_unpack_hooks_are_backward() -> None:
    x = torch.randn(100, requires_grad=True)

    def rebuild(_: None) -> torch.Tensor:
        return x.detach().sin().exp()

    def step(replay: bool) -> None:
        x.grad = None
        y = x.detach().sin().requires_grad_()
        if not replay:
            y.exp().sum().backward()
            return
        with saved_tensors_hooks(lambda _: None, rebuild):
            loss = y.exp().sum()
        loss.backward()

    plain = measure(lambda: step(replay=False), timed_runs=0)
    lean = measure(lambda: step(replay=True), timed_runs=0)
    assert plain.kept_bytes - lean.kept_bytes == 400
    replayed = [event for event in lean.timeline if event.op in ("ExpBackward0: aten::sin", "ExpBackward0: aten::exp")]
    assert [event.bytes for event in replayed if event.bytes > 0] == [400, 400]
    assert {event.phase for event in replayed} == {"backward"}


def test_recomputed_modules_are_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))
    x = torch.randn(2, 4, requires_grad=True)

    def step() -> None:
        checkpoint(model, x, use_reentrant=False).pow(2).sum().backward()

    result = measure(step, timed_runs=0)
    tanh = [(e.phase, e.module) for e in result.timeline if e.op.endswith("aten::tanh") and e.bytes == 2 * 64 * 4]
    assert tanh == [("forward", "Sequential.1"), ("backward", "Sequential.1")]


def test_micro_batches_keep_their_phases() -> None:
    mlp = TwoLayers(32, 8, 16, 4, torch.float32)

    def step() -> None:
        mlp.loss().backward()
        mlp.loss().backward()

    result = measure(step, timed_runs=0)
    runs = [
        phase
        for i, phase in enumerate(e.phase for e in result.timeline)
        if not i or result.timeline[i - 1].phase != phase
    ]
    assert runs[:4] == ["forward", "backward", "forward", "backward"]
    assert result.kept_bytes == mlp.hidden_bytes + mlp.loss_bytes  # at the first backward
    assert (
        result.live_bytes_after("forward") == mlp.parameter_bytes + mlp.hidden_bytes + mlp.loss_bytes
    )  # at the second


def test_a_step_without_backward_is_all_forward() -> None:
    mlp = TwoLayers(32, 8, 16, 4, torch.float32)
    result = measure(mlp.loss, timed_runs=0)
    assert result.kept_bytes == 0
    assert {event.phase for event in result.timeline} == {"forward"}
    assert result.live_bytes_after("backward") == 0
    assert result.timeline[-1].live_bytes == 0


def test_an_explicit_gradient_and_autograd_grad() -> None:
    x = torch.randn(100, requires_grad=True)
    grad_output = torch.randn(100)
    result = measure(lambda: torch.autograd.grad(x.exp(), x, grad_output), timed_runs=0)
    assert result.kept_bytes == 400
    assert result.peak_bytes == 800
    assert result.live_bytes_after("backward") == 800  # the gradient, and x.exp(), which the call still holds


def test_what_is_alive_at_the_peak_adds_up() -> None:
    mlp = TwoLayers(32, 8, 16, 4, torch.float32)
    result = measure(lambda: mlp.loss().backward(), timed_runs=0)
    assert sum(block.bytes for block in result.alive_at_peak()) == result.peak_bytes
    assert [block.bytes for block in result.alive_at_peak()][:3] == [mlp.hidden_bytes] * 3
    assert max(event.live_bytes for event in result.timeline) == result.peak_bytes
    assert all(b.seconds >= a.seconds for a, b in zip(result.timeline, result.timeline[1:], strict=False))


def test_cycles_count_until_the_step_is_over() -> None:
    def step() -> None:
        for _ in range(5000):  # enough objects for a collection, if it were on
            cycle: list[object] = [torch.empty(1)]
            cycle.append(cycle)

    assert measure(step, timed_runs=0).peak_bytes == 5000 * 4
    assert gc.isenabled()


def test_tensors_of_every_kind_may_stand_by() -> None:
    bystanders = [nn.LazyLinear(3).weight, torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.empty(0)]
    assert measure(lambda: torch.empty(3), timed_runs=0).peak_bytes == 12
    del bystanders


def test_what_is_released_around_the_step_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [torch.empty(100), torch.empty(200), torch.empty(300)]
    real = instrument._marking_modules

    @contextlib.contextmanager
    def releasing_around(*, lines: bool) -> Iterator[None]:
        held.pop()
        with real(lines=lines):
            yield
        held.pop()

    monkeypatch.setattr(instrument, "_marking_modules", releasing_around)
    result = measure(held.pop, timed_runs=0)
    assert [event.bytes for event in result.timeline] == [-800]
    assert not held


def test_an_error_of_the_step_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trace is read of a step that failed: an error in there would hide the user's."""
    monkeypatch.setattr(instrument, "read_trace", lambda _: pytest.fail("read a trace"))

    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        measure(step, timed_runs=0)
    assert raised.value.__context__ is None
    assert not instruments_left()


def test_two_measurements_agree() -> None:
    mlp = TwoLayers(32, 8, 16, 4, torch.float32)

    def step() -> None:
        mlp.model.zero_grad()
        mlp.loss().backward()

    step()
    first, second = measure(step, timed_runs=0), measure(step, timed_runs=0)
    assert [event.bytes for event in first.timeline] == [event.bytes for event in second.timeline]


def test_runs_are_counted() -> None:
    calls: list[None] = []
    assert measure(lambda: calls.append(None), timed_runs=4).seconds > 0
    assert len(calls) == 5
    assert measure(lambda: calls.append(None), timed_runs=0).seconds > 0
    assert len(calls) == 6


def test_text_and_json() -> None:
    mlp = TwoLayers(32, 8, 16, 4, torch.float32)
    result = measure(lambda: mlp.loss().backward(), timed_runs=0)
    text = str(result)
    assert f"{result.peak_bytes:,} B" in text
    assert "ReluBackward0" in text
    assert json.loads(result.to_json()) == json.loads(json.dumps(result.as_dict()))
    assert json.loads(result.to_json())["timeline"][0]["op"] == "aten::linear"
    with pytest.raises(ValueError, match="expected a phase"):
        result.live_bytes_after("forwards")  # type: ignore[arg-type]


MODULE_CALL = nn.Module.__call__


def instruments_left() -> list[str]:
    found = {
        "marks": nn.Module.__call__ is not MODULE_CALL,
        "profiler": _torch.is_profiling(),
        "log level": "KINETO_LOG_LEVEL" in os.environ,
        "collection off": not gc.isenabled(),
    }
    return [name for name, left in found.items() if left]


@pytest.mark.parametrize("fails_in_run", [1, 2, 3])
def test_an_exception_in_the_step_leaves_nothing_behind(fails_in_run: int) -> None:
    calls: list[int] = []

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(calls) + 1)
            if calls[-1] == fails_in_run:
                raise ZeroDivisionError("from the step")
            return x

    model = nn.Sequential(Failing())
    with pytest.raises(ZeroDivisionError, match="from the step"):
        measure(lambda: model(torch.ones(2)), timed_runs=2)
    assert not instruments_left()
    assert measure(lambda: torch.empty(3), timed_runs=0).peak_bytes == 12


def test_an_interrupt_in_a_module_leaves_nothing_behind() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(lambda: nn.Sequential(Interrupted())(torch.ones(2)), timed_runs=0)
    assert not instruments_left()


def test_nested_measurements_are_refused() -> None:
    with pytest.raises(LeangradError, match="measure was called inside a step"):
        measure(lambda: measure(lambda: None), timed_runs=0)
    assert not instruments_left()


def test_a_running_profiler_is_refused_and_left_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        with pytest.raises(LeangradError, match="torch's profiler is on"):
            measure(lambda: torch.empty(3), timed_runs=0)
        torch.ones(3)
    assert any(event.name == "aten::ones" for event in profiler.events())


async def coroutine_step() -> None: ...


def generator_step():
    yield


def needs_a_batch(batch: torch.Tensor, *, scale: float) -> None: ...


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (3, "got int"),
        (None, "got NoneType"),
        (coroutine_step, "coroutine function"),
        (functools.partial(coroutine_step), "coroutine function"),
        (generator_step, "generator function"),
        (needs_a_batch, "missing a required argument: 'batch'"),
        (functools.partial(needs_a_batch, torch.ones(1)), "missing a required (keyword-only )?argument: 'scale'"),
        (lambda: coroutine_step(), "returns a coroutine"),
    ],
)
def test_what_is_no_step_is_refused(step: object, message: str) -> None:
    with pytest.raises(TypeError, match=message) as caught:
        measure(step)  # type: ignore[arg-type]
    assert "pass a function of no arguments" in str(caught.value)


@pytest.mark.parametrize("timed_runs", [-1, 1.5, "3"])
def test_timed_runs_are_checked(timed_runs: object) -> None:
    with pytest.raises(ValueError, match="expected timed_runs"):
        measure(lambda: None, timed_runs=timed_runs)  # type: ignore[arg-type]


def test_callables_of_every_kind_are_steps() -> None:
    class Step:
        def __call__(self, scale: int = 1) -> None:
            torch.empty(3 * scale)

        def method(self) -> None:
            torch.empty(3)

    for step in (Step(), Step().method, functools.partial(torch.empty, 3), dict):
        assert isinstance(measure(step, timed_runs=0), Measurement)


def test_a_compiled_step_is_not_compiled_again() -> None:
    compilations: list[None] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(None)
        return graph.forward

    mlp = TwoLayers(32, 8, 16, 4, torch.float32)
    plain = measure(lambda: mlp.loss().backward(), timed_runs=1)
    mlp.model = torch.compile(mlp.model, backend=backend, fullgraph=True)
    compiled = measure(lambda: mlp.loss().backward(), timed_runs=1)
    assert len(compilations) == 1
    assert [event.bytes for event in compiled.timeline] == [event.bytes for event in plain.timeline]
    torch.compiler.reset()
    measure(lambda: mlp.loss().backward(), timed_runs=0)
    assert len(compilations) == 2  # inside the instrumented run, with no graph break at the marks
    torch.compiler.reset()


def test_marks_do_not_look_like_hooks() -> None:
    seen = []

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(bool(_torch.has_global_hooks() or _torch.has_hooks(self)))
            return super().forward(x)

    model = Model(4, 2)
    measure(lambda: model(torch.ones(1, 4)), timed_runs=1)
    assert seen == [False, False]


def test_a_trace_without_memory_is_refused(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "trace.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": []}, file)
    with pytest.raises(LeangradError, match="did not report"):
        read_trace(path)


def test_a_module_is_no_step() -> None:
    with pytest.raises(TypeError, match=r"got a module, Linear; pass its step, such as `lambda: .*backward\(\)`"):
        measure(nn.Linear(2, 2))

    class Whole(nn.Module):  # a module that needs no arguments can be one
        def forward(self) -> torch.Tensor:
            return torch.ones(8)

    assert measure(Whole(), timed_runs=0).peak_bytes == 32


@pytest.mark.gpu
def test_cuda_counts_in_blocks_and_names_backward() -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()
    x, c = torch.randn(256, 512, device="cuda"), torch.randn(256, 512, device="cuda")

    def step() -> None:
        model.zero_grad()
        (model(x) * c).sum().backward()

    step()  # cuBLAS takes its workspace
    model.zero_grad()
    result = measure(step, timed_runs=0)
    hidden_bytes = 256 * 1024 * 4
    assert result.device == "cuda:0"
    assert result.kept_bytes == hidden_bytes + 512
    assert result.peak_bytes == max(event.live_bytes for event in result.timeline)
    assert sum(block.bytes for block in result.alive_at_peak()) == result.peak_bytes
    gradients = {
        e.module for e in result.timeline if e.bytes > 0 and e.phase == "backward" and e.op.startswith("Addmm")
    }
    assert gradients == {"Sequential.0", "Sequential.2"}
    assert result.live_bytes_after("other") == size_of(*model.parameters())
    again = measure(step, timed_runs=0)  # which releases the gradients that the step before has left
    assert again.timeline[0].live_bytes < 0
    assert (again.kept_bytes, again.peak_bytes) == (result.kept_bytes, result.peak_bytes)
