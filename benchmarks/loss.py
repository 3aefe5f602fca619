"""The projection to a vocabulary and its cross entropy, forward and backward: plain, torch's, Liger's, Apple's, ours.

    python -m benchmarks.loss [--device cuda] [--hidden 4096] [--vocab 128256] [--tokens 8192 32768] [--write loss_h200]
    python -m benchmarks.loss --device cuda --models [--write loss_models_h200]
    python -m benchmarks.loss --device cuda --head --hidden 2048 --vocab 128256 --tokens 8192 [--write loss_head_h200]

A row is one way at one number of tokens. `ms` is the time of a step: the median over the rounds, in which all ways are
timed one after another; CPU time on a CPU with one thread, else wall-clock time. `time_ratio` is its ratio to plain.
`peak_bytes` is the peak memory without the arguments and the returned gradients. `loss_error`, `input_error` and
`weight_error` are the distances to the float64 results, relative to their norm; the loss is multiplied by 1/3, as in
the accumulation of three micro-batches. If a way is not installed or fails, its row says so.

With `--models` a row is one way to train one of two language models: plain, lean, lean with lazy logits
(`exact=False`), `torch.compile`, the same with leangrad's backend without and with its fused loss, and Liger's kernels
with Liger's loss. `ms` is the time of a step as training runs it, `device_ms` that of its kernels, `peak_gib` the peak
above the memory allocated before the step.

With `--head` a row is one shape: `three_ms` is the time of the three matmuls alone, `compile_ms` that of plain under
`torch.compile`, and `leangrad_ms` that of leangrad in eager mode, all measured with CUDA events.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from benchmarks.environment import write_rows
from leangrad.compiled import compile_lean

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
FACTOR = 1 / 3
LOGITS = {"options": {"leangrad.fused_loss": False}}


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def torch_chunked() -> Loss:
    """Return the chunked loss of torch 2.13 and newer."""
    function, options = getattr(F, "linear_cross_entropy"), getattr(torch.nn, "LinearCrossEntropyOptions")()  # noqa: B009
    return lambda x, weight, target: function(x, weight, target, options=options)


def liger() -> Loss:
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda x, weight, target: function(x, weight, target)


def liger_float32() -> Loss:
    """Return Liger's loss with the weight gradient accumulated in float32, which is not its default."""
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda x, weight, target: function(x, weight, target, accum_dtype=torch.float32)


def cce(impl: str) -> Callable[[], Loss]:
    def load() -> Loss:
        package = importlib.import_module("cut_cross_entropy")
        said: dict[str, Any] = {"impl": impl}
        if impl == "cce_exact" and not hasattr(package.LinearCrossEntropyImpl, "CCE_EXACT"):
            said = {"impl": "cce", "filter_eps": None}  # the same settings, in versions without the name "cce_exact"
        return lambda x, weight, target: package.linear_cross_entropy(x, weight, target, **said)

    return load


WAYS: dict[str, Callable[[], Loss]] = {
    "plain": lambda: plain,
    "leangrad": lambda: leangrad.linear_cross_entropy,
    "torch": torch_chunked,
    "liger": liger,
    "liger, float32 sums": liger_float32,
    "cce": cce("cce"),
    "cce_exact": cce("cce_exact"),
    "cce_kahan_full_c": cce("cce_kahan_full_c"),
}


