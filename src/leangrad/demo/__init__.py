"""The demo of `leangrad demo`: trains three small real models plain and lean, side by side.

`case` defines a model with its data; `residual_net`, `gpt` and `swiglu` are the three models; `comparison` trains them.
"""

from leangrad.demo.case import Case
from leangrad.demo.comparison import Comparison, compare
from leangrad.demo.gpt import gpt
from leangrad.demo.residual_net import residual_net
from leangrad.demo.swiglu import swiglu

__all__ = ["CASES", "Case", "Comparison", "compare", "gpt", "residual_net", "swiglu"]

CASES: tuple[Case, ...] = (residual_net(), gpt(), swiglu())
