"""What the values and the leaves of a chain must be for a pattern to know it: compared one by one."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from leangrad.ledger.fuse.chain import TABLE
from leangrad.ledger.values.value import Value

Places = tuple[tuple[int, int], ...]

look_at_value = attrgetter("function", "dtype", "layout", "kwargs", "readers", "parents")


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """What a program depends on in a tensor that it reads."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_neg()


class PatternOp(NamedTuple):
    """One value of a chain, and where its arguments are. Who reads it is a row before this one, by number."""

    reader: tuple[int, int]  # who reads it first, and as which argument; of the root there is none
    again: Places  # who else reads it
    look: tuple[Any, ...]  # what ``look_at_value`` gives
    is_to_come: bool  # readers are to come
    is_held: bool  # for recipes
    length: int  # of its arguments
    numbers: Places  # and which of the chain's each is
    constants: tuple[tuple[int, Any], ...]
    leaves: Places  # and which of the chain's each is

    def is_root(self, value: Value) -> bool:
        """Whether ``value`` is the same root, whoever reads it."""
        return bool(look_at_value(value)[:4] == self.look[:4])

    def is_inner(self, value: Any, made: dict[int, Tensor], task: int) -> bool:
        """Whether ``value`` is made in the same way, and just as worth making here: by its readers, and if held."""
        if type(value) is not Value or value.tensor is not None or value.memo is not None:
            return False
        if look_at_value(value) != self.look:
            return False
        if value.readers and (value.reads < value.readers or value.task != task) is not self.is_to_come:
            return False
        return value.parents <= 1 or (value._is_held() is self.is_held and id(value) not in made)


class Leaf(NamedTuple):
    """What a chain reads."""

    is_kept: bool
    is_op: bool  # its function takes part in chains
    is_made: bool  # it was kept or held, or made in this rebuild, before the leaves were taken
    kind: tuple[Any, ...] | None  # of its tensor, where that is known

    def is_leaf(self, value: Any, made: dict[int, Tensor]) -> bool:
        """Whether ``value``, if kept, is of the same kind, and otherwise is no more and no less at hand."""
        if type(value) is not Value or (value.tensor is not None) is not self.is_kept:
            return False
        if value.tensor is not None:
            return kind_of(value.tensor) == self.kind
        is_made = value.memo is not None or id(value) in made
        return (value.function in TABLE) is self.is_op and is_made is self.is_made
