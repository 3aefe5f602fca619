"""A real browser without a window, for tests that look at pages, and a folder for what it saw."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent

# Without these Chromium asks its maker's hosts for updates at every start, and as root it does not start at all.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window, with everything that its console says."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: the extra `docs`")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Chromium and chromedriver (Debian's packages chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield chromium
    chromium.quit()


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where pictures of the pages are left, to be looked at."""
    folder = ROOT / "build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def look(browser: Any, *, width: int, scheme: str) -> None:
    """Set the width of the window, and what the reader's system prefers: "light" or "dark"."""
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def console_errors(browser: Any) -> list[str]:
    """What the console said since the last time."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
