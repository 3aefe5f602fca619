"""`leangrad.nn.MLP` against the `nn.Sequential` it equals: time, peak, kept bytes, allocations in backward.

    python -m benchmarks.nn.mlp [--device cuda] [--write mlp_cpu]

One process runs both. Steps are timed in alternation, plain first in one round and lean first in the next, and the time
ratio is the median over the rounds. On CUDA the time of a step is the wall time from an idle device to an idle device,
and a row also has the time of the kernels alone and the number of launches, because either may limit a step. All cases
are timed before the first is profiled: once a profiler was on, each launch of the process takes longer. On one thread
of a CPU (`OMP_NUM_THREADS=1`) CPU time is measured, which other programs on the machine disturb less. Peaks include
gradients and scratch, but not the parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.environment import write_rows
from leangrad.engine.grad_buffer import release_scratch
from leangrad.measure import measure
from leangrad.nn import MLP

MODULES = {"relu": nn.ReLU, "gelu": nn.GELU}


@dataclass(frozen=True)
class Case:
    name: str
    layers: int
    width: int
    batch: int
    activation: str
    dtype: str = "float32"


CASES = {
    "cpu": [Case(f"wide-{act}", 8, 1024, 4096, act) for act in ("gelu", "relu")],
    "cuda": [
        *(Case(f"wide-{act}", 8, 1024, 4096, act, "bfloat16") for act in ("gelu", "relu")),
        *(Case(f"narrow-{act}", 64, 64, 256, act, "bfloat16") for act in ("gelu", "relu")),
        *(Case(f"large-{act}", 8, 4096, 8192, act, "bfloat16") for act in ("gelu", "relu")),
    ],
}


def build(case: Case, device: str) -> tuple[nn.Module, nn.Module]:
    """Return the plain and the lean model, with equal parameters."""
    torch.manual_seed(0)
    sizes, dtype = [case.width] * (case.layers + 1), getattr(torch, case.dtype)
    lean = MLP(sizes, case.activation, device=device, dtype=dtype)
    children: list[nn.Module] = []
    for i in range(case.layers):
        children.append(nn.Linear(case.width, case.width, device=device, dtype=dtype))
        if i < case.layers - 1:
            children.append(MODULES[case.activation]())
    plain = nn.Sequential(*children)
    plain.load_state_dict(lean.state_dict())
    return plain, lean


def train_step(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        F.mse_loss(model(x), target).backward()

    return step


def clock_of(device: str) -> str:
    return "process" if device == "cpu" and torch.get_num_threads() == 1 else "wall"


def seconds_of(step: Callable[[], None], device: str) -> float:
    read = time.process_time if clock_of(device) == "process" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    start = read()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return read() - start


def time_in_turns(steps: dict[str, Callable[[], None]], device: str, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name in sorted(steps, reverse=bool(i % 2)):
            times[name].append(seconds_of(steps[name], device))
    return times


def kernels_of(step: Callable[[], None], runs: int = 5) -> tuple[float, float]:
    """Return the milliseconds in kernels and the number of launches of one step on CUDA, after a warm-up."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(20):  # warm-up: a device that was idle runs faster than one that works
        step()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(runs):
            step()
        torch.cuda.synchronize()
    events = profile.key_averages()
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    launches = sum(event.count for event in events if "LaunchKernel" in event.key or "MemsetAsync" in event.key)
    return sum(event.self_device_time_total for event in on_device) / runs / 1e3, launches / runs


def peak_and_kept_bytes(model: nn.Module, step: Callable[[], None]) -> tuple[int, int]:
    """Return peak and kept bytes of a step without the parameters; gradients and scratch are freed before it."""
    model.zero_grad()
    release_scratch()
    found = measure(step, timed_runs=0)
    return found.peak_bytes, found.kept_bytes


