"""leangrad and what a user would pick instead, on the same work, each in a process of its own.

    make bench                                                                # the CPU set, as the next line
    OMP_NUM_THREADS=1 python -m benchmarks --workers 2 --write side_by_side_cpu
    OMP_NUM_THREADS=1 python -m benchmarks --device cuda --workers 5 --write side_by_side_h200     # full shapes
    python -m benchmarks --readme                                              # README's table and pictures, from rows

A row is one way on one model (`leangrad.bench`, which says what is measured and how): its peak above what stands before
a step, what it keeps over the floor, its time over plain's in the same process, its largest difference of a gradient
from plain's, and, for the models of LARGEST, the largest batch in the memory that plain takes for its own. Rows with an
`axis` tell how the peak grows when a GPT has more layers, is wider, or has longer or more sequences. On a CPU only the
models of COMPILED are compiled, which takes about a minute each. On a GPU one process at a time runs steps, with
processors of its own, and several prepare theirs or compile meanwhile.
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

from benchmarks.cases import FULL, PLAIN_DTYPE, SHAPES, SMALL, UNROLLED
from benchmarks.environment import RESULTS, commit
from leangrad.bench import WAYS, Bench, Row, bench

TARGET = "benchmarks.cases:make"
COMPILED = ("gpt2_medium", "resnet50")
LARGEST = ("gpt2_medium", "resnet50")
AXES = {"layers": "depth", "width": "width", "length": "length", "batch": "batch"}
FACTORS = (2, 4)
SCALED = ("checkpoint", "lean")  # beside plain
EAGER = tuple(name for name, choice in WAYS.items() if not choice.compiles)
Known = dict[str, dict[str, Any]]  # rows that are there already, by their ways
_FIELDS = {one.name for one in fields(Row)}
TURNS: dict[str, dict[str, Any]] = {"cpu": {"rounds": 4, "steps": 2}, "cuda": {"rounds": 5, "steps": 2, "seconds": 2}}


@dataclass(frozen=True)
class Asked:
    """What is measured on each model.

    - `ways`: some of them; None: all that `parts_of` a model are for it.
    - `largest`: whether the largest batch is searched, for the models of LARGEST.
    - `turnstile`: a file, by which one process at a time has the GPU.
    """

    device: str
    ways: list[str] | None = None
    largest: bool = True
    turnstile: str = ""

    def compiles(self, name: str) -> bool:
        """Whether a model is compiled too."""
        return name not in UNROLLED if self.device == "cuda" else name in COMPILED


def rows_of(name: str, of: Asked, add: Callable[[list[dict[str, Any]]], object], known: Known) -> None:
    """All ways on one model but those whose rows are `known`.

    The largest batch is searched without those that compile anew for each size.
    """
    asked = [way for way in of.ways or [] if way not in known]
    dtype = "bfloat16" if of.device == "cuda" and name not in PLAIN_DTYPE else ""
    settings: dict[str, Any] = {"autocast": dtype, "turnstile": of.turnstile, **TURNS[of.device]}
    settings["budget"] = _known_budget(known)
    if of.device == "cuda" and name in UNROLLED:
        settings |= {"rounds": 2, "steps": 1}  # a step takes seconds, and the others wait for it
    options = {"name": name, "device": of.device}
    fitting = [way for way in asked if way in EAGER] if of.largest and name in LARGEST else []
    rest = [way for way in asked if way not in fitting]
    added = set(known)  # plain may run all the same, and its row then lacks the largest batch

    def found(so_far: Bench) -> None:
        """Add the row of the last way; plain's but once."""
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
    """What `bench` would compare a budget at, if it ran the ways that are known again; None: it will find out."""
    if "checkpoint" not in known:
        return None
    lean = known.get("lean", {}).get("peak_bytes")
    return known["checkpoint"].get("peak_bytes") or (int(0.8 * lean) if lean else None)


def parts_of(name: str, of: Asked) -> list[Asked]:
    """What runs one after the other; on a GPU plain is first, and the other parts run at the same time after it."""
    asked = of.ways or [way for way in WAYS if of.compiles(name) or not WAYS[way].compiles]
    if of.device == "cpu":
        return [replace(of, ways=asked)]
    eager = [way for way in asked if way in EAGER and way != "plain"]
    compiled = [[way] for way in asked if way not in EAGER]
    return [replace(of, ways=ways) for ways in (["plain"], *compiled[:1], eager, *compiled[1:]) if ways]


