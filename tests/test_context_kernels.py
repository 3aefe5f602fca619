"""The Triton kernel of the attention context: under the interpreter everywhere, compiled where there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    script = Path(__file__).with_name("context_kernel_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "all kernels agree" in result.stdout


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    from tests import context_kernel_cases

    context_kernel_cases.check_all("cuda")


@pytest.mark.gpu
def test_offsets_beyond_31_bits_on_a_gpu() -> None:
    from leangrad.kernels.context import finish_backward

    rows, width = (1 << 21) + 1, 1 << 10
    g = torch.ones(rows, width, dtype=torch.bfloat16, device="cuda")
    strength = torch.tensor([1024.0], device="cuda")
    total = finish_backward(g, g, g, strength, g)
    assert total is not None
    assert total.item() == rows * width
    assert g[-1].eq(2).all()
    assert g[0].eq(2).all()
