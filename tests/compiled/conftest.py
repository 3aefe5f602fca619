"""What several tests of the compiled engine begin with."""

from __future__ import annotations

import os
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


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
