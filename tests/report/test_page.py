"""The report in a real browser: it opens without a word on the console, and is read by pointer and by keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leangrad
from leangrad.report import Report, StepRecord
from leangrad.timeline.event import Event, format_bytes
from tests.support.browser import console_errors, look

WICKED = "</script><b>bold</b>"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    with leangrad.profile(title="Where the memory of <train.py> goes") as profile:
        for _ in range(7):
            optimizer.zero_grad()
            model(torch.randn(512, 64)).square().mean().backward()
            optimizer.step()
    return profile.report


def opened(browser: Any, report: Report, path: Path, *, width: int = 1200, scheme: str = "light") -> Any:
    look(browser, width=width, scheme=scheme)
    report.save(path)
    browser.get("about:blank")
    console_errors(browser)
    browser.get(path.as_uri())
    assert browser.execute_script("return document.body.dataset.ready") == "yes"
    return browser


def rows(browser: Any) -> list[str]:
    """The first cells of the tree."""
    return browser.execute_script(
        "return [...document.querySelectorAll('#tree tbody tr')].map((row) => row.cells[0].textContent.trim())"
    )


def press(browser: Any, selector: str, *keys: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).focus()", selector)
    for key in keys:
        browser.switch_to.active_element.send_keys(key)
    browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_it_opens(browser: Any, report: Report, tmp_path: Path, pictures: Path, width: int, scheme: str) -> None:
    page = opened(browser, report, tmp_path / "report.html", width=width, scheme=scheme)
    page.save_screenshot(str(pictures / f"report_{width}_{scheme}.png"))
    assert page.title == "Where the memory of <train.py> goes"
    assert page.find_element("id", "says").text.splitlines() == list(report.sentences)
    assert report.chosen is not None
    assert format_bytes(report.chosen.peak_bytes) in page.find_element("id", "when").text
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth + 1")
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    drawn = page.execute_script(
        "const c = document.getElementById('canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const seen = new Set(); for (let n = 0; n < d.length; n += 4) seen.add(d[n] + ',' + d[n+1] + ',' + d[n+2]);"
        "return seen.size"
    )
    assert drawn > 5  # the categories, the lines and the words
    assert console_errors(page) == []


def test_by_keys(browser: Any, report: Report, tmp_path: Path, pictures: Path) -> None:
    page = opened(browser, report, tmp_path / "report.html")
    press(page, "#chart", "\ue011")  # Home
    assert "0.00 ms into the step" in page.find_element("id", "when").text
    press(page, "#chart", "\ue014", "\ue014")  # right, twice
    assert page.find_element("id", "chart").get_attribute("aria-valuenow") == "2"
    press(page, "#chart", "p")
    assert page.find_element("id", "when").text.startswith("at the peak")
    outer = rows(page)
    assert outer[0] == "▸Sequential"
    press(page, "#tree tbody tr", "\ue014")
    assert len(rows(page)) > len(outer)
    for _ in range(6):  # down to a source line
        page.execute_script(
            "[...document.querySelectorAll('#tree tbody tr[aria-expanded=false]')].forEach((row) => row.click())"
        )
    lines = [row for row in rows(page) if Path(__file__).name in row]
    assert lines
    page.save_screenshot(str(pictures / "report_tree.png"))
    press(page, "#tree tbody tr", "\ue012")  # left: closes it
    assert console_errors(page) == []


def test_by_pointer(browser: Any, report: Report, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains

    page = opened(browser, report, tmp_path / "report.html")
    chart = page.find_element("id", "chart")
    before = page.find_element("id", "when").text
    ActionChains(page).move_to_element_with_offset(chart, -400, 0).click().pause(0.2).perform()
    assert page.find_element("id", "when").text != before
    held = page.find_element("id", "when").text
    ActionChains(page).move_to_element_with_offset(chart, 300, 0).pause(0.2).perform()
    assert page.find_element("id", "when").text == held
    buttons = page.find_elements("css selector", "#steps button")
    assert [button.text.partition(":")[0] for button in buttons] == [step.name for step in report.steps]
    buttons[-1].click()
    lean = report.steps[-1]
    assert format_bytes(lean.peak_bytes) in page.find_element("id", "when").text
    assert console_errors(page) == []


def test_the_names_of_the_program_are_text(browser: Any, tmp_path: Path) -> None:
    event = Event(0.001, 1000, 1000, 0, WICKED, f"Net.{WICKED}", "forward", WICKED)
    step = StepRecord(WICKED, (event,), {}, 0, 0.001, "cpu")
    page = opened(browser, Report(WICKED, (step,), (WICKED,)), tmp_path / "report.html")
    assert page.title == WICKED
    assert page.find_elements("css selector", "b") == []
    assert WICKED in page.find_element("id", "says").text
    assert console_errors(page) == []


def test_nothing_was_measured(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, Report("A title", (), ("Nothing to measure.",)), tmp_path / "report.html")
    assert page.find_element("id", "says").text == "Nothing to measure."
    assert not page.find_element("id", "chart").is_displayed()
    assert console_errors(page) == []


def test_many_tensors(browser: Any, tmp_path: Path) -> None:
    """A step of 40,000 events: what is drawn does not grow with them, so that keys are answered at once."""
    timeline = [
        Event(n / 1e4, 1000, 0, n, f"aten::op{n % 50}", f"Net.blocks.{n % 400}.mlp", "forward") for n in range(20_000)
    ]
    timeline += [Event(4 - n / 1e4, -1000, 0, n, "", "", "backward") for n in reversed(range(20_000))]
    step = StepRecord("step 1", tuple(timeline), {}, 0, 4.0, "cpu")
    page = opened(browser, Report("Large", (step,)), tmp_path / "report.html")
    assert "20.00 MB" in page.find_element("id", "when").text
    for _ in range(2):
        page.execute_script(
            "[...document.querySelectorAll('#tree tbody tr[aria-expanded=false]')].forEach((row) => row.click())"
        )
    names = rows(page)
    assert len(names) == 203  # Net, blocks, the largest 200 of them, and a row for the others
    assert names[-1] == "200 more"
    took = page.execute_async_script(
        "const done = arguments[0]; const chart = document.getElementById('chart'); const start = performance.now();"
        "let left = 20; const next = () => { if (!left--) return done((performance.now() - start) / 20);"
        "chart.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', shiftKey: true}));"
        "requestAnimationFrame(() => requestAnimationFrame(next)); }; next();"
    )
    print(f"{took:.0f} ms for one move")
    assert page.find_element("id", "chart").get_attribute("aria-valuenow") == str(20_000 - 200)
    assert console_errors(page) == []