def step(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value = loss(x, weight, target)
    dx, dW = torch.autograd.grad(value.float() * FACTOR, (x, weight))
    return value.detach(), dx, dW


def truth(x: Tensor, weight: Tensor, target: Tensor, rows: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, input gradient and weight gradient of plain in float64, computed ``rows`` tokens at a time."""
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
    """Return the relative distance of ``found`` from ``exact``, by rows, without a whole float64 copy of ``found``."""
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
    """Return a row for each way at one shape (tokens, hidden, vocabulary)."""
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
            found = step(loss, x, weight, target)  # also compiles kernels
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


def measure_head(tokens: int, hidden: int, vocabulary: int) -> dict[str, Any]:
    """Return milliseconds on the GPU, in bfloat16: the three matmuls of a head, plain compiled, and leangrad's loss."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden, device="cuda") / hidden**0.5).bfloat16().requires_grad_()
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    row: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "vocab": vocabulary, "three_ms": _three(x, weight)}
    compiled = torch.compile(plain)
    row["compile_ms"] = _on_device(lambda: step(compiled, x, weight, target))
    row["leangrad_ms"] = _on_device(lambda: step(leangrad.linear_cross_entropy, x, weight, target))
    return row


@torch.no_grad()
def _three(x: Tensor, weight: Tensor) -> float:
    logits = torch.randn(len(x), len(weight), device="cuda", dtype=x.dtype)
    dx, dW = torch.empty_like(x), torch.empty_like(weight)

    def run() -> None:
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        torch.mm(logits.t(), x, out=dW)

    return _on_device(run)


def _on_device(run: Callable[[], object], rounds: int = 5) -> float:
    times = []
    for n in range(2 + rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if n >= 2:
            times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


# Whole models


def measure_model(name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to train one model."""
    from benchmarks import models

    case = next(case for case in models.CASES if case.name == name)
    for way, make_ready in MODEL_WAYS.items():
        try:
            yield {"case": name, "way": way, **_of_model(case, make_ready)}
        except (ImportError, RuntimeError) as error:
            yield {"case": name, "way": way, "failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def _compiled(model: nn.Module, backend: Any, **options: Any) -> nn.Module:
    return torch.compile(model, backend=backend, **options)  # type: ignore[return-value]


def _with_liger(model: nn.Module) -> nn.Module:
    importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
    return model


MODEL_WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "lean": leangrad.lean,
    "lean, exact=False": lambda model: leangrad.lean(model, exact=False),
    "compile": lambda model: _compiled(model, "inductor"),
    "compile leangrad, fused_loss=False": lambda model: _compiled(model, compile_lean, **LOGITS),
    "compile leangrad": lambda model: _compiled(model, compile_lean),
    "liger": _with_liger,  # last, because it changes functions of transformers for the whole process
}


def _of_model(case: Any, make_ready: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    return prepare(case, make_ready)()


def prepare(case: Any, make_ready: Callable[[nn.Module], nn.Module]) -> Callable[[], dict[str, Any]]:
    """Run the first forward and backward of a model, which compiles it; return a function that measures the model."""
    from benchmarks.models import _in_a_row, _memory, _step_of, kernels

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = case.make().train()
    if case.name == "gpt2_medium":
        model.loss_type = "ForCausalLM"  # without it the model issues a warning, which breaks the compiled graph
    ready, batch = make_ready(model), case.batch(case.size)

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if case.autocast else nullcontext():
            return case.loss(ready, batch)  # type: ignore[no-any-return]

    def measure() -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        step = _step_of(forward, optimizer)
        for _ in range(5):
            step()
        memory = _memory(forward, optimizer)
        ms = min(_in_a_row(step)["ms_in_a_row"] for _ in range(3))
        return {"ms": ms, "device_ms": min(kernels(step) for _ in range(2)), **memory}

    forward().backward()
    model.zero_grad(set_to_none=True)
    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--dtype", help="default bfloat16 on CUDA, float32 on the CPU")
    parser.add_argument("--rounds", type=int, help="timed steps of each way; default 20 on CUDA, 5 on the CPU")
    parser.add_argument("--way", nargs="+", choices=sorted(WAYS), help="only these, beside plain")
    parser.add_argument("--models", nargs="*", metavar="NAME", help="models in the place of the loss alone")
    parser.add_argument("--head", action="store_true", help="the products alone, compiled and ours, on a GPU")
    parser.add_argument("--write", help="the name of a file for the rows, in benchmarks/results")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    if options.way:
        for name in set(WAYS) - {"plain", *options.way}:
            del WAYS[name]
    rows: list[dict[str, Any]] = []
    for name in () if options.models is None else options.models or ("llama_1b", "gpt2_medium"):
        for row in measure_model(name):
            print(json.dumps(row), flush=True)
            rows.append(row)
            if options.write:
                write_rows(options.write, options.device, rows)
    for tokens in options.tokens if options.head else ():
        rows.append(measure_head(tokens, options.hidden, options.vocab))
        print(json.dumps(rows[-1]), flush=True)
    for tokens in options.tokens if options.models is None and not options.head else ():
        shape = (tokens, options.hidden, options.vocab)
        for row in measure(shape, dtype, options.device, options.rounds or (20 if on_gpu else 5)):
            print(json.dumps(row))
            rows.append(row)
    if options.write:
        write_rows(options.write, options.device, rows)


if __name__ == "__main__":
    main()
