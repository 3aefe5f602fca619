"""All ways, each in its process: which jobs are run, what becomes of a process, and how rows are shown."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import leangrad
from leangrad.bench import WAYS, Bench, Job, Row, bench
from leangrad.bench import run as run_module
from leangrad.bench.run import run_job

FACTORIES = """
import os, signal, sys, time
import torch
from torch import nn

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def left():
    print("good", "bye")
    os._exit(3)

def slow():
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600.25")
    open("began", "w").close()
    time.sleep(600)

def fine(rows=2):
    print("a user's own words")
    return nn.Linear(8, 8), torch.randn(rows, 8)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_models.py"
    path.write_text(FACTORIES)
    return path


# Processes


def test_a_way_in_a_process_of_its_own(factories: Path) -> None:
    row = run_job(Job("my_models:fine", "plain", {"rows": 3}, rounds=0), timeout=300)
    assert (row.outcome, row.rows, row.note) == ("measured", 3, "")
    assert "my_models" not in sys.modules


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("killed", "its process was ended by SIGKILL (the system may have run out of memory)"),
        ("left", "its process ended with exit code 3: good bye"),
    ],
)
def test_a_process_that_crashes_is_a_row(factories: Path, name: str, note: str) -> None:
    assert run_job(Job(f"{factories}:{name}", "lean"), timeout=300) == Row("lean", "failed", note=note)


def test_a_process_that_takes_too_long_is_ended_with_its_children(
    factories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over when the factory has begun: a clock of the test's own says so."""
    real = subprocess.Popen.communicate

    def communicate(self: Any, given: bytes, timeout: float) -> Any:
        self.stdin.write(given)
        self.stdin.close()
        self.stdin = None
        while not (factories.parent / "began").exists():
            assert self.poll() is None
            time.sleep(0.05)
        return real(self, timeout=0.01)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    row = run_job(Job(f"{factories}:slow", "lean"), timeout=7)
    assert row == Row("lean", "failed", note="took longer than 7 s, and was ended")
    monkeypatch.undo()
    listed = subprocess.run(["ps", "axo", "stat=,args="], capture_output=True, text=True, check=True).stdout
    assert [line for line in listed.splitlines() if "sleep 600.25" in line and not line.startswith("Z")] == []


# Which jobs are run


def answers(monkeypatch: pytest.MonkeyPatch, **rows: Row) -> list[Job]:
    """Every job is answered from `rows`, or as measured; the jobs."""
    asked: list[Job] = []

    def stand_in(job: Job, timeout: float) -> Row:
        asked.append(job)
        peak = {"plain": 100, "checkpoint": 40, "lean": 60}.get(job.way, 50)
        usual = Row(
            job.way, peak_bytes=peak, kept_bytes=peak // 2, rows=8, machine={"hardware": "ARM CPU", "torch": "2"}
        )
        return rows.get(job.way, usual)

    monkeypatch.setattr(run_module, "run_job", stand_in)
    return asked


def test_plain_is_always_first_and_has_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch)
    bench("a:b", ["lean", "checkpoint"], options={"n": 1}, autocast="bfloat16", rounds=3, steps=4)
    assert [(job.way, job.floor) for job in asked] == [("plain", True), ("checkpoint", False), ("lean", False)]
    assert {(job.target, job.options["n"], job.autocast, job.rounds, job.steps) for job in asked} == {
        ("a:b", 1, "bfloat16", 3, 4)
    }


def test_plain_is_not_run_again_where_its_row_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch)
    known = Row("plain", peak_bytes=200, kept_bytes=100, floor_bytes=10)
    rows = bench("a:b", ["lean", "lean_budget", "checkpoint"], plain=known).as_rows()
    assert [job.way for job in asked] == ["checkpoint", "lean", "lean_budget"]
    assert not any(job.floor for job in asked)
    assert [row["way"] for row in rows] == ["plain", "checkpoint", "lean", "lean_budget"]
    assert [row["peak_over_plain"] for row in rows] == [1.0, 0.2, 0.3, 0.25]
    assert rows[1]["kept_over_floor"] == 2.0


def test_on_a_cpu_what_compiles_is_left_out_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch)
    found = bench("a:b")
    assert [job.way for job in asked] == [name for name, choice in WAYS.items() if not choice.compiles]
    assert sum("was left out: to compile for a CPU takes minutes" in note for note in found.notes) == 3
    asked.clear()
    assert bench("a:b", list(WAYS)).notes == ()
    assert [job.way for job in asked] == list(WAYS)
    asked = answers(monkeypatch, plain=Row("plain", machine={"hardware": "NVIDIA H200"}))
    assert bench("a:b").notes == ()
    assert [job.way for job in asked] == list(WAYS)


