"""The tests' own measures: what counts as the same bits, and that a program fails where nothing is rebuilt."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leangrad.ledger import Ledger
from tests.support import assert_same_bits, same_bits
from tests.support.ledger_programs import (
    Region,
    assert_raises_where_plain_trains,
    assert_same_as_plain,
    backward,
    leaf,
    rebuilds,
)

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_a_copy_has_the_same_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    assert same_bits(x, x.clone())
    assert same_bits(x, x.clone(), strides=True, nans="bits")


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_two_signs_differ(dtype: torch.dtype) -> None:
    zero = torch.zeros(2, dtype=dtype)
    assert torch.equal(zero, -zero)
    assert not same_bits(zero, -zero)
    with pytest.raises(AssertionError, match=r"weight: \d of \d elements differ, the first at \(0"):
        assert_same_bits(zero, -zero, "weight")


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_last_bit_counts(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    real = torch.view_as_real(x) if dtype.is_complex else x
    real[-1] += torch.finfo(real.dtype).eps
    assert not same_bits(x, torch.ones(3, dtype=dtype))


def test_nan_is_a_failure_unless_it_is_asked_for() -> None:
    nan = torch.tensor([math.nan, 1.0])
    other = torch.frombuffer(bytearray(b"\x01\x00\xc0\xff\x00\x00\x80\x3f"), dtype=torch.float32)  # another NaN, and 1
    assert not same_bits(nan, nan)
    for nans in ("bits", "any"):
        assert same_bits(nan, nan, nans=nans)
        assert same_bits(nan, other, nans=nans) == (nans == "any")
        assert not same_bits(nan, torch.ones(2), nans=nans)
        assert not same_bits(torch.tensor([math.nan, 0.0]), torch.tensor([math.nan, -0.0]), nans=nans)


def test_dtype_shape_and_layout_count() -> None:
    x = torch.zeros(2, 3)
    assert not same_bits(x, x.double())
    assert not same_bits(x, x.view(3, 2))
    assert not same_bits(x, x.to_sparse())
    assert not same_bits(x, None)
    assert same_bits(None, None)


def test_strides_count_where_asked() -> None:
    x = torch.randn(4, 5)
    turned = x.t().contiguous().t()
    assert same_bits(x, turned)
    assert not same_bits(x, turned, strides=True)
    one = torch.randn(1, 5)
    assert same_bits(one, one.as_strided((1, 5), (99, 1)), strides=True)  # of one row nobody sees the stride


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    assert same_bits(x.conj(), x.conj().resolve_conj())
    assert same_bits(x.conj().imag, x.conj().resolve_conj().imag)
    assert not same_bits(x, x.conj())


def sparse(value: float, *, coalesced: bool = True) -> Tensor:
    x = torch.sparse_coo_tensor(torch.tensor([[1, 2]]), torch.tensor([value, 2.0]), (4,), check_invariants=True)
    return x.coalesce() if coalesced else x


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # by torch 2.11
def test_sparse_tensors_are_compared_by_their_values() -> None:
    assert same_bits(sparse(0.0), sparse(0.0))
    assert not same_bits(sparse(0.0), sparse(-0.0))
    assert not same_bits(sparse(0.0), sparse(0.0, coalesced=False))


def small_program(region: Region, change: bool = False) -> list[Tensor | None]:
    w, b = leaf(8, 8), leaf(8, seed=1)
    with region:
        z = (w + b).sin()
    if change:
        b.detach().mul_(2)
    backward(z)
    return [w.grad, b.grad]


def test_a_program_passes_only_with_a_ledger_that_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_as_plain(small_program)
    assert_raises_where_plain_trains(small_program, "a parameter or input, torch.float32 [8]")
    with pytest.raises(AssertionError):
        assert_same_as_plain(rebuilds(999)(lambda region: small_program(region)))
    monkeypatch.setattr(Ledger, "region", lambda ledger, module=None: None)
    with pytest.raises(AssertionError, match="nothing was rebuilt"):
        assert_same_as_plain(small_program)
    with pytest.raises(AssertionError, match="nothing was rebuilt"):
        assert_raises_where_plain_trains(small_program, "a parameter or input")


def test_tests_compare_by_same_bits() -> None:
    """``torch.equal`` would let -0.0 pass for 0.0."""
    tests = Path(__file__).parent
    found = [path.name for path in tests.rglob("*.py") if "torch.equal" in path.read_text()]
    assert sorted(found) == ["bits.py", "test_support.py"]
