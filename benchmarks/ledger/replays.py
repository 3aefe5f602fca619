"""Device time of the replays of the H200 table's models, against a lower bound that no tool could go below.

    python -m benchmarks.ledger.replays --case gpt2_medium --write h200_replays

The nodes of backward read the tensors that lean did not keep, so each must be written once: that is a lower bound of
the bytes to move. A row holds the kernel time of a step in plain and in lean, the parts of the difference that fused
replays and ATen's ops take, the time of each kind of fused replay alone and of a copy of as many bytes on the same
device, and the ratio to plain if every fused replay ran at the speed of a copy.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import leangrad
from benchmarks.environment import write_rows
from benchmarks.models import CASES, Case, kernels
from leangrad.kernels.launch import Launch, stream_for
from leangrad.ledger import no_regions

TIMES = 9

Floats = tuple[float, ...]


class Heard:
    """Records the fused replays that are launched inside the context.

    - `calls`: how often each `Launch` was called.
    - `kinds`: for each `Launch`, shape, stride and dtype of the tensors of its last call, and its floats.
    """

    def __init__(self) -> None:
        self.calls: Counter[Launch] = Counter()
        self.kinds: dict[Launch, tuple[list[tuple[Any, ...]], Floats]] = {}

    def __enter__(self) -> Heard:
        self._call = Launch.__call__
        heard, call = self, Launch.__call__

        def listen(launch: Launch, stream: int | None, tensors: tuple[Tensor, ...], floats: Floats = ()) -> None:
            heard.calls[launch] += 1
            heard.kinds[launch] = [(t.shape, t.stride(), t.dtype) for t in tensors], floats
            call(launch, stream, tensors, floats)

        Launch.__call__ = listen  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Launch.__call__ = self._call  # type: ignore[method-assign]


def run(case: Case) -> dict[str, Any]:
    """Measure one model at its full size."""
    plain, lean, heard = _steps(case)
    torch.cuda.empty_cache()
    replays = [_alone(launch, count, *heard.kinds[launch]) for launch, count in heard.calls.items()]
    fused = sum(r["count"] * r["us"] for r in replays) / 1e3
    copied = sum(r["count"] * r["copy_us"] for r in replays) / 1e3
    return {
        "case": case.name,
        "plain_kernel_ms": plain,
        "lean_kernel_ms": lean,
        "kernel_ratio": lean / plain,
        "fused_ms": fused,
        "fused_gb": sum(r["count"] * r["mb"] for r in replays) / 1e3,
        "fused_at_the_speed_of_a_copy_ms": copied,
        "left_to_aten_ms": lean - plain - fused,
        "ratio_at_the_speed_of_a_copy": (lean - fused + copied) / plain,
        "replays": sorted(replays, key=lambda r: -r["count"] * r["us"]),
    }


def _steps(case: Case) -> tuple[float, float, Heard]:
    """Return the kernel time of a plain and of a lean step in milliseconds, and the fused replays of the lean step."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = case.make().train()
    batch = case.batch(case.size)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if case.autocast else nullcontext():
            loss = case.loss(model, batch)
        loss.backward()

    leangrad.lean(model)
    for _ in range(6):  # the step is recorded, the trace is followed, and fused kernels are compared with ATen's ops
        step()
    with Heard() as heard:
        step()
    lean = kernels(step)
    with no_regions():
        step()
        plain = kernels(step)
    return plain, lean, heard


def _alone(launch: Launch, count: int, kinds: list[tuple[Any, ...]], floats: Floats) -> dict[str, Any]:
    """Time one kind of replay by itself, with a cold cache as in a step, and a copy that moves as many bytes."""
    tensors = [torch.empty_strided(shape, stride, dtype=dtype, device="cuda") for shape, stride, dtype in kinds]
    for t in tensors:
        if t.is_floating_point():
            t.normal_()
    nbytes = sum(t.untyped_storage().nbytes() for t in tensors)
    here = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(here)
    us = _time(lambda: launch(stream_for(launch.device), tuple(tensors), floats))
    return {"count": count, "mb": nbytes / 1e6, "us": us, "copy_us": _time(lambda: there.copy_(here))}


def _time(run: Callable[[], object]) -> float:
    """Return the median time of ``run`` on the device in microseconds, with a cold cache."""
    cold = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(TIMES):
        cold.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", default=["vit_l", "gpt2_medium"])
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if case.name in arguments.case:
            rows.append(run(case))
            print({k: v for k, v in rows[-1].items() if k != "replays"}, flush=True)
            torch.cuda.empty_cache()
    if arguments.write:
        write_rows(arguments.write, "cuda", rows)


if __name__ == "__main__":
    main()
