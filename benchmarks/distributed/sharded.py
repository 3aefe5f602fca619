"""Bytes that each rank keeps from forward to backward: one device, DDP, variants of FSDP2, tensor parallel.

    python -m benchmarks.distributed.sharded [--write sharded_cpu]

Two real processes over gloo, a transformer of four blocks, 8 x 128 tokens for each rank; plain and lean. A row has the
bytes allocated between forward and backward of a step that follows its plan, as ``leangrad.measure`` counts them on
rank 0, gathered parameters included. ``lean_beyond_gathered_bytes`` excludes those: they are taken to be the bytes that
plain keeps there and does not keep on one device. ``bits`` is whether losses, gradients and weights of the four steps
before were bitwise equal to plain PyTorch on every rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import leangrad
from benchmarks.environment import write_rows
from tests.support import same_bits
from tests.support.ranks import Transformer, local, loss_of, run_ranks

BATCH, STEPS = (8, 128), 4


def net() -> Transformer:
    return Transformer(depth=4, width=128, length=BATCH[1])


def fsdp2(model: Any, parts: Callable[[Any], list[nn.Module]], **options: Any) -> nn.Module:
    """Apply `fully_shard` to the modules that ``parts`` returns, then to the model."""
    for part in parts(model):
        fully_shard(part, **options)
    whole: nn.Module = fully_shard(model, **options)
    return whole


def blocks(model: Any) -> list[nn.Module]:
    return [*model.blocks]


def layers(model: Any) -> list[nn.Module]:
    return [m for m in model.blocks.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]


def checkpointed(model: Any) -> nn.Module:
    model.around = functools.partial(checkpoint, use_reentrant=False)
    return fsdp2(model, blocks)


def tensor_parallel(model: Any) -> nn.Module:
    """Split the heads of attention and the units of each MLP over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    split = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"up": ColwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, {**split, "attention.proj": RowwiseParallel(), "down": RowwiseParallel()})
    return model  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "one device": lambda model: model,
    "DDP": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "FSDP2 per block": lambda model: fsdp2(model, blocks),
    "FSDP2 per layer": lambda model: fsdp2(model, layers),
    "FSDP2 root only": lambda model: fsdp2(model, lambda _: []),
    "FSDP2 per block, not resharded after forward": lambda model: fsdp2(model, blocks, reshard_after_forward=False),
    "FSDP2 per block, parameters on the CPU": lambda model: fsdp2(
        model, blocks, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "FSDP2 per block, each checkpointed": checkpointed,
    "tensor parallel": tensor_parallel,
}


def train(model: nn.Module, rank: int) -> list[Tensor]:
    """Run `STEPS` steps; return the loss and the gradients of each, and the final weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    seen = []
    for step in range(STEPS):
        loss = loss_of(model, 10 * step + rank, BATCH)
        loss.backward()
        seen += [loss.detach().clone(), *(local(p.grad).clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [local(p.detach()).clone() for p in model.parameters()]


def row(way: str, rank: int) -> dict[str, Any]:
    """Return the row of one way; all ranks call this together."""
    runs, kept = [], []
    for make in (net, lambda: leangrad.lean(net())):
        model = WAYS[way](make())
        # Under tensor parallelism every rank needs the same batch, hence the same seed.
        seed = 0 if way == "tensor parallel" else rank
        runs.append(train(model, seed))
        kept.append(leangrad.measure(lambda: loss_of(model, 99, BATCH).backward(), timed_runs=0).kept_bytes)  # noqa: B023
    bits = torch.tensor(all(same_bits(a, b) for a, b in zip(*runs, strict=True)), dtype=torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.MIN)
    return {"way": way, "plain_kept_bytes": kept[0], "lean_kept_bytes": kept[1], "bits": bool(bits)}


def work(rank: int, ways: list[str], found: str) -> None:
    """Run all ways on one rank; rank 0 writes the rows to the file ``found``."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module.*returned a view")
    rows = [row(way, rank) for way in ways]
    for one in rows:
        if one["way"] != "tensor parallel" and "checkpointed" not in one["way"]:
            gathered = one["plain_kept_bytes"] - rows[0]["plain_kept_bytes"]
            one["lean_beyond_gathered_bytes"] = one["lean_kept_bytes"] - gathered
    if rank == 0:
        Path(found).write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        run_ranks(work, arguments.ranks, Path(folder), list(WAYS), str(found))
        rows = json.loads(found.read_text())
    for one in rows:
        beyond = one.get("lean_beyond_gathered_bytes", 0) / rows[0]["lean_kept_bytes"]
        print(
            f"{one['way']:<45} {one['plain_kept_bytes'] / 1e6:6.2f} -> {one['lean_kept_bytes'] / 1e6:6.2f} MB"
            + (f", beyond gathered parameters {beyond:.3f} of one device's" if beyond else "")
            + ("" if one["bits"] else ", NOT EQUAL")
        )
    if arguments.write:
        write_rows(arguments.write, "cpu", [{**one, "ranks": arguments.ranks} for one in rows])


if __name__ == "__main__":
    main()
