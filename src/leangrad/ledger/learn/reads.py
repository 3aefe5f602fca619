"""What backward reads of a recorded step, in order: with the items, the graph that the policy plans with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from leangrad.ledger.learn import gradients, scratch
from leangrad.ledger.learn.recorded_step import RecordedStep
from leangrad.ledger.learn.scratch import Convolution
from leangrad.policy import graph as policy

__all__ = ["Reader", "Reads", "Segment"]


class Reader(NamedTuple):
    """A node that reads a saved tensor in backward."""

    node: int  # its number
    guess: int  # the bytes of the gradients at that time, where the graph does not tell
    scratch: int = 0  # the bytes that it takes beside them
    convolution: Convolution | None = None  # whose scratch counts too


class Segment(Protocol):
    """What a plan asks of the ledger of a checkpointed segment."""

    def peak_bytes(self) -> int:
        """What backward holds at most of the tensors of the segment."""


class Reads:
    """The reads of the backward passes over one step."""

    def __init__(self, items: Sequence[policy.Value]) -> None:
        self._items = items
        self._reads: list[tuple[int, ...]] = []  # of each op of backward that is noted: the items it reads
        self._readers: list[Reader] = []  # of each read
        self._to_come: dict[int, list[Reader]] = {}  # of each item: those that will read it, in order
        self._scratch: dict[Convolution, int] = {}  # what they take, in bytes
        self._segments: list[tuple[int, Segment]] = []  # which read is a segment that was run again
        self._saved: dict[tuple[int, int], list[int]] = {}  # by item and node: the numbers of the saved tensors

    def expect(self, step: RecordedStep, saved_by: Sequence[int]) -> None:
        """Forward has ended. Of each item: who will read it, and whose scratch that will take.

        saved_by: the number of the node that saved each tensor.
        """
        convolutions = {
            place: call.convolution for call in step.calls for place in range(call.first, call.first + len(call.names))
        }
        for place, (tensor, node) in enumerate(zip(step.saved, saved_by, strict=False)):
            if tensor.item >= 0:
                reader = Reader(node, 2 * self._items[tensor.item].nbytes, convolution=convolutions.get(place))
                self._to_come.setdefault(tensor.item, []).append(reader)
                self._saved.setdefault((tensor.item, node), []).append(place)

    def add(self, item: int, node: int) -> None:
        """Backward reads ``item``; ``node``: the number of the node that does, where no reader was expected."""
        self._reads.append((item,))
        readers = self._to_come.get(item)  # backward comes to the last of them first
        self._readers.append(readers.pop() if readers else Reader(node, 2 * self._items[item].nbytes))

    def add_other(self, reader: Reader) -> None:
        """Backward is just now at a node that reads nothing which was kept or rebuilt."""
        self._reads.append(())
        self._readers.append(reader)

    def add_segment(self, segment: Segment) -> None:
        """Backward has come to a checkpoint and runs its segment again: the plan takes it for a read with scratch."""
        self._segments.append((len(self._reads), segment))
        self.add_other(Reader(-1, 0))

    def measure_scratch(self) -> None:
        """Backward has ended: measure what its convolutions took beside saved tensors and gradients."""
        if any(len(item.inputs) > 1 for item in self._items):  # else there is nothing to plan
            self._scratch = scratch.measure(r.convolution for r in self._readers if r.convolution is not None)

    def graph(self, step: RecordedStep, nodes: gradients.Graph, *, leaves_stay: bool) -> policy.Graph:
        """The step as the policy sees it: its tensors, and the ops of backward that read them.

        Which op reads which saved tensor is noted in ``step.read_at``.

        nodes: those of the step; leaves_stay: the gradients of parameters are new ones, and stay.
        """
        alive = self._alive(nodes, leaves_stay)
        segments = dict(self._segments)
        others = sorted(alive.keys() - {r.node for r in self._readers})
        ops: list[policy.Value] = []
        read_at: dict[int, int] = {}
        for at, (read, reader) in enumerate(zip(self._reads, self._readers, strict=True)):
            nbytes = alive.get(reader.node, reader.guess) + reader.scratch
            if reader.convolution is not None:
                nbytes += self._scratch.get(reader.convolution, 0)
            if at in segments:
                nbytes = segments[at].peak_bytes()
            between = 0
            while others and others[-1] > reader.node >= 0:
                between = max(between, alive[others.pop()])
            if between > nbytes:  # nodes that read nothing, and so use none of the items
                ops.append(policy.Value(0, is_backward=True, scratch=between))
            for item in read:
                for place in self._saved.get((item, reader.node), ()):
                    read_at.setdefault(place, len(ops))
            ops.append(policy.Value(0, read, is_backward=True, scratch=nbytes))
        step.read_at = read_at
        return policy.Graph((*self._held_items(step), *ops))

    def _held_items(self, step: RecordedStep) -> list[policy.Value]:
        """The items. What autograd has saved it holds, also if this backward did not come to its reader."""
        unread = {tensor.item for tensor in step.saved}.difference(*self._reads)
        return [
            replace(item, is_asked_for=True) if n in unread and item.is_fixed else item
            for n, item in enumerate(self._items)
        ]

    def _alive(self, nodes: gradients.Graph, leaves_stay: bool) -> dict[int, int]:
        """The bytes of gradients that are alive while each node runs."""
        ran = {r.node for r in self._readers}
        idle = {r.node for readers in self._to_come.values() for r in readers} - ran
        return nodes.alive(without=idle, leaves_stay=leaves_stay)
