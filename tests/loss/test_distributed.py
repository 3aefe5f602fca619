"""Two real processes over gloo: a model with lazy logits inside DDP and FSDP2 trains like the plain one inside it."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from leangrad.lean import lean, ledger_of
from leangrad.loss import linear_cross_entropy
from tests.support.ranks import start_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

WORLD, WORDS, WIDTH = 2, 600, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids)))


class LossInside(Net):
    """The loss without logits, where FSDP2 has the weight."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.table(ids))
        return linear_cross_entropy(hidden, self.head.weight, ids, linear_bias=self.head.bias)


def wrapped(kind: str, net: Net) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "ddp, static":
        return DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    if kind == "fsdp2, head apart":
        net.head.weight = nn.Parameter(net.table.weight.detach().clone())
        fully_shard(net.head, reshard_after_forward=True)
    return fully_shard(net)


def local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def train(model: nn.Module, rank: int) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    seen = []
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        ids = torch.randint(WORDS, (4, 12))
        found = model(ids)
        loss = found if found.dim() == 0 else F.cross_entropy(found.view(-1, WORDS), ids.view(-1))
        loss.backward()
        seen += [loss.detach().clone(), *(local(p.grad).clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_near(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f"{what}, {n}")


def work(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    try:
        for kind in ("ddp", "ddp, static", "fsdp2", "fsdp2, head apart"):
            expected = train(wrapped(kind, Net()), rank)
            net = lean(Net(), exact=False, min_bytes=0)
            found = train(wrapped(kind, net), rank)
            assert_near(found, expected, kind)
            said = "its weight is freed after the call" if "fsdp2" in kind else "are not kept"
            assert said in ledger_of(net).summary(), kind
            if kind == "fsdp2":
                assert_near(train(wrapped(kind, lean(LossInside(), min_bytes=0)), rank), expected, "loss inside")
    finally:
        dist.destroy_process_group()


def test_two_processes_train_like_plain(tmp_path: Path) -> None:
    start_ranks(work, (str(tmp_path / "store"),), WORLD)
