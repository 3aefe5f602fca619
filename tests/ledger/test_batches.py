"""Which batches share a ledger."""

import copy

import torch
from torch import Tensor

from leangrad.errors import BudgetError
from leangrad.ledger import Goal, Ledger
from leangrad.ledger.batches import MOST, Batches


def batches() -> Batches:
    return Batches(Ledger(residual_depth="auto", min_bytes=0, goal=Goal(budget=1000)))


def rows(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_a_batch_that_is_smaller_in_every_dimension_shares_it() -> None:
    known = batches()
    first = known.select(((rows(8, 16),), {"mask": rows(8)}))
    assert first is known.ledger
    assert known.select(((rows(4, 16),), {"mask": rows(1)})) is first
    assert known.select(((rows(8, 16),), {"mask": rows(8)})) is first


def test_a_batch_that_is_larger_in_one_dimension_does_not() -> None:
    known = batches()
    first = known.select(rows(8, 16))
    second = known.select(rows(2, 17))
    assert second is not first
    assert (second.goal, second.min_bytes, second.residual_depth) == (first.goal, first.min_bytes, "auto")
    assert known.select(rows(8, 16)) is first
    assert known.select(rows(2, 17)) is second


def test_a_batch_with_other_tensors_does_not() -> None:
    known = batches()
    inputs = [rows(4), (rows(4), rows(4)), {"x": rows(4)}, {"y": rows(4)}, rows(4, 1), [[rows(4)]], (None, "a")]
    assert len({known.select(one) for one in inputs}) == len(inputs)


def test_the_order_of_keywords_does_not_matter() -> None:
    known = batches()
    assert known.select({"x": rows(4), "y": rows(8)}) is known.select({"y": rows(8), "x": rows(4)})


def test_the_largest_replaces_smaller_ones() -> None:
    known = batches()
    first = known.select(rows(8, 16))
    largest = known.select(rows(16, 16))
    assert largest is not first
    assert known.select(rows(8, 16)) is largest


def test_the_oldest_goes() -> None:
    known = batches()
    first = known.select(rows(1, 100))
    others = [known.select(rows(2 + n, 99 - n)) for n in range(MOST)]
    assert len({first, *others}) == MOST + 1
    assert known.select(rows(2, 99)) is others[0]
    assert known.select(rows(1, 100)) is not first


def test_a_budget_that_cannot_be_met_says_nothing_about_smaller_batches() -> None:
    known = batches()
    first = known.select(rows(8))
    first._tuner._error = BudgetError("", smallest=1)  # type: ignore[union-attr]
    smaller = known.select(rows(4))
    assert smaller is not first
    assert known.select(rows(8)) is first
    assert known.select(rows(2)) is smaller


def test_a_copy_has_learned_nothing() -> None:
    known = batches()
    known.select(rows(8))
    copied = copy.deepcopy(known)
    assert copied.select(rows(9)) is copied.ledger is not known.ledger
