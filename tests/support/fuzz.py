"""How many random examples a fuzz runs: a few in `make test`, all of them in `make fuzz`."""

import os

from hypothesis import HealthCheck, settings


def examples(small: int, large: int) -> int:
    """`large` where `LEANGRAD_FUZZ=large` is set, else `small`.

    >>> examples(20, 30_000) in (20, 30_000)
    True
    """
    return large if os.environ.get("LEANGRAD_FUZZ") == "large" else small


def fuzz_settings(small: int, large: int) -> settings:
    """Hypothesis settings for so many examples: the same ones on every machine, however long each takes."""
    return settings(
        max_examples=examples(small, large),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
