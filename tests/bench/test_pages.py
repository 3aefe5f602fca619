"""The tables and pictures of README and docs are those that the committed rows give."""

import re
from xml.etree import ElementTree

import pytest

from benchmarks.bench import readme
from benchmarks.bench.cases import FULL, SMALL, make
from benchmarks.bench.side_by_side import AXES, FACTORS, SCALED, scaling
from benchmarks.environment import RESULTS
from leangrad.bench import WAYS


@pytest.mark.parametrize("page", readme.PAGES)
def test_pages_show_the_committed_rows(page: str) -> None:
    """If this fails: `python -m benchmarks --readme`."""
    text = (readme.ROOT / page).read_text()
    assert readme.filled(page) == text
    shown = re.findall(r"<!-- rows: ([\w ]+) -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert shown
    assert all(content.strip() for _, content in shown)


def test_every_part_is_shown_somewhere() -> None:
    pages = "".join((readme.ROOT / page).read_text() for page in readme.PAGES)
    assert {name for name in readme.PARTS if f"<!-- rows: {name} -->" in pages} == set(readme.PARTS)


def test_a_changed_figure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(readme.PARTS, "cpu", lambda: "| other | figures |")
    assert readme.filled("README.md") != (readme.ROOT / "README.md").read_text()


def test_pictures_are_those_of_the_committed_rows() -> None:
    """If this fails: `python -m benchmarks --readme`."""
    for name, content in readme.pictures().items():
        assert (RESULTS / name).read_text() == content, name
        assert ElementTree.fromstring(content).tag.endswith("svg")
        assert "prefers-color-scheme: dark" in content


def test_rows_are_there_for_every_model_and_way() -> None:
    found = {(row["case"], row["way"]) for row in readme.cpu_rows()}
    eager = [way for way, choice in WAYS.items() if not choice.compiles]
    assert found >= {(case, way) for case in SMALL for way in eager}
    assert {case for case, way in found if way == "compile_leangrad"}
    assert all(row["outcome"] == "measured" or row["note"] for row in readme.cpu_rows())
    assert all(
        row["bitwise"] for row in readme.cpu_rows() if row["way"] in ("lean", "lean_budget") and "bitwise" in row
    )
    grown = {(row["axis"], row["factor"], row["way"]) for row in readme.rows_in(readme.CPU) if "axis" in row}
    axes = {("base", 1), *((axis, factor) for axis in AXES.values() for factor in FACTORS)}
    assert grown == {(*place, way) for place in axes for way in ("plain", *SCALED)}
    assert {(axis, factor) for axis, factor, _ in scaling()} == axes


def test_every_small_model_can_be_made() -> None:
    for name in SMALL:
        model, batch, *_ = make(name)
        assert next(model.parameters()).requires_grad
        assert len(batch[0]) > 1
    assert len(FULL) == 17
