"""Train the same model, with the same gradients, in a fraction of the memory.

    import leangrad

    model = leangrad.lean(model)    # same class, same parameters, same state_dict, same gradients

[Note: names of rooms] `lean`, `measure` and `verify` are functions here and also the modules that hold them. The
imports below run each module first and bind its function last, so `leangrad.measure(step)` is the function, and
`from leangrad.measure import Measurement` still finds the module, by its path. That is why none of the three may be
imported lazily: the first import by path would then put the module in the function's place.
"""

from leangrad import errors
from leangrad.lean import is_lean, lean, ledger_of, plain, saving
from leangrad.measure import measure
from leangrad.packed import pack_gradients
from leangrad.verify import verify

__all__ = ["errors", "is_lean", "lean", "ledger_of", "measure", "pack_gradients", "plain", "saving", "verify"]

__version__ = "0.1.0.dev0"
