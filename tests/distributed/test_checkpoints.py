"""Checkpoints of torch.distributed, and a rank that dies: torch's own errors, and no waiting of ours."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from leangrad.lean import lean, ledger_of
from tests.support import same_bits
from tests.support.ranks import Scaled, Transformer, local, loss_of, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


def sharded(*, is_lean: bool) -> Any:
    net = Transformer(Scaled)
    if is_lean:
        lean(net, min_bytes=0)
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, 10 * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def save_and_load(rank: int, folder: str) -> None:
    """Plain and lean models load what the other has saved, and go on alike; a running one may load too."""
    ends = []
    for saver, loader in ((False, False), (True, False), (False, True), (True, True)):
        first = sharded(is_lean=saver)
        optimizer = torch.optim.AdamW(first.parameters(), lr=0.01)
        train(first, optimizer, rank, range(3))
        model_state, optimizer_state = get_state_dict(first, optimizer)
        assert not any("leangrad" in name for name in model_state)
        path = f"{folder}/{saver}_{loader}"
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        second = sharded(is_lean=loader)
        optimizer = torch.optim.AdamW(second.parameters(), lr=0.01)
        train(second, optimizer, rank, range(10, 13))  # so that its plan stands
        model_state, optimizer_state = get_state_dict(second, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        set_state_dict(second, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        train(second, optimizer, rank, range(3, 6))
        if loader:
            assert ledger_of(second).differences == 0
        ends.append([local(p.detach()).clone() for p in second.parameters()])
    for end in ends[1:]:
        assert all(same_bits(a, b) for a, b in zip(end, ends[0], strict=True))


def test_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(save_and_load, 2, tmp_path, str(tmp_path))


def work_until_death(rank: int, store: str, found: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    model = sharded(is_lean=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank, range(3))
    if rank == 1:
        os._exit(0)  # with no word to the other
    try:
        train(model, optimizer, rank, range(3, 6))
    except RuntimeError as error:
        Path(found).write_text(f"{type(error).__module__} {type(error).__name__}: {error}")
    os._exit(0)


def test_a_rank_that_dies_leaves_the_other_with_torchs_own_error(tmp_path: Path) -> None:
    found = tmp_path / "error"
    start = time.monotonic()
    mp.spawn(work_until_death, (str(tmp_path / "store"), str(found)), nprocs=2)
    assert found.exists(), f"no error after {time.monotonic() - start:.0f} s"
    assert "leangrad" not in found.read_text()
    assert any(word in found.read_text() for word in ("gloo", "Connection", "Timed out", "timed out")), (
        found.read_text()
    )
