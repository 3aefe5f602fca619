"""`leangrad.nn.TransformerBlock` against its own plain form: time, kept bytes and the floor, peak, allocations.

    python -m benchmarks.nn.transformer                  # on the CPU: width 512, 8 x 512 tokens
    python -m benchmarks.nn.transformer --device cuda    # larger, float32, bfloat16 and autocast

One process runs both: steps are timed in alternation, plain then lean, and the time ratio is the median of the ratios
of each such pair. The peak includes gradients and all scratch, but not the parameters. The floor is that of the plain
form (`leangrad.floor`); neither it nor the kept bytes include the batch. `temporary_maps` are allocations after warm-up
that are at least as large as an activation map, and that are neither kept for backward nor returned by the block: those
that `out=` is meant to avoid. Rows are written to `benchmarks/results/transformer_<device>.json`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.environment import write_rows
from leangrad import floor
from leangrad.engine.grad_buffer import release_scratch
from leangrad.measure import measure
from leangrad.nn import TransformerBlock


@dataclass(frozen=True)
class Case:
    name: str
    width: int = 512
    heads: int = 8
    batch: int = 8
    length: int = 512
    blocks: int = 1
    activation: str = "gelu"
    norm: str = "layer"
    kv_heads: int | None = None
    rotary: bool = False
    causal: bool = True
    dropout: float = 0.0
    dtype: str = "float32"
    autocast: bool = False


_LLAMA: dict[str, Any] = {"activation": "swiglu", "norm": "rms", "rotary": True}
_LARGE: dict[str, Any] = {"width": 2048, "heads": 16, "length": 2048, "batch": 4, "blocks": 4}
CASES = {
    "cpu": [
        Case("gpt"),
        Case("llama", kv_heads=2, **_LLAMA),
        Case("encoder", causal=False),
    ],
    "cuda": [
        Case("gpt-autocast", autocast=True, **_LARGE),
        Case("gpt-bf16", dtype="bfloat16", **_LARGE),
        Case("llama-bf16", dtype="bfloat16", kv_heads=4, **_LLAMA, **_LARGE),
        Case("gpt-dropout-bf16", dtype="bfloat16", dropout=0.1, **_LARGE),
        Case("small-bf16", dtype="bfloat16", blocks=12),
    ],
}


class Plain(nn.Module):
    """The same blocks, each run in its plain form, as the modules that it consists of."""

    def __init__(self, blocks: nn.Sequential):
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            x = block.plain(x)
        return x


def build(case: Case, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        name: getattr(case, name) for name in ("activation", "norm", "kv_heads", "rotary", "causal", "dropout")
    }
    options |= {"device": device, "dtype": getattr(torch, case.dtype), "bias": case.norm == "layer"}
    return nn.Sequential(*(TransformerBlock(case.width, case.heads, **options) for _ in range(case.blocks)))


def cast(case: Case, device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, torch.bfloat16) if case.autocast else nullcontext()


def train_step(case: Case, device: str, model: nn.Module, x: Tensor, weight: Tensor) -> Callable[[], None]:
    """Return a step: forward, a loss whose gradient is a tensor of the size of the output, and backward."""

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with cast(case, device):
            y = model(x)
        (y * weight).sum().backward()

    return step


def seconds_of(step: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_and_kept_bytes(step: Callable[[], None], model: nn.Module) -> tuple[int, int]:
    """Return the peak of a first step, with all scratch, and the kept bytes of a second one, without the scratch."""
    peaks_and_kept = []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        found = measure(step, timed_runs=0)
        peaks_and_kept.append((found.peak_bytes, found.kept_bytes))
    return peaks_and_kept[0][0], peaks_and_kept[1][1]


def temporary_maps(step: Callable[[], None], map_bytes: int) -> dict[str, int]:
    """Count the blocks at least as large as a map that a step allocates and frees within forward or within backward.

    Kept tensors are freed in another phase, and returned ones are not freed, so they do not count. In backward those of
    matmuls are also counted separately; the blocks that attention's own kernel allocates there, three in both forms,
    are not counted.
    """
    timeline = measure(step, timed_runs=2).timeline
    freed_in = {event.block: event.phase for event in timeline if event.bytes < 0}
    maps = [
        e for e in timeline if e.bytes >= map_bytes and freed_in.get(e.block) == e.phase and "aten::mul" not in e.op
    ]
    backward = [e for e in maps if e.phase == "backward" and "attention" not in e.op]
    return {
        "forward": sum(e.phase == "forward" for e in maps),
        "backward": len(backward),
        "products": sum("aten::mm" in e.op for e in backward),
    }


def ratio_of(times: dict[str, list[float]]) -> float:
    """Return the ratio of the lean time to the plain time: the median over the rounds."""
    return statistics.median(lean / plain for plain, lean in zip(times["plain"], times["lean"], strict=True))


def largest_difference(plain: list[Tensor | None], lean: list[Tensor | None]) -> float:
    """Return the largest difference of any gradient, relative to the largest entry of the plain gradient."""
    pairs = [(p, q) for p, q in zip(plain, lean, strict=True) if p is not None and q is not None]
    return max(float((p - q).abs().max() / p.abs().max()) for p, q in pairs)


def run(case: Case, device: str, repeats: int) -> dict[str, Any]:
    lean = build(case, device)
    plain = Plain(lean)
    dtype = torch.float32 if case.autocast else getattr(torch, case.dtype)
    x = torch.randn(case.batch, case.length, case.width, device=device, dtype=dtype)
    weight = torch.randn_like(x)
    steps = {name: train_step(case, device, model, x, weight) for name, model in (("plain", plain), ("lean", lean))}
    gradients: dict[str, list[Tensor | None]] = {}
    for name in ("plain", "lean", "plain", "lean"):
        torch.manual_seed(1)
        seconds_of(steps[name], device)
        gradients[name] = [parameter.grad for parameter in lean.parameters()]
    difference = largest_difference(gradients["plain"], gradients["lean"])
    gradients.clear()
    times: dict[str, list[float]] = {"plain": [], "lean": []}
    cpu_times: dict[str, list[float]] = {"plain": [], "lean": []}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.process_time()
            times[name].append(seconds_of(step, device))
            cpu_times[name].append(time.process_time() - start)
    release_scratch()
    plain_peak, plain_kept = peak_and_kept_bytes(steps["plain"], plain)
    lean_peak, lean_kept = peak_and_kept_bytes(steps["lean"], lean)
    # The output of the last block is alive when backward begins, in both forms; the floor does not include it.
    output_bytes = x.numel() * x.element_size()
    row = {
        **asdict(case),
        "repeats": repeats,
        "plain_ms": statistics.median(times["plain"]) * 1e3,
        "lean_ms": statistics.median(times["lean"]) * 1e3,
        "time_ratio": ratio_of(times),
        "cpu_time_ratio": ratio_of(cpu_times),  # CPU time of all threads, which a busy machine disturbs least
        "plain_peak_bytes": plain_peak,
        "lean_peak_bytes": lean_peak,
        "plain_kept_bytes": plain_kept,
        "lean_kept_bytes": lean_kept,
        "output_bytes": output_bytes,
        "largest_gradient_difference": difference,
    }
    if device == "cpu":
        autocast = torch.bfloat16 if case.autocast else None
        floor_bytes = floor(plain, x, lambda y: (y * weight).sum(), autocast=autocast).bytes
        row |= {
            "floor_bytes": floor_bytes,
            "kept_over_floor": (lean_kept - output_bytes) / floor_bytes,
            "lean_temporary_maps": temporary_maps(steps["lean"], output_bytes),
            "plain_temporary_maps": temporary_maps(steps["plain"], output_bytes),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--repeats", type=int, help="timed steps of each; default 9 on the CPU, 20 on CUDA")
    parser.add_argument("--case", nargs="+", help="only the cases of these names")
    parser.add_argument("--dry", action="store_true", help="write no rows")
    options = parser.parse_args()
    repeats = options.repeats or (20 if options.device == "cuda" else 9)
    rows = []
    columns = ("plain", "lean ms", "time", "cpu", "plain", "kept MB", "floor")
    print(f"{'case':<18}" + "".join(f"{name:>9}" for name in columns) + "  temporaries")
    for case in CASES[options.device]:
        if options.case is None or case.name in options.case:
            row = run(case, options.device, repeats)
            rows.append(row)
            kept = f"{row['plain_kept_bytes'] / 1e6:>9.1f}{row['lean_kept_bytes'] / 1e6:>9.1f}"
            print(
                f"{case.name:<18}{row['plain_ms']:>9.2f}{row['lean_ms']:>9.2f}{row['time_ratio']:>9.3f}"
                f"{row['cpu_time_ratio']:>9.3f}{kept}{row.get('kept_over_floor', float('nan')):>9.4f}"
                f"  {row.get('lean_temporary_maps', '')}",
                flush=True,
            )
    if not options.dry:
        print(write_rows(f"transformer_{options.device}", options.device, rows))


if __name__ == "__main__":
    main()
