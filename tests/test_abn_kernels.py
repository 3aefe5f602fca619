"""The Triton kernels of activated batch norm: under the interpreter everywhere, compiled where there is a GPU."""

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
    script = Path(__file__).with_name("abn_kernel_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "all kernels agree" in result.stdout


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    from tests import abn_kernel_cases

    abn_kernel_cases.check_all("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_large_map_on_a_gpu(channels_last: bool) -> None:
    """More than 2³¹ elements: offsets need 64 bits."""
    from leangrad.nn.abn import InPlaceABN

    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(9, 64, 2048, 2048, dtype=torch.bfloat16, device="cuda", memory_format=memory_format)
    x.copy_(torch.arange(9, device="cuda").view(-1, 1, 1, 1) - 4.0)
    z = InPlaceABN(64, activation="identity").cuda()(x)
    expected = (torch.arange(9, device="cuda") - 4.0) / 60**0.5 * 3
    torch.testing.assert_close(z[:, -1, -1, -1].float(), expected.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(z[:, 0, 0, 0].float(), expected.float(), rtol=1e-2, atol=1e-2)
