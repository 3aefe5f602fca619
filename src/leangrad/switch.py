"""`LEANGRAD_DISABLE=1` in the environment runs everything plain, to find out whether leangrad causes a problem.

    LEANGRAD_DISABLE=1 python train.py

What it changes: no region opens, so `lean` and `saving` do nothing; the modules of `leangrad.nn` run their plain form;
`convert_abn` converts nothing; the layers of a packed model compute plain gradients, which are then copied to their
place. `InPlaceABNSync` over several processes has no plain form and runs as usual. The variable is read at every call,
so it may be set or unset while the program runs. Empty and 0 mean off.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["NAME", "disabled", "is_plain_for_now", "plain_for_now"]

NAME = "LEANGRAD_DISABLE"

# The dict behind `os.environ`, if it has the known form, else `os.environ`: every layer reads the variable, and a
# lookup in `os.environ` raises and catches a KeyError if the variable is not set.
_values: Any = getattr(os.environ, "_data", None)
_key: Any = os.environ.encodekey(NAME) if isinstance(_values, dict) else NAME
_values = _values if isinstance(_values, dict) else os.environ
_OFF = (None, "", "0", b"", b"0")

_lock = threading.Lock()
_plain_runs = 0  # how many `plain_for_now` contexts are open


def disabled() -> bool:
    """Whether `LEANGRAD_DISABLE` is set and neither empty nor 0, or a `plain_for_now` is open.

    >>> disabled()
    False
    """
    return _plain_runs > 0 or _values.get(_key) not in _OFF


@contextmanager
def plain_for_now() -> Iterator[None]:
    """Run everything plain, in all threads (backward on a GPU has its own), as if `LEANGRAD_DISABLE` were set.

    >>> with plain_for_now():
    ...     disabled()
    True
    """
    global _plain_runs
    with _lock:
        _plain_runs += 1
    try:
        yield
    finally:
        with _lock:
            _plain_runs -= 1


def is_plain_for_now() -> bool:
    """Whether a `plain_for_now` is open; what runs inside it is not a training step."""
    return _plain_runs > 0
