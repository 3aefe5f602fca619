"""The scans against a plain loop over time, in alternation in one process: time, kept bytes, and their growth with T.

    python -m benchmarks.nn.scan                  # on the CPU
    python -m benchmarks.nn.scan --device cuda    # also the time of each kernel

The plain loop gets the slices of each time step by `unbind`; with `u[:, t]` its backward would be quadratic in T.
"doubling", on CUDA only, is plain PyTorch without a loop: log2(T) passes over all states. The rows are written to
benchmarks/results/scan_<device>.json, the picture of the growth (on the CPU) to benchmarks/results/scan_kept_bytes.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import RESULTS, write_rows
from leangrad.measure import measure
from leangrad.nn.scan import _Kind, _plain, rg_lru, selective_scan

LENGTHS = (256, 512, 1024, 2048)  # 4096 is measured in any case


def plain_selective_scan(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    state = u.new_zeros(u.shape[0], *A.shape)
    outputs = []
    for u_t, dt_t, B_t, C_t in zip(*(x.unbind(1) for x in (u, dt, B, C)), strict=True):
        decay = torch.exp(-dt_t.unsqueeze(-1) * A)
        state = decay * state + (1 - decay) / A * B_t.unsqueeze(1) * u_t.unsqueeze(-1)
        outputs.append((C_t.unsqueeze(1) * state).sum(-1) + D * u_t)
    return torch.stack(outputs, 1)


def plain_rg_lru(x: Tensor, r: Tensor, i: Tensor, lam: Tensor) -> Tensor:
    state = x.new_zeros(x.shape[0], x.shape[2])
    outputs = []
    log = 8 * F.logsigmoid(lam)
    for x_t, r_t, i_t in zip(*(x.unbind(1) for x in (x, r, i)), strict=True):
        a = torch.exp(r_t * log)
        state = a * state + (1 - a) * i_t * x_t
        outputs.append(state)
    return torch.stack(outputs, 1)


def mamba_inputs(batch: int, T: int, width: int, N: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    u, dt = torch.randn(batch, T, width), torch.rand(batch, T, width) * 0.1
    A = torch.arange(1.0, N + 1).repeat(width, 1)
    B, C = torch.randn(batch, T, N), torch.randn(batch, T, N)
    maps = [x.to(device, dtype) for x in (u, dt, B, C)]
    inputs = [maps[0], maps[1], A.to(device), maps[2], maps[3], torch.ones(width, device=device)]
    return [x.requires_grad_() for x in inputs]


def rg_lru_inputs(batch: int, T: int, width: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    maps = [torch.randn(batch, T, width), torch.rand(batch, T, width), torch.rand(batch, T, width)]
    inputs = [*(x.to(device, dtype) for x in maps), torch.linspace(2, 6, width, device=device)]
    return [x.requires_grad_() for x in inputs]


class Step:
    """Forward and backward; notes in ``kept_bytes`` the bytes that CUDA had allocated between the two."""

    def __init__(self, function: Callable[..., Any], inputs: list[Tensor]) -> None:
        self.function, self.inputs = function, inputs
        self.grad, self.kept_bytes = torch.randn_like(inputs[0]), 0

    def __call__(self) -> None:
        out = self.function(*self.inputs)
        z = out[0] if isinstance(out, tuple) else out
        del out
        self.kept_bytes = torch.cuda.memory_allocated() if z.is_cuda else 0
        torch.autograd.backward(z, self.grad)
        for x in self.inputs:
            x.grad = None


def doubling(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    return _plain(_Kind("zoh"), u, dt, A, B, C, D, None, None)[0]


def seconds_of(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def memory_of(step: Step, device: str) -> dict[str, int]:
    """Return the bytes allocated between forward and backward and at the peak, without the inputs."""
    if device == "cpu":
        found = measure(step, timed_runs=0)
        return {"kept_bytes": found.kept_bytes, "peak_bytes": found.peak_bytes}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return {"kept_bytes": step.kept_bytes - before, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def compare(case: str, plain: Step, lean: Step, device: str, rounds: int) -> dict[str, Any]:
    """Time both in alternation and measure their memory; the time ratio is the median over the rounds."""
    for step in (plain, lean, lean):
        step()
    pairs = [(seconds_of(plain, device), seconds_of(lean, device)) for _ in range(rounds)]
    row: dict[str, Any] = {
        "case": case,
        "plain_ms": 1e3 * statistics.median(p for p, _ in pairs),
        "lean_ms": 1e3 * statistics.median(q for _, q in pairs),
        "time_ratio": statistics.median(q / p for p, q in pairs),
    }
    for name, step in (("plain", plain), ("lean", lean)):
        row |= {f"{name}_{key}": count for key, count in memory_of(step, device).items()}
    row["kept_ratio"] = row["lean_kept_bytes"] / row["plain_kept_bytes"]
    print(json.dumps(row), flush=True)
    return row


def growth(device: str) -> list[dict[str, Any]]:
    """Return rows with the kept bytes of both for growing T; these include the output, which both compute."""
    rows = []
    for T in LENGTHS:
        inputs = mamba_inputs(1, T, 512, 16, device, torch.float32)
        row: dict[str, Any] = {"case": "bytes of selective_scan and of the loop, 1 x T x 512, N 16, float32", "T": T}
        for name, function in (("plain", plain_selective_scan), ("lean", selective_scan)):
            found = memory_of(Step(function, inputs), device)
            row |= {f"{name}_{key}": count for key, count in found.items()}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def kernels(device: str, rounds: int) -> list[dict[str, Any]]:
    """Return rows with the wall time and the time of each kernel, lean only, mostly at training sizes in bfloat16."""
    from torch.profiler import ProfilerActivity, profile

    rows = []
    small, large = (1, 4096, 512, 16, device, torch.float32), (8, 2048, 2048, 16, device, torch.bfloat16)
    cases: list[tuple[str, Callable[..., Any], list[Tensor]]] = [
        ("selective_scan, 1 x 4096 x 512, N 16, float32", selective_scan, mamba_inputs(*small)),
        ("selective_scan, 8 x 2048 x 2048, N 16, bfloat16", selective_scan, mamba_inputs(*large)),
        ("rg_lru, 8 x 2048 x 2048, bfloat16", rg_lru, rg_lru_inputs(8, 2048, 2048, device, torch.bfloat16)),
    ]
    for case, function, inputs in cases:
        step = Step(function, inputs)
        step()
        wall = statistics.median(seconds_of(step, device) for _ in range(rounds))
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step()
            torch.cuda.synchronize()
        times: Counter[str] = Counter()
        for event in found.key_averages():
            times[event.key.split("<")[0].removeprefix("void ")] += round(event.self_device_time_total)
        largest = dict(times.most_common(8))
        rows.append(
            {"case": case, "wall_ms": 1e3 * wall, "kernels_ms": sum(times.values()) / 1e3, "kernels_us": largest}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def draw(rows: list[dict[str, Any]]) -> str:
    """Return a picture of the kept bytes over T as SVG, with logarithmic axes."""
    from math import log10

    width, height, left, bottom = 560, 360, 70, 45
    lengths = [row["T"] for row in rows]
    top_bytes, low_bytes = 2e9, 1e6

    def place(T: float, count: float) -> tuple[float, float]:
        x = left + (width - left - 110) * (log10(T / lengths[0]) / log10(lengths[-1] / lengths[0]))
        y = height - bottom - (height - bottom - 20) * log10(count / low_bytes) / log10(top_bytes / low_bytes)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">steps T (width 512, 16 states)</text>',
        f'<text x="14" y="{height / 2}" text-anchor="middle" transform="rotate(-90 14 {height / 2})">kept bytes</text>',
    ]
    for count, label in ((1e6, "1 MB"), (1e7, "10 MB"), (1e8, "100 MB"), (1e9, "1 GB")):
        (x, y), (end, _) = place(lengths[0], count), place(lengths[-1], count)
        parts.append(
            f'<path d="M{x} {y}H{end}" stroke="#ddd"/><text x="{x - 6}" y="{y + 4}" text-anchor="end">{label}</text>'
        )
    for T in lengths:
        x, y = place(T, low_bytes)
        parts.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{T}</text>')
    for key, label, color in (("plain_kept_bytes", "plain loop", "#c44"), ("lean_kept_bytes", "leangrad", "#26a")):
        points = [place(row["T"], row[key]) for row in rows]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in points]
        parts.append(f'<text x="{points[-1][0] + 8}" y="{points[-1][1] + 4}" fill="{color}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    device, rounds = options.device, options.rounds
    inputs = mamba_inputs(1, 4096, 512, 16, device, torch.float32)
    gates = rg_lru_inputs(1, 4096, 512, device, torch.float32)
    scan = Step(selective_scan, inputs)
    against = partial(compare, device=device, rounds=rounds)
    title = "selective_scan, 1 x 4096 x 512, N 16, float32, against "
    rows = [
        against(title + "the loop", Step(plain_selective_scan, inputs), scan),
        against("rg_lru, 1 x 4096 x 512, float32, against the loop", Step(plain_rg_lru, gates), Step(rg_lru, gates)),
    ]
    if device == "cuda":
        rows.append(against(title + "doubling", Step(doubling, inputs), scan))
        rows += kernels(device, 10)
    else:
        grown = growth(device)
        (RESULTS / "scan_kept_bytes.svg").write_text(draw([*grown, {"T": 4096, **rows[0]}]))
        rows += grown
    print(write_rows(f"scan_{device}", device, rows).read_text())


if __name__ == "__main__":
    main()
