"""The function mode of a region, as the handlers of calls see it: ``handlers``, ``random_ops``, ``mutation``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.overrides import TorchFunctionMode

from leangrad.ledger.observe.rng import Draw
from leangrad.ledger.origins.upstream_anchors import RecentProducts
from leangrad.ledger.values.cast import Anchor
from leangrad.ledger.values.pending_save import PendingSave, ShapeOnlyReader
from leangrad.ledger.values.value import Value


class ObservedRegion(Protocol):
    """What the notes ask of their region."""

    min_bytes: int
    max_products: int  # products that a recipe may run through in a row
    product_settings: tuple[Any, ...]  # under which they run, as the region began
    fence: int
    packing: bool  # the region itself is at work
    changing: Any  # the tensor that a function is changing in place right now
    catches: int  # not 0: the output of a product is held for a while, to be kept in the stead of a larger tensor
    # Anchors that plain would not have kept: parameters by their id, other tensors by their memory.
    watched_parameters: dict[int, list[weakref.ref[Anchor]]]
    watched_memory: dict[int, list[weakref.ref[Anchor]]]
    anchors: list[weakref.ref[Value]]  # those that plain has kept too
    rewritten: dict[int, int]  # memory that was changed unseen, and the number of the first node after that
    products: RecentProducts
    draw: Draw | None  # of the call that runs: see [Note: attention that draws]
    slots: list[PendingSave] | None  # of the tensors saved in the call that runs, if they are decided when it has ended

    def changes(self, number: int) -> None:
        """Memory that recipes may read changes in place; the node of this ``number`` has made it, if that is known."""

    def resolve(self, slots: Sequence[PendingSave], claimed: Mapping[int, ShapeOnlyReader]) -> None:
        """Decide what becomes of the tensors that a call has saved."""

    def settle(self, node: Any, nr: int, name: str) -> None:
        """Give the recipe of output ``nr`` of ``node`` to the value that was kept as its saved ``name``."""


class FunctionMode(TorchFunctionMode):
    """The function override of one region, as handlers see it; ``trace.py`` runs the calls."""

    def __init__(self, book: ObservedRegion) -> None:
        super().__init__()
        self.book = book
