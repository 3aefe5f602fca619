"""Time against peak memory: plain, lean with budgets, the floor, a bound on the time, a checkpoint per block.

    OMP_NUM_THREADS=1 python -m benchmarks.budgets --write budgets_cpu                # models of the zoo
    OMP_NUM_THREADS=1 python -m benchmarks.budgets --device cuda --write budgets_h200 # the four models, and timm's

On a CPU the rows are the points of `leangrad.frontier`: all ways are timed in alternation in one process, and gradients
are compared bit for bit. On a GPU one way after another is measured, in alternation with a plain model that stays on
the device: `ms` is the time of a step as training runs it, `ratio` the median over the rounds of its ratio to plain.
`peak` does not include the memory of the plain model; a budget does, because it limits the peak of all allocated
memory. With `--kernels`, `device_ms` is the time of the kernels; once a profiler has run, each kernel launch of the
process takes longer, so `ms` of all later ways is then too high.

The budgets lie at fixed shares of the range between the floor's peak and the plain peak, and at the checkpoint's peak.
`slowdown` is `lean(model, slowdown=1.1)`, with the share of the floor's saving that it still has. `spare` is
`lean(model)` with its default `spare`, while `lean` has `spare=0`. On a GPU there are also `selective`, a checkpoint
per block that keeps matmuls, convolutions and attention, and `save_on_cpu` with pinned memory. (The budget of
`torch.compile` is in `benchmarks.compiled.backends`.)
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
WAYS = ("checkpoint", "budget", "slowdown", "spare", "selective", "save_on_cpu")
SHARES = (1.0, 0.75, 0.5, 0.25)
SLOWDOWN = 1.1
SPARE = 0.02
# How many steps to run at most before a way is measured; with a goal, no more than `AFTER` once the plan is final.
SETTLED = {"budget": 34, "slowdown": 1200, "spare": 32, "plain": 4, "lean": 6, "checkpoint": 4}
SETTLED |= {"selective": 3, "save_on_cpu": 2}
AFTER = 6
ROUNDS = 9
TURNS = 5  # on a GPU, rounds in which plain and another way are timed


def on_cpu(found: Case, points: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model of the zoo: the points of its frontier, and a row for `slowdown`."""
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
        for n in range(SETTLED[way]):
            if n >= AFTER and way == "slowdown" and leangrad.ledger_of(models[way]).is_settled:
                break
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
    """Yield the rows of one model: all ways, one after another."""
    from benchmarks import models
    from benchmarks.compiled.backends import _checkpointed, _table, _timm

    tables = {case.name: _table(case) for case in models.CASES}
    setup = tables.get(name) or _timm(name, 128)

    trained = _Trained(setup, lambda model: model, SETTLED["plain"])
    beside = torch.cuda.memory_allocated()

    def measure(way: str, make_ready: Callable[[nn.Module], nn.Module], **said: Any) -> dict[str, Any]:
        row: dict[str, Any] = {"case": name, "way": way, **said}
        try:
            return row | _in_turns(trained, _Trained(setup, make_ready, SETTLED[way]), beside, of_kernels=of_kernels)
        except (BudgetError, RuntimeError, AssertionError) as error:  # AssertionError: no checkpoint in timm's model
            return row | {"error": str(error).splitlines()[0]}
        finally:
            gc.collect()
            gc.freeze()  # else the objects that this way leaves in caches slow down each collection of the next way
            torch.cuda.empty_cache()

    plain, floor = measure("plain", lambda model: model), measure("lean", partial(leangrad.lean, spare=0))
    yield from (plain, floor)
    checkpointed: dict[str, Any] = {}
    if {"checkpoint", "budget"} & set(ways):
        checkpointed = measure("checkpoint", _checkpointed)
        yield checkpointed
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
            yield measure("budget", partial(leangrad.lean, budget=beside + budget), at=share, budget=budget)
    if "slowdown" not in ways:
        return
    slow = measure("slowdown", lambda model: leangrad.lean(model, slowdown=SLOWDOWN))
    if "peak" in slow:
        slow["share_of_the_saving"] = (plain["peak"] - slow["peak"]) / max(1, plain["peak"] - floor["peak"])
    yield slow


def _changed(change: Callable[[nn.Module], object]) -> Callable[[nn.Module], nn.Module]:
    """Turn a function that changes a model in place into one that also returns the model."""

    def make_ready(model: nn.Module) -> nn.Module:
        change(model)
        return model

    return make_ready


class _Trained:
    """A model that was trained in one way for ``steps`` steps; with a goal for fewer, if its plan is final before.

    - `ready`: the model as the way prepared it.
    - `step`: runs one more training step.
    - `highest`: the peak of allocated bytes over the steps so far, including those before the plan was final.
    """

    def __init__(self, setup: Any, make_ready: Callable[[nn.Module], nn.Module], steps: int) -> None:
        from benchmarks.models import _step_of

        torch.manual_seed(0)
        model, loss = setup()
        self.ready = make_ready(model)

        def forward() -> Tensor:
            return loss(self.ready)  # type: ignore[no-any-return]

        self.step = _step_of(forward, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))
        torch.cuda.reset_peak_memory_stats()
        left = steps
        while left > 0:
            self.step()
            left -= 1
            if left > AFTER and self._is_settled():
                left = AFTER
        torch.cuda.synchronize()
        self.highest = torch.cuda.max_memory_allocated()
        model.zero_grad(set_to_none=True)

    def _is_settled(self) -> bool:
        ledger = leangrad.ledger_of(self.ready) if leangrad.is_lean(self.ready) else None
        return ledger is not None and ledger.goal is not None and ledger.is_settled


def _in_turns(plain: _Trained, other: _Trained, beside: int, *, of_kernels: bool) -> dict[str, Any]:
    """Time ``other`` in alternation with ``plain``, and return its time, its peak and its ratio to plain.

    beside: bytes that the plain model holds on the device; they are subtracted from the peaks.
    of_kernels: also measure the time of the kernels with the profiler.
    """
    from benchmarks.models import _in_a_row, kernels

    torch.cuda.reset_peak_memory_stats()
    other.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - beside
    turns = []
    for _ in range(TURNS):
        turns.append([_in_a_row(one.step)["ms_in_a_row"] for one in (plain, other)])
        plain.ready.zero_grad(set_to_none=True)
    ledger = leangrad.ledger_of(other.ready) if leangrad.is_lean(other.ready) else None
    row = {
        "peak": peak,
        "highest": other.highest - beside,
        "ms": min(ms for _, ms in turns),
        "plain_ms": min(ms for ms, _ in turns),
        "ratio": statistics.median(ms / of_plain for of_plain, ms in turns),
        "status": "" if ledger is None else ledger.goal_status,
    }
    if of_kernels:
        of_plain, taken = (min(kernels(one.step) for _ in range(2)) for one in (plain, other))
        row |= {"device_ms": taken, "device_ratio": taken / of_plain}
    return row


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
            rows.append(row)
            print(json.dumps(row), flush=True)
            if chosen.write:
                write_rows(chosen.write, chosen.device, rows)


if __name__ == "__main__":
    main()
