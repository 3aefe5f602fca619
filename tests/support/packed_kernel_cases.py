"""The kernels over flat buffers against torch in float64; run by test_packed_kernels.py, also as a script.

As a script, under `TRITON_INTERPRET=1`, the kernels take CPU tensors. The interpreter cuts bfloat16 off where a GPU
rounds.
"""

import copy
import sys

import torch
from torch import Tensor, nn

from leangrad.kernels import flat as kernels
from leangrad.kernels import serves
from leangrad.packed import pack_gradients
from tests.support import same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = {
    "one": (64,),
    "edges": (kernels.PIECE, kernels.PIECE - 64, kernels.PIECE + 128),
    "unaligned": (7, 101, 1),
    "empty": (0, 64, 0),
    "many": tuple(64 * (i + 1) for i in range(37)),
}


def vectors(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n).to(device, dtype) for n in sizes]


def check_norm(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    flats = vectors(sizes, dtype, device)
    assert serves(flats[0])
    norms = kernels.piece_norms(flats)
    assert norms.dtype == torch.float32
    truth = torch.cat(flats).double().norm()
    torch.testing.assert_close(torch.linalg.vector_norm(norms).double(), truth, rtol=2e-7, atol=0)
    flats[-1 if flats[-1].numel() else 1][-1] = float("nan")
    assert torch.linalg.vector_norm(kernels.piece_norms(flats)).isnan()


def check_scale(sizes: tuple[int, ...], dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> None:
    flats = vectors(sizes, dtype, device)
    factor = torch.tensor(0.3, device=device)
    expected = [(flat.float() * factor).to(out_dtype) for flat in flats]
    outs = flats if dtype == out_dtype else [torch.full_like(f, float("nan"), dtype=out_dtype) for f in flats]
    kernels.scale(flats, factor, outs)
    for out, truth in zip(outs, expected, strict=True):
        if device == "cuda" or out_dtype != torch.bfloat16:
            assert same_bits(out, truth)
        else:
            torch.testing.assert_close(out, truth, rtol=2**-7, atol=0)


def check_clip(dtype: torch.dtype, wide: bool, device: str) -> None:
    """The whole way, in several ranges, against torch's own clipping."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 7)).to(device, dtype)
    mine = copy.deepcopy(plain)
    packed = pack_gradients(mine, torch.float32 if wide else None, range_bytes=8192)
    x = torch.randn(5, 96).to(device, dtype)
    for model in (plain, mine):
        y = model(x)
        y.backward(torch.ones_like(y))
    norm = packed.clip_norm_(0.5, cast=wide)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).float(), rtol=5e-3, atol=0)
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert a.grad.dtype == dtype
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=1e-5)
    torch.testing.assert_close(packed.norm(), torch.tensor(0.5, device=device), rtol=5e-3, atol=0)


def check_all(device: str) -> None:
    for dtype in DTYPES:
        for name, sizes in SIZES.items():
            if name == "edges" and device == "cpu" and dtype != torch.bfloat16:
                continue  # one dtype of the large ones is enough for the interpreter
            check_norm(sizes, dtype, device)
            check_scale(sizes, dtype, dtype, device)
            check_scale(sizes, torch.float32, dtype, device)
        check_clip(dtype, False, device)
        check_clip(dtype, True, device)


if __name__ == "__main__":
    check_all("cpu")
    sys.stdout.write("all kernels agree\n")
