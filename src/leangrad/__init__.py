"""Train the same model, with the same gradients, in a fraction of the memory.

    import leangrad

    model = leangrad.lean(model)    # same class, same parameters, same state_dict, same gradients

[Note: names of rooms] `floor`, `frontier`, `lean`, `measure` and `verify` are functions here and also the modules that
hold them. The imports below run each module first and bind its function last, so `leangrad.measure(step)` is the
function, and `from leangrad.measure import Measurement` still finds the module, by its path. That is why none of the
five may be imported lazily: the first import by path would then put the module in the function's place.

`nn` and the other folders of `_ON_DEMAND` share their name with no function. They are imported when they are first
asked for, because `import leangrad` would take twice as long with them. `nn` is not in `__all__`: a star import would
put it in the place of `torch.nn`.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from leangrad import errors
from leangrad.floor import floor
from leangrad.frontier import frontier
from leangrad.lean import is_lean, lean, ledger_of, plain, saving
from leangrad.loss import linear_cross_entropy
from leangrad.measure import measure
from leangrad.packed import pack_gradients
from leangrad.verify import verify

if TYPE_CHECKING:
    from leangrad import functional as functional
    from leangrad import nn as nn
    from leangrad import norm_cache as norm_cache
    from leangrad import tape as tape
    from leangrad import workspace as workspace

__all__ = [
    "errors",
    "floor",
    "frontier",
    "is_lean",
    "lean",
    "ledger_of",
    "linear_cross_entropy",
    "measure",
    "pack_gradients",
    "plain",
    "saving",
    "verify",
]

__version__ = "0.1.0.dev0"

_ON_DEMAND = frozenset(("functional", "nn", "norm_cache", "tape", "workspace"))


def __getattr__(name: str) -> ModuleType:
    if name in _ON_DEMAND:
        return importlib.import_module(f"leangrad.{name}")  # which also makes it an attribute: asked for once
    raise AttributeError(f"module 'leangrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})
