"""The Triton kernel of the attention context: under the interpreter everywhere, compiled where there is a GPU."""

import pytest
import torch

from tests.support.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    run_interpreted("context_kernel_cases.py", "all kernels agree")


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    from tests.support import context_kernel_cases

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
