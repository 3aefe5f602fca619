"""The order in which backward reads the saved tensors of a recorded step; with the items, the graph for the policy."""

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

    node: int  # sequence number of the node; -1: not known
    guess: int  # bytes of the gradients alive at that time, used if ``gradients.Graph`` does not contain the node
    scratch: int = 0  # bytes that the node allocates beside the gradients
    convolution: Convolution | None = None  # the convolution of the node, whose measured scratch is added


class Segment(Protocol):
    """What a plan needs from the ledger of a checkpointed segment."""

    def peak_bytes(self) -> int:
        """Return the peak bytes of the tensors of the segment in backward."""


class Reads:
    """The reads of the backward passes over one step."""

    def __init__(self, items: Sequence[policy.Value]) -> None:
        self._items = items
        self._reads: list[tuple[int, ...]] = []  # for each recorded op of backward, the items that it reads
        self._readers: list[Reader] = []  # for each recorded op of backward, the node
        self._to_come: dict[int, list[Reader]] = {}  # by item, the readers that have not run yet, in forward order
        self._scratch: dict[Convolution, int] = {}  # measured scratch in bytes
        self._segments: list[tuple[int, Segment]] = []  # recomputed segments, each with its position in ``_reads``
        self._saved: dict[tuple[int, int], list[int]] = {}  # numbers of the saved tensors, by item and node

    def expect(self, step: RecordedStep, saved_by: Sequence[int]) -> None:
        """Note at the end of forward which node will read each item, and which convolution's scratch it will use.

        saved_by: for each saved tensor, the number of the node that saved it.
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
        """Record that backward reads ``item``; ``node``: the number of its reader, used if no reader was expected."""
        self._reads.append((item,))
        readers = self._to_come.get(item)  # backward runs the last reader first
        self._readers.append(readers.pop() if readers else Reader(node, 2 * self._items[item].nbytes))

    def add_other(self, reader: Reader) -> None:
        """Record that backward runs a node that reads no item."""
        self._reads.append(())
        self._readers.append(reader)

    def add_segment(self, segment: Segment) -> None:
        """Record that backward recomputes a checkpointed segment; the plan treats it as a read with scratch."""
        self._segments.append((len(self._reads), segment))
        self.add_other(Reader(-1, 0))

    def measure_scratch(self) -> None:
        """Measure, after backward, the memory that its convolutions used beside saved tensors and gradients."""
        if any(len(item.inputs) > 1 for item in self._items):  # otherwise there is nothing to plan
            self._scratch = scratch.measure(r.convolution for r in self._readers if r.convolution is not None)

    def graph(self, step: RecordedStep, nodes: gradients.Graph, *, leaves_stay: bool) -> policy.Graph:
        """Return the step as the policy sees it: its tensors, and the ops of backward that read them.

        Also sets ``step.read_at`` (which op of backward reads each saved tensor), ``step.plain_bytes`` and
        ``step.shares_logits``.

        nodes: the autograd nodes of the step.
        leaves_stay: whether parameters have no ``.grad`` yet, so that their gradients are new memory and stay.
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
            if between > nbytes:  # nodes before this one read no item but hold more: they become an op without inputs
                ops.append(policy.Value(0, is_backward=True, scratch=between))
            for item in read:
                for place in self._saved.get((item, reader.node), ()):
                    read_at.setdefault(place, len(ops))
            overwrites = reader.node in nodes.overwriting
            ops.append(policy.Value(0, read, is_backward=True, scratch=nbytes, overwrites=overwrites))
        step.read_at = read_at
        overwritten = self._overwritten(nodes)
        step.plain_bytes = sum(2 * self._items[n].nbytes for n in overwritten)  # log-probabilities and their gradient
        items = self._held_items(step)
        graph = policy.Graph((*(replace(v, can_be_kept=n not in overwritten) for n, v in enumerate(items)), *ops))
        readers = (graph.values[r] for n in overwritten for r in graph.readers[n])
        step.shares_logits = not all(reader.overwrites for reader in readers)
        return graph

    def _overwritten(self, nodes: gradients.Graph) -> set[int]:
        """Return the rebuildable items over which the node that reads them writes its gradient.

        A plan must not keep them: it would then hold both the kept tensor and the gradient.
        """
        read = zip(self._reads, self._readers, strict=True)
        found = {item for items, reader in read if reader.node in nodes.overwriting for item in items}
        return {n for n in found if not self._items[n].is_fixed}

    def _held_items(self, step: RecordedStep) -> list[policy.Value]:
        """Return the items; those that are fixed, saved and not read in this backward pass are marked as asked for.

        Autograd holds a saved tensor even if this backward pass did not reach its reader.
        """
        unread = {tensor.item for tensor in step.saved}.difference(*self._reads)
        return [
            replace(item, is_asked_for=True) if n in unread and item.is_fixed else item
            for n, item in enumerate(self._items)
        ]

    def _alive(self, nodes: gradients.Graph, leaves_stay: bool) -> dict[int, int]:
        """Return, by node, the bytes of gradients that are alive while the node runs.

        Backward does not begin at nodes that were expected to read an item and did not run.
        """
        ran = {r.node for r in self._readers}
        idle = {r.node for readers in self._to_come.values() for r in readers} - ran
        return nodes.alive(without=idle, leaves_stay=leaves_stay)
