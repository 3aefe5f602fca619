"""A report as text, as JSON and as a page: the same figures in each, and the user's names only ever as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leangrad
from leangrad.measure import Measurement
from leangrad.report import Report, StepRecord
from leangrad.report.page import embedded, render
from leangrad.timeline.event import Event, format_bytes

WICKED = "</script><img src=x onerror=alert(1)>&amp;\u2028"


def steps(module: str = "Net.blocks.0.mlp") -> tuple[StepRecord, StepRecord]:
    timeline = (
        Event(0.001, 6_000_000, 6_000_000, 0, "aten::addmm", module, "forward", "net.py:3"),
        Event(0.002, 1_000_000, 7_000_000, 1, "aten::gelu", module, "forward", "net.py:4"),
        Event(0.003, 2_000_000, 9_000_000, 2, "AddmmBackward0: aten::mm", module, "backward", "net.py:3"),
        Event(0.004, -6_000_000, 3_000_000, 0, "", "", "backward"),
        Event(0.005, -1_000_000, 2_000_000, 1, "", "", "backward"),
    )
    standing = {"parameters": 1_000_000, "optimizer state": 2_000_000}
    plain = StepRecord("step 3", timeline, standing, 7_000_000, 0.005, "cpu")
    lean = StepRecord("step 7 (lean)", timeline[1:3], standing, 1_000_000, 0.005, "cpu", is_lean=True)
    return plain, lean


def test_sentences_and_advice() -> None:
    report = Report("A title", steps(), ("A note.",), logits_bytes=3_000_000)
    assert report.sentences == (
        (
            "A step peaks at 12.00 MB (step 3, in backward (AddmmBackward0: aten::mm of Net.blocks.0.mlp)): "
            "parameters 8%, optimizer state 17%, gradients 17%, kept activations 58%."
        ),
        "At the peak, 58% is kept by Net.blocks.*.mlp (all kept activations: 7.00 MB).",
        "Between forward and backward the step keeps 7.00 MB.",
        (
            "Lean peaks at 6.00 MB, 50% less (step 7 (lean)): it keeps 1.00 MB for backward where plain keeps 7.00 MB, "
            "and rebuilds the rest, bit for bit."
        ),
        "The logits and what their loss keeps are 3.00 MB of the peak: exact=False never makes them.",
        "A note.",
    )
    assert [advice.line for advice in report.advice] == [
        "model = leangrad.lean(model)",
        "model = leangrad.lean(model, exact=False)",
        "",
    ]
    assert "optimizer's state is 2.00 MB" in report.advice[2].text


def test_the_same_figures_in_every_form() -> None:
    report = Report("A title", steps())
    data = json.loads(report.to_json())
    for step, found in zip(report.steps, data["steps"], strict=True):
        assert found["peak_bytes"] == step.peak_bytes == sum(found["at_peak"].values())
        assert found["kept_bytes"] == step.kept_bytes
        assert sum(found["bytes"]) == step.timeline[-1].live_bytes - (
            step.timeline[0].live_bytes - step.timeline[0].bytes
        )
        for count in found["at_peak"].values():
            assert not count or format_bytes(count) in str(report)
    assert [data["strings"][n] for n in data["steps"][0]["module"]] == ["Net.blocks.0.mlp"] * 3 + ["", ""]
    assert all(sentence in str(report) for sentence in data["sentences"])


def test_nothing_was_measured() -> None:
    report = Report("A title", (), ("Nothing to measure.",))
    assert report.chosen is None
    assert report.sentences == ("Nothing to measure.",)
    assert report.advice == ()
    assert "Nothing to measure." in report.to_html()


@pytest.mark.parametrize("text", [WICKED, "<!--", "]]>", "\\u003c", '"', "é😀"])
def test_embedded_data_is_text(text: str) -> None:
    found = embedded({"name": text})
    assert json.loads(found) == {"name": text}
    assert not set(found) & set("<>&\u2028")


def test_a_page_holds_no_word_of_the_user_as_markup() -> None:
    page = Report(WICKED, steps(f"Net.{WICKED}"), (WICKED,)).to_html()
    assert WICKED not in page
    assert page.count("</script>") == 2
    assert "onerror=alert" in page  # as text in the data, where < is \u003c


def test_a_page_is_filled_once() -> None:
    """A name that looks like a place to fill stays what it is."""
    data: dict[str, Any] = {"title": "/*script*/ /*style*/ /*data*/"}
    assert "/*script*/ /*style*/ /*data*/" in render(data)


def measured() -> Measurement:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    return leangrad.measure(lambda: model(torch.ones(64, 8)).sum().backward(), timed_runs=0)


def test_a_measurement_is_saved(tmp_path: Path) -> None:
    found = measured()
    for ending in ("html", "json", "txt"):
        found.save(tmp_path / f"step.{ending}")
    data = json.loads((tmp_path / "step.json").read_text())
    assert data["steps"][0]["peak_bytes"] == found.peak_bytes
    assert format_bytes(found.peak_bytes) in (tmp_path / "step.txt").read_text()
    assert "<!doctype html>" in (tmp_path / "step.html").read_text()


def test_in_a_notebook() -> None:
    shown = measured()._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert shown.count("<") == 2
