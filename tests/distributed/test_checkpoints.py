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
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from leangrad.lean import lean, ledger_of
from tests.support import same_bits
from tests.support.ranks import Scaled, Transformer, local, loss_of, run_ranks, start_ranks

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
    run_ranks(save_and_load, 2, tmp_path, str(tmp_path), copies=True)


def work_until(rank: int, store: str, folder: str, end: str, is_lean: bool) -> None:
    """Train until the second rank ends: dies, or runs out of memory in forward or backward and then dies."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    model = sharded(is_lean=is_lean)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank, range(3))
    if rank == 1 and end == "death":
        os._exit(0)  # with no word to the other
    if rank == 1:
        run_out_of_memory(model.blocks[1], end)
    try:
        train(model, optimizer, rank, range(3, 6))
    except RuntimeError as error:
        Path(folder, f"error_{rank}").write_text(f"{type(error).__module__} {type(error).__name__}: {error}")
    os._exit(0)


def run_out_of_memory(block: nn.Module, where: str) -> None:
    """Let there be no memory left in the middle of this block."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def fail_in_backward(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(fail)

    block.up.register_forward_hook(fail if where == "forward" else fail_in_backward)


def errors_after(end: str, is_lean: bool, folder: Path) -> dict[int, str]:
    """What the ranks raise, by rank."""
    folder.mkdir()
    start = time.monotonic()
    start_ranks(work_until, (str(folder / "store"), str(folder), end, is_lean), 2)
    found = {rank: path.read_text() for rank in range(2) if (path := folder / f"error_{rank}").exists()}
    assert 0 in found, f"no error after {time.monotonic() - start:.0f} s"
    return found


@pytest.mark.parametrize("end", ["death", "forward", "backward"])
def test_a_rank_that_ends_leaves_the_other_with_torchs_own_error(end: str, tmp_path: Path) -> None:
    """One that dies, and one that runs out of memory in the middle of its forward or its backward."""
    lean_errors = errors_after(end, True, tmp_path / "lean")
    plain_errors = errors_after(end, False, tmp_path / "plain")
    assert any(word in lean_errors[0] for word in ("gloo", "Connection", "Timed out", "timed out")), lean_errors
    assert not any("leangrad" in error for error in lean_errors.values())
    assert lean_errors.keys() == plain_errors.keys()
    for rank, error in plain_errors.items():
        assert lean_errors[rank].split(":")[0] == error.split(":")[0]  # of the same class
    if end != "death":
        assert lean_errors[1] == plain_errors[1]
        assert "OutOfMemoryError: CUDA out of memory" in lean_errors[1]
