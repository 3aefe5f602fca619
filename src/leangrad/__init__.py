"""Train the same model, with the same gradients, in a fraction of the memory.

    import leangrad

    model = leangrad.lean(model)    # same class, same parameters, same state_dict, same gradients

The training loop stays as it is. What else there is:

    lean(model, budget="20GB")              keep as much as fits; slowdown=1.1: rebuild as much as the time allows
    lean(model, exact=False)                train a language model without its logits
    plain(model), is_lean(model)            undo lean; whether a model is lean
    saving()                                lean for a region of code: with saving(): loss = ...
    ledger_of(model).summary()              what was kept, what is rebuilt, and why
    verify(model, batch)                    compare lean and plain training of this model, bit for bit
    measure(step)                           how much memory a step uses, and what holds it
    profile("report.html")                  the same for a whole training loop, as a page: with profile(...): train()
    floor(model, batch)                     the fewest bytes that could be kept for backward
    frontier(model, batch)                  time against memory, for every way to train this model
    pack_gradients(model)                   all gradients in one flat buffer
    linear_cross_entropy(hidden, w, y)      the loss of a language model without its logits
    errors                                  what leangrad raises about itself

    torch.compile(model, backend="leangrad")              for compiled models, instead of lean
    leangrad.nn.convert_abn(model)                        for CNNs with batch norm
    leangrad.integrations.transformers.LeanCallback       for Hugging Face's Trainer
    leangrad.integrations.lightning.Lean                  for Lightning's Trainer

With LEANGRAD_DISABLE=1 in the environment everything runs plain. On the command line there is `leangrad --help`. Pages
with lines to copy are in docs/.
"""

# [Note: names of rooms] `floor`, `frontier`, `lean`, `measure`, `profile` and `verify` are functions here and modules
# that hold them. The imports below run each module first and bind its function last, so `leangrad.measure(step)` is
# the function, and `from leangrad.measure import Measurement` still finds the module, by its path. That is why none of
# the six may be imported lazily: the first import by path would then put the module in the function's place.
#
# `nn` and the other modules of `_ON_DEMAND` share their name with no function. They are imported on first access,
# because `import leangrad` would take twice as long with them. `nn` is not in `__all__`: a star import would replace
# the caller's `torch.nn` by it.

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from leangrad import errors as errors
from leangrad.floor import floor
from leangrad.frontier import frontier
from leangrad.lean import is_lean, lean, ledger_of, plain, saving
from leangrad.loss import linear_cross_entropy
from leangrad.measure import measure
from leangrad.packed import pack_gradients
from leangrad.profile import profile
from leangrad.verify import verify

if TYPE_CHECKING:
    from leangrad import functional as functional
    from leangrad import integrations as integrations
    from leangrad import nn as nn
    from leangrad import norm_cache as norm_cache
    from leangrad import tape as tape
    from leangrad import workspace as workspace

__all__ = [
    "floor",
    "frontier",
    "is_lean",
    "lean",
    "ledger_of",
    "linear_cross_entropy",
    "measure",
    "pack_gradients",
    "plain",
    "profile",
    "saving",
    "verify",
]

__version__ = "0.1.0.dev0"

_ON_DEMAND = frozenset(("functional", "integrations", "nn", "norm_cache", "tape", "workspace"))


def __getattr__(name: str) -> ModuleType:
    if name in _ON_DEMAND:
        return importlib.import_module(f"leangrad.{name}")  # which also sets the attribute: called once
    raise AttributeError(f"module 'leangrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})
