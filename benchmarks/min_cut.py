"""The cheapest set of values to keep, as a minimum cut."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

__all__ = ["min_cut"]


def min_cut(
    costs: Sequence[int], inputs: Sequence[Sequence[int]], fixed: AbstractSet[int], needed: AbstractSet[int]
) -> set[int]:
    """The cheapest set of values from which every `needed` value is kept or can be rebuilt.

    Value `i` costs `costs[i]` to keep. It can be rebuilt where all of `inputs[i]` are at hand, unless it is `fixed`.
    A value with no inputs that is not fixed is free. Of several cheapest sets, the one nearest to the fixed values.

    >>> sorted(min_cut([40, 10, 30], [[], [0], [1]], fixed={0}, needed={0, 2}))
    [0]
    >>> sorted(min_cut([40, 10, 30], [[], [0], [1]], fixed={0}, needed={2}))
    [1]
    """
    network = _Network()
    # Value i is the arc 2i -> 2i + 1 of capacity costs[i]. Only what backward can ask for takes part.
    seen, frontier = set(needed), list(needed)
    source, sink = 2 * len(costs), 2 * len(costs) + 1
    endless = sum(costs) + 1
    while frontier:
        value = frontier.pop()
        network.connect(2 * value, 2 * value + 1, costs[value])
        if value in needed:
            network.connect(2 * value + 1, sink, endless)
        if value in fixed:
            network.connect(source, 2 * value, endless)
            continue
        for one in set(inputs[value]):
            network.connect(2 * one + 1, 2 * value, endless)
            if one not in seen:
                seen.add(one)
                frontier.append(one)
    reached = network.saturate(source, sink)
    return {value for value in seen if 2 * value in reached and 2 * value + 1 not in reached}


class _Network:
    """Arcs with capacities; arc k and its reverse k ^ 1 are neighbours in the lists. Dinic's algorithm."""

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.room: list[int] = []
        self.arcs: dict[int, list[int]] = {}

    def connect(self, tail: int, head: int, capacity: int) -> None:
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self.arcs.setdefault(start, []).append(len(self.heads))
            self.heads.append(end)
            self.room.append(room)

    def saturate(self, source: int, sink: int) -> dict[int, int]:
        """Send as much flow as there is room for; returns the nodes that the source can still reach."""
        while True:
            levels = self._levels(source)
            if sink not in levels:
                return levels
            untried = {node: len(arcs) for node, arcs in self.arcs.items()}
            while path := self._path(source, sink, levels, untried):
                amount = min(self.room[arc] for arc in path)
                for arc in path:
                    self.room[arc] -= amount
                    self.room[arc ^ 1] += amount

    def _levels(self, source: int) -> dict[int, int]:
        levels, frontier = {source: 0}, [source]
        for node in frontier:  # grows while it is walked: breadth first
            for arc in self.arcs.get(node, ()):
                head = self.heads[arc]
                if self.room[arc] and head not in levels:
                    levels[head] = levels[node] + 1
                    frontier.append(head)
        return levels

    def _path(self, source: int, sink: int, levels: dict[int, int], untried: dict[int, int]) -> list[int]:
        """A shortest path with room, as arcs; an arc that led nowhere is not tried again."""
        path: list[int] = []
        node = source
        while node != sink:
            if untried.get(node, 0):
                arc = self.arcs[node][untried[node] - 1]
                if self.room[arc] and levels.get(self.heads[arc]) == levels[node] + 1:
                    path.append(arc)
                    node = self.heads[arc]
                else:
                    untried[node] -= 1
            elif path:
                node = self.heads[path.pop() ^ 1]
                untried[node] -= 1
            else:
                break
        return path
