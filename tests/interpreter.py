"""Triton's interpreter, which runs kernels where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(script: str, verdict: str) -> None:
    """Run a script beside this file in a process of its own, since Triton reads the variable when it is imported."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert verdict in result.stdout
