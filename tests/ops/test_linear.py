"""The linear map's four products: torch's bits, whatever was in the buffer before."""

import pytest
import torch
import torch.nn.functional as F

from leangrad.ops.linear import linear, linear_backward_bias, linear_backward_input, linear_backward_weight
from tests.support import same_bits

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n", "i", "o"), [(5, 3, 4), (1, 1, 1), (0, 3, 4), (64, 33, 17)])
def test_products_are_torchs(n, i, o, bias, dtype):
    x = torch.randn(n, i, dtype=dtype, requires_grad=True)
    w = torch.randn(o, i, dtype=dtype, requires_grad=True)
    b = torch.randn(o, dtype=dtype, requires_grad=True) if bias else None
    y = F.linear(x, w, b)
    g = torch.randn_like(y)
    dx, dw, *db = torch.autograd.grad(y, [x, w, b] if bias else [x, w], g)
    with torch.no_grad():
        for stale in (None, NAN):

            def buffer(like, stale=stale):
                return None if stale is None else torch.full_like(like, stale)

            assert same_bits(linear(x, w, b, out=buffer(y)), y)
            assert same_bits(linear_backward_input(g, w, into=buffer(x)), dx)
            assert same_bits(linear_backward_weight(g, x, into=buffer(w)), dw)
            if bias:
                assert same_bits(linear_backward_bias(g, into=buffer(b)), db[0])
