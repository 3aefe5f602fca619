"""Decisions that are postponed until the call that saved the tensors has ended.

Only then is it known which node reads each of them: see [Note: decided when the call has ended] in
``values/pending_save.py``. If that node reads only the shape, autograd may hold a stand-in instead of the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.decision import PLAIN_TYPES, Decider, DecidingRegion, StepListener
from leangrad.ledger.values.node_metadata import LIVE, VALUES
from leangrad.ledger.values.pending_save import PendingSave, ShapeOnlyReader
from leangrad.ledger.values.shape_only import INDEXED, SIZES, ShapeOnly
from leangrad.ledger.values.value import Value


class DeferredDecisions:
    """The postponed decisions of one region."""

    __slots__ = ("_decider", "_recorder", "_region")

    def __init__(self, region: DecidingRegion, decider: Decider, recorder: StepListener | None) -> None:
        self._region, self._decider, self._recorder = region, decider, recorder

    def defer(self, tensor: Tensor, *, expected: bool = False) -> PendingSave:
        """Return an empty slot for ``tensor``, saved in a call that may make a node of ``SHAPE_ONLY``; decide later.

        expected: in the recorded step a stand-in replaced the tensor.
        """
        assert self._region.slots is not None
        slot = PendingSave(tensor, self._region.saved_count - 1, expected)
        self._region.slots.append(slot)
        return slot

    def resolve(self, slots: Sequence[PendingSave], claimed: Mapping[int, ShapeOnlyReader]) -> None:
        """Decide about the tensors in ``slots``, now that the call that saved them has ended.

        claimed: by the id of a slot, the node that reads its tensor only for the shape, as ``SHAPE_ONLY`` lists it.
        """
        saved = self._region.saved_count
        with torch.no_grad():  # as inside a pack hook
            for slot in slots:
                tensor, claim = slot.tensor, claimed.get(id(slot))
                self._region.saved_count = slot.number + 1
                assert tensor is not None
                if claim is not None and self.is_shape_only(tensor, claim, expected=slot.expected):
                    strides = None if claim.kind == SIZES else tensor.stride()
                    slot.packed = ShapeOnly(tensor.shape, strides, tensor.dtype, tensor.device)
                    self._region.needs_mode()
                    if self._recorder is not None:
                        node: Any = tensor.grad_fn
                        self._recorder.shape_only(type(node).__name__, tensor.nbytes, node._sequence_nr())
                elif tensor._version != slot.version:  # the call itself changed it
                    slot.keep()
                else:
                    slot.packed = self._decider.decide(tensor)
                slot.tensor = None
                if self._recorder is not None:
                    assert slot.packed is not None
                    self._recorder.packed(slot.packed)
        self._region.saved_count = saved

    def is_shape_only(self, tensor: Tensor, claim: ShapeOnlyReader, *, expected: bool = False) -> bool:
        """Whether a stand-in can replace ``tensor``, of which ``claim`` reads only the shape, and saves memory.

        expected: in the recorded step it did both.
        """
        if (
            type(tensor) not in PLAIN_TYPES
            or tensor.is_leaf
            or tensor.layout is not torch.strided
            or tensor.nbytes < self._region.min_bytes
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        if claim.kind != SIZES:
            span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            if span > tensor.numel():  # its strides span more memory than its elements; the stand-in would too
                return False
        return expected or self._stand_in_pays(tensor, claim)

    def _stand_in_pays(self, tensor: Tensor, claim: ShapeOnlyReader) -> bool:
        """Whether fewer bytes are kept if ``tensor`` is not kept for the node of ``claim``.

        If ``tensor`` were kept, the op's output could be rebuilt from it. So if the output has more bytes, as in
        padding, a stand-in pays only if ``tensor`` is available anyway: kept or rebuilt for another reader, or a
        product that can be caught. A max pooling also returns indices, which could be rebuilt too.

        A stand-in with strides uses as much memory as the tensor while its node runs. So if ``tensor`` is kept for an
        earlier op, the node gets ``tensor`` itself: backward reaches that op later, so its life is not prolonged.
        """
        base = tensor._base
        owner = tensor if base is None or base.grad_fn is None else base
        node: Any = owner.grad_fn
        known = node.metadata.get(VALUES[owner.output_nr])
        value = known() if known is not None else None
        is_caught = LIVE in node.metadata
        gives = _torch.output_nbytes(claim.node, 0)
        if gives > tensor.nbytes and value is None and not is_caught:
            return False
        if claim.kind == SIZES:
            return True
        if type(value) is Value and value.tensor is not None and value.readers:
            return False
        if claim.kind != INDEXED:
            return True
        indices = gives // tensor.itemsize * torch.int64.itemsize
        return (
            is_caught or self._decider.walk.origin(node, owner.output_nr) is None
        ) and gives + indices < tensor.nbytes
