"""The saved tensors of a recorded step as the summary shows them: kept, rebuilt, shared or shape only, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHAPE_ONLY = "shape only"  # a value of ``Entry.outcome``

# Values of ``Entry.why``: the reasons, as the summary shows them.
SHARED = "kept or rebuilt once for all that read it"
EXTRA = "larger tensors are rebuilt from it"
LOWER_PEAK = "rebuilding it would raise the peak"
HAS_ROOM = "the budget has room for it, or the time none to rebuild it"
SPARED = "the GPU waits for the host, and rebuilding it would save little"
TOO_MUCH_WORK = "too small for the work of rebuilding it"


@dataclass(frozen=True)
class Entry:
    """One saved tensor in the summary."""

    module: str  # path of the module whose forward saved the tensor, and whose backward reads it
    op: str  # autograd node or op that made the tensor
    outcome: str  # "kept", "rebuilt", "shared" or "shape only"
    nbytes: int
    why: str  # reason for the outcome; empty if there is nothing to explain
    made_by: str = ""  # path of the module whose forward made the tensor
    is_extra: bool = False  # kept only because recipes start from it; plain PyTorch would not keep it


@dataclass(frozen=True)
class Totals:
    """Bytes of the tensors that autograd saved in one recorded step, by outcome."""

    kept_bytes: int = 0
    rebuilt_bytes: int = 0
    shared_bytes: int = 0  # tensors saved once more: each is kept or rebuilt once for all of its readers
    shape_only_bytes: int = 0  # tensors of which backward reads only the shape

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Totals:
        """Sum the bytes of the entries of a step by outcome."""
        found = dict.fromkeys(("kept", "rebuilt", "shared", SHAPE_ONLY), 0)
        for entry in entries:
            found[entry.outcome] += entry.nbytes
        return cls(*found.values())
