"""Llama 1B under FSDP2 and DDP on one rank over NCCL: memory and time of lean with real CUDA streams.

    python -m benchmarks.distributed.one_rank --write one_rank_h200

One process with one GPU, `fully_shard` per block, bfloat16, 4 x 2048 tokens, AdamW. A row is one way: `peak_gib` and
`kept_gib` above the memory allocated before the step, `ms` of a step as training runs it, `device_ms` of its kernels.
`bits` is whether loss, gradients and weights of three steps at a quarter of the batch are bitwise equal to plain
PyTorch; for plain itself, whether a second run gives the same. These steps use the math backend of attention, because
torch's fused attention kernels give other bits in each run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import leangrad
from benchmarks.environment import write_rows
from benchmarks.models import CASES, _in_a_row, _memory, _step_of, kernels
from tests.support import same_bits
from tests.support.checkpointed import checkpoint_blocks
from tests.support.ranks import local

CASE = next(case for case in CASES if case.name == "llama_1b")
STEPS = 3


def fsdp2(model: Any) -> nn.Module:
    for block in model.model.layers:
        fully_shard(block)
    whole: nn.Module = fully_shard(model)
    return whole


def checkpointed(model: nn.Module) -> nn.Module:
    checkpoint_blocks(model, use_reentrant=False)
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


Change = Callable[[Any], nn.Module]
WAYS: dict[str, tuple[Change, Change]] = {
    "FSDP2, plain": (lambda model: model, fsdp2),
    "FSDP2, checkpoint": (checkpointed, fsdp2),
    "FSDP2, lean": (leangrad.lean, fsdp2),
    "FSDP2, lean with checkpoint": (lambda model: checkpointed(leangrad.lean(model)), fsdp2),
    "DDP, plain": (lambda model: model, ddp),
    "DDP, lean": (leangrad.lean, ddp),
}


def make(way: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = CASE.make().train()
    change, wrap = WAYS[way]
    return wrap(change(model))


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    out: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return out


def train(way: str) -> list[Tensor]:
    """Run `STEPS` steps; return the loss and the gradients of each, and the final weights, in host memory."""
    model = make(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(model, CASE.batch(1))
        loss.backward()
        seen += [loss.detach().cpu(), *(local(p.grad).cpu() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return seen + [local(p.detach()).cpu() for p in model.parameters()]


def cost(way: str) -> dict[str, float]:
    """Return memory and time of a step of one way."""
    model = make(way)
    batch = CASE.batch(CASE.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step = _step_of(partial(loss_of, model, batch), optimizer)
    for _ in range(6):
        step()
    memory = _memory(partial(loss_of, model, batch), optimizer)
    ms = min(_in_a_row(step)["ms_in_a_row"] for _ in range(3))
    return {**memory, "ms": ms, "device_ms": min(kernels(step) for _ in range(2))}


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed.one_rank", description=__doc__)
    parser.add_argument("--write", default="", metavar="NAME")
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warnings.simplefilter("ignore")
    torch.cuda.set_device(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for way in WAYS:
            rows.append({"case": CASE.name, "way": way, **cost(way)})
            clean()
            print(json.dumps(rows[-1]), flush=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        for row in rows:
            with sdpa_kernel(SDPBackend.MATH):
                if row["way"].endswith("plain"):
                    expected = train(row["way"])
                    clean()
                found = train(row["way"])
            row["bits"] = all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
            clean()
            print(row["way"], row["bits"], flush=True)
        dist.destroy_process_group()
    if arguments.write:
        write_rows(arguments.write, "cuda", rows)


if __name__ == "__main__":
    main()
