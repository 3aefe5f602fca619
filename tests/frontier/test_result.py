"""How a frontier reads: as a table, as JSON, as a picture and in a notebook."""

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from leangrad.frontier import Frontier, Point
from leangrad.frontier.picture import Mark, draw

SVG = "{http://www.w3.org/2000/svg}"
POINTS = (
    Point("plain", None, 9_000_000, 8_000_000, 0.1, 1.0),
    Point("lean, budget", 7_000_000, 6_900_000, 6_000_000, 0.105, 1.05, True),
    Point("lean", None, 4_000_000, 3_000_000, 0.12, 1.2, True, "the floor"),
    Point("lean, budget", 2_000_000, None, None, None, None, None, 'refused: <no> & "never"'),
    Point("checkpoint", None, 3_500_000, 1_000_000, 0.13, 1.3, False, "around 4 × Block, from 1 on"),
)
FOUND = Frontier("Net", "cpu", POINTS, "one more thing")


def test_the_table() -> None:
    assert FOUND.table().splitlines() == [
        "way            budget     peak     kept       time  × plain  gradients  note",
        "plain                  9.00 MB  8.00 MB  100.00 ms     1.00",
        "lean, budget  7.00 MB  6.90 MB  6.00 MB  105.00 ms     1.05  same bits",
        "lean                   4.00 MB  3.00 MB  120.00 ms     1.20  same bits  the floor",
        "lean, budget  2.00 MB" + " " * 51 + 'refused: <no> & "never"',
        "checkpoint             3.50 MB  1.00 MB  130.00 ms     1.30  DIFFER     around 4 × Block, from 1 on",
    ]
    assert str(FOUND) == FOUND.table() + "\none more thing"


def test_json_has_everything() -> None:
    read = json.loads(FOUND.to_json(indent=1))
    assert Frontier(**{**read, "points": tuple(Point(**point) for point in read["points"])}) == FOUND


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FOUND.model = "Other"  # type: ignore[misc]


def test_the_picture_has_a_mark_for_each_point_with_figures() -> None:
    root = ElementTree.fromstring(FOUND.svg())
    says = [title.text for group in root.iter(f"{SVG}g") if (title := group.find(f"{SVG}title")) is not None]
    assert says == [
        "plain: 9.00 MB, 100.00 ms",
        "lean, budget: 6.90 MB, 105.00 ms",
        "lean: 4.00 MB, 120.00 ms",
        "checkpoint: 3.50 MB, 130.00 ms",
    ]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "Net on cpu"
    assert {"plain", "lean", "checkpoint", "time, × plain", "1.10", "6 MB"} <= set(texts)
    (line,) = root.iter(f"{SVG}polyline")
    assert len(line.get("points", "").split()) == 2  # lean's two, from the smaller peak to the larger
    assert "prefers-color-scheme: dark" in FOUND.svg()


def test_marks_stand_inside_and_in_order() -> None:
    root = ElementTree.fromstring(FOUND.svg())
    circles = [(float(one.get("cx", 0)), float(one.get("cy", 0))) for one in root.iter(f"{SVG}circle")]
    legend, budget, floor = circles
    assert floor[0] < budget[0]  # less memory is further left
    assert floor[1] < budget[1]  # more time is further up
    assert all(64 <= x <= 696 and 76 <= y <= 364 for x, y in (budget, floor))
    assert legend[1] < 76


@pytest.mark.parametrize("name", ["<b>&\"'", "a\x00b\x1b[0m", "x" * 300, "]]>", "\ud800"])
def test_names_are_escaped(name: str) -> None:
    found = dataclasses.replace(FOUND, model=name)
    root = ElementTree.fromstring(found.svg())
    shown = "".join(letter for letter in name if letter.isprintable())
    assert next(text.text for text in root.iter(f"{SVG}text")) == f"{shown} on cpu"


@pytest.mark.parametrize("peaks", [[5], [5, 5], [0, 0], [10**12, 3], [10_000_000, 10_000_001]])
@pytest.mark.parametrize("heights", [[1.0], [0.0], [1.0, 1.0001], [3.0, 500.0]])
def test_any_figures_can_be_drawn(peaks: list[int], heights: list[float]) -> None:
    marks = [Mark("lean", peak, height, "") for peak in peaks for height in heights]
    text = draw("title", marks, "time")
    ElementTree.fromstring(text)
    assert not re.search(r"nan|inf\b", text)
    assert text.count("<circle") == len(marks) + 1


def test_no_figures_are_told() -> None:
    text = Frontier("Net", "cpu", (Point("plain", note="ran out of memory"),)).svg()
    ElementTree.fromstring(text)
    assert "no way has both a time and a peak" in text


def test_save(tmp_path: Path) -> None:
    FOUND.save(tmp_path / "frontier.svg")
    FOUND.save(str(tmp_path / "again.SVG"))
    assert (tmp_path / "frontier.svg").read_text(encoding="utf-8") == FOUND.svg()
    with pytest.raises(ValueError, match=r"SVG file, such as 'frontier.svg', got '.*\.png'"):
        FOUND.save(tmp_path / "frontier.png")


def test_a_notebook_shows_picture_and_table() -> None:
    root = ElementTree.fromstring(FOUND._repr_html_())
    assert root.find(f".//{SVG}svg") is not None
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert len(rows) == 1 + len(POINTS)
    assert rows[4][-1] == 'refused: <no> & "never"'
    assert [one.text for one in root.iter("p")] == ["one more thing"]