def backward_allocations(model: nn.Module, x: Tensor) -> int:
    """Return how many blocks at least as large as an activation map the model's backward allocates, after warm-up."""
    grad = torch.randn_like(x)

    def step() -> None:
        model.zero_grad()
        model(x).backward(grad)

    timeline = measure(step, timed_runs=2).timeline
    map_bytes = x.numel() * x.element_size()
    return sum(event.phase == "backward" and event.bytes >= map_bytes for event in timeline)


def largest_difference(plain: nn.Module, lean: nn.Module) -> float:
    """Return the largest difference of any gradient, relative to the largest entry of the plain gradient."""
    pairs = zip(plain.parameters(), lean.parameters(), strict=True)
    ratios = [
        (p.grad - q.grad).abs().max() / p.grad.abs().max()
        for p, q in pairs
        if p.grad is not None and q.grad is not None
    ]
    return max(float(ratio) for ratio in ratios)


def build_steps(case: Case, device: str) -> tuple[dict[str, nn.Module], dict[str, Callable[[], None]], Tensor]:
    """Return the models by name, a training step of each, and their input."""
    plain, lean = build(case, device)
    x = torch.randn(case.batch, case.width, device=device, dtype=getattr(torch, case.dtype))
    target = torch.randn_like(x)
    models = {"plain": plain, "lean": lean}
    return models, {name: train_step(model, x, target) for name, model in models.items()}, x


def time_cases(cases: list[Case], device: str, rounds: int, visits: int = 3) -> list[dict[str, Any]]:
    """Return a row for each case; cases are visited several times, so that a slow minute of the machine affects all."""
    built = [build_steps(case, device) for case in cases]
    rows: list[dict[str, Any]] = [{**asdict(case), "rounds": rounds, "clock": clock_of(device)} for case in cases]
    times: list[dict[str, list[float]]] = [{name: [] for name in steps} for _, steps, _ in built]
    for visit in range(visits):
        for (models, steps, _), row, found in zip(built, rows, times, strict=True):
            time_in_turns(steps, device, 20 if device == "cuda" else 1)
            row["largest_gradient_difference"] = largest_difference(models["plain"], models["lean"])
            share = rounds * (visit + 1) // visits - rounds * visit // visits
            for name, seconds in time_in_turns(steps, device, share).items():
                found[name] += seconds
            for model in models.values():
                model.zero_grad()
    for row, found in zip(rows, times, strict=True):
        row["time_ratio"] = statistics.median(b / a for a, b in zip(found["plain"], found["lean"], strict=True))
        row |= {f"{name}_ms": statistics.median(seconds) * 1e3 for name, seconds in found.items()}
    return rows


def profile_case(case: Case, device: str) -> dict[str, Any]:
    models, steps, x = build_steps(case, device)
    row: dict[str, Any] = {}
    for name, model in models.items():
        steps[name]()
        if device == "cuda":
            row[f"{name}_kernel_ms"], row[f"{name}_launches"] = kernels_of(steps[name])
        row[f"{name}_peak_bytes"], row[f"{name}_kept_bytes"] = peak_and_kept_bytes(model, steps[name])
        row[f"{name}_backward_allocations"] = backward_allocations(model, x)
    row["peak_ratio"] = row["lean_peak_bytes"] / row["plain_peak_bytes"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--rounds", type=int, help="timed steps of each; default 15 on the CPU, 300 on CUDA")
    parser.add_argument("--case", help="run the one case of this name")
    parser.add_argument("--write", help="the name of a file for the rows, in benchmarks/results")
    options = parser.parse_args()
    rounds = options.rounds or (300 if options.device == "cuda" else 15)
    cases = [case for case in CASES[options.device] if options.case in (None, case.name)]
    rows = time_cases(cases, options.device, rounds)
    for case, row in zip(cases, rows, strict=True):
        row |= profile_case(case, options.device)
        print(json.dumps(row))
    if options.write:
        write_rows(options.write, options.device, rows)


if __name__ == "__main__":
    main()
