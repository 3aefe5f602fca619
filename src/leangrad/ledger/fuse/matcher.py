"""Compares the values and leaves of a chain, one by one, with what a pattern says that they must be."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from leangrad.ledger.fuse.chain import TABLE
from leangrad.ledger.values.value import Value

Places = tuple[tuple[int, int], ...]

look_at_value = attrgetter("function", "dtype", "layout", "kwargs", "readers", "recipe_reads")


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """The properties of a tensor on which a program that reads it depends."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_neg()


class PatternOp(NamedTuple):
    """One row of a pattern: what a value must be, and which arguments it has. Its readers are rows before this one."""

    reader: tuple[int, int]  # row of its first reader, and position among the arguments there; unused for the root
    again: Places  # the same for its other readers
    look: tuple[Any, ...]  # what ``look_at_value`` returns for it
    will_be_read: bool  # saved tensors will still read it in this backward pass
    is_held: bool  # held for recipes, as ``Value._is_held`` says
    length: int  # number of its arguments
    numbers: Places  # positions among its arguments, and indices among the chain's numbers
    constants: tuple[tuple[int, Any], ...]  # positions among its arguments, and values
    leaves: Places  # positions among its arguments, and indices among the chain's leaves

    def is_root(self, value: Value) -> bool:
        """Whether ``value`` is made in the same way as the root of the pattern, whatever its readers are."""
        return bool(look_at_value(value)[:4] == self.look[:4])

    def is_inner(self, value: Any, made: dict[int, Tensor], task: int) -> bool:
        """Whether ``value`` is made in the same way, and whether its readers and its being held are the same too."""
        if type(value) is not Value or value.tensor is not None or value.memo is not None:
            return False
        if look_at_value(value) != self.look:
            return False
        if value.readers and (value.reads < value.readers or value.task != task) is not self.will_be_read:
            return False
        return value.recipe_reads <= 1 or (value._is_held() is self.is_held and id(value) not in made)


class Leaf(NamedTuple):
    """What a leaf of a chain must be for the pattern to match."""

    is_kept: bool
    is_op: bool  # its function may be in a chain: it is in ``TABLE``
    is_made: bool  # it was kept, held, or made in this rebuild, before the leaves were taken
    kind: tuple[Any, ...] | None  # ``kind_of`` its tensor; None if that is not known

    def is_leaf(self, value: Any, made: dict[int, Tensor]) -> bool:
        """Whether ``value`` fits: a kept one by the kind of its tensor, any other by ``is_op`` and ``is_made``."""
        if type(value) is not Value or (value.tensor is not None) is not self.is_kept:
            return False
        if value.tensor is not None:
            return kind_of(value.tensor) == self.kind
        is_made = value.memo is not None or id(value) in made
        return (value.function in TABLE) is self.is_op and is_made is self.is_made
