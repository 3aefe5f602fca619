"""`leangrad profile SCRIPT`: the script runs as it would alone, and a report of it is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from leangrad.cli import app

TRAIN = """
import sys

import torch
from torch import nn

print("arguments", sys.argv[1:], __name__, __file__)
torch.set_num_threads(1)  # the same sums in every process
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(256, 16)).square().mean()
        loss.backward()
        optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", train(int(sys.argv[1])).item().hex())
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    threads = torch.get_num_threads()
    yield tmp_path / "train.py"
    torch.set_num_threads(threads)


def profiled(*arguments: str) -> tuple[int, str, str]:
    """The exit code, and what went to both outputs."""
    done = CliRunner().invoke(app, ["profile", *arguments])
    return done.exit_code, done.stdout, done.stderr


def names(path: Path) -> list[str]:
    return [step["name"] for step in json.loads(path.read_text())["steps"]]


def test_a_script(script: Path, tmp_path: Path) -> None:
    code, out, err = profiled("-o", "report.json", "train.py", "7", "--its-own", "-o", "x")
    assert code == 0
    assert "arguments ['7', '--its-own', '-o', 'x'] __main__ " in out
    alone = subprocess.run([sys.executable, "train.py", "7"], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == alone.splitlines()[-1]  # the last loss, to the bit
    assert names(tmp_path / "report.json") == ["step 1", "step 3", "step 7 (lean)"]
    assert "leangrad: A step peaks at" in err
    assert "leangrad: the report is in report.json" in err


def test_a_module(script: Path, tmp_path: Path) -> None:
    code, out, _ = profiled("-o", "report.json", "-m", "train", "3")
    assert code == 0
    assert "arguments ['3'] __main__" in out
    assert json.loads((tmp_path / "report.json").read_text())["title"] == "Where the memory of -m train 3 goes"


def test_the_page_is_the_default(script: Path, tmp_path: Path) -> None:
    assert profiled("train.py", "1")[0] == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("ending", "code", "printed"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a word')", 1, "a word"),
        ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_how_a_script_ends(script: Path, tmp_path: Path, ending: str, code: int, printed: str) -> None:
    script.write_text(f"{TRAIN}\n{ending}\n")
    found, _, err = profiled("-o", "report.json", "train.py", "3")
    assert found == code
    assert printed in err
    assert "runpy" not in err  # a traceback begins in the script
    assert names(tmp_path / "report.json") == ["step 1", "step 3"]


def test_private(script: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    script.rename(tmp_path / "secret" / "train.py").write_text(f"{TRAIN}\nraise ValueError('secret')\n")
    code, _, _ = profiled("--private", "-o", "report.html", "secret/train.py", "2")
    assert code == 1
    page = (tmp_path / "report.html").read_text()
    assert "secret" not in page
    assert "ended in step 3 by ValueError." in page


def test_each_rank_has_its_file(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code, _, err = profiled("-o", "report.json", "train.py", "1")
    assert code == 0
    assert "the report is in report.rank1.json" in err
    assert names(tmp_path / "report.rank1.json") == ["step 1"]


@pytest.mark.slow
def test_compared_with_a_second_run(script: Path, tmp_path: Path) -> None:
    code, _, _ = profiled("--compare", "-o", "report.json", "train.py", "7")
    assert code == 0
    seconds = ["step 1 (lean), second run", "step 3 (lean), second run", "step 7 (lean), second run"]
    assert names(tmp_path / "report.json") == ["step 1", "step 3", *seconds]
    data = json.loads((tmp_path / "report.json").read_text())
    assert [step["name"] for step in data["steps"] if step["is_compared"]] == ["step 7 (lean), second run"]
    assert data["ledger"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_script_that_forks(script: Path, tmp_path: Path) -> None:
    forks = "child = os.fork()\nif not child:\n    train(2)\n    sys.exit(5)\nprint('child', os.wait()[1] >> 8)\n"
    script.write_text(f"{TRAIN}\nimport os\n{forks}")
    command = [sys.executable, "-m", "leangrad", "profile", "-o", "report.json", "train.py", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "child 5" in done.stdout
    assert done.stderr.count("the report is in") == 1
    assert names(tmp_path / "report.json") == ["step 1", "step 3"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "found no file 'nowhere.py'"),
        (["-o", "nowhere/report.html", "train.py"], "found no folder 'nowhere'"),
        ([], "Missing argument"),
    ],
)
def test_bad_arguments(script: Path, arguments: list[str], says: str) -> None:
    code, _, err = profiled(*arguments)
    assert code == 2
    assert says in " ".join(err.replace("│", " ").split())
