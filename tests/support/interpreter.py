"""Triton's interpreter, which runs kernels where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(script: str, verdict: str) -> None:
    """Run a script beside this file under the interpreter; skip the test where that cannot even run a loop."""
    result = _run(script)
    if result.returncode and (probe := _run("interpreter_probe.py")).returncode:
        pytest.skip(f"Triton's interpreter does not run here: {probe.stderr.strip().splitlines()[-1]}")
    assert result.returncode == 0, result.stderr[-3000:]
    assert verdict in result.stdout


def _run(script: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since Triton reads the variable when it is imported."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent.parent.parent), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
