"""Small programs, run plain and through a ledger: what the tests of the ledger's safety share.

A program takes a region (a ledger, or nothing) to put its forward into, and returns the tensors that must come out the
same: gradients, mostly. It makes its leaves from a seed, so every call starts from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leangrad.errors import ChangedError
from leangrad.lean import saving

Region = AbstractContextManager[Any]
Program = Callable[[Region], list[Tensor | None]]

DEPTHS = (0, 2, "auto")
STEPS = 3  # the first is recorded, the later ones use what it taught


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Sigmoid())


def grads(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()


def backward(*outputs: Tensor, **options: Any) -> None:
    """Backward with a random gradient, which tells apart what ``.sum()`` does not."""
    draw = torch.Generator().manual_seed(7)
    seeds = [torch.randn(t.shape, generator=draw).to(t.dtype) for t in outputs]
    torch.autograd.backward(outputs, seeds, **options)


def run(program: Program, region: Region, steps: int = STEPS) -> list[list[Tensor | None]]:
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        results.append(program(region))
    return results


def assert_same(mine: list[Tensor | None], plain: list[Tensor | None], what: object) -> None:
    for n, (a, b) in enumerate(zip(mine, plain, strict=True)):
        if a is None or b is None:
            assert a is b, (what, n)
        else:
            assert a.dtype == b.dtype, (what, n)
            assert torch.equal(a, b), (what, n)


def assert_same_as_plain(program: Program, *, depths: tuple[Any, ...] = DEPTHS, or_changed: bool = False) -> None:
    """The same bits as plain in every step, at every depth; ``or_changed`` allows a ChangedError instead."""
    plain = run(program, nullcontext())
    assert any(t is not None and t.count_nonzero() for t in plain[0]), "the program computes nothing"
    assert all(t is None or t.isfinite().all() for t in plain[0]), "the program computes no numbers"
    for depth in depths:
        try:
            mine = run(program, saving(residual_depth=depth, min_bytes=0))
        except ChangedError:
            if not or_changed:
                raise
            continue
        for step, (a, b) in enumerate(zip(mine, plain, strict=True)):
            assert_same(a, b, (depth, step))


def assert_raises_like_plain(program: Program, names: str) -> None:
    """Plain refuses; lean does too, with an error that is PyTorch's own kind and has ``names`` in it."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(program, nullcontext(), 1)
    for depth in DEPTHS:
        ledger = saving(residual_depth=depth, min_bytes=0)
        for _ in range(STEPS):
            with pytest.raises(ChangedError, match="modified by an inplace operation") as caught:
                run(program, ledger, 1)
            assert isinstance(caught.value, RuntimeError)
            assert names in str(caught.value), caught.value
