"""Imports the library that a module of this folder supports, or raises an ImportError that says what to install."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

__all__ = ["require"]


def require(name: str, minimum: str, *, user: str, package: str = "") -> ModuleType:
    """Import and return the module ``name``; raises ImportError if it is missing or older than ``minimum``.

    user: the part of leangrad that needs it, as named in the error.
    package: name of the package to install, if it differs from that of the module.

    >>> require("torch", "2.11", user="this example").__name__
    'torch'
    >>> require("torch", "1000.0", user="this example")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ImportError: this example needs torch 1000.0 or newer, found ...; pip install -U "torch>=1000.0"
    """
    package = package or name.partition(".")[0]
    mend = f'pip install -U "{package}>={minimum}"'
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise  # the library is installed, but one of its dependencies is not
        raise ImportError(f"{user} needs {package} {minimum} or newer, which is not installed; {mend}") from None
    version = str(getattr(importlib.import_module(name.partition(".")[0]), "__version__", minimum))
    if _numbers(version) < _numbers(minimum):
        raise ImportError(f"{user} needs {package} {minimum} or newer, found {version}; {mend}")
    return module


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (5, 22, 2) for 5.22.2.dev0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
