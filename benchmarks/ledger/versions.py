"""Time and peak of two versions of the library in alternation: what a change costs or saves.

    git worktree add ../before 67f7914
    OMP_NUM_THREADS=1 python -m benchmarks.ledger.versions ../before --write versions_cpu
    python -m benchmarks.ledger.versions ../before --device cuda --write versions_h200

Each version has its own process, which imports leangrad from its tree and all else (models, batches) from this one. The
two processes alternate, a few steps each, so that other load on the machine slows down both. Host time is by
`time.process_time`; wall time includes the wait for the device. Ratios are after / before, the median over the rounds.
A row compares the peaks too. `--null` compares the other version with itself, which shows the noise. A model whose name
begins with `converted_` is changed by `convert_abn` only and is not lean.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time a worker imports torch in its functions, after its paths are set
    from torch import Tensor, nn

HERE = Path(__file__).parents[2]
ZOO = ("gpt", "llama", "resnet", "vit", "unet")
GPU = ("resnet50", "vit_l", "gpt2_medium", "llama_1b")
TIMM = (
    "efficientnet_b0",
    "convnext_tiny",
    "swin_tiny_patch4_window7_224",
    "densenet121",
    "nf_resnet50",
    "gmlp_s16_224",
)
CONVERTED = "converted_"  # prefix of a model's name: changed by `convert_abn` only, not lean
SECONDS = 0.5  # duration of the timed steps of each version in one round; at least one step


def compare(before: Path, after: Path, case: str, device: str, rounds: int) -> dict[str, Any]:
    """Compare the versions in two trees on one model; return the row."""
    workers = [_Worker(before, case, device), _Worker(after, case, device)]
    try:
        steps = max(1, int(SECONDS / max(workers[0].run(1)["wall"], workers[1].run(1)["wall"])))
        turns: list[list[dict[str, float]]] = [[], []]
        for n in range(rounds):
            for side in (0, 1) if n % 2 else (1, 0):
                turns[side].append(workers[side].run(steps))
        row: dict[str, Any] = {"case": case, "rounds": rounds, "steps": steps}
        for what in ("host", "wall"):
            ratios = [b[what] / a[what] for a, b in zip(*turns, strict=True)]
            row[f"{what}_ratio"] = round(statistics.median(ratios), 4)
            row[f"{what}_ms"] = [round(1e3 * statistics.median(t[what] for t in side), 3) for side in turns]
        row["peak_bytes"] = [side[-1]["peak"] for side in turns]
        return row
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that runs one version of the library; see `_work`."""

    def __init__(self, tree: Path, case: str, device: str) -> None:
        paths = os.pathsep.join((str(tree / "src"), str(HERE), os.environ.get("PYTHONPATH", "")))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ledger.versions", str(tree), "--work-on", case, "--device", device],
            cwd=HERE,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self, steps: int) -> dict[str, float]:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise SystemExit(f"a process ended with {self._process.wait()}; what it said is above")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _work(tree: Path, case: str, device: str) -> None:
    """Run a worker process: for each number of steps on stdin, run so many steps and print the time of one."""
    import leangrad
    from benchmarks.environment import WARM_UP

    assert Path(leangrad.__file__).is_relative_to(tree.resolve()), f"leangrad is imported from {leangrad.__file__}"
    step, wait, peak = _gpu_step(case) if device == "cuda" else _zoo_step(case)
    for _ in range(WARM_UP):
        step()
    print(json.dumps({}), flush=True)
    peak_bytes = peak()
    for line in sys.stdin:
        wait()
        gc.collect()
        host, wall = time.process_time(), time.perf_counter()
        for _ in range(int(line)):
            step()
        host = time.process_time() - host
        wait()
        wall = time.perf_counter() - wall
        print(json.dumps({"host": host / int(line), "wall": wall / int(line), "peak": peak_bytes}), flush=True)


Parts = tuple[Callable[[], None], Callable[[], None], Callable[[], int]]  # run a step, wait for it, measure its peak


def _zoo_step(name: str) -> Parts:
    import torch

    import leangrad
    from tests.zoo import case

    torch.manual_seed(0)
    one = case(name.removeprefix(CONVERTED))
    batch, model = one.batch(), _prepare(name)(one.make())

    def step() -> None:
        one.step(model, batch).backward()
        model.zero_grad()

    return step, lambda: None, lambda: leangrad.measure(step, timed_runs=0).peak_bytes


def _prepare(name: str) -> Callable[[nn.Module], nn.Module]:
    import leangrad

    return leangrad.nn.convert_abn if name.startswith(CONVERTED) else leangrad.lean


def _gpu_step(name: str) -> Parts:
    import torch

    from benchmarks.models import CASES, _step_of

    torch.manual_seed(0)
    model, forward = _table(name) if name in {case.name for case in CASES} else _timm(name)
    step = _step_of(forward, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))

    def peak() -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)

    return step, torch.cuda.synchronize, peak


def _table(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a lean or converted model of `benchmarks.models`, and a function that runs forward and the loss."""
    import torch

    from benchmarks.models import CASES

    (one,) = (case for case in CASES if case.name == name.removeprefix(CONVERTED))
    with torch.device("cuda"):
        model = _prepare(name)(one.make().train())
    batch = one.batch(one.size)

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if one.autocast else nullcontext():
            return one.loss(model, batch)

    return model, forward


def _timm(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a lean model of timm, and a function that runs forward and the loss: batch 128 in channels_last."""
    import torch

    import leangrad
    from benchmarks.ledger.architectures import setup

    model, forward = setup(name, torch.channels_last, 128)
    leangrad.lean(model)
    return model, forward


def main() -> None:
    """Compare another version with this one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger.versions", description=main.__doc__)
    parser.add_argument("before", type=Path, metavar="TREE", help="the root of a checkout of the other version")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--case", nargs="+", metavar="NAME", help="of tests/zoo; on cuda of benchmarks/models or timm; converted_NAME"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--null", action="store_true", help="compare the other version with itself")
    parser.add_argument("--write", metavar="NAME", help="write the rows to benchmarks/results")
    parser.add_argument("--work-on", metavar="NAME", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work_on:
        _work(chosen.before, chosen.work_on, chosen.device)
        return
    from benchmarks.environment import write_rows

    rows = []
    after = chosen.before if chosen.null else HERE
    for name in chosen.case or ((*GPU, *TIMM) if chosen.device == "cuda" else ZOO):
        rows.append(compare(chosen.before.resolve(), after.resolve(), name, chosen.device, chosen.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if chosen.write:
        write_rows(chosen.write, chosen.device, rows)


if __name__ == "__main__":
    main()
