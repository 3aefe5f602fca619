"""Two real processes over gloo: a lean model inside DDP and FSDP2 trains bit for bit like the plain one inside it."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from leangrad.errors import BudgetError
from leangrad.lean import lean, ledger_of
from tests.support import same_bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

WORLD = 2


class Block(nn.Module):
    """A residual block with its norm first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    """Residual blocks with a shared scale: recipes run from one block into the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 4)
        self.register_buffer("mean", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.scale).tanh()
        for block in self.blocks:
            h = block(h)
        h = (h.sigmoid() - self.mean).sin()
        dist.all_reduce(self.mean)  # which moves no version counter
        self.mean.mul_(0.4)
        return self.head(h)


def wrapped(kind: str, net: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "ddp_view":
        return DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=True)
    return fully_shard(net)


def local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def train(model: nn.Module, rank: int, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(6, 8)).log_softmax(-1)[:, 0].mean()
        loss.backward()
        seen += [loss.detach().clone(), *(local(p.grad).clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [local(p.detach()).clone() for p in model.parameters()]


def work(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    try:
        for kind in ("ddp", "ddp_view", "fsdp2"):
            expected = train(wrapped(kind, Net()), rank)
            net = lean(Net(), min_bytes=0)
            found = train(wrapped(kind, net), rank)
            assert ledger_of(net).totals().rebuilt_bytes > 0, kind
            for n, (a, b) in enumerate(zip(found, expected, strict=True)):
                assert same_bits(a, b), (kind, n)
    finally:
        dist.destroy_process_group()


def work_within_budgets(rank: int, file: str) -> None:
    """Each rank plans by itself: no plan has a collective in it, so that they need not agree."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    try:
        for kind in ("ddp", "fsdp2"):
            expected = train(wrapped(kind, Net()), rank, STEPS)
            with pytest.raises(BudgetError, match="cannot be met"):  # on every rank alike, before a collective
                train(wrapped(kind, lean(Net(), budget=1, min_bytes=0)), rank, STEPS)
            for budget in (7_500, 9_000 + 1_000 * rank, 10**9):  # about the least; some, and on rank 1 more; all
                net = lean(Net(), budget=budget, min_bytes=0)
                found = train(wrapped(kind, net), rank, STEPS)
                assert ledger_of(net).differences == 0, (kind, budget, ledger_of(net).trace_status)
                for n, (a, b) in enumerate(zip(found, expected, strict=True)):
                    assert same_bits(a, b), (kind, budget, n)
    finally:
        dist.destroy_process_group()


STEPS = 14  # until a plan for a budget stands


def test_two_processes_train_like_plain(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path / "store"),), nprocs=WORLD)


def test_two_processes_with_budgets_train_like_plain(tmp_path: Path) -> None:
    mp.spawn(work_within_budgets, (str(tmp_path / "store"),), nprocs=WORLD)
