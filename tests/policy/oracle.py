"""The policy's questions answered by the plainest means: every set of values, and sets of memories tick by tick."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, combinations

from leangrad.policy.copies import Copy, find_copies
from leangrad.policy.cut import HANDED_OUT, SCALE
from leangrad.policy.graph import Graph
from leangrad.policy.kernels import Fusion, Kernels


def keepable(graph: Graph) -> list[int]:
    """What may be kept at all, but for what stands anyway."""
    return [
        n
        for n, value in enumerate(graph.values)
        if not (value.is_backward or value.is_standing or value.is_forced or value.view_of is not None)
        and value.can_be_kept
    ]


def every_set(values: Sequence[int]) -> Iterator[frozenset[int]]:
    """All sets of these values."""
    sets = chain.from_iterable(combinations(values, size) for size in range(len(values) + 1))
    return map(frozenset, sets)


def cost(graph: Graph, kept: AbstractSet[int], price: float, pinned: AbstractSet[int]) -> float | None:
    """What keeping this set costs, the price of what is made again included. None: it is not enough.

    What forward returns counts a little less, as in the cut, which so keeps it rather than a value of equal size.
    A value that the user has forced is made again, if anything that backward may make again rests on it.
    """
    values = graph.values

    def is_final(n: int) -> bool:
        value = values[n]
        return not value.is_forced and (value.is_fixed or value.is_standing or n in pinned)

    reach, frontier = set(), list(graph.needed)
    while frontier:
        n = frontier.pop()
        if n not in reach:
            reach.add(n)
            frontier += [] if is_final(n) else values[n].inputs
    made, frontier = set(), [*graph.needed, *(n for n in reach if values[n].is_forced)]
    while frontier:
        n = frontier.pop()
        if n in kept or n in made or (values[n].is_standing and not values[n].is_forced):
            continue
        if is_final(n):
            return None
        made.add(n)
        frontier += values[n].inputs
    prices = sum(values[n].price for n in made if values[n].inputs and not values[n].is_forced)
    scales = {n: HANDED_OUT / SCALE if n in graph.handed_out else 1.0 for n in kept}
    return sum(scales[n] * values[n].nbytes for n in kept if not values[n].is_standing) + price * prices


def cheapest_cost(graph: Graph, price: float, pinned: AbstractSet[int]) -> float | None:
    """The cost of the cheapest set of all. None: no set is enough."""
    found = (cost(graph, kept, price, pinned) for kept in every_set(keepable(graph)))
    return min((one for one in found if one is not None), default=None)


def peak(graph: Graph, kept: frozenset[int]) -> int:
    """The most that a step holds, tick by tick."""
    values = graph.values
    given = {n for n, value in enumerate(values) if value.is_output and not value.is_backward}
    forward = [n for n in range(len(values)) if n in ancestors(graph, given | kept, frozenset())]
    backward: list[int] = []
    for n, value in enumerate(values):
        if value.is_backward:
            before = ancestors(graph, set(value.inputs), kept | set(backward))
            backward += [*sorted(i for i in before if not values[i].is_backward), n]
    asked = {n for n, value in enumerate(values) if value.is_asked_for and not value.is_backward}
    backward += sorted(ancestors(graph, asked, kept | set(backward)))
    handed = {graph.base(n) for n in given}
    gradients = {graph.base(n) for n in backward if values[n].is_output and values[n].is_backward}
    held = {graph.base(n) for n in kept} | handed
    first = phase(Kernels(graph, forward, held, Fusion(), is_backward=False), set())
    lasting = handed | gradients | {graph.base(n) for n in asked}
    second = Kernels(graph, backward, lasting, Fusion(), is_backward=True)
    return max(first, phase(second, held, find_copies(second)))


def ancestors(graph: Graph, ends: AbstractSet[int], there: AbstractSet[int]) -> set[int]:
    """The values that are made for ``ends``."""
    found: set[int] = set()
    for n in reversed(range(len(graph.values))):
        read = any(n in graph.values[r].inputs for r in found)
        if (n in ends or read) and n not in there and not graph.values[n].is_standing:
            found.add(n)
    return found


def phase(kernels: Kernels, held: AbstractSet[int], copies: Sequence[Copy] = ()) -> int:
    """The most that is held while the values of a phase are made."""
    using = {copy.value: copy.readers for copy in copies}
    graph, order, place, lasting = kernels.graph, kernels.order, kernels.place, kernels.lasting
    values = graph.values

    def ticks(n: int) -> set[int]:
        """When the numbers of a value are read: by an op that writes, or inside it."""
        found: set[int] = set()
        for r in order:
            if n in values[r].inputs and r not in using.get(n, ()):
                found |= {place[r]} if kernels.written[r] else ticks(r) or {place[r]}
        return found

    memories = {n for n in order if kernels.written[n]} | set(held)
    busy: dict[int, set[int]] = {m: set() for m in memories}
    for n in range(len(values)):
        if graph.base(n) in memories:
            busy[graph.base(n)] |= ticks(n) | ({place[n]} if n in place else set())
    for n, readers in using.items():  # they read what the value is made from
        read = set().union(*({place[r]} if kernels.written[r] else ticks(r) or {place[r]} for r in readers))
        for m in kernels.reads[n]:
            busy.setdefault(m, set()).update(read)
    sizes = [sum(values[m].nbytes for m in held if not values[m].is_standing)]
    for tick in range(len(order)):
        live = {
            m for m in memories if (m in held or place[m] <= tick) and (m in lasting or any(t >= tick for t in busy[m]))
        }
        sizes.append(sum(values[m].nbytes for m in live if not values[m].is_standing))
    return max(sizes)
