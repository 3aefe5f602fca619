"""What several tests of the compiled engine begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from leangrad.compiled.partitioner import chosen
from tests.support.compiling import no_caches


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    """Nothing was compiled or chosen before, and nothing comes out of a cache."""
    torch._dynamo.reset()
    chosen.clear()
    with no_caches():
        yield
