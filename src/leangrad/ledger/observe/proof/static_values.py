"""What is known about a value before a forward runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from leangrad.ledger.observe.proof.facts import PLAIN

__all__ = ["DATA", "DTYPE", "GIVEN", "NOTHING", "Data", "Group", "Known", "List", "ListMethod", "Method", "NoKeywords"]
__all__ += ["OfTensor", "Parent", "Row", "Unproven", "Value", "as_data", "freeze", "join", "key_of", "known", "merge"]

MOST = 4096  # alternatives of one value


class Unproven(Exception):  # noqa: N818 - no error: the answer of the search
    """The code does something that the proof does not know."""


@dataclass(frozen=True)
class Data:
    """Tensors, numbers, strings, None, and lists, tuples and dictionaries of such."""

    may_be_dtype: bool = False  # whether a dtype or a device may be among them
    is_held: bool = False  # whether others may hold it too: an argument of the forward, a parameter, a buffer, a view


@dataclass(frozen=True, eq=False)
class Known:
    """One of these objects of Python."""

    values: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and list(map(id, self.values)) == list(map(id, other.values))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.values)))


@dataclass(frozen=True)
class Row:
    """A tuple of these values."""

    values: tuple[Value, ...]


@dataclass(frozen=True)
class NoKeywords:
    """The ``**keywords`` of a function that was called without any; they may only be passed on."""


@dataclass(frozen=True)
class Group:
    """Any number of values, each of them this one: a list, or something to iterate over."""

    value: Value


class List:
    """A list that a function makes; all names for it share what it may hold.

    Where a name may stand for one list or another, the two count as one from then on. Where something else may hold it
    or its elements, such as a dictionary or an iterator, it is frozen: it may get nothing new.
    """

    changes: ClassVar[int] = 0  # how often any list was found to hold something new

    def __init__(self, value: Value | None = None) -> None:
        self.any_of = value  # any of its elements; None: it has none yet
        self.same_as: List | None = None  # the list that it counts as
        self.is_frozen = False

    @property
    def root(self) -> List:
        """The list that stands for all those that count as one with this."""
        return self if self.same_as is None else self.same_as.root

    @property
    def value(self) -> Value | None:
        """Any of its elements; None: it has none yet."""
        return self.root.any_of

    def add(self, value: Value) -> None:
        """Note that it may hold ``value``, too."""
        root = self.root
        found = value if root.any_of is None else join([root.any_of, value])
        if root.any_of is None or key_of(found) != key_of(root.any_of):
            if root.is_frozen:
                raise Unproven("a list changes that something else may hold")
            root.any_of = found
            List.changes += 1

    def unite(self, other: List) -> List:
        """Let the two count as one."""
        root, added = self.root, other.root
        if root is not added:
            added.same_as = root
            if root.is_frozen or added.is_frozen:
                raise Unproven("two lists of which something else may hold one")
            if added.any_of is not None:
                root.add(added.any_of)
        return root

    def freeze(self) -> None:
        """Let it get nothing new."""
        self.root.is_frozen = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, List) and self.root is other.root

    def __hash__(self) -> int:
        return hash(List)


@dataclass(frozen=True)
class ListMethod:
    """A method that stores something in a list."""

    name: str
    owner: List


@dataclass(frozen=True)
class Method:
    """A method bound to a module."""

    function: FunctionType
    owner: Known


@dataclass(frozen=True)
class OfTensor:
    """A method, by name, of a tensor, a number, a string, a list or a dictionary."""

    name: str
    holder: Data


@dataclass(frozen=True)
class Parent:
    """What ``super()`` returns in a method of ``kind``."""

    kind: type
    owner: Known


Value: TypeAlias = Data | Known | Row | Group | NoKeywords | List | ListMethod | Method | OfTensor | Parent
DATA, DTYPE, NOTHING = Data(), Data(may_be_dtype=True), Known((None,))
GIVEN = Data(is_held=True)
DTYPES = (torch.dtype, torch.device, torch.memory_format, torch.layout)


def known(value: Any) -> Known:
    """Return the value that is this object."""
    return Known((value,))


def join(values: Iterable[Value]) -> Value:
    """Return the value that may be any of ``values``."""
    found = list(dict.fromkeys(values))
    if not found:
        return NOTHING
    one, *others = found
    for other in others:
        one = _join(one, other)
    return one


def _join(a: Value, b: Value) -> Value:
    if a == b:
        return a
    if isinstance(a, Known) and isinstance(b, Known):
        values = {id(value): value for value in (*a.values, *b.values)}
        if len(values) > MOST:
            raise Unproven("too many alternatives")
        return Known(tuple(values.values()))
    if isinstance(a, Row) and isinstance(b, Row) and len(a.values) == len(b.values):
        return Row(tuple(map(_join, a.values, b.values)))
    if isinstance(a, Group) and isinstance(b, Group):
        return Group(_join(a.value, b.value))
    if isinstance(a, List) and isinstance(b, List):
        return a.unite(b)
    if isinstance(a, Method) and isinstance(b, Method) and a.function is b.function:
        return Method(a.function, Known(tuple({id(one): one for one in (*a.owner.values, *b.owner.values)}.values())))
    return merge([shared(a), shared(b)])


def shared(value: Value) -> Data:
    """Return ``value`` as data that something else may hold from now on: its lists get nothing new."""
    found = as_data(value)
    freeze(value)
    return found


def freeze(value: Value) -> None:
    """Let the lists in ``value`` get nothing new."""
    match value:
        case List():
            value.freeze()
            if value.value is not None:
                freeze(value.value)
        case Row(values):
            for one in values:
                freeze(one)
        case Group(one):
            freeze(one)


def key_of(value: Value) -> Any:
    """Return something to compare that also says what lists hold now."""
    match value:
        case List():
            return id(value.root), None if value.value is None else key_of(value.value)
        case Row(values):
            return tuple(map(key_of, values))
        case Group(one):
            return Group, key_of(one)
        case ListMethod():
            raise Unproven("a method of a list is passed on")
    return value


def merge(several: Iterable[Data]) -> Data:
    """Return what holds each of ``several``."""
    found = list(several)
    return Data(any(one.may_be_dtype for one in found), any(one.is_held for one in found))


def as_data(value: Value) -> Data:
    """Return ``value`` as data, if it can be nothing else."""
    match value:
        case Data():
            return value
        case Row(values):
            return merge(map(as_data, values))
        case Group(one):
            return as_data(one)
        case List():
            return DATA if value.value is None else as_data(value.value)
        case Known(values):
            return merge(map(_data_of, values))
    raise Unproven(f"{value} in place of data")


def _data_of(value: Any) -> Data:
    """Return an object as data."""
    if isinstance(value, DTYPES):
        return DTYPE
    if type(value) in (Tensor, nn.Parameter):
        return GIVEN
    if type(value) in PLAIN or type(value) in (type(Ellipsis), slice):
        return DATA
    if type(value) in (tuple, torch.Size):
        return merge(map(_data_of, value))
    raise Unproven(f"{type(value)} in place of data")
