"""`leangrad.nn.MLP` against the `nn.Sequential` it equals: time, peak, kept bytes, allocations in backward.

    python -m benchmarks.mlp                  # on the CPU
    python -m benchmarks.mlp --device cuda    # the H200 cases, in bfloat16

One process serves both: the steps are timed in turns, plain then lean, and the time ratio is the median of the ratios
of neighbours. Peaks are above the parameters, gradients and scratch included. Each case appends one row to
`benchmarks/results/mlp.jsonl` (`--out` names another file).
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.lease import release_scratch
from leangrad.measure import measure
from leangrad.nn import MLP

RESULTS = Path(__file__).parent / "results" / "mlp.jsonl"
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
    ],
}


def build(case: Case, device: str) -> tuple[nn.Module, nn.Module]:
    """The plain and the lean model, with the same parameters."""
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


def seconds_of(step: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_and_kept_bytes(model: nn.Module, step: Callable[[], None]) -> tuple[int, int]:
    """Above the parameters: no gradient and no scratch stands when the step begins."""
    model.zero_grad()
    release_scratch()
    found = measure(step, timed_runs=0)
    return found.peak_bytes, found.kept_bytes


def backward_allocations(model: nn.Module, x: Tensor) -> int:
    """Allocations of at least one activation map in the model's own backward, after warm-up."""
    grad = torch.randn_like(x)

    def step() -> None:
        model.zero_grad()
        model(x).backward(grad)

    timeline = measure(step, timed_runs=2).timeline
    map_bytes = x.numel() * x.element_size()
    return sum(event.phase == "backward" and event.bytes >= map_bytes for event in timeline)


def largest_difference(plain: nn.Module, lean: nn.Module) -> float:
    """Of any gradient, relative to the largest entry of plain's."""
    pairs = zip(plain.parameters(), lean.parameters(), strict=True)
    ratios = [
        (p.grad - q.grad).abs().max() / p.grad.abs().max()
        for p, q in pairs
        if p.grad is not None and q.grad is not None
    ]
    return max(float(ratio) for ratio in ratios)


def run(case: Case, device: str, repeats: int) -> dict[str, Any]:
    plain, lean = build(case, device)
    x = torch.randn(case.batch, case.width, device=device, dtype=getattr(torch, case.dtype))
    target = torch.randn_like(x)
    steps = {"plain": train_step(plain, x, target), "lean": train_step(lean, x, target)}
    for _ in range(3):
        for step in steps.values():
            seconds_of(step, device)
    difference = largest_difference(plain, lean)
    times: dict[str, list[float]] = {"plain": [], "lean": []}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(seconds_of(step, device))
    ratios = [lean_s / plain_s for plain_s, lean_s in zip(times["plain"], times["lean"], strict=True)]
    plain_peak, plain_kept = peak_and_kept_bytes(plain, steps["plain"])
    lean_peak, lean_kept = peak_and_kept_bytes(lean, steps["lean"])
    return {
        "benchmark": "mlp",
        **asdict(case),
        "repeats": repeats,
        "plain_ms": statistics.median(times["plain"]) * 1e3,
        "lean_ms": statistics.median(times["lean"]) * 1e3,
        "time_ratio": statistics.median(ratios),
        "plain_peak_bytes": plain_peak,
        "lean_peak_bytes": lean_peak,
        "peak_ratio": lean_peak / plain_peak,
        "plain_kept_bytes": plain_kept,
        "lean_kept_bytes": lean_kept,
        "lean_backward_allocations": backward_allocations(lean, x),
        "plain_backward_allocations": backward_allocations(plain, x),
        "largest_gradient_difference": difference,
        **surroundings(device),
    }


def surroundings(device: str) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": device,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--repeats", type=int, help="timed steps of each; default 15 on the CPU, 50 on CUDA")
    parser.add_argument("--case", help="run the one case of this name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    repeats = options.repeats or (50 if options.device == "cuda" else 15)
    print(
        f"{'case':<14}{'plain ms':>10}{'lean ms':>10}{'time':>8}{'plain MB':>10}{'lean MB':>10}{'peak':>8}{'allocs':>8}"
    )
    for case in CASES[options.device]:
        if options.case in (None, case.name):
            row = run(case, options.device, repeats)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{case.name:<14}{row['plain_ms']:>10.2f}{row['lean_ms']:>10.2f}{row['time_ratio']:>8.3f}"
                f"{row['plain_peak_bytes'] / 1e6:>10.1f}{row['lean_peak_bytes'] / 1e6:>10.1f}{row['peak_ratio']:>8.3f}"
                f"{row['lean_backward_allocations']:>8d}"
            )


if __name__ == "__main__":
    main()
