"""The Triton kernels of the scan: under the interpreter everywhere, compiled where there is a GPU."""

import pytest
import torch

from tests.support import same_bits
from tests.support.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    run_interpreted("scan_kernel_cases.py", "all kernels agree")


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    from tests.support import scan_kernel_cases

    scan_kernel_cases.check_all("cuda", scan_kernel_cases.LARGE)


@pytest.mark.gpu
def test_results_do_not_depend_on_timing() -> None:
    from leangrad.ops import scan as ops
    from tests.support import scan_kernel_cases

    scan, start, end, dz = scan_kernel_cases.case("zoh", (2, 1000, 200, 16), torch.float32, "cuda")
    found = []
    for _ in range(2):
        z, bounds = ops.forward(scan, start, 32)
        found.append([z, bounds, *ops.backward(scan, bounds, dz, end, 32)])
    assert all(one is other or same_bits(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.gpu
def test_offsets_beyond_31_bits_on_a_gpu() -> None:
    """2³¹ elements and a few more: the last row of the batch is what it is alone."""
    from leangrad.nn.scan import rg_lru

    x = torch.zeros(5, 1 << 17, 3300, dtype=torch.bfloat16, device="cuda")
    x[-1].normal_()
    gate = torch.full((1, 1, 1), 0.5, dtype=torch.bfloat16, device="cuda").expand_as(x).contiguous()
    lam = torch.linspace(-2, 4, 3300, device="cuda")
    h, _ = rg_lru(x, gate, gate, lam)
    alone, _ = rg_lru(x[-1:], gate[-1:], gate[-1:], lam)
    assert same_bits(h[-1], alone[0])
    assert not h[:-1].any()