def scaling() -> list[tuple[str, int, dict[str, int]]]:
    """Each axis and factor, and the shape; the base comes first."""
    shapes = [("base", 1, dict(SHAPES))]
    for name, axis in AXES.items():
        shapes += [(axis, factor, {**SHAPES, name: factor * SHAPES[name]}) for factor in FACTORS]
    return shapes


def scaled_rows(axis: str, factor: int, shape: dict[str, int], add: Callable[[list[dict[str, Any]]], object]) -> None:
    """The peaks of a GPT of one shape."""
    options = {"name": "gpt2_medium", **shape}
    found = bench(TARGET, SCALED, name="gpt2_medium", options=options, rounds=0)
    add([{"axis": axis, "factor": factor, **shape, **row, "machine": found.machine} for row in found.as_rows()])


class Rows:
    """What has been measured so far; written after each way. `keep`: beside the rows of earlier runs."""

    def __init__(self, write: str, order: list[str], keep: bool) -> None:
        self.write, self.order, self.lock = write, order, Lock()
        self.found: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.machine: dict[str, Any] = {}
        self.added: set[tuple[str, str]] = set()  # models and ways of this run
        if keep and (RESULTS / f"{write}.json").exists():
            content = json.loads((RESULTS / f"{write}.json").read_text())
            self._put([{"commit": content["commit"], **row} for row in content["rows"]])

    def known_of(self, name: str) -> Known:
        """The rows of this model that are there, by their ways."""
        rows = [row for row in self.found.values() if "axis" not in row and row["case"] == name]
        return {row["way"]: row for row in rows if row["outcome"] != "failed"}

    def plain_of_this_run(self, name: str) -> Known:
        """Plain's row of this model, if it was measured just now: no part of the run measures it again."""
        plain = self.known_of(name).get("plain")
        return {} if plain is None or (name, "plain") not in self.added else {"plain": plain}

    def has_axis(self, axis: str, factor: int) -> bool:
        """Whether the rows of this shape are there."""
        ways = {row["way"] for row in self.found.values() if (row.get("axis"), row.get("factor")) == (axis, factor)}
        return ways == {"plain", *SCALED}

    def _put(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.found[row.get("axis"), row.get("factor"), row["case"], row["way"]] = row

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Print the rows, and write all there are."""
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
        """Write what there is, in the order of the models."""
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
        from benchmarks.readme import write_all

        write_all()
        return
    known = FULL if chosen.device == "cuda" else SMALL
    names = chosen.case or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no model {unknown[0]!r}; there are {', '.join(known)}")
    if chosen.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread has a clock that other programs do not change
    if (chosen.keep or chosen.resume) and not chosen.write:
        parser.error("--keep and --resume need --write NAME: the rows of which earlier run?")
    rows = Rows(chosen.write, list(known), chosen.keep or chosen.resume)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.workers) as pool:
        turnstile = f"{folder}/turnstile" if chosen.device == "cuda" else ""
        asked = Asked(chosen.device, chosen.ways, not chosen.no_largest, turnstile)
        before = {name: rows.known_of(name) if chosen.resume else {} for name in names}

        def measure(name: str, first: Asked, *others: Asked) -> None:
            rows_of(name, first, rows.add, rows.plain_of_this_run(name) | before[name])
            if others and "plain" in rows.known_of(name):  # it ran
                jobs.extend(pool.submit(measure, name, part) for part in others)

        jobs: list[Future[None]] = []
        jobs += [pool.submit(measure, name, *parts_of(name, asked)) for name in names]
        if chosen.device == "cpu" and (chosen.scaling or not (chosen.no_scaling or chosen.case)):
            shapes = [one for one in scaling() if not (chosen.resume and rows.has_axis(*one[:2]))]
            jobs += [pool.submit(scaled_rows, *one, rows.add) for one in shapes]
        for job in jobs:  # those that are added meanwhile too
            job.result()
