"""The function mode of a region, as the handlers in ``handlers``, ``random_ops`` and ``mutation`` see it."""

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
    """What the function mode and its handlers need from their region."""

    min_bytes: int
    max_products: int  # products that a recipe may run through in a row; 0: no product is computed twice
    product_settings: tuple[Any, ...]  # torch's settings for products when the region began; () if max_products was 0
    # Sequence number from which nodes are trusted: their outputs were watched since they were made. Outputs of older
    # nodes are not rebuilt.
    trusted_from: int
    is_packing: bool  # a pack hook of the region is running, or the region is suspended or has ended
    runs_again: bool  # the region is that of a segment that a checkpoint runs again
    sharded: bool  # FSDP of the first kind shards the parameters, and no recipe reads them
    splits_losses: bool  # cross entropy may be computed in parts
    saves_cast_logits: bool  # the running call saves logits that were cast, and nothing else reads their source
    changing: Any  # the tensor that a function is changing in place right now
    # Not 0: the output of a product is held for a while, because it may be kept in place of a larger tensor. Along a
    # trace it is the bytes of that output in the recorded step.
    catches: int
    # Anchors that plain PyTorch would not have kept: parameters by id, other tensors by the address of their memory.
    watched_parameters: dict[int, list[weakref.ref[Anchor]]]
    watched_memory: dict[int, list[weakref.ref[Anchor]]]
    anchors: list[weakref.ref[Value]]  # anchors that plain PyTorch has kept, too
    # Memory that changed in place without a record by autograd: its address, and the sequence number of the first node
    # after the change.
    rewritten: dict[int, int]
    split_memory: set[int]  # addresses of memory that was split unsafely: see `handle_unsafe_split`
    products: RecentProducts
    draw: Draw | None  # the random draw of the running call, see [Note: attention that draws]; None if it has none
    # One slot for each tensor that the running call has saved, if decisions are deferred until it returns; else None.
    slots: list[PendingSave] | None

    def distrust(self, until: int | None = None) -> None:
        """Let no recipe rely on outputs of nodes below sequence number ``until``; None: of any node made so far."""

    def needs_mode(self, node: Any = None) -> None:
        """Note in a recorded step that the running call, or that which made ``node``, needs the function mode.

        See [Note: without the function mode].
        """

    def changes(self, number: int) -> None:
        """Note that memory which recipes may read is about to change in place.

        number: sequence number of the node that made the tensor; -1 if it is not known.
        """

    def watch(self, value: Value) -> None:
        """Watch an anchor that plain PyTorch does not keep, so that it is copied before its memory changes.

        A recipe, or an autograd Function of leangrad, reads it in backward.
        """

    def resolve(self, slots: Sequence[PendingSave], claimed: Mapping[int, ShapeOnlyReader]) -> None:
        """Decide about the tensors that a call has saved; ``claimed``: by slot id, nodes that read only a shape."""

    def attach_recipe(self, node: Any, nr: int, name: str) -> None:
        """Give the recipe of output ``nr`` of ``node`` to the value kept as saved tensor ``name`` of ``node``."""


class FunctionMode(TorchFunctionMode):
    """The torch function mode of one region, as handlers see it; its subclass in ``learn/trace.py`` runs the calls."""

    def __init__(self, region: ObservedRegion) -> None:
        super().__init__()
        self.region = region
