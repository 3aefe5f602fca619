"""The Triton kernels over flat buffers: under the interpreter everywhere, compiled where there is a GPU."""

import pytest
import torch

from tests.support.interpreter import run_interpreted

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    run_interpreted("packed_kernel_cases.py", "all kernels agree")


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    from tests.support import packed_kernel_cases

    packed_kernel_cases.check_all("cuda")


@pytest.mark.gpu
def test_offsets_beyond_31_bits_on_a_gpu() -> None:
    from leangrad.kernels import flat as kernels

    flats = [torch.ones(n, dtype=torch.bfloat16, device="cuda") for n in (2**31 + 2**14, 64)]
    norm = torch.linalg.vector_norm(kernels.piece_norms(flats))
    torch.testing.assert_close(norm.item(), (2**31 + 2**14 + 64) ** 0.5, rtol=1e-6, atol=0)
    kernels.scale(flats, torch.tensor(0.5, device="cuda"), flats)
    assert all(flat.min() == flat.max() == 0.5 for flat in flats)


@pytest.mark.gpu
def test_a_table_is_sent_again_when_the_buffers_move() -> None:
    from leangrad.kernels import flat as kernels

    factor = torch.tensor(2.0, device="cuda")
    for round_ in range(3):
        flats = [torch.full((64 * (i + 1),), float(round_), device="cuda") for i in range(5)]
        kernels.scale(flats, factor, flats)
        assert all((flat == 2 * round_).all() for flat in flats)
        keep = flats  # so that the next ones lie elsewhere
    del keep
