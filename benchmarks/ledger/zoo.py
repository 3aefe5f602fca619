"""Every model of the zoo, plain and lean: kept bytes against the floor, peak, time, and whether gradients are the same.

    python -m benchmarks.ledger.zoo [--case gpt llama] [--write zoo_cpu]

Peak and kept bytes are exact (`leangrad.measure`); the peak is also compared with those of constant cuts. The time is
that of lean over plain, the median over steps that alternate in one process. `replays_over_plain` is the time of the
replayed ops alone over that of a plain step: a ledger that keeps as little cannot take less than 1 plus that. Under
bfloat16 autocast matmuls are computed in float32 and rounded (`tests/zoo/bfloat16.py`), because most CPUs have no
bfloat16 units; these rows have bytes and bitwise equality, but no times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import leangrad
from benchmarks.environment import write_rows
from leangrad import floor
from leangrad.ledger.values.rebuild.inplace_variants import IN_PLACE
from leangrad.ledger.values.value import Value
from tests.zoo import CASES, Case, FastBFloat16, case

ROUNDS = 7
DEPTHS = (0, 1, 2, 3, 4, 8)  # values of `residual_depth` to compare with the cut that lean chooses itself


def measure_case(found: Case, *, bfloat16: bool) -> dict[str, Any]:
    """Measure one model; return the row."""
    torch.manual_seed(0)
    batch = found.batch()
    plain_model, lean_model = _make(found), _make(found)
    ledger = leangrad.saving()

    def step(model: nn.Module, region: Any) -> Tensor:
        with ExitStack() as stack:
            if region is not None:
                stack.enter_context(region)
            if bfloat16:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            return found.step(model, batch)

    def plain() -> None:
        step(plain_model, None).backward()

    def lean() -> None:
        step(lean_model, ledger).backward()

    with ExitStack() as stack:
        if bfloat16:
            stack.enter_context(FastBFloat16())
        least = floor(_make(found), batch, found.loss, autocast=torch.bfloat16 if bfloat16 else None).bytes
        same = all(_same(plain_model, plain, lean_model, lean, seed) for seed in range(3))
        before, after = leangrad.measure(plain, timed_runs=0), leangrad.measure(lean, timed_runs=0)
        row = {
            "case": found.name,
            "dtype": "bfloat16 autocast" if bfloat16 else "float32",
            "bitwise": same,
            "floor_bytes": least,
            "plain_kept_bytes": before.kept_bytes,
            "lean_kept_bytes": after.kept_bytes,
            "plain_peak_bytes": before.peak_bytes,
            "lean_peak_bytes": after.peak_bytes,
            "kept_over_floor": after.kept_bytes / least,
            "peak_over_plain": after.peak_bytes / before.peak_bytes,
        }
        if not bfloat16:
            depths = [_peak_at(depth, lambda region: step(lean_model, region)) for depth in DEPTHS]
            row["peak_over_best_depth"] = after.peak_bytes / min(depths)
            row["time_over_plain"] = time_ratio(plain, lean)
            row["replays_over_plain"] = replay_ratio(plain, lean)
    return row


def _peak_at(depth: int, step: Callable[[Any], Tensor]) -> int:
    """Return the peak of a step in which all residual chains are cut at the depth ``depth``."""
    ledger = leangrad.saving(residual_depth=depth)
    step(ledger).backward()
    return leangrad.measure(lambda: step(ledger).backward(), timed_runs=0).peak_bytes


def _make(found: Case) -> nn.Module:
    torch.manual_seed(0)
    return found.make()


def _same(a: nn.Module, step_a: Callable[[], None], b: nn.Module, step_b: Callable[[], None], seed: int) -> bool:
    for model, step in ((a, step_a), (b, step_b)):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        step()
    mine = [*(p.grad for p in a.parameters()), *a.buffers()]
    other = [*(p.grad for p in b.parameters()), *b.buffers()]
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(mine, other, strict=True))


def time_ratio(plain: Callable[[], None], lean: Callable[[], None]) -> float:
    """Return the time of a lean step over that of a plain one: the median over rounds of one step each."""
    ratios = []
    for _ in range(ROUNDS):
        start = time.process_time()
        plain()
        middle = time.process_time()
        lean()
        ratios.append((time.process_time() - middle) / (middle - start))
    return statistics.median(ratios)


class _Timed:
    """A recipe's function that adds its time to ``spent``, in seconds over all instances; equal to the function."""

    spent = 0.0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = self.function(*args, **kwargs)
        _Timed.spent += time.process_time() - start
        return result

    def __eq__(self, other: object) -> bool:
        return self.function == getattr(other, "function", other)

    def __hash__(self) -> int:
        return hash(self.function)


def replay_ratio(plain: Callable[[], None], lean: Callable[[], None]) -> float:
    """Return the time of the functions that recipes call over that of a plain step: the median over rounds."""
    rebuild, in_place = Value._rebuild, dict(IN_PLACE)

    def timed(self: Value, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        if self.function is not None and type(self.function) is not _Timed:
            self.function = _Timed(self.function)
        return rebuild(self, made, task)

    ratios = []
    try:
        Value._rebuild = timed  # type: ignore[method-assign]
        IN_PLACE.update({k: _Timed(f) for k, f in in_place.items()})
        for _ in range(ROUNDS):
            start = time.process_time()
            plain()
            spent = time.process_time() - start
            _Timed.spent = 0.0
            lean()
            ratios.append(_Timed.spent / spent)
    finally:
        Value._rebuild = rebuild  # type: ignore[method-assign]
        IN_PLACE.update(in_place)
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", default=[c.name for c in CASES])
    parser.add_argument("--float32-only", action="store_true")
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.case:
        for bfloat16 in (False,) if arguments.float32_only else (False, True):
            row = measure_case(case(name), bfloat16=bfloat16)
            rows.append(row)
            ratio = f"{row['time_over_plain']:.3f}" if "time_over_plain" in row else "  -  "
            print(
                f"{row['case']:<16} {row['dtype']:<18} bitwise {row['bitwise']!s:<5} "
                f"kept {row['lean_kept_bytes'] / 1e6:7.2f} MB = {row['kept_over_floor']:.3f} x floor, "
                f"peak {row['peak_over_plain']:.3f} x plain, time {ratio} x plain",
                flush=True,
            )
    above = [row["case"] for row in rows if row.get("peak_over_best_depth", 0.0) > 1.0]
    print(f"peak above that of the best constant depth: {', '.join(above) or 'none'}")
    times = [row["time_over_plain"] for row in rows if "time_over_plain" in row]
    if times:
        bound = statistics.median(1 + row["replays_over_plain"] for row in rows if "time_over_plain" in row)
        print(f"median time {statistics.median(times):.3f} x plain; plain and the replayed ops alone {bound:.3f}")
    if arguments.write:
        write_rows(arguments.write, "cpu", rows)


if __name__ == "__main__":
    main()
