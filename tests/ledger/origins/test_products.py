"""Products that a recipe runs again: each bit for bit, and those that no recipe may run."""

import pytest
import torch

from leangrad.ledger.origins.rules import PRODUCTS
from tests.support.rule_cases import PRODUCT_CASES, Case, check


@pytest.mark.parametrize(("case", "dtype"), [p for case in PRODUCT_CASES for p in case.parameters()])
def test_case(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_every_product_has_a_case() -> None:
    assert {c.node for c in PRODUCT_CASES} == set(PRODUCTS)
