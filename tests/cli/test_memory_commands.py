"""The commands `leangrad frontier` and `leangrad fit`, on a user's own file."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import leangrad
from leangrad.cli import app
from leangrad.frontier import Frontier, Point, ways
from tests.support.budgets import lean_down_to

FACTORIES = """
import torch
from torch import nn

def block(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())

def pair():
    return nn.Sequential(block(), block()), torch.randn(4, 8)

def large():
    return nn.Sequential(block(64), block(64)), torch.randn(512, 64)

def large_with_loss():
    return *large(), lambda out: (out - 1).pow(2).mean()

def triple():
    return *pair(), lambda out: (out - 1).pow(2).mean()

def no_tensors():
    return nn.Linear(2, 2), ()

def other_rows():
    return nn.Bilinear(2, 2, 2), (torch.ones(3, 2), torch.ones(4, 2))

def fixed_loss():
    targets = torch.ones(4, 8)
    return *pair(), lambda out: (out - targets).mean()

def frozen():
    return nn.Linear(2, 2).requires_grad_(False), torch.ones(2, 2)

def alone():
    return nn.Linear(2, 2)
"""


def invoke(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=env)


def words(text: str) -> str:
    """Without line breaks and frames, which depend on the width of the terminal."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ways, "lean", lean_down_to(1))
    path = tmp_path / "my_models.py"
    path.write_text(FACTORIES)
    yield path
    sys.modules.pop("my_models", None)


# frontier


@pytest.mark.parametrize("name", ["large", "large_with_loss"])
def test_frontier_of_a_users_model(factories: Path, name: str) -> None:
    picture = factories.parent / "picture.svg"
    result = invoke("frontier", f"{factories}:{name}", "--points", "1", "--steps", "1", "--picture", str(picture))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [re.split(r"  +", line)[0] for line in lines] == ["way", "plain", "lean, budget", "lean", "checkpoint"]
    assert "around 2 × Sequential, from 0 on" in lines[-1]
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_frontier_as_json_with_its_progress_on_stderr(factories: Path) -> None:
    options = ("--points", "0", "--steps", "1", "--json")
    result = invoke("frontier", f"{factories}:pair", *options, FORCE_COLOR="1", TERM="xterm")
    assert result.exit_code == 0, result.output
    read = json.loads(result.stdout)
    assert [point["way"] for point in read["points"]] == ["plain", "lean", "checkpoint"]
    assert "100%" in result.stderr


def test_frontier_hands_its_options_on(factories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spy(model: nn.Module, batch: Any, loss: Any, **named: Any) -> Frontier:
        seen.append((named["points"], named["steps"], named["autocast"]))
        return Frontier("Net", "cpu", (Point("plain"),))

    monkeypatch.setattr(leangrad, "frontier", spy)
    assert invoke("frontier", f"{factories}:pair").exit_code == 0
    assert invoke("frontier", f"{factories}:pair", "--points", "3", "--steps", "2", "--autocast", "bf16").exit_code == 0
    assert seen == [(6, 10, None), (3, 2, torch.bfloat16)]


@pytest.mark.parametrize(
    ("way", "bitwise", "code"),
    [("lean", False, 1), ("lean, budget", False, 1), ("checkpoint", False, 0), ("lean", None, 0)],
)
def test_frontier_fails_if_a_gradient_of_lean_differs(
    factories: Path, monkeypatch: pytest.MonkeyPatch, way: str, bitwise: bool | None, code: int
) -> None:
    found = Frontier("Net", "cpu", (Point("plain"), Point(way, bitwise=bitwise)))
    monkeypatch.setattr(leangrad, "frontier", lambda *args, **named: found)
    assert invoke("frontier", f"{factories}:pair").exit_code == code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--points", "-1"], "Invalid value for '--points'"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--picture", "frontier.png"], "expected --picture to name an SVG file"),
        (["--picture", "no_such_folder/frontier.svg"], "found no folder 'no_such_folder'"),
    ],
)
def test_frontier_refuses_bad_options(factories: Path, options: list[str], message: str) -> None:
    result = invoke("frontier", f"{factories}:pair", *options)
    assert result.exit_code == 2
    assert message in words(result.output)


# fit


def test_fit_a_users_model(factories: Path) -> None:
    result = invoke("fit", f"{factories}:triple", "--memory", "1GB", "--most", "6", FORCE_COLOR="1", TERM="xterm")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "the largest batch within 1.00 GB on cpu"
    assert [re.split(r"  +", line)[:2] for line in lines[2:]] == [
        [way, "6"] for way in ("plain", "checkpoint", "lean", "lean, budget")
    ]
    assert "100%" in result.stderr


def test_fit_as_json(factories: Path) -> None:
    result = invoke("fit", f"{factories}:pair", "--memory", "200", "--json", FORCE_COLOR="1", TERM="xterm")
    assert result.exit_code == 0, result.output
    read = json.loads(result.stdout)
    assert read["memory"] == 200
    assert {way["way"]: way["rows"] for way in read["ways"]}["plain"] == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pair", ["--memory", "20 gigs"], "--memory must be a number of bytes above 0"),
        ("pair", ["--memory", "0"], "got '0'"),
        ("pair", ["--memory=-1"], "got '-1'"),
        ("pair", ["--memory", "nan"], "got 'nan'"),
        ("pair", ["--memory", "90%"], "got '90%'"),
        ("pair", [], "Missing option '--memory'"),
        ("pair", ["--memory", "1GB", "--most", "0"], "Invalid value for '--most'"),
        ("no_tensors", ["--memory", "1GB"], "expected a batch with a tensor whose dimension 0 counts its rows, got ()"),
        ("other_rows", ["--memory", "1GB"], "the same dimension 0, which counts its rows, got float32[3, 2] and"),
        ("alone", ["--memory", "1GB"], "expected alone() to return (model, batch) or (model, batch, loss), got Linear"),
        ("frozen", ["--memory", "1GB"], "ValueError: expected a model with a parameter that requires a gradient"),
        ("fixed_loss", ["--memory", "1GB"], "the loss has to take any number of rows"),
        ("nothing", ["--memory", "1GB"], "expected a function 'nothing'"),
    ],
)
def test_fit_refuses_bad_input(factories: Path, name: str, options: list[str], message: str) -> None:
    result = invoke("fit", f"{factories}:{name}", *options)
    assert result.exit_code == 2
    assert message in words(result.output)
    assert not result.stdout


def test_both_are_in_the_help() -> None:
    text = words(invoke("--help").output)
    assert "frontier" in text
    assert "fit" in text
