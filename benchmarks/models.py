"""Time and memory of the four models of the H200 table, plain and lean in one process.

    python -m benchmarks.models --floor --write h200_models   # all four, full size
    python -m benchmarks.models --case vit_l --scale 8        # one, with an eighth of the batch

Plain and lean are timed in alternation. A row holds, for both:

- the time of a step in milliseconds: ``ms`` if the host waits for the device after each step, ``ms_in_a_row`` for steps
  one after another, as training runs them. Each round gives the median of twelve steps, and for steps in a row also the
  mean; the row has the median over the rounds and the best one (other programs on the host make a step slower, never
  faster). The ratios of lean to plain are medians over the rounds.
- the time of a step's kernels alone, and the host's time for forward and for backward.
- the peak of allocated bytes above those before the step (parameters and optimizer state), and the bytes alive between
  forward and backward.

An unrelated loop of Python is timed before and after each measurement, because hosts were seen to halve their speed
from one second to the next: ``quiet_time_ratio`` is the median over the rounds in which that loop took at most a fifth
more time than in its best round. A row also has the floor, computed at an eighth of the batch and scaled, and the
difference of lean's gradients from the plain ones, beside the difference between two plain runs. ``nothing`` is plain
under a function mode and saved-tensor hooks that do nothing: the host time that any such tool costs before it does its
work.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import leangrad
from benchmarks.environment import WARM_UP, write_rows
from benchmarks.ledger.overhead import PassThrough
from leangrad.ledger import no_regions
from leangrad.ledger.fuse import fused

STEPS, FIRST = 12, 4
ROUNDS = 6  # rounds in which steps in a row are timed; in half of them also steps that the host waits for
QUIET = 1.2  # a round is quiet if the loop of Python took at most this many times its best time


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    size: int
    autocast: bool
    floor_gib: float  # the floor as counted by hand, in the design's table of figures


def _classify(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _language(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]


def _images(size: int, memory_format: torch.memory_format) -> tuple[Tensor, ...]:
    x = torch.randn(size, 3, 224, 224, device="cuda").to(memory_format=memory_format)
    return x, torch.randint(0, 1000, (size,), device="cuda")


def _tokens(size: int, length: int, vocabulary: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, vocabulary, (size, length), device="cuda"),)


def _resnet() -> nn.Module:
    from torchvision.models import resnet50

    model: nn.Module = resnet50().to(memory_format=torch.channels_last)
    return model


def _vit() -> nn.Module:
    from torchvision.models import vit_l_16

    model: nn.Module = vit_l_16()
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False))
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=2048, tie_word_embeddings=True, use_cache=False, rope_theta=500000.0,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).to(torch.bfloat16)
    return model


CASES = (
    Case("resnet50", _resnet, lambda n: _images(n, torch.channels_last), _classify, 192, True, 4.2),
    Case("vit_l", _vit, lambda n: _images(n, torch.contiguous_format), _classify, 64, True, 7.4),
    Case("gpt2_medium", _gpt2, lambda n: _tokens(n, 1024, 50257), _language, 16, True, 10.0),
    Case("llama_1b", _llama, lambda n: _tokens(n, 2048, 128256), _language, 4, False, 6.7),
)


def run(case: Case, scale: int) -> dict[str, Any]:
    """Measure one case."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = case.make().train()
    batch = case.batch(max(1, case.size // scale))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if case.autocast else nullcontext():
            return case.loss(model, batch)

    row: dict[str, Any] = {"case": case.name, "batch": batch[0].shape[0], "floor_hand_gib": case.floor_gib}
    forward().backward()
    optimizer.step()  # allocates the optimizer's state
    leangrad.lean(model)
    first, again = _with_plain(model, forward), _with_plain(model, forward)
    lean_first, lean_learned = _gradients(model, forward), _gradients(model, forward)
    ways: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: _plainly(forward),
        "lean": forward,
        "nothing": lambda: _under_nothing(forward),
    }
    steps = {way: _step_of(one, optimizer) for way, one in ways.items()}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    for way, one in ways.items():
        row[way] = _memory(one, optimizer)
    turns = [_turn(steps, n) for n in range(ROUNDS)]  # the ways alternate, because the host's speed changes
    for way in steps:
        for name in ("ms", "ms_in_a_row", "mean_ms_in_a_row"):
            times = [turn[way][name] for turn in turns if name in turn.get(way, {})]
            row[way][name], row[way]["best_" + name] = statistics.median(times), min(times)
    row["waited_ratio"] = _ratio(turns, "ms")
    row["time_ratio"], row["mean_time_ratio"] = _ratio(turns, "ms_in_a_row"), _ratio(turns, "mean_ms_in_a_row")
    at_best = min(turn["loop_ms"] for turn in turns)
    quiet = [turn for turn in turns if turn["loop_ms"] <= QUIET * at_best]
    row["quiet_time_ratio"], row["quiet_turns"] = _ratio(quiet, "ms_in_a_row"), len(quiet)
    for way, one in ways.items():
        row[way] |= _host(one, optimizer)
    row["turns"] = turns
    late, lean_late = _with_plain(model, forward), _gradients(model, forward)
    row["plain_noise"] = _compare(first, again)
    row["lean_fused_against_plain"] = _compare(late, lean_late)
    row["lean_against_plain"] = _compare(first, lean_first)
    row["lean_learned_against_plain"] = _compare(first, lean_learned)
    row["fused"] = {k: v for k, v in fused.report().items() if k != "refused"}
    for way in ("plain", "lean"):  # at the end: once a profiler was on, each launch of the process takes longer
        row[way]["kernel_ms"] = kernels(steps[way])
    row["kernel_ratio"] = row["lean"]["kernel_ms"] / row["plain"]["kernel_ms"]
    row["peak_ratio"] = row["lean"]["peak_gib"] / row["plain"]["peak_gib"]
    return row


def _turn(steps: dict[str, Callable[[], None]], n: int) -> dict[str, Any]:
    """Time every way in round ``n``; ``loop_ms`` is the longest time of the loop of Python in this round."""
    turn: dict[str, Any] = {}
    loops = [_loop()]
    for way in list(steps) if n % 2 == 0 else list(reversed(steps)):
        if way != "nothing" or n < 2:
            turn[way] = {"ms": _waited(steps[way])} if n < ROUNDS // 2 else {}
            turn[way] |= _in_a_row(steps[way])
            loops.append(_loop())
    turn["loop_ms"] = max(loops)
    return turn


def _loop() -> float:
    """Return the time of a loop of Python in milliseconds, the best of three runs: a measure of the host's speed."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        held: dict[int, tuple[int, str]] = {}
        for i in range(40_000):
            held[i % 1024] = (i, str(i % 8))
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def _ratio(turns: list[dict[str, Any]], name: str) -> float:
    """Return the time ``name`` of lean over that of plain: the median over the rounds that have it."""
    return float(statistics.median(t["lean"][name] / t["plain"][name] for t in turns if name in t["lean"]))


def _plainly(forward: Callable[[], Tensor]) -> Tensor:
    with no_regions():
        return forward()


def _under_nothing(forward: Callable[[], Tensor]) -> Tensor:
    with no_regions(), PassThrough(), saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return forward()


def _with_plain(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    with no_regions():
        return _gradients(model, forward)


def _gradients(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    buffers = [b.clone() for b in model.buffers()]
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    forward().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    for b, before in zip(model.buffers(), buffers, strict=True):
        b.copy_(before)
    return gradients


def _compare(a: list[Tensor], b: list[Tensor]) -> dict[str, Any]:
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        scale = float(x.float().abs().max())
        worst = max(worst, float((x.float() - y.float()).abs().max()) / (scale or 1.0))
    return {"bitwise": all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), "largest": worst}


def _step_of(forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward().backward()
        optimizer.step()

    return step


def _memory(forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> dict[str, float]:
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = forward()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    del loss
    optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    optimizer.zero_grad(set_to_none=True)
    return {"peak_gib": peak / 2**30, "kept_gib": kept / 2**30}


def _waited(step: Callable[[], None]) -> float:
    """Return the median time in milliseconds of steps after each of which the host waits for the device."""
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _in_a_row(step: Callable[[], None]) -> dict[str, float]:
    """Return the median and the mean time in milliseconds of steps one after another, as training runs them.

    The time is measured on the device, from the end of one step to the end of the next. The first steps are not timed:
    they fill the device's queue.
    """
    for _ in range(FIRST):
        step()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in itertools.pairwise(ends)]
    return {"ms_in_a_row": statistics.median(times), "mean_ms_in_a_row": statistics.mean(times)}


def _host(forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the host's time in milliseconds for forward and for backward; the device is idle before each."""
    times: list[tuple[float, float]] = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = forward()
        middle = time.perf_counter()
        torch.cuda.synchronize()
        again = time.perf_counter()
        loss.backward()
        times.append((middle - start, time.perf_counter() - again))
        torch.cuda.synchronize()
    names = ("host_forward_ms", "host_backward_ms")
    return {name: statistics.median(t[k] for t in times) * 1e3 for k, name in enumerate(names)}


def kernels(step: Callable[[], None]) -> float:
    """Return the sum of the times of a step's kernels, in milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profile.key_averages()) / 1e3)


def scaled_floor(case: Case, scale: int = 8) -> float:
    """Return the floor in GiB, computed with a ``scale``-th of the batch and multiplied back."""
    from leangrad import floor

    torch.manual_seed(0)
    size = max(1, case.size // scale)
    batch = case.batch(size)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.make().cuda().train()

        def forward(self, *inputs: Tensor) -> Tensor:
            return case.loss(self.model, inputs)

    found = floor(Step(), batch, autocast=torch.bfloat16 if case.autocast else None)
    return found.bytes * (case.size / size) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", default=[c.name for c in CASES])
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--write", default="")
    parser.add_argument("--summary", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if case.name not in arguments.case:
            continue
        row: dict[str, Any] = {}
        try:
            row = run(case, arguments.scale)
            gc.collect()
            torch.cuda.empty_cache()
            if arguments.floor:
                row["floor_gib"] = scaled_floor(case)
        except Exception as error:  # go on with the other cases
            import traceback

            traceback.print_exc()
            row = {**row, "case": case.name, "error": repr(error)[:400]}
        gc.collect()
        torch.cuda.empty_cache()
        rows.append(row)
        print(row, flush=True)
    if arguments.write:
        out = write_rows(arguments.write, "cuda", rows)
        if "OUT" in os.environ:
            os.system(f"cp {out} $OUT/")


if __name__ == "__main__":
    main()
