"""Random numbers that are drawn again: the bits that ATen multiplied by, and only if nobody else drew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.errors import LeangradError
from leangrad.lean import saving
from leangrad.ledger.observe import random_ops, rng
from tests.support import same_bits
from tests.support.ledger_programs import backward, leaf

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def drawn_by_aten(shape: tuple[int, ...], dtype: torch.dtype, p: float) -> tuple[Tensor, random_ops.DropoutMask]:
    """The factor as ATen makes it, and what is noted of it."""
    torch.manual_seed(7)
    state = rng.state_of(CPU)
    assert state is not None
    factor = torch.empty(shape, dtype=dtype).bernoulli_(1 - p).div_(1 - p)
    return factor, random_ops.DropoutMask(factor, p, state, rng.mark_of(CPU))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.3, 0.5, 0.9, 1 - 1e-6])
def test_factor(dtype: torch.dtype, p: float) -> None:
    """In float16 the last is infinite: zeros must stay zeros all the same."""
    factor, draw = drawn_by_aten((33, 37), dtype, p)
    assert same_bits(draw.factor(), factor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_has_the_factor_that_is_assumed(dtype: torch.dtype) -> None:
    factor, _ = drawn_by_aten((33, 37), dtype, 0.3)
    torch.manual_seed(7)
    assert same_bits(F.dropout(torch.ones(33, 37, dtype=dtype), 0.3), factor)


@pytest.mark.parametrize("function", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout])
@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False), (1.0, False)])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_that_does_nothing_hands_its_input_back(
    function: Callable[..., Tensor], p: float, training: bool, inplace: bool
) -> None:
    """Nothing of it is noted, and nothing moves before it, as it is no change."""
    x = torch.ones(3, 4, requires_grad=True) * 2
    state, version = torch.get_rng_state(), x._version
    assert function(x, p, training, inplace) is x
    assert x._version == version
    assert same_bits(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 1 - 1e-6])
def test_alpha_dropout_from_one_drawing(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(33, 37, dtype=dtype)
    _, draw = drawn_by_aten((33, 37), dtype, p)
    torch.manual_seed(7)
    factor = draw.alpha_factor()
    assert same_bits(x * factor + draw.alpha_shift(factor), F.alpha_dropout(x, p, training=True))


def test_alpha_dropout_draws_once_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is rebuilt from the factor and from what is added, which follows from the factor."""
    drawn = 0
    bernoulli = random_ops.DropoutMask.bernoulli

    def counted(self: random_ops.DropoutMask) -> Tensor:
        nonlocal drawn
        drawn += 1
        return bernoulli(self)

    monkeypatch.setattr(random_ops.DropoutMask, "bernoulli", counted)
    w, x = leaf(32, 32), leaf(16, 32, seed=1)
    ledger = saving(min_bytes=0)
    for n in range(3):
        with ledger:
            y = F.alpha_dropout(x @ w, 0.3, training=True) @ w
        assert drawn == n
        backward(y)
        assert drawn == n + 1


def test_a_dropout_keeps_one_state() -> None:
    """5 KB of a Mersenne twister before it, and a short mark of where it ended."""
    state, mark = rng.state_of(CPU), rng.mark_of(CPU)
    assert isinstance(state, Tensor)
    assert isinstance(mark, bytes)
    assert len(mark) == rng.MARK_BYTES
    assert state.nbytes > 5000


@pytest.mark.parametrize("words", [1, 2, 623, 624, 625, 1248, 624 * 7])
def test_a_draw_by_another_is_noticed(words: int) -> None:
    """After whole rounds of the twister its place is the same, and its words are not."""
    torch.manual_seed(7)
    state = rng.state_of(CPU)
    torch.empty(100).bernoulli_(0.5)
    torch.empty(words, dtype=torch.int32).random_()
    after = rng.mark_of(CPU)
    assert state is not None
    with pytest.raises(LeangradError, match="another thread drew"):
        rng.draw_again(state, after, lambda g: torch.empty(100).bernoulli_(0.5, generator=g))


def test_without_marks_the_whole_state_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_marks_tell", lambda: False)
    factor, draw = drawn_by_aten((33, 37), torch.float32, 0.3)
    assert isinstance(draw.after, bytes)
    assert len(draw.after) > 5000
    assert same_bits(draw.factor(), factor)


def test_the_default_generator_is_left_alone() -> None:
    _, draw = drawn_by_aten((33, 37), torch.float32, 0.3)
    before = torch.get_rng_state()
    draw.factor()
    rng._marks_tell.cache_clear()
    assert rng._marks_tell()
    assert same_bits(before, torch.get_rng_state())


@pytest.mark.gpu
@pytest.mark.parametrize("function", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout])
def test_on_cuda(function: Callable[..., Tensor]) -> None:
    """Only the fused dropout is drawn again there; what alpha dropout draws is kept."""
    results = []
    for region in (contextlib.nullcontext(), saving(min_bytes=0)):
        torch.manual_seed(0)
        w = torch.randn(32, 32, device="cuda", requires_grad=True)
        with region:
            y = (function((w @ w).view(4, 8, 4, 8), 0.3, training=True).sin() @ w[:8]).cos()
        y.backward(torch.ones_like(y) * 2)
        assert w.grad is not None
        results.append((y.detach(), w.grad, torch.cuda.get_rng_state()))
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)
