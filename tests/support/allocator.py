"""An allocator whose counters a test sets: steps on a CPU are planned as on a GPU."""

import pytest
import torch

from leangrad._torch import Counters
from leangrad.ledger import ledger as ledger_module
from leangrad.ledger.learn import timing
from leangrad.ledger.tune import peaks

__all__ = ["FakeAllocator"]


class FakeAllocator:
    """The counters that a budget reads, on a device with room for everything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counters: Counters) -> None:
        self.counters = counters
        monkeypatch.setattr(ledger_module, "_is_on_gpu", lambda _: True)
        monkeypatch.setattr(peaks, "_counters", lambda: self.counters)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10**10))
        monkeypatch.setattr(timing.Stopwatch, "__init__", lambda watch, *, on_gpu: setattr(watch, "_on_gpu", False))
