"""A recorded step as plain data, from which the decisions and the trace of later steps are derived for a given plan.

A plan is the set ``kept`` of item numbers that later steps keep; None stands for what the recorded step itself kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from leangrad.ledger.decision import Decision, SavedKind
from leangrad.ledger.learn.early_end import Ends
from leangrad.ledger.learn.entries import EXTRA, HAS_ROOM, LOWER_PEAK, SHAPE_ONLY, SPARED, TOO_MUCH_WORK, Entry
from leangrad.ledger.learn.trace import ANY_SIZE, Call, RecordedCall, Trace
from leangrad.ledger.learn.unwatched import Handover, Needs
from leangrad.policy import graph as policy

NARROW = "sum in fewer bits"  # the summary's op name for the kept source of a cast: see [Note: kept in fewer bits]
KEPT, REBUILT, SHAPE = -1, -2, -3  # what became of a saved tensor that is not an item; SHAPE: shape only
# May be in a plan beside item numbers. Then shape-only tensors that are saved after the last rebuilt tensor are kept.
# So nothing is left to decide from there on, and the function mode ends: see [Note: the function mode ends early].
LAST_SHAPES = -4


class SavedTensor(NamedTuple):
    """What became of one tensor that autograd saved."""

    item: int  # number of the item that it is, or is a view of; else KEPT, REBUILT or SHAPE
    made_by: tuple[str, int] | None  # op and bytes of its Value; None if it has no Value
    is_bare: bool  # kept, and no recipe reads it
    has_node: bool  # whether it has a Value and is the output of an autograd node, or a view of one
    small_bytes: int  # its bytes, if it was kept without a decision because it is small; else -1
    # For a tensor that is not an item: the items whose recipes read it. None: not known, any recipe may read it.
    read_by: frozenset[int] | None = None
    shape_bytes: int = 0  # bytes of the tensor, if backward reads only its shape; else 0
    reads: frozenset[int] = frozenset()  # if it is rebuilt and not an item: the items that its recipe reads


class Learned(NamedTuple):
    """What later steps use of a recorded step."""

    kept: frozenset[int] | None  # the items that the plan keeps; None: what the recorded step kept
    decisions: Sequence[Decision | None]  # for each saved tensor: see [Note: decisions by saved tensor]
    saved_kinds: Sequence[SavedKind]  # for each saved tensor, what becomes of it
    trace: Trace | None  # the calls of the step; None if tensors to decide about were saved outside of calls
    caught: Collection[int]  # numbers of the calls whose product is kept although autograd does not save it
    peak_bytes: int  # predicted peak of saved tensors and gradients in backward
    small: frozenset[int] = frozenset()  # the saved tensors that were kept without a decision because they are small


@dataclass
class RecordedStep:
    """The tensors of one step, what became of each, and the calls that saved them."""

    items: Sequence[policy.Value]  # tensors about which a decision was made, or that recipes start from
    decided: Sequence[tuple[int, bool]]  # for each decision, in order: its item, and whether the item is kept
    saved: Sequence[SavedTensor]  # every saved tensor, in order
    entries: list[Entry]  # the lines of the summary
    first_decision: int  # index in ``entries`` of the first decision; the other decisions follow it
    calls: Sequence[RecordedCall]
    # By the numbers of the calls whose product is kept although autograd did not save it: the items that these products
    # are; empty if that is not known.
    caught: Mapping[int, frozenset[int]]
    min_bytes: int
    # For each item that was cast from a tensor in fewer bits: the item of that source, and whether the recorded step
    # kept the source instead.
    sources: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    why_kept: str = LOWER_PEAK  # the reason that the summary gives for items that the plan keeps by choice
    undecided: Mapping[int, int] = field(default_factory=dict)  # items without a decision, by the index of their entry
    spared: frozenset[int] = frozenset()  # the items that are kept to spare the host
    ends: Ends | None = None  # events that tell where the function mode may end early; None: it may not
    needs: Needs | None = None  # the calls that need the function mode; None: all of them do
    read_at: Mapping[int, int] = field(default_factory=dict)  # by saved tensor, the op of backward that reads it
    shares_logits: bool = False  # the logits of a loss in parts are read by others too, or rebuilt for others
    plain_bytes: int = 0  # bytes of logit-sized tensors that plain PyTorch makes in backward and no plan does

    def entries_under(self, kept: frozenset[int] | None) -> list[Entry]:
        """Return the summary's entries for later steps that keep the items ``kept``."""
        entries = list(self.entries)
        for n, (item, was_kept) in enumerate(self.decided, self.first_decision):
            entry, stays = entries[n], self._stays(item, was_kept, kept)
            if stays != (entry.outcome == "kept"):
                why = "" if not stays else TOO_MUCH_WORK if self.items[item].is_fixed else self._why_kept(item)
                entries[n] = replace(entry, outcome="kept" if stays else "rebuilt", why=why)
        for n, item in self.undecided.items():
            if kept is not None and item in kept:
                entries[n] = replace(entries[n], outcome="kept", why=HAS_ROOM)
        if kept is not None and LAST_SHAPES in kept:
            shapes = [n for n, entry in enumerate(entries) if entry.outcome == SHAPE_ONLY]
            places = [n for n, saved in enumerate(self.saved) if saved.item == SHAPE]
            last = self._last_rebuilt(kept)
            for n in [n for n, place in zip(shapes, places, strict=False) if place > last]:
                entries[n] = replace(entries[n], outcome="kept", why=HAS_ROOM)
        if any(entry.outcome == "rebuilt" for entry in entries):
            staying = self._staying(kept)
            narrow = [self.items[n].nbytes for n in {n for n, _ in self.sources.values()} if n in staying]
            return entries + [Entry("", NARROW, "kept", nbytes, EXTRA, "", is_extra=True) for nbytes in narrow]
        return [entry for entry in entries if not entry.is_extra]  # nothing is rebuilt, so nothing is kept for recipes

    def _why_kept(self, item: int) -> str:
        return SPARED if item in self.spared else self.why_kept

    def decisions(self, kept: frozenset[int] | None, held: frozenset[int]) -> list[Decision | None]:
        """Return a Decision for each saved tensor, in order; None for a tensor that has no Value.

        kept: the items to keep; None: keep what the recorded step kept, and rebuild what it rebuilt.
        held: of the items that may be freed and rebuilt once more, those that are held until their readers have run.
        """
        staying = self._staying(kept)
        fleeting: set[int] = set()
        if kept is not None:
            fleeting = {n for n, item in enumerate(self.items) if item.is_repeatable and n not in held}
        narrow = {n for n, (source, _) in self.sources.items() if source in staying}
        return [
            None
            if s.made_by is None
            else Decision(s.made_by[0], s.item in staying, s.made_by[1], s.item in fleeting, s.item in narrow)
            for s in self.saved
        ]

    def saved_kinds(self, kept: frozenset[int] | None) -> list[SavedKind]:
        """Return what becomes of each saved tensor, in order, if the items ``kept`` are kept."""
        return [
            SavedKind.BARE if is_bare else SavedKind.SHAPE_ONLY if saved.item == SHAPE else SavedKind.DECIDED
            for saved, is_bare in zip(self.saved, self._bare(kept), strict=True)
        ]

    def _bare(self, kept: frozenset[int] | None) -> list[bool]:
        """Return for each saved tensor, in order, whether it is kept and no recipe reads it.

        A plan that keeps more than the recorded step has fewer recipes, so fewer kept tensors are anchors.
        """
        if kept is None:
            return [saved.is_bare for saved in self.saved]
        staying, (read, seen) = self._staying(kept), self._read(kept)
        stays = [s.item < 0 or s.item in staying for s in self.saved]  # a plan may rebuild what the recorded step kept
        last = self._last_rebuilt(kept) if LAST_SHAPES in kept else len(self.saved)
        return [
            (is_kept and (s.is_bare or (s.item in staying and not self._is_read(s, read, seen))))
            or (s.item == SHAPE and n > last)
            for n, (s, is_kept) in enumerate(zip(self.saved, stays, strict=True))
        ]

    def _read(self, kept: frozenset[int]) -> tuple[set[int], set[int]]:
        """Return the items that recipes read if the items ``kept`` are kept, and those that are rebuilt."""
        staying = self._staying(kept)
        stack = [item for item, _ in self.decided if item not in staying]
        stack += [saved.item for saved in self.saved if saved.item >= 0 and saved.item not in staying]
        read, seen = set[int]().union(*(saved.reads for saved in self.saved)), set[int]()
        stack += [n for n in read if n not in staying]
        while stack:
            n = stack.pop()
            if n not in seen:
                seen.add(n)
                read.update(self.items[n].inputs)
                stack.extend(i for i in self.items[n].inputs if i not in staying and not self.items[i].is_fixed)
        return read, seen

    def caught_under(self, kept: frozenset[int] | None) -> frozenset[int]:
        """Return the numbers of the calls whose product recipes read if the items ``kept`` are kept.

        A plan that keeps what would be rebuilt from a product need not hold the product.
        """
        if kept is None or not self.caught:
            return frozenset(self.caught)
        read, _ = self._read(kept)
        return frozenset(call for call, items in self.caught.items() if not items or not items.isdisjoint(read))

    def _last_rebuilt(self, kept: frozenset[int]) -> int:
        """Return the number of the last saved tensor that is rebuilt; -1 if none is."""
        staying = self._staying(kept) | {SHAPE}
        return max((n for n, saved in enumerate(self.saved) if saved.item not in staying), default=-1)

    def shape_bytes(self, kept: frozenset[int]) -> int:
        """Return the bytes of the shape-only tensors that the plan ``kept`` keeps whole: see ``LAST_SHAPES``."""
        if LAST_SHAPES not in kept:
            return 0
        return sum(saved.shape_bytes for saved in self.saved[self._last_rebuilt(kept) + 1 :])

    @staticmethod
    def _is_read(saved: SavedTensor, read: set[int], replayed: set[int]) -> bool:
        """Whether a recipe reads the kept tensor ``saved``.

        read: the items that recipes read.
        replayed: the items that are rebuilt.
        """
        if saved.item >= 0:
            return saved.item in read
        return saved.read_by is None or not saved.read_by.isdisjoint(replayed)

    @property
    def unkept_bytes(self) -> int:
        """Bytes that plain PyTorch uses and no plan does.

        These are the bytes of random numbers, which are drawn again, of shape-only tensors, and ``plain_bytes``.
        """
        drawn = (s.made_by[1] for s in self.saved if s.item == REBUILT and s.made_by is not None)
        return (
            self.plain_bytes + sum(drawn) + sum(entry.nbytes for entry in self.entries if entry.outcome == SHAPE_ONLY)
        )

    def kept_items(self) -> frozenset[int]:
        """Return the items that the recorded step kept."""
        fixed = {n for n, item in enumerate(self.items) if item.is_fixed}
        kept = [*self.decided, *self.sources.values()]
        return frozenset(fixed.union(n for n, was_kept in kept if was_kept))

    def _staying(self, kept: frozenset[int] | None) -> set[int]:
        """Return the items that are kept, not rebuilt, together with KEPT."""
        may_stay = (*self.decided, *self.sources.values())
        staying = {KEPT} | {n for n, was_kept in may_stay if self._stays(n, was_kept, kept)}
        if kept is not None:  # a plan may also keep items about which no decision was made
            staying.update(saved.item for saved in self.saved if saved.item in kept)
        return staying

    def _stays(self, item: int, was_kept: bool, kept: frozenset[int] | None) -> bool:
        """Whether ``item`` is kept under the plan ``kept``; ``was_kept``: whether the recorded step kept it."""
        return was_kept if kept is None else self.items[item].is_fixed or item in kept

    def trace(self, kept: frozenset[int] | None, *, is_tuned: bool = False) -> Trace | None:
        """Return the trace of the step's calls; None if a tensor that may need a hook was saved outside of all calls.

        Such a tensor is any that is not bare, i.e. that is rebuilt or that recipes read.

        is_tuned: leave out the calls after the last one that involves a recipe.
        """
        staying, bare, caught = self._staying(kept), self._bare(kept), self.caught_under(kept)
        needs = None if self.needs is None else self.needs.with_calls(caught)
        saves: dict[Any, bool] = {}
        for call in self.calls:
            saves[call.function] = bool(call.names) or call.begins_checkpoint or saves.get(call.function, False)
        calls, numbers, seen = [], [], 0
        for number, call in enumerate(self.calls):
            if saves[call.function]:
                places = [(place, name) for place, name in enumerate(call.names, call.first) if not bare[place]]
                seen += len(places)
                last = max((p for p, name in places if self.saved[p].item not in staying or name is None), default=-1)
                anchors = tuple((p, n) for p, n in places if p > last and n is not None and self.saved[p].has_node)
                catches, quiet = call.nbytes if number in caught else 0, call.graded is False
                grows, begins = self._may_grow(call), call.begins_checkpoint
                calls.append(Call(call.function, call.first, last, anchors, catches, grows, quiet, begins))
                numbers.append(number)
        handled = {call.function for call in self.calls if call.handled}
        graded = {call.function for call in self.calls if call.graded}
        unseen = frozenset(call.function for call in self.calls if call.graded is False) - graded
        passes = frozenset(f for f, found in saves.items() if not found and f not in handled and f not in unseen)
        if seen != bare.count(False):
            return None
        if not is_tuned:
            handover = None if needs is None else needs.longest(len(self.calls), bare)
            return Trace(calls, saves, unseen, passes, handover=handover, again=_index_of(handover, numbers))
        uses = [
            n
            for n, call in enumerate(calls)
            if call.last >= 0 or call.anchors or call.catches or call.begins_checkpoint
        ]
        last_use = max(uses, default=-1)
        border = None if self.ends is None else self.ends.border(numbers[last_use] if uses else -1)
        end = len(self.calls) if border is None or self.ends is None else self.ends.calls_at(border)
        handover = None if needs is None else needs.longest(end, bare)
        again = _index_of(handover, numbers)
        return Trace(calls[: last_use + 1], saves, unseen, passes, False, border, handover, again)

    @cached_property
    def small(self) -> frozenset[int]:
        """The numbers of the saved tensors that were kept without a decision because they are small."""
        return frozenset(n for n, saved in enumerate(self.saved) if saved.small_bytes >= 0)

    def calls_until(self, kept: frozenset[int]) -> int:
        """Return how many calls of the trace lead up to the last one that involves a recipe.

        If the step has no trace, return the number of all of its calls.
        """
        trace = self.trace(kept, is_tuned=True)
        return len(self.calls) if trace is None else len(trace.calls)

    def _may_grow(self, call: RecordedCall) -> int:
        """Return how many elements the output of ``call`` may have while all tensors that were small stay small.

        Small tensors are kept without a decision; from ``min_bytes`` on they would need one. The tensors that the call
        saves are assumed to grow in proportion to its output. The output counts too if it is small and its function has
        a handler, because the handler has recorded nothing about a small output.
        """
        saved = self.saved[call.first : call.first + len(call.names)]
        nbytes = max((s.small_bytes for s in saved), default=-1)
        if call.handled and call.graded and call.nbytes < self.min_bytes:
            nbytes = max(nbytes, call.nbytes)
        if nbytes <= 0:
            return call.size if nbytes == 0 else ANY_SIZE
        return max(call.size, (call.size * self.min_bytes - 1) // nbytes)


def _index_of(handover: Handover | None, numbers: Sequence[int]) -> int:
    """Return the index of the first call of a trace after the function mode is set again.

    numbers: the numbers of the trace's calls.
    """
    return 0 if handover is None else bisect_left(numbers, handover.calls[1])
