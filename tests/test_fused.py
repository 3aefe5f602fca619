"""Chains that are replayed as one kernel: structure and IEEE arithmetic under Triton's interpreter, everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_chains_under_the_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    script = Path(__file__).with_name("fused_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "all chains agree" in result.stdout


@pytest.mark.gpu
def test_chains_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from leangrad.ledger import fused
    from tests import fused_cases

    monkeypatch.setattr(fused, "MIN_BYTES", 0)
    fused_cases.check_recipes("cuda")
