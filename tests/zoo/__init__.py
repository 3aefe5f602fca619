"""The zoo: twenty small models that cover what people train, and ten real ones from `transformers`.

Every promise of leangrad is kept over all of them. A case's activations outweigh its parameters and are large enough
(5 to 60 MB kept by plain PyTorch in float32) that a change in memory shows, and a step takes a fraction of a second.

>>> one = case("gpt")
>>> model, batch = one.make(), one.batch()
>>> one.step(model, batch).backward()
"""

from . import attention, conv, habits, hf, sequence
from .bfloat16 import FastBFloat16
from .case import TAGS, Case

__all__ = ["CASES", "HF", "SMALL", "TAGS", "Case", "FastBFloat16", "case"]

SMALL: tuple[Case, ...] = conv.CASES + attention.CASES + sequence.CASES + habits.CASES
HF: tuple[Case, ...] = hf.CASES
CASES = SMALL + HF


def case(name: str) -> Case:
    """The case of that name."""
    for one in CASES:
        if one.name == name:
            return one
    raise KeyError(f"no case is called {name!r}; there are {', '.join(one.name for one in CASES)}")
