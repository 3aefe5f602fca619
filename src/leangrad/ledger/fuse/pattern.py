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
from typing import Any

import torch
from torch import Tensor

from leangrad.ledger.fuse.chain import TABLE, Chain, is_number
from leangrad.ledger.fuse.lowering import STATIC
from leangrad.ledger.fuse.matcher import Fetch, Leaf, Match, Row, kind_of, write_fetch, write_match
from leangrad.ledger.values.value import Value

PLAIN = (int, float, bool, str, type(None), tuple, torch.Size, torch.dtype, torch.memory_format, torch.layout)
AGAIN = object()  # in the place of a plan: see ``Pattern``


class UnlikeError(Exception):
    """No pattern can be made: a constant of the chain cannot be compared."""


class Pattern:
    """How to know the like of a chain, and the plan that serves them.

    plan      None: they are replayed op by op. AGAIN: to rebuild their leaves makes values of the chain too, so that it
              is another one then.
    match     the values of the chain under a root, if it is like this one
    fetch     what a launch needs, if it still is; where there is no plan, it is never asked
    """

    __slots__ = ("fetch", "hits", "match", "plan")

    match: Match
    fetch: Fetch

    def __init__(self, chain: Chain, at_hand: list[bool], tensors: Sequence[Tensor | None], plan: Any) -> None:
        """``at_hand``: of each leaf, whether it was made before the leaves were taken; ``tensors``: where known."""
        rows = _rows(chain)
        leaves = [
            Leaf(v.tensor is not None, v.function in TABLE, made, None if tensor is None else kind_of(tensor))
            for v, made, tensor in zip(chain.leaves, at_hand, tensors, strict=True)
        ]
        self.match = write_match(rows, leaves)
        if plan is not None:
            outputs = [len(rows) - 1 - k for k in chain.outputs[:-1]]
            self.fetch = write_fetch(rows, leaves, outputs, None if plan is AGAIN else plan.device)
        self.plan = plan
        self.hits = 0


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
        reader, *again = readers.get(id(v), [(-1, -1)])
        args = list(enumerate(v.args))
        numbers = [i for i, a in args if is_number(a) and v.function not in STATIC]
        number -= len(numbers)
        kwargs = {key: _comparable(a) for key, a in v.kwargs.items()}
        rows.append(
            Row(
                op=v.op,
                reader=reader,
                again=tuple(again),
                look=(v.function, v.dtype, v.layout, kwargs, v.readers, v.parents),
                dtype=v.dtype,
                kwargs=kwargs,
                readers=v.readers,
                parents=v.parents,
                is_to_come=chain.is_to_come(v),
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
