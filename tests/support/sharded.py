"""Models under FSDP2, plain and lean, and whether they train alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from leangrad.lean import lean
from tests.support import same_bits
from tests.support.ranks import local, loss_of


def sharded(net: Any, **options: Any) -> Any:
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net)


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    return sharded(make(), **options), sharded(lean(make(), min_bytes=0), **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.05, foreach=True)  # which moves no version of a DTensor


def train(model: nn.Module, steps: int = 4, *, rank: int = 0, leaves_gradients: bool = False) -> None:
    """Some steps; ``leaves_gradients``: and one more that the optimizer does not make."""
    optimizer = optimizer_of(model)
    for step in range(steps):
        loss_of(model, 10 * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    if leaves_gradients:
        loss_of(model, 99).backward()


def state(model: nn.Module) -> list[Tensor]:
    found = [local(p.detach()).clone() for p in model.parameters()]
    return found + [local(p.grad).clone() for p in model.parameters() if p.grad is not None]


def assert_same_run(run: Callable[[Any], object], *models: Any) -> None:
    expected, *others = ((run(model), state(model)) for model in models)
    for result, values in others:
        assert len(values) == len(expected[1])
        for n, (a, b) in enumerate(zip(values, expected[1], strict=True)):
            assert same_bits(a, b), n
        assert (result is None) == (expected[0] is None)
