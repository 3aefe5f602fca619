"""Time against peak: plain, lean with budgets, the floor, a bound on the time, checkpoint per block.

    OMP_NUM_THREADS=1 python -m benchmarks.budgets --write budgets_cpu                # models of the zoo
    OMP_NUM_THREADS=1 python -m benchmarks.budgets --device cuda --write budgets_h200 # the four models, and timm's

On a CPU a row of the frontier is what `leangrad.frontier` measures, all ways in turns in one process, gradients bit for
bit. On a GPU one way after another has the device for itself, since a budget is the peak of all that is allocated:
`ms` is the step as training runs it, and with `--kernels` `device_ms` is the time of its kernels; but where a profiler
has run once each launch costs the host more, so that `ms` of all ways but plain is too long then. Budgets: shares of
the room between plain's peak and the floor's, and the checkpoint's own peak. `slowdown` is `lean(model, slowdown=1.1)`,
with the share of the floor's saving that it kept, and `spare` is `lean(model)` as it is, while `lean` has
`spare=0`. Beside them on a GPU: `selective`, a checkpoint per block that keeps products, convolutions and attention,
and `save_on_cpu` with pinned memory. (Compile's own budget is in `benchmarks.compiled`.)
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import leangrad
from benchmarks.environment import RESULTS, write_rows
from leangrad.bench.peers import checkpoint_selectively, save_on_host
from leangrad.errors import BudgetError
from tests.zoo import CASES, Case

ZOO = ("resnet", "convnext", "unet", "gpt", "llama", "bert", "t5", "vit", "mamba", "hf_gpt2")
GPU = ("resnet50", "vit_l", "gpt2_medium", "llama_1b")
WAYS = ("budget", "slowdown", "spare", "selective", "save_on_cpu")
SHARES = (1.0, 0.75, 0.5, 0.25)
SLOWDOWN = 1.1
SPARE = 0.02
# Steps before a way is measured.
SETTLED = {"budget": 34, "slowdown": 150, "spare": 32, "plain": 4, "lean": 6, "checkpoint": 4}
SETTLED |= {"selective": 3, "save_on_cpu": 2}
ROUNDS = 9


def on_cpu(found: Case, points: int) -> Iterator[dict[str, Any]]:
    """The frontier of one model of the zoo, and what a bound on the time gives."""
    torch.manual_seed(0)
    batch, model = found.batch(), found.make().train()
    frontier = leangrad.frontier(model, batch, found.loss, points=points)
    if found.name == PICTURED:
        frontier.save(RESULTS / "frontier_cpu.svg")
    for point in frontier.points:
        yield {"case": found.name, **{k: v for k, v in vars(point).items() if v not in (None, "")}}
    yield {"case": found.name, "way": "slowdown"} | _slowdown_on_cpu(found, model, batch)


PICTURED = "gpt"


def _slowdown_on_cpu(found: Case, model: nn.Module, batch: tuple[Any, ...]) -> dict[str, Any]:
    models = {
        "plain": copy.deepcopy(model),
        "lean": leangrad.lean(copy.deepcopy(model)),
        "slowdown": leangrad.lean(copy.deepcopy(model), slowdown=SLOWDOWN),
    }

    def step(way: str) -> None:
        models[way].zero_grad()
        found.step(models[way], batch).backward()

    for way in models:
        for _ in range(SETTLED[way]):
            step(way)
    times: dict[str, list[float]] = {way: [] for way in models}
    for _ in range(ROUNDS):
        for way, taken in times.items():
            began = time.perf_counter()
            step(way)
            taken.append(time.perf_counter() - began)
    ratios = {way: statistics.median(a / b for a, b in zip(times[way], times["plain"], strict=True)) for way in models}
    peaks = {way: leangrad.measure(partial(step, way), timed_runs=0).peak_bytes for way in models}
    saved = (peaks["plain"] - peaks["slowdown"]) / max(1, peaks["plain"] - peaks["lean"])
    return {
        "ratio": ratios["slowdown"],
        "lean_ratio": ratios["lean"],
        "peak_bytes": peaks["slowdown"],
        "share_of_the_saving": saved,
    }


# ------------------------------------------------------------------------------------------------------------- on a GPU


def on_gpu(name: str, shares: tuple[float, ...], ways: list[str], *, of_kernels: bool) -> Iterator[dict[str, Any]]:
    """All ways of one model, one after another."""
    from benchmarks import models
    from benchmarks.compiled import _checkpointed, _table, _timm

    tables = {case.name: _table(case) for case in models.CASES}
    setup = tables.get(name) or _timm(name, 128)

    def measure(way: str, make_ready: Callable[[nn.Module], nn.Module], **said: Any) -> dict[str, Any]:
        row: dict[str, Any] = {"case": name, "way": way, **said}
        try:
            return row | _on_gpu(setup, make_ready, SETTLED[way], of_kernels=of_kernels)
        except (BudgetError, RuntimeError, AssertionError) as error:  # AssertionError: timm has no checkpoint
            return row | {"error": str(error).splitlines()[0]}
        finally:
            gc.collect()
            gc.freeze()  # else what this way leaves in caches makes every collection of the next one longer
            torch.cuda.empty_cache()

    plain, floor = measure("plain", lambda model: model), measure("lean", partial(leangrad.lean, spare=0))
    checkpointed = measure("checkpoint", _checkpointed)
    yield from (plain, floor, checkpointed)
    if "selective" in ways:
        yield measure("selective", _changed(checkpoint_selectively))
    if "save_on_cpu" in ways:
        yield measure("save_on_cpu", _changed(save_on_host))
    if "spare" in ways:
        yield measure("spare", partial(leangrad.lean, spare=SPARE))
    if "budget" in ways:
        budgets = {f"{share:g}": int(floor["peak"] + share * (plain["peak"] - floor["peak"])) for share in shares}
        if "peak" in checkpointed:
            budgets["checkpoint's peak"] = checkpointed["peak"]
        for share, budget in budgets.items():
            yield measure("budget", partial(leangrad.lean, budget=budget), at=share, budget=budget)
    if "slowdown" not in ways:
        return
    slow = measure("slowdown", lambda model: leangrad.lean(model, slowdown=SLOWDOWN))
    if "peak" in slow:
        slow["share_of_the_saving"] = (plain["peak"] - slow["peak"]) / max(1, plain["peak"] - floor["peak"])
    yield slow


def _changed(change: Callable[[nn.Module], object]) -> Callable[[nn.Module], nn.Module]:
    """A change in place as a function that returns the model."""

    def make_ready(model: nn.Module) -> nn.Module:
        change(model)
        return model

    return make_ready


def _on_gpu(
    setup: Any, make_ready: Callable[[nn.Module], nn.Module], steps: int, *, of_kernels: bool
) -> dict[str, Any]:
    from benchmarks.models import _in_a_row, _step_of, kernels

    torch.manual_seed(0)
    model, loss = setup()
    ready = make_ready(model)

    def forward() -> Tensor:
        return loss(ready)  # type: ignore[no-any-return]

    step = _step_of(forward, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    highest = torch.cuda.max_memory_allocated()  # of all steps so far, those on the way to a plan too
    turns = [_in_a_row(step)["ms_in_a_row"] for _ in range(2 if steps > 2 else 1)]
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    ledger = leangrad.ledger_of(ready) if leangrad.is_lean(ready) else None
    return {
        "peak": peak,
        "highest": highest,
        "ms": min(turns),
        **({"device_ms": min(kernels(step) for _ in range(2))} if of_kernels else {}),
        "status": "" if ledger is None else ledger.goal_status,
    }


def main() -> None:
    """Measure models and print a row for each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=main.__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", nargs="+", metavar="NAME")
    parser.add_argument("--points", type=int, default=6, help="budgets on a CPU")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES, help="budgets on a GPU")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="on a GPU, beside the usual ones")
    parser.add_argument("--kernels", action="store_true", help="on a GPU, the time of the kernels too: see above")
    parser.add_argument("--write", metavar="NAME", help="write the rows to benchmarks/results")
    chosen = parser.parse_args()
    zoo = {case.name: case for case in CASES}
    rows: list[dict[str, Any]] = []
    for name in chosen.case or (GPU if chosen.device == "cuda" else ZOO):
        if chosen.device == "cuda":
            found = on_gpu(name, tuple(chosen.shares), chosen.ways, of_kernels=chosen.kernels)
        else:
            found = on_cpu(zoo[name], chosen.points)
        for row in found:
            if "peak" in row and rows and rows[-1]["case"] == name:
                plain = next(one for one in rows if one["case"] == name)
                row["ratio"] = row["ms"] / plain["ms"]
                if chosen.kernels:
                    row["device_ratio"] = row["device_ms"] / plain["device_ms"]
            rows.append(row)
            print(json.dumps(row), flush=True)
            if chosen.write:
                write_rows(chosen.write, chosen.device, rows)


if __name__ == "__main__":
    main()
