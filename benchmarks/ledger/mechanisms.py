"""The time of a step without each of the mechanisms that the ledger has for speed, in one process.

(Two of them save memory too: casts and in place.)

    OMP_NUM_THREADS=1 python -m benchmarks.ledger.mechanisms --write mechanisms_cpu
    python -m benchmarks.ledger.mechanisms --device cuda --write mechanisms_h200

A row is one lean model and one mechanism; steps with it and without it alternate. Ratios are without / with, the median
over the rounds: host time by `time.process_time`, wall time including the wait for the device, on a GPU also the time
of the kernels; and the peak. The list has the lines of source, with comments, that each mechanism consists of.

trace       hooks are set only around the calls that save what is rebuilt (`learn/trace.py`, 400 lines)
unwatched   the function mode is not set where no call needs it (`learn/unwatched.py` and in `region.py`, 210 lines; the
            proof that makes it safe, `observe/proof`, 2,000)
kernels     chains of recipes run as one Triton kernel (`ledger/fuse`, 1,600 lines; `kernels/pointwise.py`, 300)
patterns    a known chain is recognized without being collected again (`fuse/pattern.py`, `fuse/matcher.py`, 240 lines)
launch      kernels are started without Triton's inspection of every argument (`kernels/launch.py`, 130 lines)
collector   Python's garbage collector is paused while a region is open (`gc_pause.py`, 26 lines)
casts       a parameter's cast is saved without a walk and a `Value` (`values/cast.py` and `Decider._cast`, 110 lines)
in place    a replayed op writes into an input that only it uses (`values/rebuild/inplace_variants.py`, 59 lines)
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks.environment import WARM_UP, write_rows
from benchmarks.ledger.versions import GPU, TIMM, ZOO, _gpu_step, _zoo_step
from leangrad.kernels import launch
from leangrad.ledger.decision import Decider
from leangrad.ledger.fuse import fused
from leangrad.ledger.gc_pause import GcPause
from leangrad.ledger.learn.early_end import EarlyEnds
from leangrad.ledger.ledger import Ledger
from leangrad.ledger.values.rebuild.inplace_variants import IN_PLACE
from leangrad.ledger.values.rebuild.replays import replayers

SECONDS = 0.3  # duration of the timed steps with or without a mechanism in one round; at least one step


def _without_trace() -> AbstractContextManager[Any]:
    return patch.object(Ledger, "trace", property(lambda self: None, lambda self, trace: None), create=True)


@contextmanager
def _without_patterns() -> Iterator[None]:
    with patch.object(fused, "_store_pattern", lambda *_: None), patch.dict(fused._patterns, clear=True):
        yield


def _without_collector() -> AbstractContextManager[Any]:
    return patch.object(GcPause, "__init__", lambda self: setattr(self, "_is_on", False))


def _without_unwatched() -> AbstractContextManager[Any]:
    allowed = EarlyEnds.allowed

    def watched(self: EarlyEnds, handover: Any, border: Any, batch: Any) -> Any:
        return allowed(self, None, border, batch)

    return patch.object(EarlyEnds, "allowed", watched)


OUT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "trace": _without_trace,
    "unwatched": _without_unwatched,
    "kernels": lambda: patch.dict(replayers, clear=True),  # for all threads: backward runs in its own thread
    "patterns": _without_patterns,
    "launch": lambda: patch.object(launch, "stream_for", lambda device: None),
    "collector": _without_collector,
    "casts": lambda: patch.object(Decider, "_cast", lambda *_: None),
    "in place": lambda: patch.dict(IN_PLACE, clear=True),
}
ON_A_GPU_ONLY = ("kernels", "patterns", "launch")


def rows_of(case: str, device: str, rounds: int, mechanisms: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row of one model for each mechanism."""
    step, wait, peak = _gpu_step(case) if device == "cuda" else _zoo_step(case)
    for _ in range(WARM_UP):
        step()
    wait()
    began = time.perf_counter()
    step()
    wait()
    steps = max(1, int(SECONDS / (time.perf_counter() - began)))
    with_all = peak()
    for name in mechanisms:
        turns: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for n in range(rounds):
            for is_out in (True, False) if n % 2 else (False, True):
                with OUT[name]() if is_out else patch.dict({}):
                    turns[is_out].append(_turn(step, wait, steps, device))
        row: dict[str, Any] = {"case": case, "without": name, "rounds": rounds, "steps": steps}
        for what in turns[True][0]:
            pairs = zip(turns[True], turns[False], strict=True)
            row[f"{what}_ratio"] = round(statistics.median(out[what] / all_[what] for out, all_ in pairs), 4)
            row[f"{what}_ms"] = round(1e3 * statistics.median(turn[what] for turn in turns[False]), 3)
        with OUT[name]():
            step()
            row["peak_ratio"] = round(peak() / with_all, 4)
        yield row


def _turn(step: Callable[[], None], wait: Callable[[], None], steps: int, device: str) -> dict[str, float]:
    step()  # untimed: the mechanism fills its caches again
    wait()
    gc.collect()
    host, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    host = (time.process_time() - host) / steps
    wait()
    turn = {"host": host, "wall": (time.perf_counter() - wall) / steps}
    if device == "cuda":
        from benchmarks.models import kernels

        turn["kernels"] = kernels(step) / 1e3
    return turn


def main() -> None:
    """Measure models without each mechanism and print a row for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger.mechanisms", description=main.__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="of tests/zoo; on cuda of benchmarks/models or timm")
    parser.add_argument("--without", nargs="+", choices=list(OUT), help="some of the mechanisms only")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--write", metavar="NAME", help="write the rows to benchmarks/results")
    chosen = parser.parse_args()
    on_gpu = chosen.device == "cuda"
    names = [name for name in chosen.without or OUT if on_gpu or name not in ON_A_GPU_ONLY]
    rows: list[dict[str, Any]] = []
    for case in chosen.case or ((*GPU, *TIMM) if on_gpu else ZOO):
        for row in rows_of(case, chosen.device, chosen.rounds, names):
            rows.append(row)
            print(json.dumps(row), flush=True)
        if chosen.write:
            write_rows(chosen.write, chosen.device, rows)


if __name__ == "__main__":
    main()
