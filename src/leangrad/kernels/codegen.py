"""Compiles generated source code, under a file name by which tracebacks and `inspect` find its lines."""

from __future__ import annotations

import hashlib
import linecache
from types import CodeType

__all__ = ["compiled"]


def compiled(text: str, what: str) -> CodeType:
    """Compile ``text``, the source of a module, for ``exec``; ``what`` describes it in tracebacks.

    >>> scope = {}
    >>> exec(compiled("def twice(x):\\n    return 2 * x\\n", "an example"), scope)
    >>> scope["twice"](3)
    6
    """
    name = f"<leangrad {what} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return compile(text, name, "exec")
