"""Selects the ledger for a batch, if the model has a budget or a bound on the time.

The memory of a step depends on the shapes of its batch. A batch that is no larger in any dimension than an earlier one
uses the ledger of that one. Any other batch gets a ledger of its own, which starts with the least memory and replaces
the ledgers of all batches that are no larger. So a few shapes that alternate are each learned once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from torch import Tensor

from leangrad.ledger.ledger import Ledger

__all__ = ["Batches"]

MOST = 8  # ledgers of one model; a new one then replaces the oldest

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of each tensor of a batch: its place in it, and its shape


class Batches:
    """The ledgers of one model, by the shapes of a batch; ``ledger`` is the first."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger  # the ledger of the last batch
        self._ledgers: dict[Shapes, Ledger] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the settings; the copy has learned nothing."""
        return Batches, (self.ledger,)

    def select(self, batch: Any) -> Ledger:
        """Return the ledger of the step that begins; ``batch``: the arguments of its forward."""
        shapes = tuple(_shapes(batch, ""))
        with self._lock:
            ledger = self._known(shapes)
            if ledger is None:
                ledger = self.ledger.fresh() if self._ledgers else self.ledger
                self._ledgers = {known: one for known, one in self._ledgers.items() if not _covers(shapes, known)}
                if len(self._ledgers) == MOST:
                    del self._ledgers[next(iter(self._ledgers))]
                self._ledgers[shapes] = ledger
            if ledger is not self.ledger:
                self.ledger.end_step()
                self.ledger = ledger
        return ledger

    def _known(self, shapes: Shapes) -> Ledger | None:
        """Return the ledger of these shapes, or of larger ones unless their budget could not be met; else None."""
        same = self._ledgers.get(shapes)
        if same is not None:
            return same
        covering = (one for known, one in self._ledgers.items() if _covers(known, shapes) and not one.has_failed)
        return next(covering, None)


def _shapes(tree: Any, place: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the place and the shape of each tensor in nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        return [(place, tuple(tree.shape))]
    if isinstance(tree, Mapping):
        children = sorted(((str(key), child) for key, child in tree.items()), key=itemgetter(0))
    elif isinstance(tree, tuple | list):
        children = [(str(n), child) for n, child in enumerate(tree)]
    else:
        return []
    return [found for key, child in children for found in _shapes(child, f"{place}.{key}")]


def _covers(larger: Shapes, smaller: Shapes) -> bool:
    """Whether no tensor of ``smaller`` is larger in any dimension than the one at the same place in ``larger``."""
    return len(larger) == len(smaller) and all(
        place == other and len(a) == len(b) and all(map(int.__ge__, a, b))
        for (place, a), (other, b) in zip(larger, smaller, strict=True)
    )
