"""Writes files of benchmark rows, with the hardware, the versions and the commit that they were measured with."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
WARM_UP = 28  # steps: lean records the first, caches fill, and on a GPU lean measures whether the host is the limit


def environment(device: str) -> dict[str, Any]:
    """Return hardware, versions and commit of this run; ``device``: "cpu", a CUDA device or "simulated"."""
    from leangrad.bench.machine import describe_machine  # imported here: `versions` also runs older trees, without it

    found = {**describe_machine("cpu" if device == "simulated" else device), "commit": commit()}
    if device == "simulated":  # no kernel has run, so the machine does not matter
        found["hardware"] = device
    return found


def write_rows(name: str, device: str, rows: list[dict[str, Any]]) -> Path:
    """Write the rows of one run to ``benchmarks/results/<name>.json``, and return that path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**environment(device), "rows": rows}, indent=1) + "\n")
    return path


def commit() -> str:
    """Return the commit of this tree, from git; LEANGRAD_COMMIT overrides it, for a copy without the git history."""
    if told := os.environ.get("LEANGRAD_COMMIT"):
        return told
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=RESULTS.parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
