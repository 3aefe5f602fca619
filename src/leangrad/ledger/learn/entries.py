"""What became of each saved tensor of a recorded step, for the summary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHAPE_ONLY = "shape only"  # an outcome

# Reasons, as the summary shows them.
SHARED = "kept or rebuilt once for all that read it"
EXTRA = "larger tensors are rebuilt from it"
LOWER_PEAK = "rebuilding it would raise the peak"
HAS_ROOM = "the budget has room for it, or the time none to rebuild it"
SPARED = "the GPU waits for the host, and rebuilding it would save little"
TOO_MUCH_WORK = "too small for the work of rebuilding it"


@dataclass(frozen=True)
class Entry:
    """One saved tensor in the summary."""

    module: str  # the module whose forward saved it: its derivative reads it
    op: str  # what made it
    outcome: str  # "kept", "rebuilt", "shared" or "shape only"
    nbytes: int
    why: str
    made_by: str = ""  # the module whose forward made it
    is_extra: bool = False  # kept for recipes to start from: plain PyTorch would not keep it


@dataclass(frozen=True)
class Totals:
    """Bytes of the tensors that autograd wanted to keep in one recorded step, by what became of them."""

    kept_bytes: int = 0
    rebuilt_bytes: int = 0
    shared_bytes: int = 0  # asked for again, and kept or rebuilt once for all readers
    shape_only_bytes: int = 0  # of which backward reads the shape alone

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Totals:
        """Sum the entries of a step by what became of each tensor."""
        found = dict.fromkeys(("kept", "rebuilt", "shared", SHAPE_ONLY), 0)
        for entry in entries:
            found[entry.outcome] += entry.nbytes
        return cls(*found.values())
