"""The docs as a reader sees them: every page opens in a real browser, wide and narrow, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import console_errors, look

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
LOOKS = {"wide": (1200, "light"), "dark": (1200, "dark"), "phone": (390, "light")}

# What is not loaded; what stands out of the page to the right and is in no box that scrolls; on a wide screen, lines of
# code that are cut.
FAULTS = """
const wide = document.documentElement.clientWidth;
const kinds = ["auto", "scroll", "hidden"];
const scrolls = (e) => e && (kinds.includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
return {
  pictures: [...document.images].filter((i) => !i.complete || i.naturalWidth === 0).map((i) => i.src),
  outside: performance.getEntriesByType("resource").map((r) => r.name).filter((n) => !n.startsWith(location.origin)),
  overflow: [...document.querySelectorAll("article *")]
    .filter((e) => e.getBoundingClientRect().right > wide + 1 && !scrolls(e.parentElement))
    .map((e) => e.tagName + ": " + e.textContent.slice(0, 60)),
  scrolls: document.documentElement.scrollWidth > wide + 1,
  cut: wide < 1200 ? [] : [...document.querySelectorAll("pre code")]
    .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent.slice(0, 60)),
};
"""

PAINTED = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"


@pytest.mark.parametrize("kind", LOOKS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page(browser: Any, address: str, pictures: Path, page: str, kind: str) -> None:
    width, scheme = LOOKS[kind]
    look(browser, width=width, scheme=scheme)
    browser.get("about:blank")
    console_errors(browser)
    browser.get(f"{address}/{page}.html")
    browser.execute_async_script(PAINTED)
    browser.save_screenshot(str(pictures / f"{page}_{kind}.png"))
    faults = browser.execute_script(FAULTS)
    assert faults == {"pictures": [], "outside": [], "overflow": [], "scrolls": False, "cut": []}
    assert console_errors(browser) == []
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background.strip("rgba()").split(",")[:3])
    assert (brightness > 600) == (scheme == "light"), background


def test_the_search_finds_a_page(browser: Any, address: str, pictures: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    look(browser, width=1200, scheme="light")
    browser.get(f"{address}/index.html")
    box = browser.find_element(By.CSS_SELECTOR, "input[data-md-component=search-query]")
    box.click()
    box.send_keys("ran out of memory")
    found = WebDriverWait(browser, 20).until(
        lambda b: [e.get_attribute("href") for e in b.find_elements(By.CSS_SELECTOR, "a.md-search-result__link")]
    )
    browser.save_screenshot(str(pictures / "search.png"))
    assert any("out_of_memory.html" in link for link in found)


def test_from_the_front_page_to_another(browser: Any, address: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    look(browser, width=1400, scheme="light")
    browser.get(f"{address}/index.html")
    browser.find_element(By.LINK_TEXT, "I ran out of memory").click()
    WebDriverWait(browser, 20).until(lambda b: "out_of_memory.html" in b.current_url)
    assert "ran out of memory" in browser.find_element(By.CSS_SELECTOR, "article h1").text.lower()
    assert console_errors(browser) == []
