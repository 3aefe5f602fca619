"""The items of a recorded step: the tensors that the policy decides about, and what each is rebuilt from.

An item is a value about which a decision was made, or a kept value that the recipe of an item starts from. Other values
on the way of a recipe are not items: they are recomputed together with the item. Parameters are not items either, nor
are tensors that are kept without a decision because they are smaller than ``min_bytes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leangrad.ledger.learn.recorded_step import KEPT, REBUILT, SHAPE
from leangrad.ledger.values.cast import Packed
from leangrad.ledger.values.rebuild.inplace_variants import WITH_OUT
from leangrad.ledger.values.saved_view import SavedPart, SavedView
from leangrad.ledger.values.shape_only import ShapeOnly
from leangrad.ledger.values.value import SUMS, Value
from leangrad.policy import graph as policy

__all__ = ["Items", "value_of"]

# Maximum number of bytes that may be computed to rebuild one byte; a value that needs more is kept. So the statistics
# of a norm are kept, not summed again.
DEAR = 64


class Items:
    """The items of one step. A value that is an item has its number in ``ordinal``, and this object in ``items``."""

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes
        self.found: list[policy.Value] = []  # the items as the policy sees them, by item number
        self._dear: set[int] = set()  # ids of the values that later steps keep because rebuilding them is too much work

    def choose_dear(self, decided: Iterable[Value]) -> None:
        """Find the values in ``decided`` that later steps keep although they can be rebuilt: see ``_is_dear``."""
        self._dear = {id(value) for value in decided if _is_dear(value)}

    def close(self) -> None:
        """Forget the ids of values: the step is plain data now, and once values die their ids may be used again."""
        self._dear = set()

    def is_kept(self, value: Value) -> bool:
        """Whether ``value`` is kept, or later steps will keep it because rebuilding it is too much work."""
        return value.tensor is not None or id(value) in self._dear

    def add(self, value: Value) -> int:
        """Make ``value`` an item if it is not one yet; return its number."""
        if value.items is not self:
            if value.narrow_bytes and value.inputs[0].items is not self:  # the plan may keep the source of this cast
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
        """Make an item of each rebuilt value in ``saved`` and each value in ``decided``, so that the plan may keep it.

        Without this call, rebuilt values about which no decision was made would always be rebuilt: random numbers, and
        values that were on the way of a recipe before autograd saved them. Values smaller than ``min_bytes`` are left
        out. The values that an item is made from are added before it.
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
        """Whether a chain of rebuilt values may end with ``value``: a residual sum, or a value made from one.

        If recipes may run through products, all values after a residual sum have the sum's depth, up to the next sum.
        Then only the first item after the sum counts.
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
        """Return the numbers of the items that ``value`` is rebuilt from, and how many products the rebuild runs.

        Looks through values that are not items. A kept value on the way becomes an item.
        """
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
        """Return the sources of items that are casts: a plan may keep the source instead of the cast.

        Maps the number of each cast item to the number of its source and whether the recorded step kept the source.
        """
        found = {}
        for value in decided:
            if value.narrow_bytes and value.inputs and value.inputs[0].items is self:
                found[value.ordinal] = value.inputs[0].ordinal, self.is_kept(value.inputs[0])
        return found

    def number_of(self, packed: Packed) -> int:
        """Return the number of the item that a saved tensor is, or is a view of; else KEPT, REBUILT or SHAPE."""
        if type(packed) is ShapeOnly:
            return SHAPE
        value = value_of(packed)
        if value is None:
            return KEPT
        return value.ordinal if value.items is self else KEPT if value.tensor is not None else REBUILT

    def read_for(self, packed: Packed) -> frozenset[int]:
        """Return the numbers of the items that the recipe of a saved tensor reads which is rebuilt but is no item."""
        if self.number_of(packed) != REBUILT:
            return frozenset()
        found, stack, seen = set[int](), [value_of(packed)], set[int]()
        while stack:
            value = stack.pop()
            for v in () if value is None else value.inputs:
                if v.items is self:
                    found.add(v.ordinal)
                elif v.tensor is None and id(v) not in seen:
                    seen.add(id(v))
                    stack.append(v)
        return frozenset(found)

    def needed(self, saved: Iterable[Value | None]) -> set[int]:
        """Return the ids of the values that recipes read, if ``saved`` are the values of all saved tensors."""
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
        """Whether a saved tensor is kept, and no recipe reads it; ``needed``: ids of the values that recipes read."""
        if type(packed) is ShapeOnly:
            return False
        value = value_of(packed)
        return value is None or (id(value) not in needed and self.is_kept(value))

    def read_by(self, saved: Iterable[Value | None], decided: Sequence[Value]) -> dict[int, frozenset[int]]:
        """Return, by the id of a value that is not an item, the items whose recipes read the value.

        Leaves out values that are also read by the recipe of a value that is not an item. A saved value that no recipe
        reads has an empty set.
        """
        found: dict[int, set[int]] = {}
        others: set[int] = set()  # ids of the values that recipes of non-items read
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
    """Return the Value of a saved tensor, or of the tensor that it is a view or DTensor of; None if it has no Value."""
    if type(packed) is Value:
        return packed
    return packed.owner if type(packed) is SavedView or type(packed) is SavedPart else None


def _joins(value: Value) -> bool:
    """Whether ``value`` joins lineages: its inputs, apart from those that are ``free``, have more than one root."""
    return len({id(v.root or v) for v in value.inputs if not v.free}) > 1


def _is_dear(value: Value) -> bool:
    """Whether rebuilding ``value`` computes more than ``DEAR`` times its bytes.

    For a value in a residual chain (``depth`` is not 0) only the largest tensor on the way counts, not the sum of all.
    So the plan decides about a link of the chain however long the chain is, while a statistic of a link is kept.
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
