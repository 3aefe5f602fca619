"""Steps of an eager engine written down by hand: tensors, and the order in which backward reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from leangrad.policy import chains
from leangrad.policy.choice import lowest_peak
from leangrad.policy.cut import cheapest_cut
from leangrad.policy.graph import Graph, Value
from leangrad.policy.peak import Outcome
from leangrad.policy.replay import Replay


@dataclass(frozen=True)
class Item:
    """One tensor of a step."""

    nbytes: int
    sources: tuple[int, ...] = ()  # what it is rebuilt from; without any it is kept
    link: bool = False  # a chain may end here
    pinned: bool = False  # the caller holds it to the end
    again: bool = False  # it may be let go and made again


@dataclass(frozen=True)
class Step:
    """Tensors, the order in which backward reads them, and what is alive beside them at each read."""

    items: tuple[Item, ...]
    reads: tuple[int, ...]
    gradients: tuple[int, ...] = ()  # by default those that an op is given and writes: two of what it reads

    @cached_property
    def graph(self) -> Graph:
        tensors = [
            Value(
                item.nbytes,
                item.sources,
                is_fixed=not item.sources,
                is_output=item.pinned,
                may_end_chain=item.link,
                is_repeatable=item.again,
            )
            for item in self.items
        ]
        gradients = self.gradients or [2 * self.items[read].nbytes for read in self.reads]
        ops = [
            Value(0, (read,), is_backward=True, scratch=nbytes)
            for read, nbytes in zip(self.reads, gradients, strict=True)
        ]
        return Graph([*tensors, *ops])

    @cached_property
    def fixed(self) -> frozenset[int]:
        return frozenset(n for n, item in enumerate(self.items) if not item.sources)

    @cached_property
    def cheapest(self) -> frozenset[int]:
        return cheapest_cut(self.graph)

    def play(self, kept: Collection[int], held: Collection[int] = frozenset()) -> Outcome:
        """Play backward with what is fixed and ``kept``; of what may be made again, only ``held`` is held."""
        return Replay(self.graph)._play(self.fixed.union(kept), frozenset(held))

    def held(self, kept: Collection[int]) -> frozenset[int]:
        return Replay(self.graph).held(self.fixed.union(kept))

    def lowest(self) -> frozenset[int]:
        """What is kept beside what is fixed, for the lowest peak."""
        return lowest_peak(self.graph, Replay(self.graph).play) - self.fixed

    def ends_by_length(self, length: int) -> frozenset[int]:
        return chains.ends_by_length(self.graph, self.fixed, length)

    def ends_by_room(self, slack: int) -> frozenset[int]:
        return chains.ends_by_room(self.graph, self.fixed, slack)
