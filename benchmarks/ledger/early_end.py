"""Host time saved where steps have no function mode, on timm's models with images so small that it dominates.

    OMP_NUM_THREADS=1 python -m benchmarks.ledger.early_end --write early_end_cpu

There is one row for each model and goal: a budget halfway between the plain peak and that of `lean`, `slowdown=1.1`,
and `lean` alone.

- `ratio`: the CPU time of a step over that of a plain step.
- `mode_ratio`: the same for the same plan, with the function mode on until it ends early.
- `watched_ratio`: the same for the same plan, but with the function mode on to the end of forward, and with a `Value`
  for each small tensor that a recipe of the floor would read.
- `forward_ratio`, `forward_mode_ratio`, `forward_watched_ratio`: the same for forward alone.
- `spread_ratio`, `spread_peak`: with a budget, time and peak of a plan that is chosen without regard to where the
  function mode ends: no plan is tried that keeps all of the last layers.
- `calls`: the torch calls of the recorded forward (including those of `leangrad.measure`, if that runs the forward).
- `watched_calls`: how many of them the function mode sees.

All ways are timed in alternation in one process; a ratio is the median over the rounds. The clock, also that of the
tuner, is `time.thread_time`, so other processes do not count.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import leangrad
from benchmarks.environment import write_rows
from leangrad.ledger import Ledger
from leangrad.ledger.learn.timing import Stopwatch
from leangrad.ledger.learn.trace import Trace
from leangrad.ledger.tune import budget_search
from tests.support import same_bits

MODELS = (
    "resnet50", "efficientnet_b0", "mobilenetv3_large_100", "regnety_016", "swin_tiny_patch4_window7_224",
    "densenet121", "nf_resnet50",
)  # fmt: skip
SIZE, BATCH, MIN_BYTES = 32, 2, 1024
SETTLED = {"budget": 40, "slowdown": 1200, "spare": 4}  # most steps until the plan is final
AT_LEAST = 12
MEASURED = 10  # steps whose peaks correct the plan for a budget
ROUNDS = 15


def step(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Run a step; return its CPU time and that of its forward."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(0)
    began = time.thread_time()
    loss = model(x).square().mean()
    forward = time.thread_time() - began
    loss.backward()
    return time.thread_time() - began, forward


def peak(model: nn.Module, x: Tensor) -> int:
    """Return the peak of a step in bytes, above what was allocated before it."""
    return leangrad.measure(lambda: step(model, x), timed_runs=0).peak_bytes


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model."""
    import timm

    torch.manual_seed(0)
    size = {"swin": {"img_size": 2 * SIZE, "window_size": 4}, "vit": {"img_size": 2 * SIZE}}.get(name.split("_")[0], {})
    model: nn.Module = timm.create_model(name, num_classes=10, **size).train()
    x = torch.randn(BATCH, 3, *[size.get("img_size", SIZE)] * 2)
    plain = copy.deepcopy(model)
    floor = leangrad.lean(copy.deepcopy(model), min_bytes=MIN_BYTES)
    for _ in range(4):
        step(plain, x)
        step(floor, x)
    most, least = peak(plain, x), peak(floor, x)
    for goal, value in (("budget", (most + least) // 2), ("slowdown", 1.1), ("spare", 0.0)):
        lean = _settled(model, x, goal, value)
        row = {"case": name, "goal": goal, "at": value, **_compare(plain, lean, x)}
        row |= {"plain_peak": most, "floor_peak": least, "peak": peak(lean, x)}
        if goal == "budget":
            with patch.object(budget_search, "FEWER_CALLS", 0.0):
                spread = _settled(model, x, goal, value)
            row |= {"spread_ratio": _compare(plain, spread, x)["ratio"], "spread_peak": peak(spread, x)}
        yield row


def _settled(model: nn.Module, x: Tensor, goal: str, value: float) -> nn.Module:
    """Return a lean copy of the model with this goal, trained until its plan is final."""
    lean = leangrad.lean(copy.deepcopy(model), min_bytes=MIN_BYTES, **{goal: value})  # type: ignore[arg-type]
    if goal == "budget":  # on a CPU a peak is known only where it is measured
        for _ in range(MEASURED):
            peak(lean, x)
    for n in range(SETTLED[goal]):
        if n >= AT_LEAST and goal == "slowdown" and leangrad.ledger_of(lean).is_settled:
            break
        step(lean, x)
    return lean


def _compare(plain: nn.Module, lean: nn.Module, x: Tensor) -> dict[str, Any]:
    ledger = leangrad.ledger_of(lean)
    ways: dict[str, Callable[[], Any]] = {"": lambda: None}
    row: dict[str, Any] = {}
    if ledger.trace is not None and not ledger._is_plain:
        assert ledger.learned is not None
        now, before = (ledger.trace, ledger.learned.saved_kinds), _watched(ledger)
        mode = ledger.trace._replace(handover=None), now[1]
        ways = {"": partial(_use, ledger, *now), "mode_": partial(_use, ledger, *mode)}
        ways["watched_"] = partial(_use, ledger, *before)
        row = _calls(ledger, ledger.trace)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    plains = []
    for _ in range(ROUNDS):
        plains.append(step(plain, x))
        for way, make_ready in ways.items():
            make_ready()
            times[way].append(step(lean, x))
            pairs = zip(plain.parameters(), lean.parameters(), strict=True)
            row["same_bits"] = row.get("same_bits", True) and all(same_bits(a.grad, b.grad) for a, b in pairs)
    ways[""]()
    row["is_plain"] = ledger._is_plain
    for way, taken in times.items():
        for n, part in enumerate(("", "forward_")):
            ratio = statistics.median(a[n] / b[n] for a, b in zip(taken, plains, strict=True))
            row[f"{part}{way}ratio"] = round(ratio, 3)
    return row


def _calls(ledger: Ledger, trace: Trace) -> dict[str, int]:
    recorder = ledger.last_recorder
    assert recorder is not None
    assert recorder.step is not None
    ends, calls = recorder.step.ends, len(recorder.step.calls)
    seen = calls
    if ends is not None and trace.border is not None:
        exits = [found.calls for found in ends.exits if found.module == trace.border.module]
        seen = exits[trace.border.turn]
    if trace.handover is not None:
        seen -= trace.handover.calls[1] - trace.handover.calls[0]
    return {"calls": calls, "watched_calls": seen}


def _watched(ledger: Ledger) -> tuple[Trace | None, Any]:
    """Return trace and saved kinds of the ledger's plan for steps in which the function mode does not end early."""
    recorder = ledger.last_recorder
    assert recorder is not None
    assert recorder.step is not None
    saved = [tensor._replace(read_by=None) for tensor in recorder.step.saved]
    step = replace(recorder.step, saved=saved, ends=None, needs=None)
    return step.trace(ledger._kept_items, is_tuned=ledger.goal is not None), step.saved_kinds(ledger._kept_items)


def _use(ledger: Ledger, trace: Trace | None, saved_kinds: Any) -> None:
    assert ledger.learned is not None
    ledger.learned = ledger.learned._replace(trace=trace, saved_kinds=saved_kinds)


def main() -> None:
    """Measure models and print a row for each goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger.early_end", description=main.__doc__)
    parser.add_argument("--case", nargs="+", metavar="NAME", default=MODELS)
    parser.add_argument("--write", metavar="NAME", help="write the rows to benchmarks/results")
    chosen = parser.parse_args()
    Stopwatch.now = lambda self: time.thread_time()  # type: ignore[method-assign]
    rows = []
    for name in chosen.case:
        for row in measure(name):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if chosen.write:
                write_rows(chosen.write, "cpu", rows)


if __name__ == "__main__":
    main()
