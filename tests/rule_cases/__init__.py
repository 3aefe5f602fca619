"""Every rule of the ledger, as small functions: `tests/test_rules.py` runs them."""

from tests.rule_cases.case import Case, check
from tests.rule_cases.pointwise import POINTWISE
from tests.rule_cases.reductions import REDUCING
from tests.rule_cases.shapes import SHAPES
from tests.rule_cases.windows import WINDOWS

CASES = (*POINTWISE, *SHAPES, *REDUCING, *WINDOWS)

__all__ = ["CASES", "Case", "check"]
