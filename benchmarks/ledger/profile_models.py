"""The time of plain and lean steps on a GPU: host time of forward and backward, device time of kernels."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import leangrad
from benchmarks.models import CASES, Case

SETTINGS: dict[str, dict[str, Any]] = {
    "hooks only": {"min_bytes": 1 << 40},
    "depth 0": {"residual_depth": 0},
    "auto": {},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", nargs="*", default=["vit_l"])
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for case in CASES:
        if case.name in arguments.case:
            _examine(case, profile=arguments.profile)
            torch.cuda.empty_cache()


def _examine(case: Case, *, profile: bool) -> None:
    torch.manual_seed(0)
    model = case.make().cuda().train()
    batch = case.batch(case.size)
    plain = lean = _timed(case, model, batch, "plain")
    for label, options in SETTINGS.items():
        leangrad.lean(model, **options)
        lean = _timed(case, model, batch, label)
    if not profile:
        return
    for name, p in (("plain", plain), ("lean", lean)):
        print(name)
        print(p.key_averages().table(sort_by="self_device_time_total", row_limit=14, max_name_column_width=60))
    host = cProfile.Profile()
    host.enable()
    for _ in range(3):
        _forward(case, model, batch).backward()
    host.disable()
    pstats.Stats(host).sort_stats("tottime").print_stats(22)


def _forward(case: Case, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16) if case.autocast else nullcontext():
        return case.loss(model, batch)


def _timed(case: Case, model: nn.Module, batch: tuple[Tensor, ...], label: str) -> Any:
    """Print the medians of six steps after three untimed ones; return the kernel profile of one more step."""
    rows = []
    for i in range(9):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        a = time.perf_counter()
        loss = _forward(case, model, batch)
        b = time.perf_counter()
        torch.cuda.synchronize()
        c = time.perf_counter()
        loss.backward()
        d = time.perf_counter()
        torch.cuda.synchronize()
        e = time.perf_counter()
        if i > 2:
            rows.append((b - a, c - a, d - c, e - c))
    med = [1e3 * statistics.median(r[k] for r in rows) for k in range(4)]
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        _forward(case, model, batch).backward()
        torch.cuda.synchronize()
    kernels = sum(ev.self_device_time_total for ev in p.key_averages()) / 1e3
    print(
        f"{case.name} {label}: forward host {med[0]:.1f} total {med[1]:.1f}; backward host {med[2]:.1f} "
        f"total {med[3]:.1f}; kernels {kernels:.1f} ms",
        flush=True,
    )
    return p


if __name__ == "__main__":
    main()
