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
        "free",
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
        self.free = False  # it costs nothing worth counting: a parameter, an input, or too small to look into
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
        self._notify()

    def _notify(self) -> None:
        """This value can be had now: look again at every recipe that waited for it."""
        waiters, self.waiters = self.waiters, None
        for ref in waiters or ():
            waiter = ref()
            if waiter is not None and waiter.blocked:
                waiter.blocked = blocking(waiter.values())
                if not waiter.blocked:
                    waiter._unblocked()

    def _unblocked(self) -> None:
        """Nothing is missing any more: this value needs no tensor of its own, unless its chain is too long."""
        depth, root = self.depth, self.root
        self.settle_lineage()
        if self.tensor is not None:
            if self.depth <= self.cap:
                self.tensor = None
            else:
                self.depth, self.root = depth, root
        self._notify()

    def forget_recipe(self) -> None:
        """A kept value lets go of a recipe that still waits, and so of what that recipe holds."""
        if self.tensor is not None:
            self.function, self.args, self.kwargs, self.blocked = None, (), {}, ()

    def settle_lineage(self) -> None:
        """Set ``depth`` and ``root`` from the recipe: a join of two lineages is one deeper than they are."""
        roots: list[Value] = []
        depth = 0
        for v in self.values():
            if v.free:
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
        """The tensor itself, rebuilt if need be. It may be shared: do not write to it."""
        return self._take()[0]

    def _take(self) -> tuple[Tensor, bool]:
        """The tensor, and whether it is owned: made just now, held by nobody else, free to be overwritten."""
        tensor = self.tensor
        if tensor is not None:
            if tensor._version != self.version:
                raise ChangedError(self._changed(tensor))
            return tensor, False
        memo = self.memo
        if memo is not None and self.memo_stream == _stream(memo):
            return memo, False
        tensor, owned = self._rebuild()
        if self.reads < self.readers or self.task != _torch.graph_task():
            if self.readers:
                # [Note: a memo belongs to one stream] Backward of each op runs on the stream of its forward. What was
                # rebuilt on one stream is not ready on another, so another stream rebuilds it for itself.
                self.memo, self.memo_stream = tensor, _stream(tensor)
                return tensor, False
        return tensor, owned

    def _rebuild(self) -> tuple[Tensor, bool]:
        function = self.function
        if function is None:
            raise LeangradError(f"the input of a recipe was never kept: {self.op}; this is a bug in leangrad")
        args = list(self.args)
        # The deepest input first: a long chain is then rebuilt from its far end with no temporaries waiting on the way.
        pending = [i for i, a in enumerate(args) if type(a) is Value or type(a) is tuple]
        if len(pending) > 1:
            pending.sort(key=lambda i: -args[i].depth if type(args[i]) is Value else 0)
        owned = -1
        for i in pending:
            a = args[i]
            if type(a) is Value:
                args[i], free = a._take()
                if free and i < 2:
                    owned = i
            else:
                args[i] = [v.get() if type(v) is Value else v for v in a]
        tensor = self._overwrite(function, args, owned) if owned >= 0 else function(*args, **self.kwargs)
        layout = self.layout
        if layout is not None and (tensor.shape != layout[0] or tensor.stride() != layout[1]):
            if tensor.shape != layout[0]:
                raise LeangradError(f"{self.op} was rebuilt with shape {tuple(tensor.shape)}, expected {tuple(layout[0])}")
            tensor = torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor, function not in VIEWS

    def _overwrite(self, function: Callable[..., Tensor], args: list[Any], owned: int) -> Tensor:
        """Write the result over an owned input where the op can and the result is of the same kind; else make a new one."""
        inplace = IN_PLACE.get(function)
        if inplace is not None and len(args) <= 2:
            target, other = args[owned], args[1 - owned] if len(args) == 2 else None
            if (other is None or _fits(target, other)) and (owned == 0 or (function in COMMUTES and self.kwargs in PLAIN_SUM)):
                return inplace(target, *([] if other is None else [other]), **self.kwargs)
        return function(*args, **self.kwargs)

    def _changed(self, tensor: Tensor) -> str:
        what = "a parameter or input" if self.op == "leaf" else f"the output of {self.op}"
        mend = (
            "run backward before changing it"
            if self.op == "leaf"
            else "use the out-of-place form of the op that changed it, or change a clone"
        )
        return (
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, "
            f"{tensor.dtype} {list(tensor.shape)}, is at version {tensor._version}; expected version {self.version}. "
            f"To mend it, {mend}."
        )


IN_PLACE: dict[Any, Callable[..., Tensor]] = {}  # functions of one or two tensors, and the form that writes over the first
COMMUTES: set[Any] = set()  # those of two that may write over either
VIEWS: set[Any] = set()  # functions whose result is a view of their input, so it is never owned
PLAIN_SUM = ({}, {"alpha": 1})


def _fits(target: Tensor, other: Any) -> bool:
    """Whether a pointwise result of both is laid out like ``target``, in its dtype."""
    if not isinstance(other, Tensor):
        return True
    if other.dim() == 0:
        return other.dtype == target.dtype or not other.is_floating_point() or target.is_floating_point()
    return other.dtype == target.dtype and other.shape == target.shape and other.stride() == target.stride()


def _stream(tensor: Tensor) -> int:
    return _torch.raw_stream(tensor.device) if tensor.is_cuda else 0


def leaf_value(tensor: Tensor) -> Value:
    """A parameter, or a tensor of the caller's: it stands whether or not we hold it."""
    v = Value("leaf")
    v.tensor, v.version, v.free = tensor, tensor._version, True
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
    """Enter ``value`` with every input of its recipe that cannot be had yet."""
    for v in value.values():
        if v.tensor is None and (v.function is None or v.blocked):
            if v.waiters is None:
                v.waiters = []
            v.waiters.append(weakref.ref(value))


def released(blocked: tuple[Value, ...]) -> int:
    """The bytes of kept tensors that need nothing but ``blocked`` to be rebuilt."""
    seen: set[int] = set()
    total = 0
    stack = list(blocked)
    while stack:
        for ref in stack.pop().waiters or ():
            w = ref()
            if w is None or id(w) in seen or any(b not in blocked for b in w.blocked):
                continue
            seen.add(id(w))
            if w.tensor is not None:
                total += w.nbytes
            stack.append(w)
    return total
