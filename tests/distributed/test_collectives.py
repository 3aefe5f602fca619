"""Collectives that write into an activation inside of a lean model: no recipe reaches back beyond them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.lean import lean, ledger_of
from tests.support import same_bits
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


def gathered(h: Tensor) -> None:
    parts = [torch.empty_like(h) for _ in range(2)]
    dist.all_gather(parts, h.detach())
    with torch.no_grad():
        h.copy_(parts[1 - dist.get_rank()])


def sent(h: Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(h.detach(), 1)
    else:
        dist.recv(h, 0)


def without_gradients(h: Tensor) -> None:
    with torch.no_grad():
        dist.all_reduce(h)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda h: None,
    "a count of its own": lambda h: dist.all_reduce((h.detach() > 0).sum()),
    "all_reduce": dist.all_reduce,
    "all_reduce under no_grad": without_gradients,
    "all_reduce of an alias": lambda h: dist.all_reduce(h.detach()),
    "all_reduce of a slice": lambda h: dist.all_reduce(h.detach()[:4]),
    "all_reduce that is waited for": lambda h: dist.all_reduce(h, async_op=True).wait(),
    "coalesced": lambda h: dist.all_reduce_coalesced([h.detach()]),
    "broadcast": lambda h: dist.broadcast(h, 0),
    "recv": sent,
    "all_gather": gathered,
    "all_gather into itself": lambda h: dist.all_gather_into_tensor(h.detach(), torch.ones_like(h[:4])),
    "reduce_scatter": lambda h: dist.reduce_scatter_tensor(h.detach()[:4], torch.ones_like(h)),
    "all_to_all": lambda h: dist.all_to_all_single(h.detach(), torch.full_like(h, dist.get_rank())),
}


class Moving(nn.Module):
    """A large buffer that a recipe would read, and that a collective changes before the recipe is made."""

    def __init__(self, _: object = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(16, 4096), nn.Linear(4096, 16)
        self.register_buffer("mean", torch.rand(8, 4096))  # 128 KiB

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x)) + self.mean
        dist.all_reduce(self.mean)
        out: Tensor = self.last(h.sin())
        return out


class Net(nn.Module):
    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last, self.write = nn.Linear(16, 16), nn.Linear(16, 16), write

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        before = h * 2  # which saves nothing of it: what was saved before, plain would read as it is afterwards
        self.write(h)
        return self.last(h.sin() + before)


def train(model: nn.Module, rank: int) -> list[Tensor]:
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def work(rank: int) -> None:
    warnings.filterwarnings("ignore", message="c10d::.*an autograd kernel was not registered")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of all_reduce_coalesced
    methods = dict(vars(dist.ProcessGroup))
    rebuilt = {}
    for name, write in WRITES.items():
        expected, net = train(Net(write), rank), lean(Net(write), min_bytes=0)
        found: Any = train(net, rank)
        assert len(found) == len(expected) == 4
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True)), name
        rebuilt[name] = ledger_of(net).totals().rebuilt_bytes
    expected, found = train(Moving(), rank), train(lean(Moving(), min_bytes=0), rank)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True)), "buffer"
    unwritten = {"nothing", "a count of its own"} | ({"recv"} if rank == 0 else set())
    assert all((nbytes > 0) == (name in unwritten) for name, nbytes in rebuilt.items()), rebuilt
    assert dict(vars(dist.ProcessGroup)) == methods


def test_two_processes(tmp_path: Path) -> None:
    run_ranks(work, 2, tmp_path, copies=True)
