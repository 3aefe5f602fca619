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

Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool]
PLAIN = (int, float, bool, str, type(None), tuple, torch.Size, torch.dtype, torch.memory_format, torch.layout)


AGAIN = object()


class UnlikeError(Exception):
    """No pattern can be made: a constant of the chain cannot be compared."""


class Row(NamedTuple):
    """One value of a chain; "users" are rows before this one, by number."""

    user: int  # who reads it, and where among its arguments; −1: the root
    place: int
    again: tuple[tuple[int, int], ...]  # who else reads it, and where
    function: Any
    dtype: torch.dtype | None
    layout: Any
    kwargs: dict[str, Any]
    state: tuple[int, int, bool, bool]  # readers, parents, whether readers are to come, whether it is held for recipes
    length: int  # of its arguments
    numbers: tuple[tuple[int, int], ...]  # where among them numbers are, and which of the chain's
    constants: tuple[tuple[int, Any], ...]
    leaves: tuple[tuple[int, int], ...]  # where leaves are, and which


class Found(NamedTuple):
    """The values of a chain that matches; ``values`` from the root down, ``leaves`` and ``scalars`` as in the chain."""

    values: list[Value]
    leaves: list[Value]
    scalars: list[float]


class Pattern:
    """The rows of a chain, and the plan that serves its like.

    ``plan`` None: they are replayed op by op. AGAIN: to rebuild their leaves makes values of the chain too, so that it
    is another one then.
    """

    __slots__ = ("at_hand", "kept", "kinds", "outputs", "plan", "rows", "scalars", "unmade")

    def __init__(self, chain: Chain, at_hand: list[bool], leaves: Sequence[Tensor | None], plan: Any) -> None:
        last = len(chain.values) - 1
        self.plan = plan
        self.scalars = len(chain.scalars)
        self.outputs = [last - k for k in chain.outputs[:-1]]  # rows
        self.kinds = [None if t is None else kind_of(t) for t in leaves]
        self.kept = [v.tensor is not None for v in chain.leaves]
        self.at_hand = [(v.function in TABLE, made) for v, made in zip(chain.leaves, at_hand, strict=True)]
        self.unmade = [k for k, made in enumerate(at_hand) if not made]
        users: dict[int, list[tuple[int, int]]] = {}
        for row, value in enumerate(reversed(chain.values)):
            for place, a in enumerate(value.args):
                if type(a) is Value:
                    users.setdefault(id(a), []).append((row, place))
        number = len(chain.scalars)
        rows = []
        codes = {id(v): k for k, v in enumerate(chain.leaves)}
        for value in reversed(chain.values):
            at = users.get(id(value), [(-1, -1)])
            places = [i for i, a in enumerate(value.args) if is_number(a) and value.function not in STATIC]
            number -= len(places)
            rows.append(
                Row(
                    *at[0],
                    tuple(at[1:]),
                    value.function,
                    value.dtype,
                    value.layout,
                    value.kwargs,
                    (value.readers, value.parents, chain.is_to_come(value), value._is_held()),
                    len(value.args),
                    tuple((i, number + n) for n, i in enumerate(places)),
                    tuple(
                        (i, _comparable(a))
                        for i, a in enumerate(value.args)
                        if type(a) is not Value and i not in places
                    ),
                    tuple((i, codes[id(a)]) for i, a in enumerate(value.args) if id(a) in codes),
                )
            )
        self.rows = rows

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
        """Take the leaves, as ``Chain.take`` does; False if the chain is another one now, or a leaf of another kind."""
        for k in self.unmade:
            leaf = found.leaves[k]
            if leaf not in taken:
                taken[leaf] = leaf._take(made, task)
                if any(v.memo is not None or id(v) in made for v in found.values[1:]):
                    return False
        if self.plan is AGAIN:
            return False
        for k, leaf in enumerate(found.leaves):
            if leaf not in taken:
                taken[leaf] = leaf._take(made, task)
            if not self.kept[k] and not self._fits(taken[leaf][0], k):
                return False
        return True

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
        dtype, shape, stride, device, may_be_negated = kind
        return (
            tensor.dtype is dtype
            and tensor.shape == shape
            and tensor.stride() == stride
            and tensor.get_device() == device
            and not (may_be_negated and tensor.is_neg())
        )


def kind_of(tensor: Tensor) -> Kind:
    """What a program depends on in a tensor that it reads; the last says that it may be a part of a complex one.

    Such a part may be negated only when it is read, which no program does. Its strides are all even.
    """
    stride = tensor.stride()
    return tensor.dtype, tensor.shape, stride, tensor.get_device(), not any(s % 2 for s in stride)


def _comparable(constant: Any) -> Any:
    if type(constant) not in PLAIN:
        raise UnlikeError
    return constant
