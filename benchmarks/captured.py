"""Training steps captured in CUDA graphs: plain, a checkpoint per block, lean, and lean with the checkpoint's peak.

    OMP_NUM_THREADS=1 python -m benchmarks.captured --write captured_h200

Where the host is the limit, a step of an eager lean model takes longer than its kernels. A CUDA graph of the whole step
(docs/cuda_graphs.md) takes the host away. A row is one way for one model:

ms             time of a step as eager training runs it, in milliseconds
captured_ms    time of a replay of the captured step (forward, backward, AdamW)
peak_gib       peak of all allocated memory in an eager step
pool_gib       what the graph's own memory pool reserves
standing_gib   what is allocated between steps: parameters, the optimizer's state and the batch

The budget is the checkpoint's own peak. A way that fails has an `error`.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import leangrad
from benchmarks.environment import write_rows

CASES = ("resnet50", "vit_l", "gpt2_medium", "llama_1b")
MOST_STEPS = 60
GIB = 2**30


def measure(name: str, way: str, budget: int | None) -> dict[str, Any]:
    """Train one model in one way until its steps are alike, time them, then capture one and time its replays."""
    from benchmarks import models
    from benchmarks.compiled.backends import _checkpointed, _table, _timm
    from benchmarks.models import _in_a_row, _step_of

    setup = {case.name: _table(case) for case in models.CASES}.get(name) or _timm(name, 128)
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain": lambda model: model,
        "checkpoint": _checkpointed,
        "lean": leangrad.lean,
        "budget": lambda model: leangrad.lean(model, budget=budget),
    }
    torch.manual_seed(0)
    model, loss = setup()
    ready = makers[way](model)

    def forward() -> Tensor:
        return loss(ready)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
    step = _step_of(forward, optimizer)
    row: dict[str, Any] = {"case": name, "way": way}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for n in range(MOST_STEPS):
            step()
            if n >= 4 and (not leangrad.is_lean(ready) or leangrad.ledger_of(ready).is_settled):
                break
        torch.cuda.synchronize()
        row["steps"] = n + 1
        optimizer.zero_grad(set_to_none=True)
        row["standing_gib"] = torch.cuda.memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["ms"] = _in_a_row(step)["ms_in_a_row"]
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if leangrad.is_lean(ready):
        row["status"] = leangrad.ledger_of(ready).goal_status
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    pool = [one["total_size"] for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]
    row["pool_gib"] = sum(pool) / GIB
    row["captured_ms"] = _in_a_row(graph.replay)["ms_in_a_row"]
    return row


def main() -> None:
    """Measure all ways on all models, and print a row for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.captured", description=main.__doc__)
    parser.add_argument("--case", nargs="+", metavar="NAME", default=CASES)
    parser.add_argument("--write", default="", metavar="NAME", help="write the rows to benchmarks/results")
    chosen = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    for name in chosen.case:
        budget: int | None = None
        for way in ("plain", "checkpoint", "lean", "budget"):
            try:
                row = measure(name, way, budget)
            except (RuntimeError, ValueError) as error:
                row = {"case": name, "way": way, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            if way == "checkpoint" and "peak_gib" in row:
                budget = int(row["peak_gib"] * GIB)
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # one for each stream that was ever used: the next way has its own
            torch.cuda.empty_cache()
            rows.append(row)
            print(json.dumps(row), flush=True)
            if chosen.write:
                write_rows(chosen.write, "cuda", rows)


if __name__ == "__main__":
    main()
