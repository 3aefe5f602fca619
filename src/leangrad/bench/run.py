"""All ways on one model, each in a process of its own; a process that crashes or hangs costs its own row only."""

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

Progress = Callable[[str, int, int], object]  # what is going on, how many ways are done, and how many there are


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
    """Measure each way to train a model in a process of its own.

    Args:
        target: MODULE:FACTORY, a file or a module and a function in it that returns (model, batch) or (model, batch,
            loss). It is called in every process, with torch's, Python's and NumPy's generators seeded.
        ways: names in `WAYS`; plain is always among them. None: all, but on a CPU those that compile, which takes a
            minute or more there.
        name: what the table calls the model.
        options: what the factory is called with.
        autocast: "bfloat16" or "float16".
        rounds, steps: plain and the way take so many turns of so many timed steps.
        seconds: of timed turns after which a way begins no further one; it takes two all the same.
        turnstile: a file that all calls name which run at the same time with the same device, so that one process at a
            time uses it.
        budget: the peak that lean with a budget may take, in bytes above what stands before a step. None: the peak of
            the checkpoint around each block, which is what most people would use; or 0.8 of lean's, if there is none.
        memory: also search the largest batch of each way in so many bytes, which count what `leangrad fit` counts: on a
            GPU the model and the batch too. 0: in as many as plain takes for the batch that was given.
        plain: its row, where it was measured before: it is not run again.
        timeout: seconds that a way may take.
        whole_traceback: of an error in the user's code, with the frames of torch and leangrad.
        progress: called with what is going on, how many ways are done, and how many there are.
        found: called after each way, with all rows so far.

    Raises:
        ValueError: a name is none of a way.
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
    unfit: dict[str, str] = {}  # ways that are none for this model, and why
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
            row = replace(row, largest_batch=row.rows)  # by definition
        rows.append(row)
        found(Bench(name or target, tuple(rows)))
        if n == 0 and row.outcome == "failed":
            break  # nothing to compare with; the error is the user's
    progress("done", len(chosen), len(chosen))
    return Bench(name or target, tuple(rows), tuple(notes))


def _is_cpu(row: Row) -> bool:
    return str(row.machine.get("hardware", "")).endswith("CPU")


def _usual_budget(rows: list[Row]) -> int | None:
    """What a budget is compared at: the checkpoint's peak; or below lean's, if there is none."""
    peaks = {row.way: row.peak_bytes for row in rows if row.peak_bytes}
    if "checkpoint" in peaks:
        return peaks["checkpoint"]
    return int(0.8 * peaks["lean"]) if "lean" in peaks else None


def run_job(job: Job, timeout: float) -> Row:
    """One way in a process of its own; what becomes of that process is told in the row."""
    with tempfile.TemporaryDirectory(prefix="leangrad_bench_") as folder:
        answer, output = Path(folder) / "answer.json", Path(folder) / "output.txt"
        with output.open("wb") as written:
            process = subprocess.Popen(
                [sys.executable, "-m", "leangrad.bench.worker", str(answer)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # with the processes that it may start to compile
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
    """End what is left of a process and of those that it has started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _epitaph(code: int, output: str) -> str:
    """Why a process has left no answer, as far as can be told."""
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    said = f": {last}" if last else ""
    if code < 0:
        name = signal.Signals(-code).name
        maybe = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{maybe}{said}"
    return f"its process ended with exit code {code}{said}"
