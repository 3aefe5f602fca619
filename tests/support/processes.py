"""Code that runs in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def in_a_process(code: str, *arguments: str, paths: Sequence[str] = (), **env: str) -> str:
    """What `code` prints. It sees the modules that this process sees, after those in `paths`."""
    paths = [*paths, *(str(ROOT / path) for path in ("src", "")), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
