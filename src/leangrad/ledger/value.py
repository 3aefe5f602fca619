"""A tensor that backward may ask for: kept, or rebuilt bit for bit from others.

[Note: what a value may hold]
A value holds detached tensors, constants and other values, never a node of the graph and never a tensor with a
``grad_fn``: a saved tensor that reaches its own node is a cycle through C++ that no garbage collector sees, and it lives
until backward runs, or for ever. The graph holds values through its saved tensors; nodes know them only by weak reference
(``node.metadata``), so a value dies with its last reader, in the middle of backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.errors import ChangedError, LeangradError

Layout = tuple[torch.Size, tuple[int, ...]]


class Value:
    """One tensor that backward may ask for.

    kept       ``tensor`` is set: an anchor, checked against its version when it is read.
    rebuilt    ``function(*args, **kwargs)`` gives it back; values among ``args`` are read first.
    absent     neither: the output of an op that is never computed twice, which nobody has kept so far.

    A kept value may have a recipe too, one that still waits for absent values: see ``blocked``.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "blocked",
        "cap",
        "caught",
        "children",
        "depth",
        "function",
        "kwargs",
        "layout",
        "leaf",
        "live",
        "memo",
        "memo_stream",
        "nbytes",
        "op",
        "ordinal",
        "readers",
        "reads",
        "root",
        "task",
        "tensor",
        "version",
        "waiters",
    )

    def __init__(self, op: str) -> None:
        self.op = op
        self.tensor: Tensor | None = None
        self.version = 0
        self.function: Callable[..., Tensor] | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.layout: Layout | None = None
        self.memo: Tensor | None = None
        self.memo_stream = 0
        self.readers = 0  # how many saved tensors are this value
        self.reads = 0  # how many of them were read in the backward pass ``task``
        self.task = -1
        self.depth = 0  # how many joins of lineages lie between this value and the furthest anchor
        self.root: Value | None = None  # the one anchor it descends from; None: itself
        self.nbytes = 0
        self.ordinal = -1  # its place in the step, while the ledger learns
        self.leaf = False  # a tensor that the caller owns anyhow: it costs nothing
        self.live: tuple[weakref.ref[Tensor], int] | None = None  # an absent value that may yet be caught, and its version
        self.caught = False  # kept by us although autograd did not ask for it
        self.cap = 0  # the depth at which it is kept rather than rebuilt
        self.blocked: tuple[Value, ...] = ()  # the absent values that its recipe waits for
        self.waiters: list[weakref.ref[Value]] | None = None  # whose recipes wait for this one
        self.children: dict[Any, weakref.ref[Value]] | None = None

    # ---------------------------------------------------------------- keeping

    def keep(self, tensor: Tensor) -> None:
        """Make this an anchor that holds ``tensor``, and let go of what it makes rebuildable."""
        self.tensor = tensor if tensor.grad_fn is None and not tensor.requires_grad else tensor.detach()
        self.version = tensor._version
        self.nbytes = tensor.nbytes
        self.depth, self.root = 0, None
        waiters, self.waiters = self.waiters, None
        if waiters:
            for ref in waiters:
                waiter = ref()
                if waiter is not None:
                    waiter.unblock(self)

    def unblock(self, anchor: Value) -> None:
        """``anchor`` is kept now: if nothing else is missing, this value needs no tensor of its own any more."""
        self.blocked = tuple(v for v in self.blocked if v is not anchor)
        if not self.blocked and self.tensor is not None and self.function is not None:
            self.settle_lineage()
            if self.depth <= self.cap:
                self.tensor = None
            else:
                self.depth, self.root = 0, None

    def forget_recipe(self) -> None:
        """A kept value lets go of a recipe that still waits, and so of what that recipe holds."""
        if self.tensor is not None:
            self.function, self.args, self.kwargs, self.blocked = None, (), {}, ()

    def settle_lineage(self) -> None:
        """Set ``depth`` and ``root`` from the recipe: a join of two lineages is one deeper than they are."""
        roots: list[Value] = []
        depth = 0
        for v in self.values():
            if v.leaf:
                continue
            if v.depth > depth:
                depth = v.depth
            root = v.root or v
            if root not in roots:
                roots.append(root)
        self.depth = depth + (len(roots) > 1)
        self.root = roots[0] if len(roots) == 1 else None

    def values(self) -> list[Value]:
        """The values that the recipe reads."""
        found = []
        for a in self.args:
            if type(a) is Value:
                found.append(a)
            elif type(a) is tuple:
                found.extend(v for v in a if type(v) is Value)
        return found

    def catchable(self) -> Tensor | None:
        """The tensor of an absent value, if it is still there and unchanged."""
        if self.live is None:
            return None
        tensor = self.live[0]()
        return tensor if tensor is not None and tensor._version == self.live[1] else None

    # ---------------------------------------------------------------- reading

    def read(self) -> Tensor:
        """One of the readers asks: hand out the tensor, and hold a rebuilt one only while others will ask."""
        task = _torch.graph_task()
        if task != self.task:
            self.task, self.reads = task, 0
        self.reads += 1
        tensor = self.get()
        if self.reads >= self.readers:
            self.memo = None
        return tensor

    def get(self) -> Tensor:
        """The tensor itself, rebuilt if need be."""
        tensor = self.tensor
        if tensor is not None:
            if tensor._version != self.version:
                raise ChangedError(self._changed(tensor))
            return tensor
        memo = self.memo
        stream = 0
        if memo is not None:
            if memo.is_cuda:
                stream = _torch.raw_stream(memo.device)
            if self.memo_stream == stream:
                return memo
        tensor = self._rebuild()
        # [Note: a memo belongs to one stream] Backward of each op runs on the stream of its forward. A value that was rebuilt
        # on one stream is not ready on another, so another stream rebuilds it for itself.
        if self.reads < self.readers or self.task != _torch.graph_task():
            self.memo = tensor
            self.memo_stream = _torch.raw_stream(tensor.device) if tensor.is_cuda else 0
        return tensor

    def _rebuild(self) -> Tensor:
        function = self.function
        if function is None:
            raise LeangradError(f"the input of a recipe was never kept: {self.op}; this is a bug in leangrad")
        args = list(self.args)
        # The deepest input first: a long chain is then rebuilt from its far end with no temporaries waiting on the way.
        pending = [i for i, a in enumerate(args) if type(a) is Value or type(a) is tuple]
        if len(pending) > 1:
            pending.sort(key=lambda i: -args[i].depth if type(args[i]) is Value else 0)
        for i in pending:
            a = args[i]
            args[i] = a.get() if type(a) is Value else [v.get() if type(v) is Value else v for v in a]
        tensor = function(*args, **self.kwargs)
        layout = self.layout
        if layout is not None and (tensor.shape != layout[0] or tensor.stride() != layout[1]):
            if tensor.shape != layout[0]:
                raise LeangradError(f"{self.op} was rebuilt with shape {tuple(tensor.shape)}, expected {tuple(layout[0])}")
            tensor = torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor

    def _changed(self, tensor: Tensor) -> str:
        what = "a parameter or input" if self.leaf else f"the output of {self.op}"
        mend = (
            "run backward before changing it"
            if self.leaf
            else "use the out-of-place form of the op that changed it, or change a clone"
        )
        return (
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, "
            f"{tensor.dtype} {list(tensor.shape)}, is at version {tensor._version}; expected version {self.version}. "
            f"To mend it, {mend}."
        )


def leaf_value(tensor: Tensor) -> Value:
    """A parameter, or a tensor of the caller's: it stands whether or not we hold it."""
    v = Value("leaf")
    v.tensor, v.version, v.leaf = tensor, tensor._version, True
    return v


def blocking(values: list[Value]) -> tuple[Value, ...]:
    """The absent values under ``values``, each once."""
    found: list[Value] = []
    for v in values:
        if v.tensor is not None:
            continue
        for b in v.blocked if v.function is not None else (v,):
            if b not in found:
                found.append(b)
    return tuple(found)


def wait(value: Value) -> None:
    """Enter ``value`` with every absent value that its recipe is blocked by."""
    for b in value.blocked:
        if b.waiters is None:
            b.waiters = []
        b.waiters.append(weakref.ref(value))
