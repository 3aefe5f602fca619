"""Whole training steps captured in CUDA graphs: eager lean beside eager plain, and compiled by either backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from tests.support import assert_same_bits, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # Inductor's own: a part with nothing to launch
]
REPLAYS = 4


class Block(nn.Module):
    """A norm, two products with an activation that lean makes again, dropout, and a residual link."""

    def __init__(self, width: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.dropout(self.down(h * torch.sigmoid(h)))


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(3):
            layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU()]
        super().__init__(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "blocks": (lambda: nn.Sequential(*(Block() for _ in range(4))), (512, 256)),
    "convolutions": (ConvNet, (16, 3, 32, 32)),
}


class Captured:
    """A step of a model (forward, loss, backward, AdamW) in one CUDA graph."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], steps: int = 5) -> None:
        self.model, self.batch = model, torch.zeros(shape, device="cuda")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(steps):  # lean records in its first steps what it follows later
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._step()

    def _step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.mse_loss(self.model(self.batch).float(), torch.zeros((), device="cuda").expand_as(self.batch))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def replay(self, batch: Tensor) -> Tensor:
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.clone()


@pytest.mark.parametrize("name", CASES)
def test_a_captured_lean_step_is_the_captured_plain_step(name: str) -> None:
    """Losses, weights and buffers, bit for bit, over several replays with other batches; dropout draws alike."""
    make, shape = CASES[name]
    runs = []
    for lean in (False, True):
        torch.manual_seed(0)
        model = make().cuda()
        if name == "convolutions":
            model.append(nn.Conv2d(16, 3, 1, device="cuda"))  # as many channels as the batch has
        step = Captured(leangrad.lean(model) if lean else model, shape)
        if lean:
            assert leangrad.ledger_of(model).trace is not None  # what was captured is the followed trace
        torch.manual_seed(1)
        losses = [step.replay(torch.randn(shape, device="cuda")) for _ in range(REPLAYS)]
        runs.append((losses, list(model.parameters()), list(model.buffers())))
    (losses, weights, buffers), (lean_losses, lean_weights, lean_buffers) = runs
    assert len({float(loss) for loss in losses}) == REPLAYS
    for plain, ours in zip([*losses, *weights, *buffers], [*lean_losses, *lean_weights, *lean_buffers], strict=True):
        assert_same_bits(ours, plain)


def test_a_captured_step_with_a_budget_is_the_captured_plain_step() -> None:
    """With a budget below the floor, under which products run again. The plan is final before the capture."""
    runs, budget = [], 0
    for way in ("measured", "plain", "budget"):
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that was ever used, and each step has its own
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(Block(512) for _ in range(6))).cuda()
        if way == "measured":
            step = Captured(leangrad.lean(model), (4096, 512))
            step.optimizer.zero_grad(set_to_none=True)
            del step.graph
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step._step()
            budget = before + int(0.9 * (torch.cuda.max_memory_allocated() - before))
            del step, model
            continue
        step = Captured(leangrad.lean(model, budget=budget) if way == "budget" else model, (4096, 512), 40)
        if way == "budget":
            assert leangrad.ledger_of(model).is_settled
        torch.manual_seed(1)
        losses = [step.replay(torch.randn(4096, 512, device="cuda")) for _ in range(REPLAYS)]
        runs.append([one.detach().cpu() for one in (*losses, *model.parameters())])  # a budget counts all on the device
        del step, model, losses
    for plain, ours in zip(*runs, strict=True):
        assert_same_bits(ours, plain)


def test_the_pool_of_a_captured_lean_step_is_smaller() -> None:
    """What the graph's own pool takes: for lean no more than for plain, and near the peak of the step."""
    pools, peaks = [], []
    for lean in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(512) for _ in range(6))).cuda()
        torch.cuda.empty_cache()
        step = Captured(leangrad.lean(model) if lean else model, (4096, 512))
        pools.append(sum(s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0)))
        step.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step._step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del step
    print("pools", pools, "peaks", peaks)
    assert peaks[1] < 0.8 * peaks[0]
    assert pools[1] < 0.9 * pools[0]


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh", "backend_name")
def test_compiled_with_cuda_graphs() -> None:
    """The option goes to Inductor; gradients are those of the same cut without CUDA graphs."""
    gradients = []
    for options in ({}, {"triton.cudagraphs": True}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(dropout=0.0) for _ in range(3))).cuda()
        run = torch.compile(model, backend="leangrad", options=options or None)
        for step in range(5):  # the second records, later ones replay
            model.zero_grad(set_to_none=True)
            torch.compiler.cudagraph_mark_step_begin()
            torch.manual_seed(step)
            run(torch.randn(64, 256, device="cuda")).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, replayed in zip(*gradients, strict=True):
        assert same_bits(plain, replayed)


@pytest.mark.usefixtures("_fresh", "backend_name")
def test_the_lines_of_the_page_run() -> None:
    page = (Path(__file__).parent.parent / "docs" / "cuda_graphs.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 2
    x, y = torch.randn(64, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    model = nn.Sequential(Block(), Block()).cuda()
    names: dict[str, Any] = {"torch": torch, "leangrad": leangrad, "model": model, "x": x, "y": y}
    names |= {"criterion": F.mse_loss, "loader": [(torch.randn_like(x), torch.randn_like(y)) for _ in range(3)]}
    before = [p.detach().clone() for p in model.parameters()]
    exec(compile(blocks[0], "cuda_graphs.md", "exec"), names)
    assert not any(same_bits(p, q) for p, q in zip(model.parameters(), before, strict=True))
    names["model"] = nn.Sequential(Block(), Block()).cuda()
    exec(compile(blocks[1], "cuda_graphs.md", "exec"), names)
    names["model"](x).sum().backward()
