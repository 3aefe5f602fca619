"""The linear map, forward and backward, on matrices: y = x Wᵀ + b with x (N, in), W (out, in), b (out,).

    dx = g W        dW = gᵀ x        db = Σ_rows g

Each result is written into the buffer that is passed, whatever is in it; without one it is allocated. The products are
the ones that autograd's own backward of `F.linear` computes, operand by operand, so the bits are the same.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "linear",
    "linear_backward_bias",
    "linear_backward_input",
    "linear_backward_weight",
    "write_wider",
    "writes_wider",
]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Returns y = x Wᵀ + b. Equals `F.linear(x, weight, bias)`.

    >>> linear(torch.ones(2, 3), torch.ones(4, 3), None, out=torch.full((2, 4), float("nan"))).unique()
    tensor([3.])
    """
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def linear_backward_input(g: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
    """Returns dx = g W, in the shape of x. `into` must not overlap g."""
    return torch.mm(g, weight, out=into)


def linear_backward_weight(g: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor:
    """Returns dW = gᵀ x, in the shape of W."""
    return torch.mm(g.t(), x) if into is None else torch.mm(g.t(), x, out=into)


def linear_backward_bias(g: Tensor, into: Tensor | None = None) -> Tensor:
    """Returns db = Σ_rows g, in the shape of b."""
    return g.sum(0) if into is None else torch.sum(g, 0, out=into)


def write_wider(left: Tensor, right: Tensor, into: Tensor, add: bool) -> None:
    """Write `left @ right` into `into`, or add it if `add`; `into` has a wider dtype than the factors.

    The product is summed and written in that dtype, with no temporary.
    """
    if add:
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
    else:
        torch.mm(left, right, out_dtype=into.dtype, out=into)


@cache
def writes_wider(device: torch.device, dtype: torch.dtype, wider: torch.dtype) -> bool:
    """Whether `write_wider` works; tried once. Only CUDA has such a product, and not for every pair of dtypes."""
    if device.type != "cuda":
        return False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    into = torch.full((16, 16), float("nan"), dtype=wider, device=device)
    try:
        write_wider(ones, ones, into, add=False)
        write_wider(ones, ones, into, add=True)
    except (RuntimeError, TypeError):
        return False
    return bool((into == 32).all())
