"""Small programs, run plain and through a ledger: what the tests of the ledger's safety share.

A program takes a region (a ledger, or nothing) to put its forward into, and returns the tensors that must come out the
same: gradients, mostly. It makes its leaves from a seed, so every call starts from the same numbers.

Every program must have something rebuilt, or a ledger that does nothing at all would pass: where all that a program
makes is rightly kept, it has a ``witness`` beside it, and ``rebuilds`` says that nothing else is rebuilt.
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
from leangrad.ledger import Ledger
from tests.support import assert_same_bits

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


WITNESS_BYTES = 8 * 8 * 4


def witness() -> tuple[Tensor, Tensor]:
    """A leaf and what is made of it, to be called in a region: ``WITNESS_BYTES`` that every open region rebuilds."""
    w = leaf(8, 8, seed=99)
    return w, (w * 2).sin()


def rebuilds(nbytes: int) -> Callable[[Program], Program]:
    """Say how many bytes the recorded step of a program rebuilds; of others it is only known that there are some."""

    def mark(program: Program) -> Program:
        program.rebuilt_bytes = nbytes  # type: ignore[attr-defined]
        return program

    return mark


def run(program: Program, region: Region, steps: int = STEPS) -> list[list[Tensor | None]]:
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        results.append(program(region))
    return results


def assert_same(mine: list[Tensor | None], plain: list[Tensor | None], what: object) -> None:
    for n, (a, b) in enumerate(zip(mine, plain, strict=True)):
        assert_same_bits(a, b, (what, n), strides=True)


def assert_rebuilt(program: Program, ledger: Ledger, what: object) -> None:
    """The last recorded step rebuilt something, and as many bytes as the program says, if it does."""
    rebuilt = ledger.totals().rebuilt_bytes
    assert rebuilt > 0, (what, "nothing was rebuilt")
    assert rebuilt == getattr(program, "rebuilt_bytes", rebuilt), what


def assert_same_as_plain(program: Program, *, depths: tuple[Any, ...] = DEPTHS) -> None:
    """The same bits as plain in every step, at every depth, with something rebuilt."""
    plain = run(program, nullcontext())
    assert any(t is not None and t.count_nonzero() for t in plain[0]), "the program computes nothing"
    assert all(t is None or t.isfinite().all() for t in plain[0]), "the program computes no numbers"
    for depth in depths:
        ledger = saving(residual_depth=depth, min_bytes=0)
        mine = run(program, ledger)
        for step, (a, b) in enumerate(zip(mine, plain, strict=True)):
            assert_same(a, b, (depth, step))
        assert_rebuilt(program, ledger, depth)


def assert_raises_where_plain_trains(program: Callable[[Region, bool], list[Tensor | None]], names: str) -> None:
    """A change that nobody can see in time is refused in every step, by an error that has ``names`` in it.

    ``program`` takes a region and whether to make the change; without it lean trains as plain does.
    """
    assert_same_as_plain(lambda region: program(region, False))
    run(lambda region: program(region, True), nullcontext())
    for depth in DEPTHS:
        ledger = saving(residual_depth=depth, min_bytes=0)
        for _ in range(STEPS):
            with pytest.raises(ChangedError, match="modified by an inplace operation") as caught:
                program(ledger, True)
            assert names in str(caught.value), caught.value


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
