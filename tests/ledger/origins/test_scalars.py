"""What a replay must read as ATen read it: probabilities that are no Python floats, statistics that lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.ledger_programs import (
    WITNESS_BYTES,
    Program,
    Region,
    assert_same_as_plain,
    backward,
    grads,
    leaf,
    rebuilds,
    witness,
)

PROBABILITIES = {
    "float32": lambda: np.float32(0.1),
    "float16": lambda: np.float16(0.1),
    "tensor": lambda: torch.tensor(0.1),
    "bfloat16 tensor": lambda: torch.tensor(0.1, dtype=torch.bfloat16),
}
DROPOUTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "dropout": lambda h, p: F.dropout(h, p),
    "alpha dropout": lambda h, p: F.alpha_dropout(h, p, training=True),
    "feature alpha dropout": lambda h, p: F.feature_alpha_dropout(h, p, training=True),
    "attention": lambda h, p: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=p)[0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("probability", PROBABILITIES.values(), ids=PROBABILITIES.keys())
@pytest.mark.parametrize("dropout", DROPOUTS.values(), ids=DROPOUTS.keys())
def test_probability_in_another_dtype(
    dropout: Callable[[Tensor, Any], Tensor], probability: Callable[[], Any], dtype: torch.dtype
) -> None:
    """``1 - p`` is computed in double precision by ATen, whatever ``p`` is."""

    def program(region: Region) -> list[Tensor | None]:
        w, x = leaf(32, 32, dtype=dtype), leaf(16, 32, seed=1, dtype=dtype)
        with region:
            y = dropout((x @ w).sin(), probability()) @ w
        backward(y)
        return [w.grad, x.grad]

    assert_same_as_plain(program)


def normed(norm: Callable[[], nn.Module], dtype: torch.dtype, *, dense: bool, is_kept: bool = False) -> Program:
    """A program that batch norm is rebuilt in, or ``is_kept``, over a map that is dense or turned."""

    def program(region: Region) -> list[Tensor | None]:
        torch.manual_seed(0)
        first, bn, last = nn.Linear(64, 16), norm(), nn.Linear(40, 8)
        x = leaf(64, 40, 64)
        with region:
            h = first(x).transpose(1, 2).to(dtype)
            y = last(bn(h.contiguous() if dense else h).sin().float())
            own, seen = witness() if is_kept else (x, x.sum())
        backward(y, seen)
        return [x.grad, own.grad, *grads(first), *grads(bn), *grads(last), *bn.buffers()]

    return program


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_batch_norm_whose_running_statistics_alone_are_wide(dtype: torch.dtype, dense: bool) -> None:
    """With no parameters and none of these ATen would round the statistics of a low-precision batch to its dtype."""
    assert_same_as_plain(normed(lambda: nn.BatchNorm1d(16, affine=False), dtype, dense=dense))


@pytest.mark.parametrize("statistic", ["running_mean", "running_var"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_with_strided_running_statistics(dtype: torch.dtype, affine: bool, statistic: str) -> None:
    """ATen computes it by another formula, with other bits: it is kept."""

    def norm() -> nn.Module:
        bn = nn.BatchNorm1d(16, affine=affine).to(dtype)
        bn.register_buffer(statistic, torch.ones(16, 2, dtype=dtype)[:, 0])
        return bn

    program = normed(norm, dtype, dense=True, is_kept=True)
    input_bytes = 64 * 16 * 40 * 8 if dtype is torch.float64 else 0  # rebuilt from the product, which is half as large
    product_bytes = 64 * 16 * 40 * 4  # the input of the last product, from the norm's output
    assert_same_as_plain(rebuilds(WITNESS_BYTES + input_bytes + product_bytes)(program))