def test_the_budget_is_the_checkpoints_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch)
    bench("a:b", ["checkpoint", "lean_budget"])
    bench("a:b", ["lean", "lean_budget"])
    bench("a:b", ["lean_budget"])
    bench("a:b", ["checkpoint", "lean_budget"], budget=7)
    budgets = [job.budget for job in asked if job.way == "lean_budget"]
    assert budgets == [40, 48, None, 7]
    assert all(job.budget is None for job in asked if job.way != "lean_budget")
    asked = answers(monkeypatch, checkpoint=Row("checkpoint", "not for this"))
    bench("a:b", ["checkpoint", "lean", "lean_budget"])
    assert asked[-1].budget == 48


def test_the_largest_batch_in_a_memory_or_in_plains_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch)
    assert bench("a:b", ["lean"], memory=70).rows[0].largest_batch is None
    assert [job.memory for job in asked] == [70, 70]
    asked.clear()
    assert bench("a:b", ["lean"], memory=0).rows[0].largest_batch == 8
    assert [job.memory for job in asked] == [None, 100]


def test_no_process_is_started_for_a_way_that_plains_knows_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, plain=Row("plain", peak_bytes=1, not_for_this={"no_logits": "there are none"}))
    rows = bench("a:b", ["lean", "no_logits", "packed"]).rows
    assert [job.way for job in asked] == ["plain", "lean", "packed"]
    assert [job.others for job in asked] == [("lean", "no_logits", "packed"), (), ()]
    assert rows[2] == Row("no_logits", "not for this", note="there are none")
    assert rows[3].way == "packed"


def test_nothing_is_run_after_plain_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, plain=Row("plain", "failed", note="why"))
    assert [row.note for row in bench("a:b").rows] == ["why"]
    assert len(asked) == 1


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch)
    told: list[tuple[str, int, int]] = []
    bench("a:b", ["lean"], progress=lambda *said: told.append(said))
    assert told == [("plain", 0, 2), ("lean", 1, 2), ("done", 2, 2)]


def test_an_unknown_way_is_an_error() -> None:
    with pytest.raises(ValueError, match="no way called 'leen'"):
        bench("a:b", ["leen"])


# Rows as text and JSON

PLAIN = Row(
    "plain", peak_bytes=20_000, kept_bytes=16_000, floor_bytes=8_000, ratio=1.01, bitwise=True, gradient_error=0.0
)
ROWS = (
    replace(PLAIN, machine={"hardware": "ARM CPU", "torch": "2.13"}),
    Row("save_on_cpu", "not for this", note="on a CPU there is nothing to move"),
    Row("compile", "failed", note="took longer than 7 s, and was ended"),
    Row("lean", peak_bytes=10_000, kept_bytes=8_400, ratio=1.251, bitwise=True, gradient_error=0.0, first_seconds=0.25),
    Row("convert_abn", peak_bytes=9_000, kept_bytes=8_000, bitwise=False, gradient_error=2.6e-6, largest_batch=16),
)


def test_the_table_shows_every_way() -> None:
    lines = str(Bench("Net", ROWS, ("a note",))).splitlines()
    assert lines[0] == "Net, ARM CPU, torch 2.13"
    assert lines[-1] == "a note"
    cells = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[2:-1]}
    assert cells == {
        "plain": "20.00 kB 1.00 16.00 kB 2.00 1.01 same bits",
        "save_on_cpu": "not shown: on a CPU there is nothing to move",
        "compile": "took longer than 7 s, and was ended",
        "lean": "10.00 kB 0.50 8,400 B 1.05 1.25 0.2 s same bits",
        "convert_abn": "9,000 B 0.45 8,000 B 1.00 off by 3e-06 16",
    }


def test_rows_as_json_are_ratios_to_plain_and_the_floor() -> None:
    read = json.loads(Bench("Net", ROWS).to_json())
    assert read["hardware"] == "ARM CPU"
    lean = next(row for row in read["rows"] if row["way"] == "lean")
    assert (lean["case"], lean["peak_over_plain"], lean["kept_over_floor"]) == ("Net", 0.5, 1.05)
    assert "machine" not in lean
    assert "peak_over_plain" not in read["rows"][1]


@pytest.mark.parametrize(
    ("way", "bitwise", "broken"), [("lean", False, ["lean"]), ("lean", None, []), ("compile", False, [])]
)
def test_only_lean_promises_bits(way: str, bitwise: bool | None, broken: list[str]) -> None:
    assert Bench("Net", (PLAIN, Row(way, bitwise=bitwise))).broken_promises == broken


def test_the_builtin_models_are_the_demos() -> None:
    from leangrad.bench.builtin import NAMES, make

    for name in NAMES:
        model, batch = make(name)
        assert leangrad.verify(model, batch).equal
    assert len(NAMES) == 3
