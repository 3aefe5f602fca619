"""The command `leangrad bench`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from leangrad.bench import Bench, Row
from leangrad.cli import app
from leangrad.cli import bench as command

FACTORY = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)

def broken():
    raise KeyError("no such data")
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def words(text: str) -> str:
    """Without line breaks and frames, which depend on the width of the terminal."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


def asked(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> list[tuple[Any, ...]]:
    """What the command asks for, answered by these rows."""
    seen: list[tuple[Any, ...]] = []

    def stand_in(target: str, ways: Any, **named: Any) -> Bench:
        named.pop("progress")
        seen.append((target, ways, named))
        return Bench(named["name"], rows or (Row("plain", peak_bytes=1),))

    monkeypatch.setattr(command, "run_bench", stand_in)
    return seen


def test_a_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For real, in processes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_bench_models.py").write_text(FACTORY)
    result = invoke("my_bench_models.py:make", "--ways", "lean", "--rounds", "0", "--json", "rows.json")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[1:] if line] == ["way", "plain", "lean"]
    (read,) = json.loads((tmp_path / "rows.json").read_text())
    assert [row["bitwise"] for row in read["rows"]] == [True, True]
    result = invoke("my_bench_models.py:broken", "--ways", "lean")
    assert result.exit_code == 2
    assert "KeyError: 'no such data'" in result.stderr
    assert 'my_bench_models.py", line 9, in broken' in result.stderr


def test_without_a_file_three_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asked(monkeypatch)
    assert invoke().exit_code == 0
    assert [(target, ways, named["options"]) for target, ways, named in seen] == [
        ("leangrad.bench.builtin:make", None, {"name": name}) for name in ("gpt", "swiglu", "residual_net")
    ]


def test_options_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asked(monkeypatch)
    line = "a.py:b --ways lean,packed --budget 2kB --memory plain --rounds 3 --timeout 9 --autocast bf16 --traceback"
    assert invoke(*line.split()).exit_code == 0
    ((target, ways, named),) = seen
    assert (target, ways) == ("a.py:b", ["lean", "packed"])
    expected = {
        "budget": 2000,
        "memory": 0,
        "rounds": 3,
        "timeout": 9.0,
        "autocast": "bfloat16",
        "whole_traceback": True,
    }
    assert expected.items() <= named.items()
    seen.clear()
    assert invoke("a.py:b", "--ways", "all", "--memory", "1MB").exit_code == 0
    assert (seen[0][1], seen[0][2]["memory"]) == (list(command.WAYS), 1_000_000)


@pytest.mark.parametrize(
    ("arguments", "words_of_it"),
    [
        (["--ways", "leen"], "there is no way called 'leen'; there are plain"),
        (["--memory", "much"], '--memory must be a number of bytes above 0, or a text such as "20GB"'),
        (["--budget", "-1"], "--budget must be a number of bytes above 0"),
        (["--json", "none/rows.json"], "found no folder 'none' to write the rows to"),
    ],
)
def test_arguments_that_are_none(arguments: list[str], words_of_it: str) -> None:
    result = invoke("a.py:b", *arguments)
    assert result.exit_code == 2
    assert words_of_it in words(result.stderr)


@pytest.mark.parametrize(("bitwise", "code"), [(True, 0), (None, 0), (False, 1)])
def test_the_exit_code_says_whether_lean_has_plains_bits(
    monkeypatch: pytest.MonkeyPatch, bitwise: bool | None, code: int
) -> None:
    asked(monkeypatch, Row("plain"), Row("compile", bitwise=False), Row("lean", bitwise=bitwise))
    assert invoke("a.py:b").exit_code == code
