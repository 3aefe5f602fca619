"""Amounts of memory as people write them: ``"20GB"``, ``"20GiB"``, ``"90%"`` of a device, or a number of bytes."""

from __future__ import annotations

import math
import re

__all__ = ["parse_budget", "parse_size", "size_text"]

UNITS = {
    "": 1,
    **{f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)},
}
UNITS["b"] = 1
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


def parse_size(size: object, name: str = "size") -> int:
    """Return the bytes that ``size`` means; ``name``: its name in error messages.

    >>> parse_size("20GB"), parse_size("1.5 GiB"), parse_size(4096)
    (20000000000, 1610612736, 4096)
    """
    expected = f'{name} must be a number of bytes above 0, or a text such as "20GB" (10^9 bytes) or "20GiB" (2^30)'
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in UNITS:
            raise ValueError(f"{expected}, got {size!r}")
        number = float(match[1]) * UNITS[match[2].lower()]
    elif isinstance(size, int | float) and not isinstance(size, bool):
        number = float(size)
    else:
        raise TypeError(f"{expected}, got {size!r}")
    if not math.isfinite(number) or number < 1:
        raise ValueError(f"{expected}, got {size!r}")
    return int(number) if isinstance(size, str | float) else int(size)


def parse_budget(budget: object) -> int | float:
    """Return the bytes that ``budget`` means; for a percentage such as ``"90%"``, the share of memory as a float.

    >>> parse_budget("24GB"), parse_budget("90%")
    (24000000000, 0.9)
    """
    match = _SHARE.fullmatch(budget) if isinstance(budget, str) else None
    if match is None:
        return parse_size(budget, "budget")
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise ValueError(f"budget must be above 0% and at most 100% of the device's memory, got {budget!r}")
    return share


def size_text(nbytes: float) -> str:
    """Return a number of bytes as text with a unit.

    >>> size_text(20_000_000_000), size_text(4_500_000), size_text(812)
    ('20.00 GB', '4.50 MB', '812 bytes')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} bytes"
