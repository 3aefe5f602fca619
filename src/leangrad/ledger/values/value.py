"""A tensor that backward may ask for: kept, or rebuilt bit for bit from others.

[Note: what a value may hold]
A value holds detached tensors, constants and other values, never a node of the graph and never a tensor with a
``grad_fn``: a saved tensor that reaches its own node is a cycle through C++ that no garbage collector sees, and it
lives until backward runs, or for ever. The graph holds values through its saved tensors; nodes know them only by weak
reference (``node.metadata``), so a value dies with its last reader, in the middle of backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from leangrad import _torch
from leangrad._torch import graph_task, stream_of
from leangrad.errors import ChangedError, LeangradError
from leangrad.ledger.values.inplace_variants import IN_PLACE, overwrite
from leangrad.ledger.values.pending_inputs import blocking, notify
from leangrad.ledger.values.rebuilt_cache import remember
from leangrad.ledger.values.saved import PackedTensor, changed
from leangrad.ledger.values.waypoints import LONGEST_RECIPE, mark_waypoint, reach_waypoints

Layout = tuple[torch.Size, tuple[int, ...]]
UNKNOWN = -1  # a stream that has not been asked for


class Value(PackedTensor):
    """One tensor that backward may ask for.

    kept       ``tensor`` is set: an anchor, checked against its version when it is read.
    rebuilt    ``function(*args, **kwargs)`` gives it back; values among ``args`` are read first.
    absent     neither: the output of an op that is never computed twice, which nobody has kept so far.

    A kept value may have a recipe too, one that still waits for absent values: see ``blocked``.
    """

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
    # The modules that have to be gathered when it is rebuilt: [Note: recipes that read sharded parameters].
    gathers: tuple[Any, ...] = ()
    check: Callable[[], None] | None = None  # of a sharded parameter: raises an error if it is not what it was
    source = 0  # of the copy of a sharded parameter: the version of what was copied
    pinned = False  # an autograd Function keeps this tensor for its own backward, in any case
    fleeting = False  # recipes that read it do not hold it for its readers: [Note: made again] in ``policy/replay.py``
    parents = 0  # how many recipes read it
    memo: Tensor | None = None  # what was rebuilt, while other readers are to come
    memo_stream = 0
    readers = 0  # how many saved tensors are this value
    reads = 0  # how many of them were read in the backward pass ``task``
    takes = 0  # how often the memo was read, by recipes as well
    task = -1
    depth = 0  # how many joins of lineages lie between this value and the furthest anchor
    root: Value | None = None  # the one anchor it descends from; None: itself
    length = 0  # how many ops are replayed one inside the other to rebuild it, at most
    is_waypoint = False  # lengths begin anew after it: see [Note: waypoints]
    is_product = False  # its function is a product
    settings: tuple[Any, ...] = ()  # of torch, under which it ran in forward
    products = 0  # how many of those ops are products, at most
    nbytes = 0
    narrow_bytes = 0  # of what it was cast from, if the plan may keep that in its stead: [Note: kept in fewer bits]
    ordinal = -1  # its number among ``items``, those of the recorded step, while the ledger learns
    items: object = None
    free = False  # it costs nothing worth counting: a parameter, an input, or too small to look into
    # The tensor of an absent value, which may yet be caught; its version; the number of the call that made it.
    live: tuple[weakref.ref[Tensor], int, int] | None = None
    growth = 0.0  # of a product that is kept before a recipe has asked: its bytes over those of the recorded step
    cap = 0  # the depth at which it is kept rather than rebuilt
    max_products = 0  # the products that its recipe may run through in a row
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
        self.depth, self.root, self.length = 0, None, 0
        self.gathers = ()
        if self.max_products:  # what is rebuilt from a weight is free; now it takes memory
            self.free = False
        if self.waiters is not None:
            notify(self)

    @property
    def is_copied(self) -> bool:
        """Whether it holds a copy of ours, and not the user's tensor: see [Note: kept in fewer bits]."""
        return self.tensor is not None and self.before is self.tensor

    def unblocked(self) -> None:
        """Nothing is missing any more: this value needs no tensor of its own, unless its chain is too long."""
        depth, root = self.depth, self.root
        self.settle_lineage()
        if self.tensor is not None:
            is_short = self.depth <= self.cap and self.length <= LONGEST_RECIPE
            # With what has to be gathered for its recipe it stays: it was saved where that may not be there.
            if is_short and self.products <= self.max_products and not any(v.gathers for v in self.inputs):
                self.tensor = self.before = None
                mark_waypoint(self, 0)  # the lengths of what was made of it meanwhile begin here
            else:
                self.depth, self.root, self.length = depth, root, 0
        notify(self)

    def set_recipe(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``function(*args, **kwargs)`` gives this value back."""
        self.function, self.args = function, args
        if kwargs:
            self.kwargs = kwargs
        self.read_arguments()

    def read_arguments(self) -> None:
        """Find the values among ``args``, or in lists among them: this value is made of them."""
        inputs: list[Value] = []
        order: list[int] = []
        args = self.args
        for i, a in enumerate(args):
            if type(a) is Value:
                inputs.append(a)
                order.append(i)
            elif type(a) is tuple and a and type(a[0]) is not int:
                inside = [v for v in a if type(v) is Value]
                if inside:
                    inputs += inside
                    order.append(i)
        gathers: tuple[Any, ...] = ()
        for v in inputs:
            v.parents += 1
            if v.gathers:
                gathers += v.gathers
        if gathers:
            self.gathers = tuple(dict.fromkeys(gathers))
        self.inputs = tuple(inputs)
        if blocked := blocking(inputs):
            self.blocked = blocked
        self.settle_lineage()
        if self.depth and len(order) > 1:
            # The deepest first: a long chain is then rebuilt from its far end with no temporaries waiting on the way.
            order.sort(key=lambda i: -args[i].depth if type(args[i]) is Value else 0)
        self.order = tuple(order)

    def forget_recipe(self) -> None:
        """A kept value lets go of a recipe that still waits, and so of what that recipe holds."""
        if self.tensor is not None:
            for v in self.inputs:
                v.parents -= 1
                if self.products:  # see [Note: a product runs once]
                    v.unread()
            self.function, self.args, self.kwargs, self.inputs, self.order, self.blocked = None, (), {}, (), (), ()

    def unread(self) -> None:
        """This value is given up, and what was made for it alone goes with it: it reads its inputs no more."""
        if not self.parents and not self.readers and self.tensor is None:
            for v in self.inputs:
                v.parents -= 1
                v.unread()

    def settle_lineage(self) -> None:
        """Set what is known of the recipe as a whole: a join of two lineages is one deeper than they are.

        [Note: lineages through products] Where recipes run through products, each product begins a lineage, so that
        ``x + f(x)`` is a join, at which a chain of recipes may end. Only sums are: what a product itself brings
        together, or the gate of a unit, is no deeper than its operands.
        """
        depth, joined, length, products = 0, False, 0, 0
        found: Value | None = None
        for v in self.inputs:
            if v.tensor is None:
                if v.length > length and not v.is_waypoint:
                    length = v.length
                if v.products > products:
                    products = v.products
            if v.free:
                continue
            if v.depth > depth:
                depth = v.depth
            root = v.root or v
            if found is None:
                found = root
            elif found is not root:
                joined = True
        self.root = None if joined or self.is_product else found
        if self.max_products and self.op not in SUMS:
            joined = False
        self.depth = depth + joined
        self.length = length + 1
        self.products = products + self.is_product

    def catchable(self) -> Tensor | None:
        """The tensor of an absent value, if it is still there and unchanged."""
        if self.live is None:
            return None
        tensor = self.live[0]()
        return tensor if tensor is not None and tensor._version == self.live[1] else None

    # ---------------------------------------------------------------- reading

    def unpack(self) -> Tensor:
        """Autograd wants its tensor back."""
        tensor = self.tensor
        if tensor is not None and tensor._version == self.version:
            return tensor
        return PackedTensor.unpack(self)

    def read(self) -> Tensor:
        """One of the readers asks: hand out the tensor, and hold a rebuilt one only while others will ask."""
        if self.before is not None and self.tensor is not None:  # only recipes read what it was
            self._check(self.tensor)
            return self.tensor
        task = graph_task()
        if task == self.task:
            self.reads += 1
        else:
            self.task, self.reads = task, 1
        if self.products and self.memo is None and self.tensor is None:
            reach_waypoints(self, task)
        if (
            self.reads >= self.readers
            and self.parents < 2
            and self.memo is None
            and self.tensor is None
            and not (self.products and self.parents)
        ):
            return self._rebuild({}, task)[0]  # nothing to look up, and nobody else to hold it for
        tensor, _ = self._take({}, task)
        if self.memo is not None and self.reads >= self.readers and not self._is_held():
            self.memo = None
        return tensor

    def anchor(self, stream: int = UNKNOWN) -> Tensor:
        """The tensor of a kept value, for a recipe that runs on ``stream``, where that was asked before."""
        tensor = self.tensor
        assert tensor is not None
        if self.before is not None:
            return self.before
        if tensor._version != self.version:
            self._check(tensor)
        if self.op == "leaf":
            if not tensor.untyped_storage().nbytes() and not is_there(tensor):
                raise LeangradError(
                    f"a recipe needs a parameter, {tensor.dtype} {list(tensor.shape)}, whose memory was freed after "
                    "forward. With sharded parameters call leangrad.lean on the module that was given to fully_shard."
                )
            if self.check is not None:
                self.check()
        elif (
            self.stream != stream
            and (not self.free or self.op == "operand")  # which may be a copy of ours
            and tensor.is_cuda
            and self.stream != stream_of(tensor)
        ):
            # The allocator must not hand this memory out again before the recipe on this stream has read it.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor

    def _check(self, tensor: Tensor) -> None:
        if tensor._version != self.version:
            what = "a parameter or input" if self.op == "leaf" else f"the output of {self.op}"
            raise ChangedError(changed(what, tensor, self.version))

    def _is_held(self) -> bool:
        """Whether a rebuilt tensor is held for the recipes that read it, until as many have.

        [Note: held for recipes] A scan that is written as a loop reads slices of its inputs, one recipe a step: each
        would rebuild the whole input. A residual stream of which autograd saves only casts is a chain of sums that
        nobody reads but the next: each link would be rebuilt from the first, and the sums grow as the square.

        [Note: a product runs once] What a product is run for is held until all that read it have, be they recipes or
        backward itself, so one backward runs the product once. A recipe that is given up no longer counts among those
        that read its inputs (``unread``): what waits for it would be held until backward ends.
        """
        parents = self.parents
        if self.products:
            return parents > 0
        return parents > 1 and (parents >= MANY or (self.depth > 0 and not self.readers))

    def _take(self, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        """The tensor, and whether it is owned: made just now, held by nobody else, free to be overwritten.

        ``made``: what this rebuild has made so far and will read again.
        """
        if self.tensor is not None:
            return self.anchor(), False
        memo = self.memo
        if memo is not None and self.memo_stream == stream_of(memo):
            self.count_takes(1)
            return memo, False
        shared = self.parents > 1
        if shared and id(self) in made:
            return made[id(self)], False
        tensor, owned = self._rebuild(made, task)
        if self.fleeting and self.task != task:  # none of its readers has come so far: it is made again for them
            return tensor, owned
        is_awaited = self.parents + self.readers > 1 and self._is_held()  # else the one recipe that reads it has come
        if is_awaited or (self.readers and (self.reads < self.readers or self.task != task)):
            # [Note: a memo belongs to one stream] Backward of each op runs on the stream of its forward. What was
            # rebuilt on one stream is not ready on another, so another stream rebuilds it for itself.
            self._hold(tensor, task, takes=1)
            return tensor, False
        if shared:
            made[id(self)] = tensor
            return tensor, False
        return tensor, owned

    def is_at_hand(self) -> bool:
        """Whether it was rebuilt already, on the stream that runs, and is held."""
        return self.memo is not None and self.memo_stream == stream_of(self.memo)

    def rebuild_ahead(self, task: int) -> None:
        """Rebuild it before any of its readers asks, and hold it for them."""
        tensor, _ = self._rebuild({}, task)
        self._hold(tensor, task, takes=0)

    def _hold(self, tensor: Tensor, task: int, takes: int) -> None:
        """Hold what was rebuilt, and was taken so often, for its next readers in this backward pass."""
        self.memo, self.memo_stream, self.takes = tensor, stream_of(tensor), takes
        remember(self, task)

    def count_takes(self, more: int) -> None:
        """What is held was read so often; after the last of its readers it is let go."""
        if self.memo is not None and self._is_held():
            self.takes += more
            if self.takes >= self.parents + self.readers and self.reads >= self.readers:
                self.memo = None

    def give_back(self, tensor: Tensor, task: int) -> None:
        """It was taken in vain: hold it again for those who count on it."""
        if self.tensor is None and self._is_held():
            self.takes = max(0, self.takes - 1)
            if self.memo is None:
                self._hold(tensor, task, self.takes)

    def _rebuild(self, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        function = self.function
        if function is None:
            raise LeangradError(f"the input of a recipe was never kept: {self.op}; this is a bug in leangrad")
        watch = watches.get(get_ident()) if watches else None
        if function in replayers:
            if watch is not None:
                watch.begin(self)
            fused = replayers[function](self, made, task)
            if watch is not None:
                watch.end(has_run=fused is not None)
            if fused is not None:
                return fused
        if self.is_product:
            self._check_settings(task)
        args = [*self.args]
        owned = -1
        for i in self.order:
            a = args[i]
            if type(a) is not Value:
                args[i] = _take_each(a, made, task)
            elif a.tensor is not None:
                args[i] = a.anchor()
            else:
                if a.readers or a.parents > 1 or a.memo is not None:
                    args[i], free = a._take(made, task)
                else:  # the same, for what nobody else will ask for
                    args[i], free = a._rebuild(made, task)
                if free and i < 2:
                    owned = i
        if watch is not None:
            watch.begin(self)
        if self.part >= 0:
            parts = function(*args, **self.kwargs)
            tensor = parts[self.part]
            if self.kin is not None:
                self._hand_on(parts, task)
        elif owned >= 0 and function in IN_PLACE:
            tensor = overwrite(function, args, self.kwargs, owned, self.dtype)
        else:
            tensor = function(*args, **self.kwargs)
        if self.dtype is not None and tensor.dtype is not self.dtype:
            tensor = tensor.to(self.dtype)
        layout = self.layout
        if layout is not None and (tensor.shape, tensor.stride()) != layout:
            tensor = self._laid_out(tensor, layout)
        if watch is not None:
            watch.end(has_run=True)
        # A view, or an input handed back (``x.to`` of its own dtype), is somebody else's memory too.
        if tensor._is_view():
            return tensor, False
        for a in args:
            if a is tensor:
                return tensor, False
        return tensor, True

    def _check_settings(self, task: int) -> None:
        """Raise an error unless a product finds the settings of forward; looked at once in a backward pass."""
        global _checked
        if task >= 0 and _checked == (task, self.settings):
            return
        if changes := _torch.changed_settings(self.settings):
            raise LeangradError(
                f"{self.op} has to run again in backward, and would have other bits than in forward, because settings "
                f"of torch have changed: {changes}. To mend it, change them after backward, or before forward."
            )
        _checked = task, self.settings

    def _laid_out(self, tensor: Tensor, layout: Layout) -> Tensor:
        if tensor.shape != layout[0]:
            raise LeangradError(f"{self.op} was rebuilt with shape {tuple(tensor.shape)}, expected {tuple(layout[0])}")
        return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def _hand_on(self, parts: Sequence[Tensor], task: int) -> None:
        """The other tensor that was made with this one: backward is about to ask for it, so it is held if it is small.

        A dropout's mask is; the indices of a pooling, 8 bytes each, are not.
        """
        other = self.kin() if self.kin is not None else None
        if other is None or other.tensor is not None or other.memo is not None or not other.readers:
            return
        tensor = parts[other.part]
        if tensor.nbytes > parts[self.part].nbytes:
            return
        if (other.task != task or other.reads < other.readers) and not tensor._is_view() and other.is_laid_out(tensor):
            other.memo, other.memo_stream = tensor, stream_of(tensor)
            remember(other, task)

    def is_laid_out(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in memory as this value did."""
        return self.layout is None or (tensor.shape == self.layout[0] and tensor.stride() == self.layout[1])


class Watch(Protocol):
    """What times the ops of rebuilds."""

    def begin(self, value: Value) -> None:
        """An op is about to run, which makes ``value``."""

    def end(self, *, has_run: bool) -> None:
        """It has run, or was left to others."""


watches: dict[int, Watch] = {}  # by thread


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """Let ``watch`` time the ops of rebuilds in this thread meanwhile."""
    thread = get_ident()
    watches[thread] = watch
    try:
        yield
    finally:
        watches.pop(thread, None)


# By function: what may replay a recipe of it together with others, as one kernel. ``fused.py`` enters itself here.
Replayer = Callable[[Value, dict[int, Tensor], int], tuple[Tensor, bool] | None]
replayers: dict[Any, Replayer] = {}


class Comparisons:
    """How often a fused kernel was compared with a replay op by op. A step in which that happens takes more memory."""

    count: ClassVar[int] = 0


def _take_each(values: tuple[Any, ...], made: dict[int, Tensor], task: int) -> list[Any]:
    return [v._take(made, task)[0] if type(v) is Value else v for v in values]


def fuses() -> bool:
    """Whether recipes may be replayed together as one kernel."""
    return bool(replayers)


_checked: tuple[int, tuple[Any, ...]] = (-1, ())  # a backward pass, and the settings that it has found
MANY = 4  # see [Note: held for recipes]
SUMS = ("AddBackward0", "SubBackward0")  # see [Note: lineages through products]
UNBOUNDED = sys.maxsize  # the sums and the products that a recipe may run through, where a plan says where it ends


def is_there(tensor: Tensor) -> bool:
    """Whether a tensor has its memory: sharding frees that of a parameter and leaves the parameter standing."""
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def leaf_value(tensor: Tensor, version: int) -> Value:
    """A parameter, or a tensor of the caller's: it stands whether or not we hold it."""
    v = Value("leaf")
    v.tensor, v.version, v.free = tensor, version, True
    return v
