"""The items of a recorded step: the tensors that the policy decides on, and what each is rebuilt from.

An item is a value that was decided on, or a kept one that the recipe of an item starts from. What a recipe runs through
and is no item is made again with the item. Parameters, and what is too small to look into, are none either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leangrad.ledger.learn.recorded_step import KEPT, REBUILT, SHAPE
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.inplace_variants import WITH_OUT
from leangrad.ledger.values.saved_view import SavedPart, SavedView
from leangrad.ledger.values.shape_only import ShapeOnly
from leangrad.ledger.values.value import SUMS, Value
from leangrad.policy import graph as policy

__all__ = ["Items", "value_of"]

DEAR = 64  # bytes that may be made to rebuild one byte: the statistics of a norm are kept, not summed again


class Items:
    """The items of one step. A value that is one of them knows its number."""

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes
        self.found: list[policy.Value] = []  # as the policy sees them, by their number
        self._dear: set[int] = set()  # the values that will be kept because rebuilding them is too much work

    def choose_dear(self, decided: Iterable[Value]) -> None:
        """Which of the values that were ``decided`` on later steps will keep, though they can be rebuilt."""
        self._dear = {id(value) for value in decided if _is_dear(value)}

    def close(self) -> None:
        """The step is plain data now: values may die, and others be known by their ids."""
        self._dear = set()

    def is_kept(self, value: Value) -> bool:
        """Whether it is kept, or will be because rebuilding it is too much work."""
        return value.tensor is not None or id(value) in self._dear

    def add(self, value: Value) -> int:
        """The number of ``value``, which is an item from now on."""
        if value.items is not self:
            if value.narrow_bytes and value.inputs[0].items is not self:  # the plan may keep what it was cast from
                value.inputs[0].nbytes = value.narrow_bytes
                self.add(value.inputs[0])
            is_kept = self.is_kept(value)
            can_be_rebuilt = value.function is not None and not value.blocked and id(value) not in self._dear
            found, products = self._sources(value) if can_be_rebuilt else (set[int](), 0)
            sources = tuple(sorted(found))
            is_link = bool(sources) and self._is_link(value)
            value.ordinal, value.items = len(self.found), self
            self.found.append(
                policy.Value(
                    value.nbytes,
                    sources,
                    is_fixed=not can_be_rebuilt or (is_kept and not is_link),
                    is_output=value.pinned,
                    may_end_chain=is_link,
                    is_repeatable=can_be_rebuilt and value.function in WITH_OUT,
                    products=products,
                )
            )
        return value.ordinal

    def add_all(self, saved: Iterable[Value | None], decided: Iterable[Value]) -> None:
        """Make items also of what is always made again otherwise: random numbers, and what a recipe runs through before
        autograd asks for it. The plan may keep them. What a value is made from comes before it.
        """
        rebuilt = [v for v in saved if v is not None and v.function is not None and v.tensor is None]
        asked = {id(v): v for v in (*rebuilt, *decided) if v.nbytes >= self._min_bytes}
        for value in asked.values():
            stack, seen = [(value, False)], set[int]()
            while stack:
                v, has_sources = stack.pop()
                if has_sources:
                    self.add(v)
                elif v.items is not self and id(v) not in seen:
                    seen.add(id(v))
                    if id(v) in asked:
                        stack.append((v, True))
                    stack.extend((one, False) for one in v.inputs if v.tensor is None)

    def _is_link(self, value: Value) -> bool:
        """Whether a chain of rebuilt values may end with this one: a residual sum, or what was made of it since.

        Where products are run again, all that follows a sum has its depth up to the next one: of that the first counts.
        """
        if not value.max_products:
            return _joins(value) or (value.depth > 0 and id(value) not in self._dear)
        stack = [value]
        while stack:
            v = stack.pop()
            if v.op in SUMS and _joins(v):
                return True
            if not v.is_product:
                stack.extend(i for i in v.inputs if i.items is not self and not i.free)
        return False

    def _sources(self, value: Value) -> tuple[set[int], int]:
        """The items that ``value`` is rebuilt from, through all that is no item; how many products that runs."""
        found, products = set[int](), int(value.is_product)
        stack, seen = [value], set[int]()
        while stack:
            for v in stack.pop().inputs:
                if v.items is self:
                    found.add(v.ordinal)
                elif id(v) in seen or v.free or (v.nbytes < self._min_bytes and v.tensor is not None):
                    continue
                elif v.tensor is not None:
                    found.add(self.add(v))
                else:
                    seen.add(id(v))
                    stack.append(v)
                    products += v.is_product
        return found, products

    def sources(self, decided: Iterable[Value]) -> dict[int, tuple[int, bool]]:
        """Of the items that were cast from others, which may be kept in their stead: those, and whether they were."""
        found = {}
        for value in decided:
            if value.narrow_bytes and value.inputs and value.inputs[0].items is self:
                found[value.ordinal] = value.inputs[0].ordinal, self.is_kept(value.inputs[0])
        return found

    def number_of(self, packed: Packed) -> int:
        """The item that a saved tensor is, or a view of; KEPT, REBUILT or SHAPE where it is none."""
        if type(packed) is ShapeOnly:
            return SHAPE
        value = value_of(packed)
        if value is None:
            return KEPT
        return value.ordinal if value.items is self else KEPT if value.tensor is not None else REBUILT

    def needed(self, saved: Iterable[Value | None]) -> set[int]:
        """The ids of the values that some recipe reads, if ``saved`` is what autograd has saved."""
        stack = [v for v in saved if v is not None and not self.is_kept(v)]
        needed: set[int] = set()
        while stack:
            for v in stack.pop().inputs:
                if id(v) not in needed:
                    needed.add(id(v))
                    if not self.is_kept(v):
                        stack.append(v)
        return needed

    def is_bare(self, packed: Packed, needed: set[int]) -> bool:
        """Whether a saved tensor is kept, and is none of the values ``needed`` by a recipe."""
        if type(packed) is ShapeOnly:
            return False
        value = value_of(packed)
        return value is None or (id(value) not in needed and self.is_kept(value))

    def read_by(self, saved: Iterable[Value | None], decided: Sequence[Value]) -> dict[int, frozenset[int]]:
        """Of the values that are no items and that only recipes of items read: of which."""
        found: dict[int, set[int]] = {}
        others: set[int] = set()  # those that recipes of other values read
        stack = [v for v in saved if v is not None]
        for value in stack:
            if value.items is not self:
                found.setdefault(id(value), set())
        stack += decided
        seen: set[int] = set()
        while stack:
            owner = stack.pop()
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            inside, walked = [owner], set[int]()
            while inside:
                for v in inside.pop().inputs:
                    if v.items is self:
                        stack.append(v)
                    elif id(v) not in walked:
                        walked.add(id(v))
                        if owner.items is self:
                            found.setdefault(id(v), set()).add(owner.ordinal)
                        else:
                            others.add(id(v))
                        inside.append(v)
        return {n: frozenset(items) for n, items in found.items() if n not in others}


def value_of(packed: Packed | None) -> Value | None:
    """The value of a saved tensor, or of what it is a view of; None: it is kept with no value around it."""
    if type(packed) is Value:
        return packed
    return packed.owner if type(packed) is SavedView or type(packed) is SavedPart else None


def _joins(value: Value) -> bool:
    """Whether it is made from several values that have nothing in common."""
    return len({id(v.root or v) for v in value.inputs if not v.free}) > 1


def _is_dear(value: Value) -> bool:
    """Whether rebuilding ``value`` makes many times its bytes on the way.

    A link of a residual chain is the plan's to decide, however long the chain; a statistic of such a link is not.
    """
    if value.tensor is not None or value.function is None:
        return False
    work = largest = 0
    stack, seen = [value], set()
    while stack:
        v = stack.pop()
        if v.tensor is None and id(v) not in seen:
            seen.add(id(v))
            work += v.nbytes
            largest = max(largest, v.nbytes)
            stack.extend(v.inputs)
    return (largest if value.depth else work) > DEAR * value.nbytes
