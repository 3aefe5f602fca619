"""Run all ways on one model, each in its own process, so that a crash or a hang affects one row only."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from leangrad.bench.job import Job, Row
from leangrad.bench.result import Bench
from leangrad.bench.ways import WAYS, find

__all__ = ["bench", "run_job"]

Progress = Callable[[str, int, int], object]  # called with the current way, the number of finished ways, and of all


def bench(
    target: str,
    ways: Sequence[str] | None = None,
    *,
    name: str = "",
    options: dict[str, Any] | None = None,
    autocast: str = "",
    rounds: int = 5,
    steps: int = 2,
    seconds: float = 120.0,
    turnstile: str = "",
    budget: int | None = None,
    memory: int | None = None,
    plain: Row | None = None,
    timeout: float = 900,
    whole_traceback: bool = False,
    progress: Progress = lambda *_: None,
    found: Callable[[Bench], object] = lambda _: None,
) -> Bench:
    """Measure each way to train a model in its own process.

    Args:
        target: MODULE:FACTORY, a file or a module and a function in it that returns (model, batch) or (model, batch,
            loss). It is called in every process; the generators of torch, Python and NumPy are seeded before the call.
        ways: names in `WAYS`; plain is always added. None: all ways, on a CPU without those that compile, which takes
            a minute or more there.
        name: the name of the model in the table; ``target`` if it is empty.
        options: keyword arguments of the factory.
        autocast: "bfloat16" or "float16"; "" for no autocast.
        rounds, steps: the number of timing rounds, and the timed steps that plain and the way each run in a round.
        seconds: a way begins no further round after this many seconds of timing, but runs at least two of them.
        turnstile: path of a lock file, the same for all calls that use one device at the same time, so that one process
            at a time uses it; "" for no lock.
        budget: the budget of ``lean_budget``: the allowed peak in bytes above the memory allocated before. None: the
            peak of the checkpoint around each block, which is what most people would use; or 0.8 of lean's peak, if
            the checkpoint has none.
        memory: also search the largest batch of each way that fits into this many bytes, counted as `leangrad fit`
            counts them: on a GPU with the model and the batch. 0: as many bytes as plain uses for the given batch.
        plain: the row of plain, if it was measured before; plain is not run again.
        timeout: the seconds after which the process of a way is killed.
        whole_traceback: report an error with all frames, those of torch and leangrad included.
        progress: called with the name of the way that runs next, the number of finished ways, and the number of all
            ways; with "done" at the end.
        found: called after each way that has a row, with all rows so far.

    Raises:
        ValueError: a name in ``ways`` is not in `WAYS`.
    """
    chosen = find(["plain", *(WAYS if ways is None else ways)])
    job = Job(
        target,
        "plain",
        options or {},
        autocast,
        rounds,
        steps,
        seconds,
        turnstile,
        others=tuple(choice.name for choice in chosen[1:]),
        floor=True,
        whole_traceback=whole_traceback,
    )
    rows: list[Row] = [] if plain is None else [plain]
    unfit: dict[str, str] = {}  # the reason for each way that does not apply to this model, by the way's name
    notes: list[str] = []
    for n, choice in enumerate(chosen):
        if n == 0 and plain is not None:
            continue
        progress(choice.name, n, len(chosen))
        if n and ways is None and choice.compiles and _is_cpu(rows[0]):
            notes.append(
                f"{choice.name} was left out: to compile for a CPU takes minutes; --ways {choice.name} runs it"
            )
            continue
        if why := unfit.get(choice.name):
            rows.append(Row(choice.name, "not for this", note=why))
            found(Bench(name or target, tuple(rows)))
            continue
        asked = replace(job, way=choice.name, floor=n == 0, others=job.others if n == 0 else ())
        if choice.name == "lean_budget":
            asked = replace(asked, budget=budget or _usual_budget(rows))
        if memory is not None and (n > 0 or memory > 0):
            asked = replace(asked, memory=memory or (rows[0].peak_bytes or 0) + (rows[0].standing_bytes or 0))
        row = run_job(asked, timeout)
        unfit, row = unfit or row.not_for_this, replace(row, not_for_this={})
        if n == 0 and memory == 0:
            row = replace(row, largest_batch=row.rows)  # by definition: the memory is what plain uses for this batch
        rows.append(row)
        found(Bench(name or target, tuple(rows)))
        if n == 0 and row.outcome == "failed":
            break  # nothing to compare with; the error comes from the user's code
    progress("done", len(chosen), len(chosen))
    return Bench(name or target, tuple(rows), tuple(notes))


def _is_cpu(row: Row) -> bool:
    return str(row.machine.get("hardware", "")).endswith("CPU")


def _usual_budget(rows: list[Row]) -> int | None:
    """Return the default budget: the peak of the checkpoint, or else 0.8 of lean's peak; None if both are unknown."""
    peaks = {row.way: row.peak_bytes for row in rows if row.peak_bytes}
    if "checkpoint" in peaks:
        return peaks["checkpoint"]
    return int(0.8 * peaks["lean"]) if "lean" in peaks else None


def run_job(job: Job, timeout: float) -> Row:
    """Run one way in its own process and return its row; if the process fails, the row says how."""
    with tempfile.TemporaryDirectory(prefix="leangrad_bench_") as folder:
        answer, output = Path(folder) / "answer.json", Path(folder) / "output.txt"
        with output.open("wb") as written:
            process = subprocess.Popen(
                [sys.executable, "-m", "leangrad.bench.worker", str(answer)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that compiler processes that it starts can be killed with it
            )
            try:
                process.communicate(job.to_json().encode(), timeout)
            except subprocess.TimeoutExpired:
                return Row(job.way, "failed", note=f"took longer than {timeout:g} s, and was ended")
            finally:
                _end(process)
        if answer.exists():
            return Row(**json.loads(answer.read_text()))
        return Row(job.way, "failed", note=_epitaph(process.returncode, output.read_text(errors="replace")))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process, if it still runs, and the processes that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _epitaph(code: int, output: str) -> str:
    """Return why a process wrote no answer, from its exit code and the last line of its output."""
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    said = f": {last}" if last else ""
    if code < 0:
        name = signal.Signals(-code).name
        maybe = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{maybe}{said}"
    return f"its process ended with exit code {code}{said}"
