"""What a benchmark row must say of where it was measured."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
WARM_UP = 28  # steps: lean records its first, caches fill, and on a GPU it finds out whether the host is the limit


def environment(device: str) -> dict[str, Any]:
    """Hardware, versions and commit of this run."""
    from leangrad.bench.machine import describe_machine  # here, since `versions` runs older trees, which lack it

    found = {**describe_machine("cpu" if device == "simulated" else device), "commit": commit()}
    if device == "simulated":  # by whatever machine: no kernel has run
        found["hardware"] = device
    return found


def write_rows(name: str, device: str, rows: list[dict[str, Any]]) -> Path:
    """Write the rows of one run to ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**environment(device), "rows": rows}, indent=1) + "\n")
    return path


def commit() -> str:
    """The commit of this tree; a copy without its history is told by LEANGRAD_COMMIT."""
    if told := os.environ.get("LEANGRAD_COMMIT"):
        return told
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=RESULTS.parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
