"""A tensor that backward may ask for: kept, or rebuilt bit for bit from others.

[Note: what a value may hold]
A value holds detached tensors, constants and other values, never a node of the graph and never a tensor with a
``grad_fn``: a saved tensor that reaches its own node is a cycle through C++ that no garbage collector sees, and it
lives until backward runs, or for ever. The graph holds values through its saved tensors; nodes know them only by weak
reference (``node.metadata``), so a value dies with its last reader, in the middle of backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from leangrad import _torch, kernels
from leangrad._torch import graph_task
from leangrad.errors import ChangedError, LeangradError
from leangrad.ledger.memos import remember
from leangrad.ledger.overwriting import IN_PLACE, overwrite
from leangrad.ledger.recipe import Layout, Recipe
from leangrad.ledger.saved import Saved, changed

UNKNOWN = -1  # a stream that has not been asked for


class Value(Recipe):
    """One tensor that backward may ask for.

    kept       ``tensor`` is set: an anchor, checked against its version when it is read.
    rebuilt    ``function(*args, **kwargs)`` gives it back; values among ``args`` are read first.
    absent     neither: the output of an op that is never computed twice, which nobody has kept so far.

    A kept value may have a recipe too, one that still waits for absent values: see ``blocked``.
    """

    def unpack(self) -> Tensor:
        """Autograd wants its tensor back."""
        tensor = self.tensor
        if tensor is not None and tensor._version == self.version:
            return tensor
        return Saved.unpack(self)

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
        if self.reads >= self.readers and self.parents < 2 and self.memo is None and self.tensor is None:
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
        elif self.stream != stream and not self.free and tensor.is_cuda and self.stream != _stream(tensor):
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
        """
        parents = self.parents
        return parents > 1 and (parents >= MANY or (self.depth > 0 and not self.readers))

    def _take(self, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        """The tensor, and whether it is owned: made just now, held by nobody else, free to be overwritten.

        ``made``: what this rebuild has made so far and will read again.
        """
        if self.tensor is not None:
            return self.anchor(), False
        memo = self.memo
        if memo is not None and self.memo_stream == _stream(memo):
            if self._is_held():
                self.takes += 1
                if self.takes >= self.parents + self.readers and self.reads >= self.readers:
                    self.memo = None
            return memo, False
        shared = self.parents > 1
        if shared and id(self) in made:
            return made[id(self)], False
        tensor, owned = self._rebuild(made, task)
        if self.fleeting and self.task != task:  # none of its readers has come so far: it is made again for them
            return tensor, owned
        if (self.readers and (self.reads < self.readers or self.task != task)) or (shared and self._is_held()):
            # [Note: a memo belongs to one stream] Backward of each op runs on the stream of its forward. What was
            # rebuilt on one stream is not ready on another, so another stream rebuilds it for itself.
            self.memo, self.memo_stream, self.takes = tensor, _stream(tensor), 1
            remember(self, task)
            return tensor, False
        if shared:
            made[id(self)] = tensor
            return tensor, False
        return tensor, owned

    def give_back(self, tensor: Tensor, task: int) -> None:
        """It was taken in vain: hold it again for those who count on it."""
        if self.tensor is None and self.takes > 0 and self._is_held():
            self.takes -= 1
            if self.memo is None:
                self.memo, self.memo_stream = tensor, _stream(tensor)
                remember(self, task)

    def _rebuild(self, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        function = self.function
        if function is None:
            raise LeangradError(f"the input of a recipe was never kept: {self.op}; this is a bug in leangrad")
        if function in _fusable():
            fused = _fusable()[function](self, made, task)
            if fused is not None:
                return fused
        args = [*self.args]
        owned = -1
        for i in self.order:
            a = args[i]
            if type(a) is not Value:
                args[i] = _take_each(a, made, task)
            elif a.tensor is not None:
                args[i] = a.anchor()
            else:
                if a.readers or a.parents > 1:
                    args[i], free = a._take(made, task)
                else:  # the same, for what nobody else will ask for
                    args[i], free = a._rebuild(made, task)
                if free and i < 2:
                    owned = i
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
        # A view, or an input handed back (``x.to`` of its own dtype), is somebody else's memory too.
        if tensor._is_view():
            return tensor, False
        for a in args:
            if a is tensor:
                return tensor, False
        return tensor, True

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
            other.memo, other.memo_stream = tensor, _stream(tensor)
            remember(other, task)

    def is_laid_out(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in memory as this value did."""
        return self.layout is None or (tensor.shape == self.layout[0] and tensor.stride() == self.layout[1])


def _take_each(values: tuple[Any, ...], made: dict[int, Tensor], task: int) -> list[Any]:
    return [v._take(made, task)[0] if type(v) is Value else v for v in values]


@functools.cache
def _fusable() -> dict[Any, Callable[[Value, dict[int, Tensor], int], tuple[Tensor, bool] | None]]:
    """The functions that may be replayed together as one kernel, and what does it: none where Triton has no device."""
    if not kernels.has_device():
        return {}
    from leangrad.ledger.fused import replay
    from leangrad.ledger.lowering import LOWERINGS, VIEWS

    return dict.fromkeys(LOWERINGS.keys() - VIEWS, replay)


def fuses() -> bool:
    """Whether recipes may be replayed together as one kernel."""
    return bool(_fusable())


MANY = 4  # see [Note: held for recipes]


def _stream(tensor: Tensor) -> int:
    return _torch.raw_stream(tensor.device) if tensor.is_cuda else 0


def is_there(tensor: Tensor) -> bool:
    """Whether a tensor has its memory: sharding frees that of a parameter and leaves the parameter standing."""
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def leaf_value(tensor: Tensor, version: int) -> Value:
    """A parameter, or a tensor of the caller's: it stands whether or not we hold it."""
    v = Value("leaf")
    v.tensor, v.version, v.free = tensor, version, True
    return v
