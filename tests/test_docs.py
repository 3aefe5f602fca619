"""The papers around the house: public names, docstrings, examples, links and the README's code."""

import doctest
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import leangrad

ROOT = Path(__file__).parent.parent
PAPERS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])
MODULES = ["leangrad", *(found.name for found in pkgutil.walk_packages(leangrad.__path__, "leangrad."))]
FUNCTIONS = [name for name in leangrad.__all__ if not isinstance(getattr(leangrad, name), ModuleType)]


# The public face


def test_at_most_a_dozen_public_names() -> None:
    assert len(leangrad.__all__) <= 12
    assert sorted(leangrad.__all__) == leangrad.__all__
    assert all(hasattr(leangrad, name) for name in leangrad.__all__)


def test_functions_that_share_their_name_with_a_module() -> None:
    from leangrad.floor import Floor
    from leangrad.frontier import Frontier
    from leangrad.measure import Measurement
    from leangrad.verify import Verification

    weight = torch.ones(4, requires_grad=True)
    assert isinstance(leangrad.measure(lambda: weight.exp().sum().backward(), timed_runs=0), Measurement)
    assert isinstance(leangrad.verify(nn.Linear(4, 2), torch.randn(3, 4)), Verification)
    assert isinstance(leangrad.floor(nn.Linear(4, 2), torch.randn(3, 4)), Floor)
    assert isinstance(leangrad.frontier(nn.Linear(4, 2), torch.randn(3, 4), points=0, steps=1), Frontier)
    assert leangrad.is_lean(leangrad.lean(nn.Linear(4, 2)))


IMPORT = """
import sys
from leangrad.measure import Measurement  # by path, before anything else
import leangrad.verify
import leangrad.lean
import leangrad
assert "leangrad.nn" not in sys.modules  # it takes as long as all the rest
import leangrad.floor
import leangrad.frontier
import leangrad.profile
functions = (leangrad.floor, leangrad.frontier, leangrad.measure, leangrad.profile, leangrad.verify, leangrad.lean)
assert all(callable(name) for name in functions)
heavy = {"triton", "transformers", "rich", "typer", "torch._dynamo", "torch._inductor"} & set(sys.modules)
assert not heavy, heavy
"""


REACHED = """
import leangrad
assert {"functional", "nn", "norm_cache", "tape", "workspace"} <= set(dir(leangrad))
assert leangrad.nn.convert_abn and leangrad.functional.activate and leangrad.workspace.Workspace
assert leangrad.norm_cache.cached_norm and leangrad.tape.Tape
try:
    leangrad.no_such_name
except AttributeError as error:
    assert str(error) == "module 'leangrad' has no attribute 'no_such_name'"
else:
    raise AssertionError
from torch import nn
from leangrad import *
assert nn.__name__ == "torch.nn"
"""


def test_modules_are_reached_from_the_package() -> None:
    result = subprocess.run([sys.executable, "-W", "error", "-c", REACHED], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_importing_is_light_and_its_order_does_not_matter() -> None:
    result = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", leangrad.__all__)
def test_public_name_is_in_the_papers(name: str) -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "how_it_works.md").read_text()
    assert re.search(rf"`(leangrad\.)?{name}\b|leangrad\.{name}\b", text), f"tell of `{name}` in README.md or docs/"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_function_has_a_line_and_an_example(name: str) -> None:
    function = getattr(leangrad, name)
    documentation = inspect.getdoc(function) or ""
    assert re.fullmatch(r".{10,120}\.", documentation.split("\n\n")[0].replace("\n", " ")), "begin with one sentence"
    assert any(test.examples for test in doctest.DocTestFinder(recurse=False).find(function, name)), "add an example"
    assert "return" in inspect.get_annotations(function)


def test_every_error_is_told() -> None:
    for name in leangrad.errors.__all__:
        kind = getattr(leangrad.errors, name)
        assert issubclass(kind, leangrad.errors.LeangradError)
        assert kind.__doc__


# Examples


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str) -> None:
    if name.startswith("leangrad.kernels."):
        pytest.importorskip("triton")
    if name.startswith("leangrad.integrations.") and name.rpartition(".")[2] in leangrad.integrations.__all__:
        pytest.importorskip(name.rpartition(".")[2], reason="installed by the extras `dev` and `trainers`")
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0, "the examples that failed are printed above"


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    found = [
        test
        for name in ("leangrad.lean", "leangrad.engine.ownership")
        for test in finder.find(importlib.import_module(name))
    ]
    assert sum(len(test.examples) for test in found) > 10


