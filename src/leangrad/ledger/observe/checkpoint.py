"""A ledger beside ``torch.utils.checkpoint``: the segment that backward runs again is lean too.

A checkpoint's forward runs under saved-tensor hooks that drop every tensor. In backward, the first that is asked for
makes it run its function again, under hooks that store each tensor for the one that was dropped; these go to autograd.
The peak of such a step most often lies there, in the segment that has just been run again.

[Note: a region in a segment that is run again]
The function runs inside a region of its own. Around each call the region sets hooks of its own, inside the
checkpoint's. What they are handed they decide on as always, and hand on to the checkpoint's hook, so that all counting,
stopping and comparing stays torch's: the tensor itself where it is kept, a ``Placeholder`` where it is rebuilt.

Who opens that region? Where a checkpoint runs inside an open region, the region sees the checkpoint's hooks in force
and puts a ``Recomputation`` around the checkpoint's function. Where a lean module runs inside a checkpoint, the module
opens one itself, each time it runs: in forward one that decides nothing, because all that is saved is dropped.

A reentrant checkpoint has no hooks. It is known by the node of what it made, and runs its function again as a piece of
forward like any other, followed by a backward of its own: the region there is an ordinary one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch

from leangrad import _torch
from leangrad.ledger.observe.active_region import opened, regions_are_forbidden
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.node_metadata import MADE, OPAQUE
from leangrad.ledger.values.pending_save import PendingSave
from leangrad.ledger.values.saved import Bare
from leangrad.ledger.values.saved_view import SavedView
from leangrad.ledger.values.value import Value

Read = Callable[[Packed | PendingSave], Any]


class Placeholder(Tensor):
    """Stands for a tensor that is rebuilt, in the place where a checkpoint stores what it computed again.

    It has the tensor's shape, dtype and device and no memory. Whoever computes with it, or detaches it as autograd does
    with all that a hook hands it, gets the tensor.
    """

    _packed: Packed | PendingSave
    _read: Read | None

    @staticmethod
    def __new__(cls, tensor: Tensor, packed: Packed | PendingSave, read: Read | None) -> Placeholder:
        """``tensor``: the one that is rebuilt from ``packed``; ``read``: who wants to know when it is asked for."""
        self: Placeholder = _torch.tensor_without_memory(cls, tensor)
        self._packed, self._read = packed, read
        return self

    __torch_function__ = _torch.no_override

    def detach(self) -> Placeholder:
        """Itself: it needs no gradient. This is what a checkpoint does before it stores a tensor."""
        return self

    def rebuilt(self) -> Tensor:
        """The tensor that it stands for."""
        if self._read is not None:
            self._read(self._packed)
        # Inside of a dispatch autograd has stepped aside; a replay needs to know which of its tensors are views.
        with enable_reentrant_dispatch():
            return self._packed.unpack()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the tensors that tokens stand for."""
        return func(*_read_all(args), **{name: _read_all(a) for name, a in (kwargs or {}).items()})


def _read_all(args: Any) -> Any:
    if isinstance(args, Placeholder):
        return args.rebuilt()
    return type(args)(_read_all(a) for a in args) if type(args) in (tuple, list) else args


def is_settled(packed: Packed | PendingSave) -> bool:
    """Whether a saved tensor is kept for good; a kept value may yet get a recipe, if it waits or is an op's noise."""
    if type(packed) is Bare:
        return True
    value = packed.owner if type(packed) is SavedView else packed
    return type(value) is Value and value.tensor is not None and not value.blocked and value.op != "input"


def mark_outside(mark: object, args: Any) -> None:
    """Let no recipe reach back beyond what a call was given that no call of this region has made.

    A region tells what is its own by the numbers of the nodes. Backward may run in another thread than forward, whose
    nodes have numbers of their own, and the arguments of a segment that is run again have their nodes of forward.
    """
    if isinstance(args, Tensor):
        node = _node_of(args)
        if node is not None and node.metadata.get(MADE) is not mark:
            node.metadata[OPAQUE] = True
    elif type(args) is tuple or type(args) is list:
        for a in args:
            mark_outside(mark, a)


def mark_made(mark: object, out: Any) -> None:
    """A call of this region has made ``out``."""
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
    """What opens the region of a segment: the segment's ledger."""

    def region_inside(self, module: nn.Module | None) -> Any:
        """A region under the hooks of the checkpoint that runs its function again; None where there can be none."""


class OuterLedger(Protocol):
    """The ledger of the region in which a checkpoint began."""

    def runs_again(self, segment: Any) -> None:
        """Backward runs a segment again: the plans that are to be made have to know."""


class Recomputation:
    """The function of a checkpoint, which runs inside a region when backward runs it again."""

    def __init__(
        self,
        function: Callable[..., Any],
        around: OuterLedger,
        ledger: SegmentLedger,
        module: weakref.ref[nn.Module] | None,
    ) -> None:
        """``ledger``: that of the segment; ``module``: whose region it began in."""
        self._function, self._around, self._ledger, self._module = function, around, ledger, module

    def __call__(self, *args: Any) -> Any:
        """Run the function again."""
        if regions_are_forbidden():
            return self._function(*args)
        self._around.runs_again(self._ledger)
        with aside():
            region = self._ledger.region_inside(None if self._module is None else self._module())
            if region is None:
                return self._function(*args)
            with region:
                return self._function(*args)


@contextmanager
def aside() -> Iterator[None]:
    """Let the region that is open in this thread, in which backward runs, see nothing for a while."""
    before = getattr(opened, "region", None)
    if before is not None:
        before.suspend()
    opened.region = None
    try:
        yield
    finally:
        opened.region = before
        if before is not None:
            before.resume()
