"""The minimum cut of a network by Dinic's algorithm: levels by breadth-first search, then blocking flows along them."""

from __future__ import annotations

__all__ = ["ENDLESS", "Network"]

ENDLESS = 1 << 62  # the capacity of an arc that is never cut


class Network:
    """A flow network of arcs with capacities. Arc ``k`` and its reverse ``k ^ 1`` are stored side by side."""

    def __init__(self) -> None:
        self._heads: list[int] = []
        self._room: list[int] = []
        self._arcs: list[list[int]] = []
        self.source, self.sink = self.node(), self.node()

    def node(self) -> int:
        """Add a node and return its number."""
        self._arcs.append([])
        return len(self._arcs) - 1

    def connect(self, tail: int, head: int, capacity: int = ENDLESS) -> None:
        """Add an arc from ``tail`` to ``head``."""
        number = len(self._heads)
        self._heads += (head, tail)
        self._room += (capacity, 0)
        self._arcs[tail].append(number)
        self._arcs[head].append(number ^ 1)

    def cut(self, *, early: bool = False) -> list[bool]:
        """Return for each node whether it lies on the sink's side of a minimum cut.

        Of all minimum cuts it is the one nearest the sink, or if ``early`` the one nearest the source. Raises
        OverflowError if a path of ``ENDLESS`` arcs leads from the source to the sink.
        """
        total = 0
        while (levels := self._levels())[self.sink] >= 0:
            total += self._fill(levels)
            if total >= ENDLESS:
                raise OverflowError("an endless path leads from the source to the sink")
        return [level < 0 for level in levels] if early else self._reaching_sink()

    def _levels(self) -> list[int]:
        heads, room, arcs = self._heads, self._room, self._arcs
        levels = [-1] * len(arcs)
        levels[self.source] = 0
        frontier = [self.source]
        while frontier and levels[self.sink] < 0:
            following: list[int] = []
            for node in frontier:
                level = levels[node] + 1
                for arc in arcs[node]:
                    head = heads[arc]
                    if levels[head] < 0 and room[arc] > 0:
                        levels[head] = level
                        following.append(head)
            frontier = following
        return levels

    def _fill(self, levels: list[int]) -> int:
        """Send flow along the levels until every path is blocked. Returns the amount of flow."""
        heads, room, arcs, sink = self._heads, self._room, self._arcs, self.sink
        untried = [len(a) for a in arcs]
        path: list[int] = []
        node, total = self.source, 0
        while True:
            if node == sink:
                amount = min(room[arc] for arc in path)
                total += amount
                first = len(path)
                for k, arc in enumerate(path):
                    room[arc] -= amount
                    room[arc ^ 1] += amount
                    if first == len(path) and room[arc] == 0:
                        first = k
                node = heads[path[first] ^ 1]  # back to the tail of the first full arc
                del path[first:]
            elif untried[node]:
                arc = arcs[node][untried[node] - 1]
                if room[arc] > 0 and levels[heads[arc]] == levels[node] + 1:
                    path.append(arc)
                    node = heads[arc]
                else:
                    untried[node] -= 1
            elif path:
                node = heads[path.pop() ^ 1]
                untried[node] -= 1
            else:
                return total

    def _reaching_sink(self) -> list[bool]:
        heads, room = self._heads, self._room
        reaches = [False] * len(self._arcs)
        reaches[self.sink] = True
        frontier = [self.sink]
        while frontier:
            node = frontier.pop()
            for arc in self._arcs[node]:
                tail = heads[arc]  # the tail of arc ``arc ^ 1``, which leads to ``node``
                if not reaches[tail] and room[arc ^ 1] > 0:
                    reaches[tail] = True
                    frontier.append(tail)
        return reaches
