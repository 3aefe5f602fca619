"""Every rule rebuilds its op bit for bit, in each form in which users write it."""

import pytest
import torch

from leangrad.ledger.origins.rules import RULES
from tests.support.rule_cases import CASES, Case, check


@pytest.mark.parametrize(("case", "dtype"), [p for case in CASES for p in case.parameters()])
def test_case(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_every_rule_has_a_case() -> None:
    assert {c.node for c in CASES} == set(RULES)