# Papers


def links(text: str) -> list[str]:
    """The targets of Markdown links that are not addresses; code is no text."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", target)]


def code_in(text: str) -> list[str]:
    """Blocks of code, and code inside lines."""
    blocks = r"```.*?```"
    return re.findall(blocks, text, re.DOTALL) + re.findall(r"`([^`]+)`", re.sub(blocks, "", text, flags=re.DOTALL))


def test_links_are_found() -> None:
    text = "[a](b.md) [c](https://d.e) [`f`](../g.py#h)\n```\n[i](j)\n```"
    assert links(text) == ["b.md", "../g.py#h"]
    assert code_in(text) == ["```\n[i](j)\n```", "f"]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_links_point_to_files(paper: Path) -> None:
    broken = [target for target in links(paper.read_text()) if not (paper.parent / target.split("#")[0]).exists()]
    assert not broken


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_links_say_where_they_lead(paper: Path) -> None:
    """A file is named by its path, or by the end of it."""
    named = re.findall(r"\[`([\w/]+\.(?:py|md|json))`\]\(([^)#\s]+)", paper.read_text())
    assert [(name, target) for name, target in named if not f"/{target}".endswith(f"/{name}")] == []


def test_readme_leads_to_every_paper() -> None:
    told = {(ROOT / target).resolve() for target in links((ROOT / "README.md").read_text())}
    assert {paper.resolve() for paper in PAPERS} - told == {ROOT.resolve() / "README.md"}


@pytest.mark.usefixtures("backend_name")
def test_readme_code_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks in their order, in one namespace, which the reader's own names are in."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    names: dict[str, Any] = {"model": model, "x": torch.randn(32, 64), "y": torch.randn(32, 64)}
    names["criterion"] = nn.functional.mse_loss
    names["train"] = lambda model: names["criterion"](model(names["x"]), names["y"]).backward()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "equal, bit for bit" in printed
    assert names["least"].bytes == 4 * 32 * (256 + 64)  # what GELU reads, and what the loss reads
    assert "the floor: 2 tensors" in printed
    assert "No optimizer has stepped" in (tmp_path / "report.html").read_text()
    assert leangrad.ledger_of(model).totals().rebuilt_bytes > 0
    assert all(parameter.grad is not None for parameter in model.parameters())
    found = leangrad.verify(*names["factory"]())
    assert found.equal
    assert found.lean.kept_bytes < 0.4 * found.plain.kept_bytes
    assert found.lean.peak_bytes < 0.7 * found.plain.peak_bytes


def test_code_of_how_it_works_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Each block of Python is followed by what it prints."""
    text = (ROOT / "docs" / "how_it_works.md").read_text()
    pairs = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, flags=re.DOTALL)
    assert len(pairs) == text.count("```python") >= 1
    for code, printed in pairs:
        exec(compile(code, "how_it_works.md", "exec"), {})
        assert capsys.readouterr().out == printed


def test_the_walk_through_of_an_op_quotes_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks that begin with a path are lines of that file; others are run, and print the block after them."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"```(python|sh|)\n(.*?)```", text, flags=re.DOTALL)
    quoted = [block.split("\n", 1) for kind, block in blocks if kind == "python" and block.startswith("# ")]
    assert len(quoted) >= 7
    for path, lines in quoted:
        source = (ROOT / path.removeprefix("# ")).read_text().splitlines()
        assert [line for line in lines.splitlines() if line not in source] == [], path
    run = [n for n, (kind, block) in enumerate(blocks) if kind == "python" and not block.startswith("# ")]
    assert len(run) == 1
    for n in run:
        exec(compile(blocks[n][1], "CONTRIBUTING.md", "exec"), {})
        assert capsys.readouterr().out == blocks[n + 1][1]


def test_files_that_contributing_names_are_there() -> None:
    """By their path, or by the end of it."""
    text = re.sub(r"```.*?```", "", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`([\w/.]+\.py)`", text))
    assert len(named) >= 8
    files = [path.as_posix() for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in files)] == []


