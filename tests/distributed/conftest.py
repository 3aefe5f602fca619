"""A process group of one, for what needs no second process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import group


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one: FSDP2 gathers, frees and reduces there as it does among many."""
    with group(0, 1, str(tmp_path / "store")):
        yield
