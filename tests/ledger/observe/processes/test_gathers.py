"""What stands for a hook of FSDP2 while a region is open."""

import gc
import sys
import weakref

import pytest
import torch._dynamo  # noqa: F401  (a stand-in asks whether it was imported)
from torch import nn

from leangrad.ledger.observe.processes.gathers import SuspendedHook


def test_it_calls_the_hook_where_no_region_is_open() -> None:
    called = []
    stand_in = SuspendedHook(lambda module, *args, **named: called.append((module, args, named)) or 7, gathers=True)
    module = nn.Linear(1, 1)
    assert stand_in(module, 1, word=2) == 7
    assert called == [(module, (1,), {"word": 2})]


@pytest.mark.parametrize("knows_dynamo", [True, False])
def test_it_does_not_wait_for_the_collector(knows_dynamo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not knows_dynamo:
        monkeypatch.delitem(sys.modules, "torch._dynamo")
    gc.disable()
    try:
        stand_in = SuspendedHook(print, gathers=True)
        seen = weakref.ref(stand_in)
        del stand_in
        assert seen() is None
    finally:
        gc.enable()
