"""Patterns of chains, by which the same chain is recognized in later steps.

[Note: known again]
A model runs the same ops at the same place in every step and in every block, each time on new values. Gathering a
chain, computing its key and looking that up takes the host longer than many kernels run. So once the program of a chain
has been proven and used, ``fused.py`` stores a pattern of the chain: a row for every value, from the root down, which
says what the value must be. Matching only compares, and stops at the first difference; then the chain is gathered
again. A chain that is replayed op by op gets a pattern too, without a plan.

A match compares all that the program depends on: functions, constants, dtypes, layouts, which operands are the same
value, and for each leaf the dtype, shape, strides and device. Numbers are collected, not compared. The rest (who still
reads a value, whether it is held already) decides only which tensors are worth making, and is compared for that reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leangrad._torch import raw_stream
from leangrad.ledger.fuse.chain import TABLE, Chain, Taken, is_number
from leangrad.ledger.fuse.lowering import STATIC
from leangrad.ledger.fuse.matcher import Leaf, PatternOp, kind_of
from leangrad.ledger.values.value import Value

# Types of the constants that a pattern can compare.
PLAIN = (int, float, bool, str, type(None), tuple, torch.Size, torch.dtype, torch.memory_format, torch.layout)
AGAIN = object()  # used in place of a plan: see ``Pattern``


class UnlikeError(Exception):
    """No pattern can be made of a chain, because one of its constants cannot be compared."""


# The values of a chain from the root down; its leaves and its numbers, both in the chain's own order.
Found = tuple[tuple[Value, ...], tuple[Value, ...], list[float]]
# The tensors of the leaves; whether each is owned (None: none is); the numbers; the values that hold other outputs.
Fetched = tuple[list[Tensor], list[bool] | None, list[float], list[Value]]


class Pattern:
    """Recognizes chains that are like one seen before, and has the plan for them.

    plan      None: these chains are replayed op by op. AGAIN: rebuilding the leaves also rebuilds values of the chain,
              so that the chain is a different one afterwards and has to be matched again.
    """

    __slots__ = ("_held", "_leaves", "_outputs", "_rows", "_scalars", "hits", "plan", "read_again")

    def __init__(self, chain: Chain, at_hand: list[bool], tensors: Sequence[Tensor | None], plan: Any) -> None:
        """Make the pattern of ``chain``.

        at_hand: for each leaf, whether it was made before the leaves were taken
        tensors: for each leaf, its tensor, or None if that is not known
        plan: see the class
        """
        self._rows = rows = _rows(chain)
        self._leaves = [
            Leaf(v.tensor is not None, v.function in TABLE, made, None if tensor is None else kind_of(tensor))
            for v, made, tensor in zip(chain.leaves, at_hand, tensors, strict=True)
        ]
        self._scalars = len(chain.scalars)
        self._outputs = [len(rows) - 1 - k for k in chain.outputs[:-1]]  # rows of the outputs other than the root
        # The rows whose values may be held. A value that only the next one of the chain reads is never held.
        self._held = [k for k, v in enumerate(chain.values[-2::-1], 1) if v.readers or v.recipe_reads > 1]
        self.plan = plan
        self.read_again = chain.read_again()
        self.hits = 0

    def match(self, root: Value, made: dict[int, Tensor], task: int) -> Found | None:
        """The values, leaves and numbers of the chain below ``root`` if it matches this pattern, else None."""
        values = [root]
        leaves: list[Value | None] = [None] * len(self._leaves)
        scalars = [0.0] * self._scalars
        for k, row in enumerate(self._rows):
            if k:
                user, place = row.reader
                value = values[user].args[place]
                if not row.is_inner(value, made, task):
                    return None
                values.append(value)
                for user, place in row.again:
                    if values[user].args[place] is not value:
                        return None
            elif not row.is_root(root):
                return None
            args = values[k].args
            if len(args) != row.length:
                return None
            for i, constant in row.constants:
                if type(args[i]) is not type(constant) or args[i] != constant:  # True == 1 == 1.0
                    return None
            for i, n in row.numbers:
                if not is_number(args[i]):
                    return None
                scalars[n] = float(args[i])
            for i, n in row.leaves:
                if leaves[n] is None and self._leaves[n].is_leaf(args[i], made):
                    leaves[n] = args[i]
                elif leaves[n] is not args[i]:
                    return None
        found = tuple([leaf for leaf in leaves if leaf is not None])
        return (tuple(values), found, scalars) if len(set(found)) == len(leaves) else None

    def fetch(self, found: Found, made: dict[int, Tensor], task: int, taken: Taken) -> Fetched | None:
        """Take the leaves that are not in ``taken`` yet; returns what a launch needs, or None if the chain has changed.

        Rebuilding a leaf may also rebuild values of this chain. These are then held, and are leaves from then on.
        Leaves that are already made are therefore taken last, as in ``Chain.take``: a held tensor counts how often it
        was taken.
        """
        values, leaves, scalars = found
        known = list(zip(leaves, self._leaves, strict=True))
        for v, leaf in known:
            if not leaf.is_made and v not in taken:
                taken[v] = v._take(made, task)
                if any(values[k].memo is not None or id(values[k]) in made for k in self._held):
                    return None
        if self.plan is AGAIN:
            return None
        for v, leaf in known:
            if not leaf.is_kept:
                if v not in taken:
                    taken[v] = v._take(made, task)
                if kind_of(taken[v][0]) != leaf.kind:
                    return None
        device = self.plan.device
        stream = raw_stream(device) if device.type == "cuda" else 0
        fetched = [(v.anchor(stream), False) if leaf.is_kept else taken.pop(v) for v, leaf in known]
        owned = None if all(leaf.is_kept for leaf in self._leaves) else [owned for _, owned in fetched]
        return [tensor for tensor, _ in fetched], owned, scalars, [values[k] for k in self._outputs]


def _rows(chain: Chain) -> list[PatternOp]:
    """One row for each value of ``chain``, from the root down, so that a value comes after all of its readers."""
    values = chain.values[::-1]
    readers: dict[int, list[tuple[int, int]]] = {}
    for row, v in enumerate(values):
        for place, a in enumerate(v.args):
            readers.setdefault(id(a), []).append((row, place))
    leaves = {id(leaf): k for k, leaf in enumerate(chain.leaves)}
    rows = []
    number = len(chain.scalars)  # counted down: the rows run from the root, against the chain's order
    for v in values:
        reader, *again = readers.get(id(v), [(-1, -1)])
        args = list(enumerate(v.args))
        numbers = [i for i, a in args if is_number(a) and v.function not in STATIC]
        number -= len(numbers)
        kwargs = {key: _comparable(a) for key, a in v.kwargs.items()}
        rows.append(
            PatternOp(
                reader=reader,
                again=tuple(again),
                look=(v.function, v.dtype, v.layout, kwargs, v.readers, v.recipe_reads),
                will_be_read=chain.will_be_read(v),
                is_held=v._is_held(),
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
