"""Every rule of the ledger, as small functions: `tests/ledger/origins/test_rules.py` runs them."""

from tests.support.rule_cases.case import Case, check
from tests.support.rule_cases.pointwise import POINTWISE
from tests.support.rule_cases.products import PRODUCT_CASES
from tests.support.rule_cases.reductions import REDUCING
from tests.support.rule_cases.shapes import SHAPES
from tests.support.rule_cases.windows import WINDOWS

CASES = (*POINTWISE, *SHAPES, *REDUCING, *WINDOWS)

__all__ = ["CASES", "PRODUCT_CASES", "Case", "check"]
