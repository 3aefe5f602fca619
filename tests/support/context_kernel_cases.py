"""The kernel of the attention context against float64; run by test_context_kernels.py, also as a script.

As a script, under `TRITON_INTERPRET=1`, the kernel takes CPU tensors. Shapes are small: the interpreter is slow.
"""

import itertools
import sys

import torch

from leangrad.kernels import INTERPRETED, serves
from leangrad.kernels.context import BLOCK, finish_backward
from leangrad.ops.context import apply_context_backward
from tests.support import same_bits

# One rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it: one place more.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11}
SHAPES = [(1, 1), (3, 5), (7, 300), (BLOCK // 64, 64), (130, 129)]


def check_pass(shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    """Every combination of what is asked for, with the output over g and apart from it."""
    map_dtype, product_dtype = dtypes
    g, p, x = (torch.randn(shape, device=device).to(dtype) for dtype in (map_dtype, product_dtype, map_dtype))
    strength = torch.tensor([0.7], device=device)
    assert serves(g)
    truth = g.double() + 0.7 / shape[1] * p.double()
    dot = (x.double() * p.double()).sum()
    for needs_x, over in itertools.product((False, True), (False, True, None)):
        source = g.clone()
        into = None if over is None else source if over else torch.full_like(g, float("nan"))
        found = finish_backward(source, p, x if needs_x else None, strength, into)
        assert (found is None) != needs_x
        if found is not None:
            assert found.dtype == torch.float64
            assert (found - dot).abs() <= 1e-12 * (x.double() * p.double()).abs().sum()
        if into is not None:
            assert (into.double() - truth).abs().max() <= TOLERANCE[map_dtype] * truth.abs().max()
        if over is not True:
            assert same_bits(source, g)


def check_op(device: str) -> None:
    """The op takes the kernel where maps are contiguous, and the plain passes where not; both give the same."""
    g, x = torch.randn(40, 24, device=device), torch.randn(40, 24, device=device)
    context, strength = torch.randn(24, 24, device=device), torch.tensor([-2.0], device=device)
    dx, ds = apply_context_backward(g, x, context, strength)
    strided = [torch.stack((t, t), 2)[..., 0] for t in (g, x)]
    other, ds_other = apply_context_backward(*strided, context, strength)
    assert dx is not None and other is not None and ds is not None and ds_other is not None  # noqa: PT018
    assert (dx - other).abs().max() < 1e-5
    assert (ds - ds_other).abs() < 1e-5 * ds.abs()
    assert (ds - (g.double() * (x.double() @ context.double())).sum() / 24).abs() < 1e-4


def check_all(device: str) -> None:
    """All of the above."""
    torch.manual_seed(0)
    float32, bfloat16, float16 = TOLERANCE
    pairs = [(float32, float32), (bfloat16, bfloat16), (float32, bfloat16), (float16, float16)]
    for shape, dtypes in itertools.product(SHAPES, pairs):
        check_pass(shape, dtypes, device)
    check_op(device)


if __name__ == "__main__":
    check_all("cpu")
    sys.stdout.write("all kernels agree\n")
