"""A recorded step as plain data, and what later steps do if they keep what the plan says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from leangrad.ledger.decision import Decision, SavedKind
from leangrad.ledger.learn.early_end import Ends
from leangrad.ledger.learn.entries import EXTRA, HAS_ROOM, LOWER_PEAK, SHAPE_ONLY, SPARED, TOO_MUCH_WORK, Entry
from leangrad.ledger.learn.trace import ANY_SIZE, Call, RecordedCall, Trace
from leangrad.policy import graph as policy

NARROW = "sum in fewer bits"  # what the summary calls one: see [Note: kept in fewer bits]
KEPT, REBUILT, SHAPE = -1, -2, -3  # what became of a saved tensor that is no item
# In a plan, beside the items that it keeps: after the last tensor that is rebuilt, those are kept too of which a shape
# would serve. Then nothing is left to decide from there on, and the override ends: [Note: the override ends early].
LAST_SHAPES = -4


class SavedTensor(NamedTuple):
    """What became of one tensor that autograd saved."""

    item: int  # the item that it is, or a view of; else KEPT, REBUILT or SHAPE
    made_by: tuple[str, int] | None  # its op and bytes; None: no value stands for it
    is_bare: bool  # kept, and no recipe reads it
    has_node: bool
    small_bytes: int  # its bytes, if it was kept unseen for having so few; else -1
    read_by: frozenset[int] | None = None  # if it is no item: those whose recipes read it; None: others may
    shape_bytes: int = 0  # its bytes, if a shape serves in its stead


@dataclass
class RecordedStep:
    """The tensors of one step, what became of each, and the calls that saved them."""

    items: Sequence[policy.Value]  # the tensors that were decided on or that recipes start from
    decided: Sequence[tuple[int, bool]]  # of every decision, in order: its item, and whether that was kept
    saved: Sequence[SavedTensor]  # every saved tensor, in order
    entries: list[Entry]
    first_decision: int  # the entry of the first decision; the others follow it
    calls: Sequence[RecordedCall]
    caught: Collection[int]  # the calls of which a tensor was kept although autograd did not ask for it
    min_bytes: int
    # Of items that were cast from others in fewer bits: which, and whether those were kept in their stead.
    sources: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    why_kept: str = LOWER_PEAK  # what the plan keeps beside the least
    undecided: Mapping[int, int] = field(default_factory=dict)  # of entries that no decision made: their items
    spared: frozenset[int] = frozenset()  # the items that are kept to spare the host
    ends: Ends | None = None  # where the override may end before the step does; None: nowhere
    read_at: Mapping[int, int] = field(default_factory=dict)  # of saved tensors: the place of their reader in backward

    def entries_under(self, kept: frozenset[int] | None) -> list[Entry]:
        """The entries as later steps make them, in which the items ``kept`` are kept."""
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
        return [entry for entry in entries if not entry.is_extra]  # no recipe starts from these any more

    def _why_kept(self, item: int) -> str:
        return SPARED if item in self.spared else self.why_kept

    def decisions(self, kept: frozenset[int] | None, held: frozenset[int]) -> list[Decision | None]:
        """For every saved tensor in order: its op, whether it is simply kept, and its bytes; None: it has no value.

        kept: the items to keep. Without them, what was kept is kept again and what was rebuilt is rebuilt again.
        held: of what may be let go and made again, what is held until its readers come.
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
        """For every saved tensor in order: what becomes of it if the items ``kept`` are kept."""
        return [
            SavedKind.BARE if is_bare else SavedKind.SHAPE_ONLY if saved.item == SHAPE else SavedKind.DECIDED
            for saved, is_bare in zip(self.saved, self._bare(kept), strict=True)
        ]

    def _bare(self, kept: frozenset[int] | None) -> list[bool]:
        """For every saved tensor in order: whether it is kept, and no recipe reads it.

        A plan that keeps more than the recorded step did has fewer recipes, and their anchors need no value.
        """
        if kept is None:
            return [saved.is_bare for saved in self.saved]
        staying = self._staying(kept)
        stack = [item for item, _ in self.decided if item not in staying]
        stack += [saved.item for saved in self.saved if saved.item >= 0 and saved.item not in staying]
        read, seen = set[int](), set[int]()
        while stack:
            n = stack.pop()
            if n not in seen:
                seen.add(n)
                read.update(self.items[n].inputs)
                stack.extend(i for i in self.items[n].inputs if i not in staying and not self.items[i].is_fixed)
        stays = [s.item < 0 or s.item in staying for s in self.saved]  # a plan may rebuild what the recorded step kept
        last = self._last_rebuilt(kept) if LAST_SHAPES in kept else len(self.saved)
        return [
            (is_kept and (s.is_bare or (s.item in staying and not self._is_read(s, read, seen))))
            or (s.item == SHAPE and n > last)
            for n, (s, is_kept) in enumerate(zip(self.saved, stays, strict=True))
        ]

    def _last_rebuilt(self, kept: frozenset[int]) -> int:
        """The number of the last saved tensor that is rebuilt; -1: none is."""
        staying = self._staying(kept) | {SHAPE}
        return max((n for n, saved in enumerate(self.saved) if saved.item not in staying), default=-1)

    def shape_bytes(self, kept: frozenset[int]) -> int:
        """Of the tensors of which a shape serves, those that are ``kept`` all the same."""
        if LAST_SHAPES not in kept:
            return 0
        return sum(saved.shape_bytes for saved in self.saved[self._last_rebuilt(kept) + 1 :])

    @staticmethod
    def _is_read(saved: SavedTensor, read: set[int], replayed: set[int]) -> bool:
        """Whether a recipe reads what is kept: one of ``replayed``, which read the items ``read``."""
        if saved.item >= 0:
            return saved.item in read
        return saved.read_by is None or not saved.read_by.isdisjoint(replayed)

    @property
    def unkept_bytes(self) -> int:
        """What plain keeps and no plan does: numbers that are drawn again, and tensors of which a shape serves."""
        drawn = (s.made_by[1] for s in self.saved if s.item == REBUILT and s.made_by is not None)
        return sum(drawn) + sum(entry.nbytes for entry in self.entries if entry.outcome == SHAPE_ONLY)

    def kept_items(self) -> frozenset[int]:
        """What the recorded step has kept."""
        fixed = {n for n, item in enumerate(self.items) if item.is_fixed}
        kept = [*self.decided, *self.sources.values()]
        return frozenset(fixed.union(n for n, was_kept in kept if was_kept))

    def _staying(self, kept: frozenset[int] | None) -> set[int]:
        """The items that are simply kept, and KEPT."""
        may_stay = (*self.decided, *self.sources.values())
        staying = {KEPT} | {n for n, was_kept in may_stay if self._stays(n, was_kept, kept)}
        if kept is not None:  # what no decision was made for may be kept too
            staying.update(saved.item for saved in self.saved if saved.item in kept)
        return staying

    def _stays(self, item: int, was_kept: bool, kept: frozenset[int] | None) -> bool:
        """Whether an item that was kept or rebuilt in the recorded step is simply kept."""
        return was_kept if kept is None else self.items[item].is_fixed or item in kept

    def trace(self, kept: frozenset[int] | None, *, is_tuned: bool = False) -> Trace | None:
        """The calls of the step; None if a tensor that is not simply kept was saved outside of all calls.

        is_tuned: calls after the last that has to do with a recipe are left out.
        """
        staying, bare = self._staying(kept), self._bare(kept)
        saves: dict[Any, bool] = {}
        for call in self.calls:
            saves[call.function] = bool(call.names) or call.begins or saves.get(call.function, False)
        calls, numbers, seen = [], [], 0
        for number, call in enumerate(self.calls):
            if saves[call.function]:
                places = [(place, name) for place, name in enumerate(call.names, call.first) if not bare[place]]
                seen += len(places)
                last = max((p for p, name in places if self.saved[p].item not in staying or name is None), default=-1)
                anchors = tuple((p, n) for p, n in places if p > last and n is not None and self.saved[p].has_node)
                catches, quiet = call.nbytes if number in self.caught else 0, call.graded is False
                grows, begins = self._may_grow(call), call.begins
                calls.append(Call(call.function, call.first, last, anchors, catches, grows, quiet, begins))
                numbers.append(number)
        handled = {call.function for call in self.calls if call.handled}
        graded = {call.function for call in self.calls if call.graded}
        unseen = frozenset(call.function for call in self.calls if call.graded is False) - graded
        passes = frozenset(f for f, found in saves.items() if not found and f not in handled and f not in unseen)
        if seen != bare.count(False):
            return None
        if not is_tuned:
            return Trace(calls, saves, unseen, passes)
        uses = [n for n, call in enumerate(calls) if call.last >= 0 or call.anchors or call.catches or call.begins]
        last_use = max(uses, default=-1)
        border = None if self.ends is None else self.ends.border(numbers[last_use] if uses else -1)
        return Trace(calls[: last_use + 1], saves, unseen, passes, is_whole=False, border=border)

    def calls_until(self, kept: frozenset[int]) -> int:
        """How many calls a step makes until the last that has to do with a recipe."""
        trace = self.trace(kept, is_tuned=True)
        return len(self.calls) if trace is None else len(trace.calls)

    def _may_grow(self, call: RecordedCall) -> int:
        """How many elements the output of ``call`` may have before something of it is large enough to be looked into.

        What it saves is taken to grow as its output does. Of a small output itself nothing was noted either.
        """
        saved = self.saved[call.first : call.first + len(call.names)]
        nbytes = max((s.small_bytes for s in saved), default=-1)
        if call.handled and call.graded and call.nbytes < self.min_bytes:
            nbytes = max(nbytes, call.nbytes)
        if nbytes <= 0:
            return call.size if nbytes == 0 else ANY_SIZE
        return max(call.size, (call.size * self.min_bytes - 1) // nbytes)
