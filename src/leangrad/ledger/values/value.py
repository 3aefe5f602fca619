"""`Value`: a tensor that backward may read. It is kept, or rebuilt bit for bit from other values.

[Note: what a value may hold]
A value holds detached tensors, constants and other values. It never holds an autograd node or a tensor with a
``grad_fn``: a saved tensor that reaches its own node is a reference cycle through C++, which Python's garbage collector
does not see and which lives until backward runs, or for ever. The graph holds values through its saved tensors; a node
holds only weak references to them (in ``node.metadata``). So a value is freed with its last reader, in the middle of
backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from leangrad import _torch
from leangrad._torch import graph_task, stream_of
from leangrad.errors import LeangradError
from leangrad.ledger.values.pending_inputs import blocking, notify
from leangrad.ledger.values.rebuild.inplace_variants import IN_PLACE, overwrite
from leangrad.ledger.values.rebuild.rebuilt_cache import remember
from leangrad.ledger.values.rebuild.replays import op_timers, replayers
from leangrad.ledger.values.rebuild.waypoints import LONGEST_RECIPE, mark_waypoint, reach_waypoints
from leangrad.ledger.values.saved import PackedTensor, changed_error

Layout = tuple[torch.Size, tuple[int, ...]]
NO_KEYWORDS: dict[str, Any] = {}  # never written to
UNKNOWN = -1  # the caller has not looked up the current stream


class Value(PackedTensor):
    """One tensor that backward may read. It is in one of three states.

    kept       ``tensor`` is set: an anchor, whose version is checked when it is read.
    rebuilt    ``function(*args, **kwargs)`` gives the tensor back; values among ``args`` are read first.
    absent     neither: the output of an op that is never computed twice, and that is not kept so far.

    A kept value may also have a recipe that still waits for absent values: see ``blocked``.
    """

    # A step makes hundreds of values and a walk reads a dozen attributes of each. With slots a walk takes a tenth less
    # time on the host than with defaults in the class.
    __slots__ = (
        "__weakref__", "args", "blocked", "cap", "casts", "check", "copied_version", "depth", "dtype",
        "fleeting", "free", "function", "gathers", "growth", "inputs", "is_product", "is_waypoint", "items",
        "kwargs", "layout", "length", "live", "max_products", "memo", "memo_reads", "memo_stream",
        "narrow_bytes", "nbytes", "op", "order", "ordinal", "part", "pinned", "plain_keeps_it", "products",
        "readers", "reads", "recipe_reads", "recipe_tensor", "root", "settings", "sibling", "stream", "task",
        "tensor", "version", "waiters",
    )  # fmt: skip

    def __init__(self, op: str) -> None:
        self.op = op  # the type name of the autograd node, or a word such as "leaf", "input", "operand" or "view"

        # -- kept
        # The kept tensor, without a ``grad_fn``; None: the value is rebuilt or absent.
        self.tensor: Tensor | None = None
        # The version counter of ``tensor`` when it was kept; it is an error if another one is found on reading.
        self.version = 0
        # The tensor that recipes read; None: they read ``tensor``. It is a copy, made before ``tensor`` was changed in
        # place, or it is ``tensor`` itself where that is a copy of ours already (`is_copied`).
        self.recipe_tensor: Tensor | None = None
        # The number of the CUDA stream that was current when ``tensor`` was kept; 0: the default stream, or a CPU.
        self.stream = 0

        # -- recipe
        self.function: Callable[..., Any] | None = None  # the op to replay; None: the value has no recipe
        self.args: tuple[Any, ...] = ()  # its arguments: values, constants, tensors, and tuples of these
        # Its keyword arguments, none of which is a value.
        self.kwargs: dict[str, Any] = NO_KEYWORDS
        # The values in ``args``, also those inside tuples; ``x * x`` has ``x`` twice.
        self.inputs: tuple[Value, ...] = ()
        # The indices of the ``args`` that are or contain values, as they are read: deepest first.
        self.order: tuple[int, ...] = ()
        # The index of this value among the tensors that ``function`` returns; -1: ``function`` returns one tensor.
        self.part = -1
        # The value of another output of the same op; None: none is known.
        self.sibling: weakref.ref[Value] | None = None
        # Shape and strides that the rebuilt tensor gets; None: those that ``function`` gives.
        self.layout: Layout | None = None
        # The dtype of the result, where ``function`` may give another one (``x_bf16 += y_float32``); None: it does not.
        self.dtype: torch.dtype | None = None

        # -- sharded parameters: see [Note: recipes that read sharded parameters] in ``origins/shards.py``
        # FSDP2's parameter groups that have to be gathered when this value is rebuilt.
        self.gathers: tuple[Any, ...] = ()
        # Of a sharded parameter that is read in place: raises an error if it has changed since forward; else None.
        self.check: Callable[[], None] | None = None
        self.copied_version = 0  # of a copy of a sharded parameter: the version of the parameter when it was copied

        # -- readers
        # True: plain PyTorch keeps this tensor for the same readers; so if it is changed in place, they read the
        # changed tensor, or get an error, as there. False: they read a copy made before the change, as recipes do.
        self.plain_keeps_it = True
        self.pinned = False  # True: an autograd Function keeps this tensor for its own backward, whatever the plan says
        # True: a recipe that reads this value does not cache it for its readers. See [Note: made again] in
        # ``policy/replay.py``.
        self.fleeting = False
        self.recipe_reads = 0  # how often recipes read this value; ``x * x`` reads ``x`` twice
        # The rebuilt tensor, cached for the next readers in this backward pass; or None.
        self.memo: Tensor | None = None
        self.memo_stream = 0  # number of the CUDA stream on which ``memo`` was rebuilt; 0: the default stream, or a CPU
        self.readers = 0  # how many saved tensors are this value or a view of it
        self.reads = 0  # how often saved tensors have read it in the backward pass ``task``
        self.memo_reads = 0  # how often ``memo`` was read, by saved tensors and recipes
        self.task = -1  # id of the backward pass that ``reads`` counts; -1: none has read it yet

        # -- lineage: properties of the recipe as a whole, set by `settle_lineage`
        self.depth = 0  # the most joins of lineages on any path from this value back to an anchor
        # Where its lineage begins: an anchor, a join or a product; None: this value itself.
        self.root: Value | None = None
        self.length = 0  # the most ops that are replayed one inside the other to rebuild it, counted from waypoints on
        self.is_waypoint = False  # True: ``length`` starts again at 0 for values made from it: see [Note: waypoints]
        self.is_product = False  # True: ``function`` is a product (a matmul, convolution or attention)
        self.settings: tuple[Any, ...] = ()  # of a product: the settings of torch under which it ran in forward
        self.products = 0  # the most products among ops that are replayed one inside the other, its own included

        # -- memory, and number in the recorded step
        self.nbytes = 0  # bytes of the tensor; 0: not known
        # Bytes of the tensor that this one was cast from, in fewer bits, if the plan may keep that tensor instead of
        # this one; else 0. See [Note: kept in fewer bits] in ``origins/upstream_anchors.py``.
        self.narrow_bytes = 0
        self.ordinal = -1  # the number of this value in ``items``; -1: it has none
        self.items: object = None  # the ``Items`` of the recorded step to which this value belongs; None: it is no item
        # True: its memory is not counted and it belongs to no lineage (a parameter, an input, a small tensor, a
        # dropout's mask).
        self.free = False

        # -- absent values, and recipes that wait for them
        # Of an absent value: its tensor, the tensor's version, and the number of the call that made it. While the
        # tensor lives and is unchanged it may still be kept. None: no such tensor is known.
        self.live: tuple[weakref.ref[Tensor], int, int] | None = None
        # Of a product that is kept before a recipe has read it: its bytes divided by those of the recorded step; else
        # 0.
        self.growth = 0.0
        self.cap = 0  # the largest ``depth`` at which this value is rebuilt; a deeper one is kept
        # How many products its recipe may run one inside the other; 0: products are not run again.
        self.max_products = 0
        self.blocked: tuple[Value, ...] = ()  # the absent values that its recipe waits for
        # The values whose recipes wait for this one; None: there are none.
        self.waiters: list[weakref.ref[Value]] | None = None
        # The casts of this value, by the arguments of the cast, so that equal casts share one value; None: there are
        # none.
        self.casts: dict[Any, weakref.ref[Value]] | None = None

    # ---------------------------------------------------------------- keeping

    def keep(self, tensor: Tensor) -> None:
        """Make this value an anchor that holds ``tensor``.

        Values whose recipes waited for it drop their own tensors.
        """
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.nbytes = tensor.nbytes
        if tensor.is_cuda:
            self.stream = _torch.raw_stream(tensor.device)
        self.depth, self.root, self.length = 0, None, 0
        self.gathers = ()
        if self.max_products:  # a weight's cast or view is free while it is rebuilt; now it uses memory
            self.free = False
        if self.waiters is not None:
            notify(self)

    @property
    def is_copied(self) -> bool:
        """Whether ``tensor`` is a copy of ours, and not the user's tensor: see [Note: kept in fewer bits]."""
        return self.tensor is not None and self.recipe_tensor is self.tensor

    def unblocked(self) -> None:
        """Settle the lineage and drop the kept tensor, if any, unless the recipe is too long.

        ``pending_inputs.notify`` calls this when no value of ``blocked`` is absent any more.
        """
        depth, root = self.depth, self.root
        self.settle_lineage()
        if self.tensor is not None:
            is_short = self.depth <= self.cap and self.length <= LONGEST_RECIPE
            # It stays kept if its recipe reads sharded parameters: these may not be gathered where it is read.
            if is_short and self.products <= self.max_products and not any(v.gathers for v in self.inputs):
                self.tensor = self.recipe_tensor = None
                mark_waypoint(self, 0)  # values made from it while it was kept count their lengths from here
            else:
                self.depth, self.root, self.length = depth, root, 0
        notify(self)

    def set_recipe(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the recipe: ``function(*args, **kwargs)`` gives this value back."""
        self.function, self.args = function, args
        if kwargs:
            self.kwargs = kwargs
        self.read_arguments()

    def read_arguments(self) -> None:
        """Find the values in ``args``, also inside tuples, and set all that follows from them.

        That is ``inputs``, ``order``, ``gathers``, ``blocked`` and the lineage; adds to the inputs' ``recipe_reads``.
        """
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
        is_blocked = False
        for v in inputs:
            v.recipe_reads += 1
            if v.gathers:
                gathers += v.gathers
            if v.tensor is None and (v.function is None or v.blocked):
                is_blocked = True
        if gathers:
            self.gathers = tuple(dict.fromkeys(gathers))
        self.inputs = tuple(inputs)
        if is_blocked:
            self.blocked = blocking(inputs)
        self.settle_lineage()
        if self.depth and len(order) > 1:
            # Deepest first: a long chain is then rebuilt from its far end, while no temporaries are held.
            order.sort(key=lambda i: -args[i].depth if type(args[i]) is Value else 0)
        self.order = tuple(order)

    def forget_recipe(self) -> None:
        """Drop the recipe of a kept value, and all that the recipe holds. The recipe may still be waiting."""
        if self.tensor is not None:
            for v in self.inputs:
                v.recipe_reads -= 1
                if self.products:  # see [Note: a product runs once]
                    v.release_inputs()
            self.function, self.args, self.kwargs, self.inputs, self.order, self.blocked = None, (), {}, (), (), ()

    def release_inputs(self) -> None:
        """Stop counting this value as a reader of its inputs, if it is not kept and nothing reads it any more.

        The same then applies to each input that is left without readers.
        """
        if not self.recipe_reads and not self.readers and self.tensor is None:
            for v in self.inputs:
                v.recipe_reads -= 1
                v.release_inputs()

    def settle_lineage(self) -> None:
        """Set ``depth``, ``root``, ``length`` and ``products`` from the inputs.

        Values with the same ``root`` are one lineage. A value made from two lineages joins them: its depth is one more
        than the deepest of its inputs.

        [Note: lineages through products] Where recipes run through products, each product begins a lineage, so that
        ``x + f(x)`` is a join, at which a chain of recipes may end. Only sums count as joins there: a product of two
        lineages, or a gate that multiplies one by another, is no deeper than its operands.
        """
        depth, joined, length, products = 0, False, 0, 0
        found: Value | None = None
        for v in self.inputs:
            if v.tensor is None:
                if v.length > length and not v.is_waypoint:
                    length = v.length
                if v.products > products:
                    products = v.products
            if not v.free:
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
        """Returns the tensor of an absent value if it is alive and unchanged, else None."""
        if self.live is None:
            return None
        tensor = self.live[0]()
        return tensor if tensor is not None and tensor._version == self.live[1] else None

    # ---------------------------------------------------------------- reading

    def unpack(self) -> Tensor:
        """Returns the tensor to autograd, at once if it is kept and unchanged."""
        tensor = self.tensor
        if tensor is not None and tensor._version == self.version:
            return tensor
        return PackedTensor.unpack(self)

    def read(self) -> Tensor:
        """Returns the tensor for one of the saved tensors, and caches it only while further reads are expected."""
        if self.recipe_tensor is not None and self.tensor is not None:  # only recipes read ``recipe_tensor``
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
            and self.recipe_reads < 2
            and self.memo is None
            and self.tensor is None
            and not (self.products and self.recipe_reads)
        ):
            return self._rebuild({}, task)[0]  # no cached tensor, and no further reader
        tensor, _ = self._take({}, task)
        if self.memo is not None and self.reads >= self.readers and not self._is_held():
            self.memo = None
        return tensor

    def anchor(self, stream: int = UNKNOWN) -> Tensor:
        """Returns the tensor of a kept value, for a recipe to read.

        stream: the current CUDA stream, on which the recipe runs, if the caller has looked it up.
        """
        tensor = self.tensor
        assert tensor is not None
        if self.recipe_tensor is not None:
            return self.recipe_tensor
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
            and (not self.free or self.op == "operand")  # an operand may be a copy of ours
            and tensor.is_cuda
            and self.stream != stream_of(tensor)
        ):
            # The allocator must not reuse this memory before the recipe on this stream has read it.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor

    def _check(self, tensor: Tensor) -> None:
        if tensor._version != self.version:
            what = "a parameter or input" if self.op == "leaf" else f"the output of {self.op}"
            raise changed_error(what, tensor, self.version)

    def _is_held(self) -> bool:
        """Whether a rebuilt tensor is cached for the recipes that read this value, until all of them have read it.

        [Note: held for recipes] A scan that is written as a loop reads slices of its inputs, in one recipe per step;
        without the cache each recipe would rebuild the whole input. A residual stream of which autograd saves only
        casts is a chain of sums that only recipes read; without the cache each sum would be rebuilt from the first one,
        and the number of sums that run would grow with the square of their number.

        [Note: a product runs once] Where a rebuild runs a product, the rebuilt tensor is cached until all its readers,
        recipes as well as saved tensors, have read it. So one backward pass runs the product once. A recipe that is
        dropped must no longer count as a reader of its inputs (`release_inputs`): a tensor that is cached for it would
        be held until backward ends.
        """
        parents = self.recipe_reads
        if self.products:
            return parents > 0
        return parents > 1 and (parents >= MANY or (self.depth > 0 and not self.readers))

    def _take(self, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        """Returns the tensor for a recipe or a reader, and whether it is owned.

        Owned means that it was made by this call and nothing else refers to it, so the caller may overwrite it.

        made: tensors that this rebuild has made so far and may read again, by the id of their value.
        task: the id of the backward pass that runs.
        """
        if self.tensor is not None:
            return self.anchor(), False
        memo = self.memo
        if memo is not None and self.memo_stream == stream_of(memo):
            self.count_takes(1)
            return memo, False
        shared = self.recipe_reads > 1
        if shared and id(self) in made:
            return made[id(self)], False
        tensor, owned = self._rebuild(made, task)
        if self.fleeting and self.task != task:  # none of its readers has read it yet: it is made again for them
            return tensor, owned
        is_awaited = self.recipe_reads + self.readers > 1 and self._is_held()  # with one reader: that one reads it now
        if is_awaited or (self.readers and (self.reads < self.readers or self.task != task)):
            # [Note: a memo belongs to one stream] Backward of each op runs on the stream of its forward. A tensor that
            # was rebuilt on one stream may not be ready on another, so another stream rebuilds it for itself.
            self._hold(tensor, task, takes=1)
            return tensor, False
        if shared:
            made[id(self)] = tensor
            return tensor, False
        return tensor, owned

    def has_memo(self) -> bool:
        """Whether a tensor that was rebuilt on the current stream is cached."""
        return self.memo is not None and self.memo_stream == stream_of(self.memo)

    def rebuild_ahead(self, task: int) -> None:
        """Rebuild the tensor before any of its readers needs it, and cache it for them."""
        tensor, _ = self._rebuild({}, task)
        self._hold(tensor, task, takes=0)

    def _hold(self, tensor: Tensor, task: int, takes: int) -> None:
        """Cache the rebuilt ``tensor`` for its next readers in this backward pass.

        takes: how many of them have read it already.
        """
        self.memo, self.memo_stream, self.memo_reads = tensor, stream_of(tensor), takes
        remember(self, task)

    def count_takes(self, more: int) -> None:
        """Count ``more`` reads of the cached tensor, and drop it after its last reader."""
        if self.memo is not None and self._is_held():
            self.memo_reads += more
            if self.memo_reads >= self.recipe_reads + self.readers and self.reads >= self.readers:
                self.memo = None

    def memoize_again(self, tensor: Tensor, task: int) -> None:
        """Undo a `_take` whose ``tensor`` was not used: cache it again for its readers."""
        if self.tensor is None and self._is_held():
            self.memo_reads = max(0, self.memo_reads - 1)
            if self.memo is None:
                self._hold(tensor, task, self.memo_reads)

    def _rebuild(self, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        function = self.function
        if function is None:
            raise LeangradError(f"the input of a recipe was never kept: {self.op}; this is a bug in leangrad")
        watch = op_timers.get(get_ident()) if op_timers else None
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
                if a.readers or a.recipe_reads > 1 or a.memo is not None:
                    args[i], free = a._take(made, task)
                else:  # the same, for a value with no other reader
                    args[i], free = a._rebuild(made, task)
                if free and i < 2:
                    owned = i
        if watch is not None:
            watch.begin(self)
        if self.part >= 0:
            parts = function(*args, **self.kwargs)
            tensor = parts[self.part]
            if self.sibling is not None:
                self._memoize_sibling(parts, task)
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
        # Not owned: a view, or an input that was returned itself (``x.to`` of its own dtype), shares its memory.
        if tensor._is_view():
            return tensor, False
        for a in args:
            if a is tensor:
                return tensor, False
        return tensor, True

    def _check_settings(self, task: int) -> None:
        """Raise an error if settings of torch under which a product ran in forward have changed.

        They are compared once in a backward pass.
        """
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

    def _memoize_sibling(self, parts: Sequence[Tensor], task: int) -> None:
        """Cache the tensor of ``sibling``, which was made together with this one, if it is no larger than this one.

        Backward is about to read it. The mask of a dropout is small enough; the indices of a pooling, 8 bytes each, are
        not.
        """
        other = self.sibling() if self.sibling is not None else None
        if other is None or other.tensor is not None or other.memo is not None or not other.readers:
            return
        tensor = parts[other.part]
        if tensor.nbytes > parts[self.part].nbytes:
            return
        if (other.task != task or other.reads < other.readers) and not tensor._is_view() and other.is_laid_out(tensor):
            other._hold(tensor, task, takes=0)

    def is_laid_out(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has the shape and strides of this value."""
        return self.layout is None or (tensor.shape == self.layout[0] and tensor.stride() == self.layout[1])


def _take_each(values: tuple[Any, ...], made: dict[int, Tensor], task: int) -> list[Any]:
    return [v._take(made, task)[0] if type(v) is Value else v for v in values]


_checked: tuple[int, tuple[Any, ...]] = (-1, ())  # the last backward pass that compared settings, and these settings
MANY = 4  # reads by recipes from which on a rebuilt tensor is cached for them: see [Note: held for recipes]
SUMS = ("AddBackward0", "SubBackward0")  # nodes that may be joins: see [Note: lineages through products]
UNBOUNDED = sys.maxsize  # no limit on the sums and products in a recipe: the plan says which tensors are kept


def is_there(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` is allocated: sharding frees that of a parameter while the parameter lives."""
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def leaf_value(tensor: Tensor, version: int) -> Value:
    """Returns the value of a parameter or of a caller's tensor, which lives whether or not the value holds it."""
    v = Value("leaf")
    v.tensor, v.version, v.free = tensor, version, True
    return v