@pytest.mark.usefixtures("backend_name")
def test_code_of_the_compile_paper_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """One model is compiled without code generation, one function with it; the others are wrapped, not run."""
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    names: dict[str, Any] = {"torch": torch, "x": torch.randn(32, 64), "y": torch.randn(32, 64)}
    names |= {"criterion": nn.functional.mse_loss, "net": plain}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "compile.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        names["model"] = plain
        exec(compile(block, "compile.md", "exec"), names)
    assert type(names["logits"]).__name__ == "LazyLogits"
    assert names["best"].shape == (4, 64)
    assert names["head"].weight.grad is not None
    told = capsys.readouterr().out
    assert "kept MB" in told
    assert "measured peak" in told
    assert all(parameter.grad is not None for parameter in plain.parameters())


@pytest.mark.usefixtures("backend_name")
def test_code_of_the_loss_paper_that_is_compiled_runs() -> None:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    sizes = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, use_cache=False, **sizes)
    )
    names: dict[str, Any] = {"torch": torch, "model": model, "words": torch.randint(512, (2, 32))}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "loss.md").read_text(), flags=re.DOTALL)
    (block,) = (block for block in blocks if "torch.compile" in block)
    exec(compile(block, "loss.md", "exec"), names)
    assert type(names["output"].logits).__name__ == "LazyLogits"
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_code_and_commands_of_the_budget_paper_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first block is run as it is, the second is the file that the commands name; these try less."""
    from typer.testing import CliRunner

    from leangrad.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = (ROOT / "docs" / "budget.md").read_text()
    code = {block.split("\n")[0]: block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)}
    names: dict[str, Any] = {"model": nn.Linear(8, 8), "x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    names["criterion"] = nn.functional.mse_loss
    exec(compile(code["import leangrad"], "budget.md", "exec"), names)
    assert "same bits" in capsys.readouterr().out
    assert (tmp_path / "frontier.svg").read_text() == names["found"].svg()
    (tmp_path / "train.py").write_text(code["import torch"])
    commands = re.findall(r"^leangrad (.+)$", text, flags=re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["frontier", "frontier", "fit"]
    smaller = {"frontier": ["--points", "1", "--steps", "1"], "fit": ["--most", "3"]}
    for command in commands:
        words = command.split()
        result = CliRunner().invoke(app, words + smaller[words[0]])
        assert result.exit_code == 0, result.output
    sys.modules.pop("train")
    assert "Sequential on cpu" in (tmp_path / "frontier.svg").read_text()


def test_commands_in_the_papers_exist() -> None:
    from leangrad.cli import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for paper in PAPERS:
        code = "\n".join(code_in(paper.read_text()))
        assert set(re.findall(r"\bmake ([a-z]+)", code)) <= targets, paper.name
        assert set(re.findall(r"(?<!from )\bleangrad\s([a-z]+)", code)) <= commands, paper.name


# Benchmarks

BENCHMARKS = ROOT / "benchmarks"


def test_every_file_of_rows_has_its_command_and_hardware() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| `(.+?)` \| (.+?) \| .+ \|$", (BENCHMARKS / "README.md").read_text(), re.MULTILINE
    )
    told = {name: (command, hardware) for name, command, hardware in rows}
    assert len(told) == len(rows)
    assert told.keys() == {path.name for path in (BENCHMARKS / "results").iterdir()}
    for name, (command, hardware) in told.items():
        path = BENCHMARKS / "results" / name
        if path.suffix == ".json":
            found = json.loads(path.read_text())
            assert found["hardware"] == hardware, name
            assert ("OMP_NUM_THREADS=1 " in command) == (found.get("threads") == 1), name
        written = re.search(r"--write (\w+)", command)
        assert written is None or written[1] == path.stem, name


def test_commands_of_benchmarks_exist_with_their_options() -> None:
    commands = re.findall(r"`[^`]*python -m benchmarks\.([\w.]+)([^`]*)`", (BENCHMARKS / "README.md").read_text())
    paths = [path for path in BENCHMARKS.rglob("*.py") if "__main__" in path.read_text()]
    scripts = {".".join(path.relative_to(BENCHMARKS).with_suffix("").parts): path.read_text() for path in paths}
    assert {name for name, _ in commands} == scripts.keys()
    assert len(scripts) > 20
    for name, options in commands:
        source = scripts[name]
        for option in re.findall(r"--[\w-]+", options):
            assert f'add_argument("{option}"' in source, f"{name} {option}"
