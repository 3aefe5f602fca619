"""`LEANGRAD_DISABLE=1` in the environment: everything runs plain, to tell whether leangrad has a part in what you see.

    LEANGRAD_DISABLE=1 python train.py

What it changes: no region opens, so `lean` and `saving` do nothing; the modules of `leangrad.nn` run their plain form;
`convert_abn` converts nothing; the layers of a packed model compute plain gradients, which are then copied to their
place. `InPlaceABNSync` over several processes has no plain form and runs as ever. The variable is looked up at every
call, so it may be set or taken back while the program runs. Empty and 0 mean off.
"""

import os
from typing import Any

__all__ = ["NAME", "disabled"]

NAME = "LEANGRAD_DISABLE"

# The dict behind `os.environ`, if there is one as we know it: every layer asks, and a name that is not in `os.environ`
# costs a raised KeyError.
_values: Any = getattr(os.environ, "_data", None)
_key: Any = os.environ.encodekey(NAME) if isinstance(_values, dict) else NAME
_values = _values if isinstance(_values, dict) else os.environ
_OFF = (None, "", "0", b"", b"0")


def disabled() -> bool:
    """Whether `LEANGRAD_DISABLE` is set to anything but 0 or nothing.

    >>> disabled()
    False
    """
    return _values.get(_key) not in _OFF
