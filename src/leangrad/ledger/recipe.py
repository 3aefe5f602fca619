"""What a value is made of: kept, or rebuilt by a function from other values, or waiting for what nobody has kept.

``value.py`` reads it in backward; this is what forward writes down.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.saved import Saved
from leangrad.ledger.waiting import blocking

if TYPE_CHECKING:
    from leangrad.ledger.value import Value

Layout = tuple[torch.Size, tuple[int, ...]]


class Recipe(Saved):
    """The half of a ``Value`` that forward writes."""

    # Defaults stand on the class: most values use few of these, and thousands are made in a step.
    tensor: Tensor | None = None
    version = 0
    # What recipes read in the stead of ``tensor``, which was changed behind autograd's back after they were stored.
    before: Tensor | None = None
    stream = 0  # the CUDA stream on which it was kept
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012  (never written to, only replaced)
    inputs: tuple[Value, ...] = ()  # the values among ``args``
    order: tuple[int, ...] = ()  # where they stand, the deepest first
    part = -1  # ``function`` gives several tensors, and this is the one
    kin: weakref.ref[Value] | None = None  # the value of another of them
    layout: Layout | None = None
    dtype: torch.dtype | None = None  # of the result, where the function alone would not tell: ``x_bf16 += y_float32``
    pinned = False  # an autograd Function keeps this tensor for its own backward, in any case
    fleeting = False  # recipes that read it do not hold it for its readers: see [Note: made again] in ``plan.py``
    parents = 0  # how many recipes read it
    memo: Tensor | None = None  # what was rebuilt, while other readers are to come
    memo_stream = 0
    readers = 0  # how many saved tensors are this value
    reads = 0  # how many of them were read in the backward pass ``task``
    takes = 0  # how often the memo was read, by recipes as well
    task = -1
    depth = 0  # how many joins of lineages lie between this value and the furthest anchor
    root: Value | None = None  # the one anchor it descends from; None: itself
    nbytes = 0
    ordinal = -1  # its place in the step of ``recorder``, while the ledger learns
    recorder: object = None
    free = False  # it costs nothing worth counting: a parameter, an input, or too small to look into
    # The tensor of an absent value, which may yet be caught; its version; the number of the call that made it.
    live: tuple[weakref.ref[Tensor], int, int] | None = None
    growth = 0.0  # of a product that is kept before a recipe has asked: its bytes over those of the recorded step
    cap = 0  # the depth at which it is kept rather than rebuilt
    blocked: tuple[Value, ...] = ()  # the absent values that its recipe waits for
    waiters: list[weakref.ref[Value]] | None = None  # whose recipes wait for this one
    children: dict[Any, weakref.ref[Value]] | None = None  # what one function made of it, for functions that have twins

    def __init__(self, op: str) -> None:
        self.op = op

    # ---------------------------------------------------------------- keeping

    def keep(self, tensor: Tensor) -> None:
        """Make this an anchor that holds ``tensor``, and let go of what it makes rebuildable."""
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.nbytes = tensor.nbytes
        if tensor.is_cuda:
            self.stream = _torch.raw_stream(tensor.device)
        self.depth, self.root = 0, None
        if self.waiters is not None:
            self._notify()

    def _notify(self) -> None:
        """This value can be had now: look again at every recipe that waited for it."""
        waiters, self.waiters = self.waiters, None
        for ref in waiters or ():
            waiter = ref()
            if waiter is not None and waiter.blocked:
                waiter.blocked = blocking(waiter.inputs)
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

    def set_recipe(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``function(*args, **kwargs)`` gives this value back."""
        self.function, self.args = function, args
        if kwargs:
            self.kwargs = kwargs
        self.read_arguments()

    def read_arguments(self) -> None:
        """Find the values among ``args``."""
        inputs: list[Any] = []
        order: list[int] = []
        kind = type(self)  # a value, as they are
        for i, a in enumerate(self.args):
            if type(a) is kind:
                inputs.append(a)
                order.append(i)
            elif type(a) is tuple and a and type(a[0]) is not int:
                inside = [v for v in a if type(v) is kind]
                if inside:
                    inputs += inside
                    order.append(i)
        self.read_values(tuple(inputs), tuple(order))

    def read_values(self, inputs: tuple[Value, ...], order: tuple[int, ...]) -> None:
        """This value is made of ``inputs``; ``order``: where they, or lists of them, stand among the arguments."""
        blocked, depth, joined, not_free = False, 0, False, 0
        root: Value | None = None
        for v in inputs:
            v.parents += 1
            if v.free:
                continue
            not_free += 1
            if v.tensor is None and (v.function is None or v.blocked):
                blocked = True
            if v.depth > depth:
                depth = v.depth
            if root is None:
                root = v.root or v
            elif root is not (v.root or v):
                joined = True
        self.inputs, self.order = inputs, order
        if depth and (not_free > 1 or inputs[0].free):
            # The deepest first: a long chain is then rebuilt from its far end with no temporaries waiting on the way.
            args, kind = self.args, type(self)
            self.order = tuple(sorted(order, key=lambda i: -args[i].depth if type(args[i]) is kind else 0))
        if blocked:
            self.blocked = blocking(inputs)
        self.depth, self.root = (depth + 1, None) if joined else (depth, root)

    def read_one(self, only: Value) -> None:
        """It is made of its first argument alone: half of all recipes."""
        only.parents += 1
        self.inputs, self.order = (only,), (0,)
        if only.tensor is None and (only.function is None or only.blocked):
            self.blocked = blocking(self.inputs)
        if not only.free:
            self.depth, self.root = only.depth, only.root or only

    def read_two(self, a: Value, b: Value) -> None:
        """It is made of its first two arguments."""
        a.parents += 1
        b.parents += 1
        self.inputs = (a, b)
        self.order = (1, 0) if b.depth > a.depth else (0, 1)
        if (a.tensor is None and (a.function is None or a.blocked)) or (
            b.tensor is None and (b.function is None or b.blocked)
        ):
            self.blocked = blocking(self.inputs)
        if a.free:
            if not b.free:
                self.depth, self.root = b.depth, b.root or b
        elif b.free or (a.root or a) is (b.root or b):
            self.depth, self.root = (a.depth if b.free or a.depth >= b.depth else b.depth), a.root or a
        else:
            self.depth = 1 + (a.depth if a.depth >= b.depth else b.depth)

    def forget_recipe(self) -> None:
        """A kept value lets go of a recipe that still waits, and so of what that recipe holds."""
        if self.tensor is not None:
            for v in self.inputs:
                v.parents -= 1
            self.function, self.args, self.kwargs, self.inputs, self.order, self.blocked = None, (), {}, (), (), ()

    def unread(self) -> None:
        """This value is given up, and what was made for it alone goes with it: it reads its inputs no more."""
        if not self.parents and not self.readers and self.tensor is None:
            for v in self.inputs:
                v.parents -= 1
                v.unread()

    def settle_lineage(self) -> None:
        """Set ``depth`` and ``root`` from the recipe: a join of two lineages is one deeper than they are."""
        depth, joined = 0, False
        found: Value | None = None
        for v in self.inputs:
            if v.free:
                continue
            if v.depth > depth:
                depth = v.depth
            root = v.root or v
            if found is None:
                found = root
            elif found is not root:
                joined = True
        self.depth = depth + joined
        self.root = None if joined else found

    def catchable(self) -> Tensor | None:
        """The tensor of an absent value, if it is still there and unchanged."""
        if self.live is None:
            return None
        tensor = self.live[0]()
        return tensor if tensor is not None and tensor._version == self.live[1] else None
