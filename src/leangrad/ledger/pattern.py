"""What a chain looked like, so that its like is known again at a glance.

[Note: known again]
A model runs the same ops at the same place in every step and in every block, on values that are new each time. To
gather a chain, to name it and to look it up takes the host longer than many a kernel runs. So once the program of a
chain has been proven and used, the chain leaves a pattern: a row for every value, from the root down, of what it must
be. Matching only compares, and stops at the first difference; then the chain is gathered afresh.

All that the program depends on is compared: functions, constants, dtypes, layouts, which operands are one value, and
of each leaf the dtype, shape, strides and device; numbers are collected. The rest (who still reads a value, whether it
is held already) decides nothing but which tensors are worth making, and is compared for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad.ledger.chain import TABLE, Chain, Taken, is_number
from leangrad.ledger.lowering import STATIC
from leangrad.ledger.value import Value

Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], bool, int, bool]
Places = tuple[tuple[int, int], ...]
PLAIN = (int, float, bool, str, type(None), tuple, torch.Size, torch.dtype, torch.memory_format, torch.layout)
AGAIN = object()  # in the place of a plan: see ``Pattern``


class UnlikeError(Exception):
    """No pattern can be made: a constant of the chain cannot be compared."""


class Row(NamedTuple):
    """One value of a chain. Who reads it is a row before this one, by number."""

    user: int  # who reads it; −1: this is the root
    place: int  # where among the arguments of that one
    again: Places  # who else reads it, and where
    function: Any
    dtype: torch.dtype | None
    layout: Any
    kwargs: dict[str, Any]
    state: tuple[int, int, bool, bool]  # readers, parents, whether readers are to come, whether it is held for recipes
    length: int  # of its arguments
    numbers: Places  # where among them numbers are, and which of the chain's
    constants: tuple[tuple[int, Any], ...]  # where constants are
    leaves: Places  # where leaves are, and which of the chain's


class Found(NamedTuple):
    """The values of a chain that matches; ``values`` from the root down, ``leaves`` and ``scalars`` as in the chain."""

    values: list[Value]
    leaves: list[Value]
    scalars: list[float]


class Pattern:
    """The rows of a chain, and the plan that serves its like.

    ``plan`` None: they are replayed op by op. AGAIN: to rebuild their leaves makes values of the chain too, so that it
    is another one then. ``at_hand``: of each leaf, whether it was made before the leaves were taken; ``leaves``: their
    tensors, where they are known; ``is_kept``: a plan serves them, and all of its leaves are kept.
    """

    __slots__ = (
        "at_hand",
        "hits",
        "is_kept",
        "kept",
        "kinds",
        "outputs",
        "plan",
        "rows",
        "scalars",
        "unkept",
        "unmade",
    )

    def __init__(self, chain: Chain, at_hand: list[bool], leaves: Sequence[Tensor | None], plan: Any) -> None:
        last = len(chain.values) - 1
        self.plan = plan
        self.rows = _rows(chain)
        self.scalars = len(chain.scalars)
        self.outputs = [last - k for k in chain.outputs[:-1]]  # rows
        self.kinds = [None if t is None else kind_of(t) for t in leaves]
        self.kept = [v.tensor is not None for v in chain.leaves]
        self.is_kept = all(self.kept) and plan is not None and plan is not AGAIN
        self.at_hand = [(v.function in TABLE, made) for v, made in zip(chain.leaves, at_hand, strict=True)]
        self.unkept = [k for k, kept in enumerate(self.kept) if not kept]
        self.unmade = [k for k, made in enumerate(at_hand) if not made]
        self.hits = 0

    def match(self, root: Value, made: dict[int, Tensor], task: int) -> Found | None:
        """The values of the chain under ``root``, if it is like this one."""
        values: list[Value] = []
        leaves: list[Any] = [None] * len(self.kinds)
        scalars = [0.0] * self.scalars
        for user, place, again, function, dtype, layout, kwargs, state, length, numbers, constants, at in self.rows:
            if user < 0:
                v = root
            else:
                v = values[user].args[place]
                if type(v) is not Value or v.tensor is not None or v.memo is not None:
                    return None
                readers, parents, to_come, held = state
                if v.readers != readers or v.parents != parents:
                    return None
                if readers and (v.reads < readers or v.task != task) is not to_come:
                    return None
                if parents > 1 and (v._is_held() is not held or id(v) in made):
                    return None
                for other, where in again:
                    if values[other].args[where] is not v:
                        return None
            args = v.args
            if v.function is not function or v.dtype is not dtype or len(args) != length:
                return None
            if v.layout != layout or v.kwargs != kwargs:
                return None
            for i, n in numbers:
                a = args[i]
                if not is_number(a):
                    return None
                scalars[n] = float(a)
            for i, constant in constants:
                if type(args[i]) is not type(constant) or args[i] != constant:
                    return None
            for i, k in at:
                leaf = args[i]
                if leaves[k] is None:
                    if type(leaf) is not Value or not self._is_like(leaf, k, made):
                        return None
                    leaves[k] = leaf
                elif leaves[k] is not leaf:
                    return None
            values.append(v)
        return Found(values, leaves, scalars) if len(set(leaves)) == len(leaves) else None

    def take(self, found: Found, made: dict[int, Tensor], task: int, taken: Taken) -> bool:
        """Take the leaves that are not kept, as ``Chain.take`` does.

        False if the chain is another one now, or a leaf of another kind.
        """
        leaves = found.leaves
        for k in self.unmade:
            v = leaves[k]
            if v not in taken:
                taken[v] = v._take(made, task)
                for inner in found.values[1:]:
                    if inner.memo is not None or id(inner) in made:
                        return False
        if self.plan is AGAIN:
            return False
        for k in self.unkept:
            v = leaves[k]
            if v not in taken:
                taken[v] = v._take(made, task)
            if not self._fits(taken[v][0], k):
                return False
        return True

    def tensors(self, found: Found, taken: Taken) -> tuple[list[Tensor], list[bool]]:
        """The tensors of the leaves, and whether each is owned; those that are not kept come out of ``taken``."""
        tensors, owned = [], []
        stream = self.plan.stream()
        for v, kept in zip(found.leaves, self.kept, strict=True):
            tensor, free = (v.anchor(stream), False) if kept else taken.pop(v)
            tensors.append(tensor)
            owned.append(free)
        return tensors, owned

    def _is_like(self, leaf: Value, k: int, made: dict[int, Tensor]) -> bool:
        """Whether ``leaf`` is of the kind of leaf k, and where it is not kept, is no more and no less at hand."""
        tensor = leaf.tensor
        if tensor is not None:
            return self.kept[k] and self._fits(tensor, k)
        at_hand = leaf.function in TABLE, leaf.memo is not None or id(leaf) in made
        return not self.kept[k] and self.at_hand[k] == at_hand

    def _fits(self, tensor: Tensor, k: int) -> bool:
        kind = self.kinds[k]
        if kind is None:
            return False
        dtype, shape, stride, contiguous, device, may_be_negated = kind
        return (
            tensor.dtype is dtype
            and tensor.shape == shape
            and (tensor.is_contiguous() if contiguous else tensor.stride() == stride)
            and tensor.get_device() == device
            and not (may_be_negated and tensor.is_neg())
        )


def kind_of(tensor: Tensor) -> Kind:
    """What a program depends on in a tensor that it reads; the last says that it may be a part of a complex one.

    Such a part may be negated only when it is read, which no program does. Its strides are all even. The fourth says
    that to be contiguous means these very strides, and is sooner asked; a dimension of size 1 may have any stride.
    """
    shape, stride = tensor.shape, tensor.stride()
    contiguous = tensor.is_contiguous() and all(n > 1 for n in shape)
    return tensor.dtype, shape, stride, contiguous, tensor.get_device(), not any(s % 2 for s in stride)


def _rows(chain: Chain) -> list[Row]:
    """The values of ``chain`` from the root down, so that each comes after all who read it."""
    values = chain.values[::-1]
    readers: dict[int, list[tuple[int, int]]] = {}
    for row, v in enumerate(values):
        for place, a in enumerate(v.args):
            readers.setdefault(id(a), []).append((row, place))
    leaves = {id(leaf): k for k, leaf in enumerate(chain.leaves)}
    rows = []
    number = len(chain.scalars)  # they are counted from the other end
    for v in values:
        (user, place), *again = readers.get(id(v), [(-1, -1)])
        args = list(enumerate(v.args))
        numbers = [i for i, a in args if is_number(a) and v.function not in STATIC]
        number -= len(numbers)
        rows.append(
            Row(
                user=user,
                place=place,
                again=tuple(again),
                function=v.function,
                dtype=v.dtype,
                layout=v.layout,
                kwargs={key: _comparable(a) for key, a in v.kwargs.items()},
                state=(v.readers, v.parents, chain.is_to_come(v), v._is_held()),
                length=len(args),
                numbers=tuple((i, number + n) for n, i in enumerate(numbers)),
                constants=tuple((i, _comparable(a)) for i, a in args if type(a) is not Value and i not in numbers),
                leaves=tuple((i, leaves[id(a)]) for i, a in args if id(a) in leaves),
            )
        )
    return rows


def _comparable(constant: Any) -> Any:
    if type(constant) not in PLAIN:
        raise UnlikeError
    return constant
