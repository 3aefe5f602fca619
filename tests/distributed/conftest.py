"""A process group of one, for what needs no second process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import _composable_state

from tests.support.ranks import group


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one: FSDP2 gathers, frees and reduces there as it does among many.

    Afterwards no sharded module is known: one that lives on counts for the whole process, and logits would not be lazy
    in the tests that come next.
    """
    with group(0, 1, str(tmp_path / "store")):
        yield
    _composable_state._module_state_mapping.clear()
