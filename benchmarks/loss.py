"""The projection to a vocabulary and its cross entropy, forward and backward: plain, torch's, Liger's, Apple's, ours.

    python -m benchmarks.loss [--device cuda] [--hidden 4096] [--vocab 128256] [--tokens 8192 32768] [--write loss_cuda]

A row is one way at one number of tokens: milliseconds of a step (the median over rounds, all ways in turns; of the
process, on one thread of a CPU), their ratio to plain's, and `peak_bytes`, the highest memory above the arguments and
the gradients that are returned. `loss_error`,
`input_error` and `weight_error` are distances to float64 relative to its norm; the loss is multiplied by 1/3, as by
the accumulation of three micro-batches. A way that is not installed, or fails, has a row that says so.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import leangrad
from benchmarks.environment import write_rows

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
FACTOR = 1 / 3


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def torch_chunked() -> Loss:
    """Of torch 2.13 and newer."""
    function, options = getattr(F, "linear_cross_entropy"), getattr(torch.nn, "LinearCrossEntropyOptions")()  # noqa: B009
    return lambda x, weight, target: function(x, weight, target, options=options)


def liger() -> Loss:
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda x, weight, target: function(x, weight, target)


def cce(impl: str) -> Callable[[], Loss]:
    def load() -> Loss:
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        return lambda x, weight, target: function(x, weight, target, impl=impl)

    return load


WAYS: dict[str, Callable[[], Loss]] = {
    "plain": lambda: plain,
    "leangrad": lambda: leangrad.linear_cross_entropy,
    "torch": torch_chunked,
    "liger": liger,
    "cce": cce("cce"),
    "cce_exact": cce("cce_exact"),
    "cce_kahan_full_c": cce("cce_kahan_full_c"),
}


def step(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value = loss(x, weight, target)
    dx, dW = torch.autograd.grad(value.float() * FACTOR, (x, weight))
    return value.detach(), dx, dW


def truth(x: Tensor, weight: Tensor, target: Tensor, rows: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """Plain in float64, some tokens at a time."""
    inputs, W = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for some, targets in zip(inputs.split(rows), target.split(rows), strict=True):
        loss = F.cross_entropy(some @ W.t(), targets, reduction="sum") / len(x)
        (loss * FACTOR).backward()
        total += loss.detach()
    assert inputs.grad is not None
    assert W.grad is not None
    return total, inputs.grad, W.grad


def distance(found: Tensor, exact: Tensor) -> float:
    """By rows, so that no float64 copy of `found` stands in memory."""
    if exact.dim() == 0:
        return float((found.double() - exact).abs() / exact.abs())
    pairs = zip(found.split(4096), exact.split(4096), strict=True)
    squares = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    return float(squares**0.5 / exact.norm())


def seconds_of(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def peak_bytes(run: Callable[[], object], device: str, returned: int) -> int:
    if device == "cpu":
        return leangrad.measure(run, timed_runs=0).peak_bytes - returned
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - returned


def measure(shape: tuple[int, int, int], dtype: torch.dtype, device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each way."""
    torch.manual_seed(0)
    tokens, hidden, vocabulary = shape
    x = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).to(dtype).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), device=device)
    returned = (x.numel() + weight.numel()) * x.element_size()
    exact = truth(x, weight, target)
    rows: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], object]] = {}
    for name, load in WAYS.items():
        row: dict[str, Any] = {
            "way": name,
            "tokens": tokens,
            "hidden": hidden,
            "vocab": vocabulary,
            "dtype": str(dtype),
        }
        rows.append(row)
        try:
            loss = load()
            found = step(loss, x, weight, target)  # compiles what there is to compile
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, AssertionError) as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        errors = zip(("loss", "input", "weight"), found, exact, strict=True)
        row |= {f"{what}_error": distance(ours, true) for what, ours, true in errors}
        del found, errors
        steps[name] = lambda loss=loss: step(loss, x, weight, target)  # type: ignore[misc]
    del exact
    for row in rows:
        if row["way"] in steps:
            row["peak_bytes"] = peak_bytes(steps[row["way"]], device, returned)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for n in range(rounds):
        for name in sorted(steps, reverse=bool(n % 2)):
            times[name].append(seconds_of(steps[name], device))
    for row in rows:
        if row["way"] in steps:
            row["ms"] = 1e3 * statistics.median(times[row["way"]])
            row["time_ratio"] = row["ms"] / (1e3 * statistics.median(times["plain"])) if "plain" in times else None
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--dtype", help="default bfloat16 on CUDA, float32 on the CPU")
    parser.add_argument("--rounds", type=int, help="timed steps of each way; default 20 on CUDA, 5 on the CPU")
    parser.add_argument("--way", nargs="+", choices=sorted(WAYS), help="only these, beside plain")
    parser.add_argument("--write", help="the name of a file for the rows, in benchmarks/results")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    if options.way:
        for name in set(WAYS) - {"plain", *options.way}:
            del WAYS[name]
    rows = []
    for tokens in options.tokens:
        shape = (tokens, options.hidden, options.vocab)
        for row in measure(shape, dtype, options.device, options.rounds or (20 if on_gpu else 5)):
            print(json.dumps(row))
            rows.append(row)
    if options.write:
        write_rows(options.write, options.device, rows)


if __name__ == "__main__":
    main()
