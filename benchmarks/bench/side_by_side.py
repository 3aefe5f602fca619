"""Compare leangrad with its alternatives on the same models, each way in its own process.

    make bench                                                                # the CPU set, as the next line
    OMP_NUM_THREADS=1 python -m benchmarks --workers 2 --write side_by_side_cpu
    OMP_NUM_THREADS=1 python -m benchmarks --device cuda --workers 5 --write side_by_side_h200     # full shapes
    python -m benchmarks --readme                                              # README's table and pictures, from rows

A row is one way on one model, measured by `leangrad.bench`: its peak above the memory allocated before a step, its kept
bytes over the floor, its time over plain in the same process, the largest difference of a gradient from plain, and for
the models of LARGEST, the largest batch that fits into the memory that plain uses for its batch. Rows with an
`axis` show how the peak grows when a GPT has more layers, is wider, or has longer or more sequences. On a CPU only the
models of COMPILED are compiled, which takes about a minute each. On a GPU one process at a time runs steps, on
processors reserved for it, while others build their models or compile.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from benchmarks.bench.cases import FULL, PLAIN_DTYPE, SHAPES, SMALL, UNROLLED
from benchmarks.environment import RESULTS, commit
from leangrad.bench import WAYS, Bench, Row, bench

TARGET = "benchmarks.bench.cases:make"
COMPILED = ("gpt2_medium", "resnet50")
LARGEST = ("gpt2_medium", "resnet50")
AXES = {"layers": "depth", "width": "width", "length": "length", "batch": "batch"}
FACTORS = (2, 4)
SCALED = ("checkpoint", "lean")  # beside plain
EAGER = tuple(name for name, choice in WAYS.items() if not choice.compiles)
Known = dict[str, dict[str, Any]]  # rows of one model that were measured before, by their ways
_FIELDS = {one.name for one in fields(Row)}
TURNS: dict[str, dict[str, Any]] = {"cpu": {"rounds": 4, "steps": 2}, "cuda": {"rounds": 5, "steps": 2, "seconds": 2}}


@dataclass(frozen=True)
class Asked:
    """What to measure on each model.

    - `device`: "cpu" or "cuda".
    - `ways`: names of ways; None: all ways that `parts_of` chooses for the model.
    - `largest`: whether to search the largest batch, for the models of LARGEST.
    - `turnstile`: path of a lock file, so that one process at a time uses the GPU; "" for no lock.
    """

    device: str
    ways: list[str] | None = None
    largest: bool = True
    turnstile: str = ""

    def compiles(self, name: str) -> bool:
        """Whether the ways that compile are measured on the model ``name``."""
        return name not in UNROLLED if self.device == "cuda" else name in COMPILED


def rows_of(name: str, of: Asked, add: Callable[[list[dict[str, Any]]], object], known: Known) -> None:
    """Measure the ways in ``of.ways`` on one model, except those whose rows are `known`; pass each new row to ``add``.

    The largest batch is searched for eager ways only: the others would compile again for each size.
    """
    asked = [way for way in of.ways or [] if way not in known]
    dtype = "bfloat16" if of.device == "cuda" and name not in PLAIN_DTYPE else ""
    settings: dict[str, Any] = {"autocast": dtype, "turnstile": of.turnstile, **TURNS[of.device]}
    settings["budget"] = _known_budget(known)
    if of.device == "cuda" and name in UNROLLED:
        settings |= {"rounds": 2, "steps": 1}  # a step takes seconds, during which other processes wait
    options = {"name": name, "device": of.device}
    fitting = [way for way in asked if way in EAGER] if of.largest and name in LARGEST else []
    rest = [way for way in asked if way not in fitting]
    added = set(known)  # plain may run again, without the largest batch; its second row is not added

    def found(so_far: Bench) -> None:
        """Add the row of the last way; that of plain only once."""
        row = so_far.as_rows()[-1] | {"machine": so_far.machine}
        if row["way"] not in added:
            added.add(row["way"])
            add([row])

    if "plain" in known:
        settings["plain"] = Row(**{k: v for k, v in known["plain"].items() if k in _FIELDS})
    if fitting:
        bench(TARGET, fitting, name=name, options=options, memory=0, found=found, **settings)
    if rest:
        bench(TARGET, rest, name=name, options=options, found=found, **settings)


def _known_budget(known: Known) -> int | None:
    """Return the budget that `bench` would use if it ran the known ways again; None if `bench` has to find it.

    See `budget` of `leangrad.bench.bench`: the peak of the checkpoint, or 0.8 of lean's.
    """
    if "checkpoint" not in known:
        return None
    lean = known.get("lean", {}).get("peak_bytes")
    return known["checkpoint"].get("peak_bytes") or (int(0.8 * lean) if lean else None)


def parts_of(name: str, of: Asked) -> list[Asked]:
    """Split what to measure on a model into parts; on a GPU plain is first, and the others run after it, in parallel.

    On a CPU there is one part.
    """
    asked = of.ways or [way for way in WAYS if of.compiles(name) or not WAYS[way].compiles]
    if of.device == "cpu":
        return [replace(of, ways=asked)]
    eager = [way for way in asked if way in EAGER and way != "plain"]
    compiled = [[way] for way in asked if way not in EAGER]
    return [replace(of, ways=ways) for ways in (["plain"], *compiled[:1], eager, *compiled[1:]) if ways]


def scaling() -> list[tuple[str, int, dict[str, int]]]:
    """Return the shapes that show how the peak grows, each with its axis and factor; the base shape is first."""
    shapes = [("base", 1, dict(SHAPES))]
    for name, axis in AXES.items():
        shapes += [(axis, factor, {**SHAPES, name: factor * SHAPES[name]}) for factor in FACTORS]
    return shapes


def scaled_rows(axis: str, factor: int, shape: dict[str, int], add: Callable[[list[dict[str, Any]]], object]) -> None:
    """Measure the peaks of a GPT of one shape, plain and in the ways of SCALED, and pass the rows to ``add``."""
    options = {"name": "gpt2_medium", **shape}
    found = bench(TARGET, SCALED, name="gpt2_medium", options=options, rounds=0)
    add([{"axis": axis, "factor": factor, **shape, **row, "machine": found.machine} for row in found.as_rows()])


class Rows:
    """The rows measured so far; written to a file after each way.

    write: the name of the results file; "" writes nothing.
    order: the names of the models, in the order of the file.
    keep: keep the rows of earlier runs that are in the file.
    """

    def __init__(self, write: str, order: list[str], keep: bool) -> None:
        self.write, self.order, self.lock = write, order, Lock()
        self.found: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.machine: dict[str, Any] = {}
        self.added: set[tuple[str, str]] = set()  # (model, way) pairs that this run has measured
        if keep and (RESULTS / f"{write}.json").exists():
            content = json.loads((RESULTS / f"{write}.json").read_text())
            self._put([{"commit": content["commit"], **row} for row in content["rows"]])

    def known_of(self, name: str) -> Known:
        """Return the rows of a model that did not fail, by their ways."""
        rows = [row for row in self.found.values() if "axis" not in row and row["case"] == name]
        return {row["way"]: row for row in rows if row["outcome"] != "failed"}

    def plain_of_this_run(self, name: str) -> Known:
        """Return the row of plain for a model if this run measured it, so that it is not measured again; else {}."""
        plain = self.known_of(name).get("plain")
        return {} if plain is None or (name, "plain") not in self.added else {"plain": plain}

    def has_axis(self, axis: str, factor: int) -> bool:
        """Whether there is a row for plain and for each way of SCALED for this shape."""
        ways = {row["way"] for row in self.found.values() if (row.get("axis"), row.get("factor")) == (axis, factor)}
        return ways == {"plain", *SCALED}

    def _put(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.found[row.get("axis"), row.get("factor"), row["case"], row["way"]] = row

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Add and print these rows, and write all rows."""
        with self.lock:
            for row in rows:
                self.machine = row.pop("machine") or self.machine
                row["commit"] = commit()
                print(json.dumps(row), flush=True)
            self._put(rows)
            self.added.update((row["case"], row["way"]) for row in rows if "axis" not in row)
            if self.write:
                self.save()

    def save(self) -> None:
        """Write all rows, in the order of the models."""
        ways = list(WAYS)
        rows = sorted(
            self.found.values(),
            key=lambda row: ("axis" in row, self.order.index(row["case"]), ways.index(row["way"])),
        )
        content = {**self.machine, "commit": commit(), "rows": rows}
        (RESULTS / f"{self.write}.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Measure all ways on all models, and print a row for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="some of the models")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="some of the ways, beside plain")
    parser.add_argument("--no-scaling", action="store_true", help="leave out how the peak grows")
    parser.add_argument("--no-largest", action="store_true", help="leave out the search for the largest batch")
    parser.add_argument("--workers", type=int, default=1, help="models that are at work at the same time")
    parser.add_argument("--write", default="", metavar="NAME", help="write the rows to benchmarks/results")
    parser.add_argument(
        "--keep", action="store_true", help="with --write: keep rows of earlier runs that are not run again"
    )
    parser.add_argument("--resume", action="store_true", help="as --keep, and what has a row is not run again")
    parser.add_argument("--scaling", action="store_true", help="also with --case: how the peak grows")
    parser.add_argument("--readme", action="store_true", help="write README's table and the pictures, and nothing else")
    chosen = parser.parse_args()
    if chosen.readme:
        from benchmarks.bench.readme import write_all

        write_all()
        return
    known = FULL if chosen.device == "cuda" else SMALL
    names = chosen.case or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no model {unknown[0]!r}; there are {', '.join(known)}")
    if chosen.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that steps are timed by CPU time, which is less noisy
    if (chosen.keep or chosen.resume) and not chosen.write:
        parser.error("--keep and --resume need --write NAME: the rows of which earlier run?")
    rows = Rows(chosen.write, list(known), chosen.keep or chosen.resume)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.workers) as pool:
        turnstile = f"{folder}/turnstile" if chosen.device == "cuda" else ""
        asked = Asked(chosen.device, chosen.ways, not chosen.no_largest, turnstile)
        before = {name: rows.known_of(name) if chosen.resume else {} for name in names}

        def measure(name: str, first: Asked, *others: Asked) -> None:
            rows_of(name, first, rows.add, rows.plain_of_this_run(name) | before[name])
            if others and "plain" in rows.known_of(name):  # plain did not fail
                jobs.extend(pool.submit(measure, name, part) for part in others)

        jobs: list[Future[None]] = []
        jobs += [pool.submit(measure, name, *parts_of(name, asked)) for name in names]
        if chosen.device == "cpu" and (chosen.scaling or not (chosen.no_scaling or chosen.case)):
            shapes = [one for one in scaling() if not (chosen.resume and rows.has_axis(*one[:2]))]
            jobs += [pool.submit(scaled_rows, *one, rows.add) for one in shapes]
        for job in jobs:  # includes jobs that are appended during the loop
            job.result()
