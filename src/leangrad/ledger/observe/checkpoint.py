"""Support for ``torch.utils.checkpoint``: leangrad also saves memory in the segment that backward runs again.

A checkpoint runs its function in forward under saved-tensor hooks that drop every tensor. In backward, the first unpack
of a dropped tensor makes the checkpoint run its function again, under hooks that store a tensor for each dropped one;
autograd reads the stored tensors. The peak of such a step is most often in the segment that has just been run again.

[Note: a region in a segment that is run again]
When backward runs the checkpoint's function again, the function runs inside a region of its own. Around each call the
region sets its own hooks, inside the checkpoint's hooks. They decide about each saved tensor as always, and pass one
tensor on to the checkpoint's hook: the saved tensor itself if it is kept, a ``Placeholder`` if it is rebuilt. Counting
the saved tensors, stopping early and comparing with the first run is therefore still done by torch.

That region is opened in one of two ways. If a checkpoint runs inside an open region, the region finds the checkpoint's
hooks in force and wraps the checkpoint's function in a ``Recomputation``, which opens the region. If a lean module runs
inside a checkpoint, the module opens a region itself each time it runs; the one in forward decides nothing, because the
checkpoint drops every saved tensor.

A reentrant checkpoint sets no hooks. The region recognizes it by the autograd node of its output. It runs its function
again like any other part of forward, followed by a backward pass of its own, so the region there is an ordinary one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch

from leangrad import _torch
from leangrad.ledger.observe.active_region import current, regions_are_forbidden
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.node_metadata import MADE, OPAQUE
from leangrad.ledger.values.pending_save import PendingSave
from leangrad.ledger.values.saved import Bare
from leangrad.ledger.values.saved_view import SavedView
from leangrad.ledger.values.value import Value

Read = Callable[[Packed | PendingSave], Any]


class Placeholder(Tensor):
    """A tensor without memory that a checkpoint stores for a saved tensor that is rebuilt when it is read.

    It has the shape, dtype and device of that tensor. Any op on it rebuilds the tensor and computes with that. So does
    the detach by which autograd reads the result of an unpack hook.
    """

    _packed: Packed | PendingSave
    _read: Read | None

    @staticmethod
    def __new__(cls, tensor: Tensor, packed: Packed | PendingSave, read: Read | None) -> Placeholder:
        """Make the placeholder of ``tensor``.

        packed: rebuilds the tensor. read: called with ``packed`` before the tensor is rebuilt; None: nothing is called.
        """
        self: Placeholder = _torch.tensor_without_memory(cls, tensor)
        self._packed, self._read = packed, read
        return self

    __torch_function__ = _torch.no_torch_function

    def detach(self) -> Placeholder:
        """Return the placeholder itself, which needs no gradient.

        A checkpoint may call this before it stores a tensor.
        """
        return self

    def rebuilt(self) -> Tensor:
        """Rebuild and return the tensor that this placeholder stands for."""
        if self._read is not None:
            self._read(self._packed)
        # Inside ``__torch_dispatch__`` autograd's dispatch keys are off, and ops do not mark their outputs as views. A
        # replay has to know which of its tensors are views.
        with enable_reentrant_dispatch():
            return self._packed.unpack()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` with each placeholder among its arguments replaced by the rebuilt tensor."""
        return func(*_read_all(args), **{name: _read_all(a) for name, a in (kwargs or {}).items()})


def _read_all(args: Any) -> Any:
    if isinstance(args, Placeholder):
        return args.rebuilt()
    return type(args)(_read_all(a) for a in args) if type(args) in (tuple, list) else args


def is_settled(packed: Packed | PendingSave) -> bool:
    """Whether it is final that a saved tensor is kept.

    Not so for a value whose recipe waits for other values, nor for one that needs no gradient (``op`` is "input"): it
    may turn out to be the noise or the second output of an op, and then gets a recipe.
    """
    if type(packed) is Bare:
        return True
    value = packed.owner if type(packed) is SavedView else packed
    return type(value) is Value and value.tensor is not None and not value.blocked and value.op != "input"


def mark_outside(mark: object, args: Any) -> None:
    """Mark the nodes of tensors that were made outside this region as opaque, so that no recipe reaches beyond them.

    Elsewhere a region recognizes the nodes made since it began by their sequence numbers. In a segment that is run
    again that fails: backward may run in another thread than forward, each thread numbers its nodes separately, and the
    arguments of the segment have nodes of forward.

    mark: object that identifies the region; ``mark_made`` has stored it in the nodes of the region's calls.
    args: arguments of a call that is about to run.
    """
    if isinstance(args, Tensor):
        node = _node_of(args)
        if node is not None and node.metadata.get(MADE) is not mark:
            node.metadata[OPAQUE] = True
    elif type(args) is tuple or type(args) is list:
        for a in args:
            mark_outside(mark, a)


def mark_made(mark: object, out: Any) -> None:
    """Store ``mark`` in the nodes of ``out``, the result of a call of this region, except in opaque nodes."""
    if isinstance(out, Tensor):
        node = _node_of(out)
        if node is not None and OPAQUE not in node.metadata:
            node.metadata[MADE] = mark
    elif type(out) is tuple or type(out) is list:
        for o in out:
            mark_made(mark, o)


def _node_of(tensor: Tensor) -> Any:
    base = tensor._base
    return tensor.grad_fn if base is None else base.grad_fn


class SegmentLedger(Protocol):
    """What a ``Recomputation`` needs from the ledger of its segment."""

    def region_inside(self, module: nn.Module | None) -> Any:
        """Return a region for a checkpoint that runs its function again, or None if none can be opened."""


class OuterLedger(Protocol):
    """What a ``Recomputation`` needs from the ledger of the region in which the checkpoint began."""

    def runs_again(self, segment: Any) -> None:
        """Note that backward runs ``segment`` again, because plans that are made later must count its memory."""


class Recomputation:
    """Wraps the function of a checkpoint, and opens a region around it when backward runs it again."""

    def __init__(
        self,
        function: Callable[..., Any],
        around: OuterLedger,
        ledger: SegmentLedger,
        module: weakref.ref[nn.Module] | None,
    ) -> None:
        """Wrap ``function``, which a checkpoint runs again in backward.

        around: ledger of the region in which the checkpoint began. ledger: ledger of the segment.
        module: reference to the module of that region; None if the region has no module.
        """
        self._function, self._around, self._ledger, self._module = function, around, ledger, module

    def __call__(self, *args: Any) -> Any:
        """Run the function again, inside a region of the segment where one can be opened."""
        if regions_are_forbidden():
            return self._function(*args)
        self._around.runs_again(self._ledger)
        with region_suspended():
            region = self._ledger.region_inside(None if self._module is None else self._module())
            if region is None:
                return self._function(*args)
            with region:
                return self._function(*args)


@contextmanager
def region_suspended() -> Iterator[None]:
    """Suspend the region that is open in this thread, if any, while backward runs a segment again inside it."""
    before = getattr(current, "region", None)
    if before is not None:
        before.suspend()
    current.region = None
    try:
        yield
    finally:
        current.region = before
        if before is not None:
            before.resume()
