"""Three small real models, trained plain and lean side by side: what `leangrad demo` runs.

`case` says what a model to be compared is, `residual_net`, `gpt` and `swiglu` are the three, `comparison` trains them.
"""

from leangrad.demo.case import Case
from leangrad.demo.comparison import Comparison, compare
from leangrad.demo.gpt import gpt
from leangrad.demo.residual_net import residual_net
from leangrad.demo.swiglu import swiglu

__all__ = ["CASES", "Case", "Comparison", "compare", "gpt", "residual_net", "swiglu"]

CASES: tuple[Case, ...] = (residual_net(), gpt(), swiglu())
