"""Where to cut a residual chain so that the peak, not only the kept bytes, is lowest.

``out_k = relu(bn(c_k) + out_{k-1})`` can be rebuilt from ``c_1 … c_k`` alone, but rebuilding the last link rebuilds
every earlier one, and each is held until its own reader comes. Backward frees memory as it goes, so a chain may be the
longer the earlier it lies in the network. The first step shows which tensors there are, what they are rebuilt from and
in which order backward reads them; here that record is played through under many cuts, and the cut with the lowest peak
is taken.

[Note: made again] What is rebuilt on the way to a later link is held until its own reader comes, or each link would be
rebuilt from the first. A link that is one cheap pass over the link before it, in the same memory (a batch norm with its
addition and activation as one layer), may be let go instead and made again: then a chain of any length takes one map.
It is held where that does not raise the peak (``holds``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_DEPTH = 12  # the deepest constant cut that is tried
SLACKS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # in units of the largest tensor
FIRST_READS = 3  # of backward: those of the loss
NEAR = 1.002  # peaks within this factor of the lowest count as equal
AGAIN = 2  # times the bytes of rebuilding each link once: so much may be rebuilt, where links are made again
MAX_REFINED = 1 << 18  # links times reads, which takes about a second; beyond that the best candidate is taken as it is
LEAN = 1.02  # among those, kept bytes within this factor of the fewest count as equal: then the least rebuilding wins


@dataclass(frozen=True)
class Item:
    """One tensor of the step."""

    nbytes: int
    sources: tuple[int, ...] = ()  # what it is rebuilt from
    choice: bool = False  # it may be kept or rebuilt; otherwise it is rebuilt if it has sources, else kept
    pinned: bool = False  # others keep it for a backward of their own, whatever becomes of it here
    again: bool = False  # it may be let go and made again: see [Note: made again]


@dataclass(frozen=True)
class Record:
    """What one step showed: its tensors, and the order in which backward read them."""

    items: tuple[Item, ...]
    reads: tuple[int, ...]
    gradients: tuple[int, ...] = ()  # of each read: the bytes of all gradients alive by then, and of its op's scratch


@dataclass
class Outcome:
    """How a record plays out under one cut."""

    peak_bytes: int
    kept_bytes: int
    rebuilt_bytes: int


def best_cut(record: Record) -> frozenset[int]:
    """The choices to keep for the lowest peak of backward; then the fewest kept bytes; then the least rebuilding."""
    tried: dict[frozenset[int], Outcome] = {}
    for cut in _candidates(record):
        if cut not in tried and (outcome := _outcome(record, cut)) is not None:
            tried[cut] = outcome
    lowest = min(o.peak_bytes for o in tried.values())
    near = [(o, cut) for cut, o in tried.items() if o.peak_bytes <= lowest * NEAR]
    fewest = min(o.kept_bytes for o, _ in near)
    lean = [(o.rebuilt_bytes, cut) for o, cut in near if o.kept_bytes <= fewest * LEAN]
    return _lowered(record, _refined(record, min(lean, key=lambda pair: pair[0])[1]))


def _outcome(record: Record, cut: frozenset[int]) -> Outcome | None:
    """How ``cut`` plays out; None if too much would be made again."""
    outcome = play(record, cut)
    repeatable = frozenset(n for n, item in enumerate(record.items) if item.again)
    if repeatable:
        limit = AGAIN * play(record, cut, repeatable).rebuilt_bytes
        if outcome.rebuilt_bytes > limit:
            outcome = play(record, cut, holds(record, cut))
            return outcome if outcome.rebuilt_bytes <= limit else None
    return outcome


def _refined(record: Record, cut: frozenset[int]) -> frozenset[int]:
    """Keep or rebuild one link more where that lowers the peak, then rebuild what is kept to no purpose."""
    choices = [n for n, item in enumerate(record.items) if item.choice]
    if len(choices) * len(record.reads) > MAX_REFINED:
        return cut
    best = play(record, cut)
    for n in choices:
        outcome = _outcome(record, cut ^ {n})
        if outcome is not None and outcome.peak_bytes * NEAR < best.peak_bytes:
            cut, best = cut ^ {n}, outcome
    for n in sorted(cut):
        outcome = _outcome(record, cut - {n})
        if outcome is not None and outcome.peak_bytes <= best.peak_bytes and outcome.kept_bytes < best.kept_bytes:
            cut, best = cut - {n}, outcome
    return cut


def _lowered(record: Record, cut: frozenset[int]) -> frozenset[int]:
    """Keep what backward reads at once in the stead of its source, if rebuilding it only adds to the peak.

    The log-probabilities under a loss are read while all is still alive: rebuilt, they take their own bytes and those
    of the logits, which nobody else needs.
    """
    best = play(record, cut)
    for n in list(dict.fromkeys(r for r in record.reads if record.items[r].nbytes))[:FIRST_READS]:
        outcome = play(record, cut | {n})
        frees_source = outcome.kept_bytes < best.kept_bytes + record.items[n].nbytes
        if frees_source and outcome.peak_bytes * NEAR < best.peak_bytes:
            cut, best = cut | {n}, outcome
    return cut


def _candidates(record: Record) -> Iterable[frozenset[int]]:
    for depth in range(MAX_DEPTH + 1):
        yield constant_cut(record, depth)
    yield frozenset()
    unit = max((i.nbytes for i in record.items if i.choice), default=0)
    for slack in SLACKS:
        yield growing_cut(record, slack * unit)


def constant_cut(record: Record, depth: int) -> frozenset[int]:
    """Keep every link that would be more than ``depth`` joins away from its anchors."""
    keep: set[int] = set()
    depths: list[int] = []
    for n, item in enumerate(record.items):
        below = max((depths[s] for s in item.sources), default=0)
        if item.choice and below + 1 > depth:
            keep.add(n)
            depths.append(0)
        else:
            depths.append(below + item.choice)
    return frozenset(keep)


def growing_cut(record: Record, slack: int) -> frozenset[int]:
    """Let each chain grow until what it rebuilds at once exceeds ``slack`` and what backward has freed by then."""
    items = record.items
    left = _counts(record)
    keep: set[int] = set()
    held: set[int] = set()
    freed = 0
    for read in record.reads:
        budget = freed + slack - sum(items[h].nbytes for h in held)
        stack = [read]
        while stack:
            n = stack.pop()
            item = items[n]
            if not item.sources or n in keep or n in held:
                continue
            if item.choice and item.nbytes > budget:
                keep.add(n)
                continue
            held.add(n)
            budget -= item.nbytes
            stack.extend(item.sources)
        left[read] -= 1
        for h in [h for h in held if left[h] <= 0]:
            held.discard(h)
        if left[read] <= 0 and (not items[read].sources or read in keep):
            freed += items[read].nbytes
    return frozenset(keep)


def holds(record: Record, cut: frozenset[int]) -> frozenset[int]:
    """What may be made again and is held all the same, since that saves the work and does not raise the peak."""
    held: frozenset[int] = frozenset()
    limit = play(record, cut).peak_bytes * NEAR
    for n in range(len(record.items) - 1, -1, -1):
        item = record.items[n]
        if item.again and item.sources and n not in cut and play(record, cut, held | {n}).peak_bytes <= limit:
            held |= {n}
    return held


def play(record: Record, cut: frozenset[int], held: frozenset[int] = frozenset()) -> Outcome:
    """Play backward through under ``cut``; of what may be made again, only what is ``held`` waits for its readers."""
    items, reads = record.items, record.reads
    run = _Run(record, cut, held)
    for tick, read in enumerate(reads):
        run.need(read, tick)
    last_use = _last_uses(record, cut)
    change = [0] * (len(reads) + 1)
    for n, last in last_use.items():
        change[last + 1] -= items[n].nbytes
    kept = sum(items[n].nbytes for n in last_use)
    for n, first, last in run.spans:
        change[first] += items[n].nbytes
        change[last + 1] -= items[n].nbytes
    live = peak = kept
    # An op of which nothing else is known holds the gradient it was given and the one it writes.
    gradients = record.gradients or tuple(2 * items[read].nbytes for read in reads)
    for tick, nbytes in enumerate(gradients):
        live += change[tick]
        peak = max(peak, live + nbytes)
    return Outcome(peak, kept, run.rebuilt_bytes)


def _is_kept(record: Record, cut: frozenset[int], n: int) -> bool:
    return not record.items[n].sources or n in cut


def _last_uses(record: Record, cut: frozenset[int]) -> dict[int, int]:
    """Of each kept item: the last read of itself, or of what is rebuilt from it.

    Also of what was rebuilt before and held since: it has its recipe for as long, and the recipe holds what it reads.
    """
    last = {read: tick for tick, read in enumerate(record.reads)}
    for n in range(len(record.items) - 1, -1, -1):  # sources come before what is rebuilt from them
        if n in last and not _is_kept(record, cut, n):
            for source in record.items[n].sources:
                last[source] = max(last.get(source, 0), last[n])
    last |= {n: len(record.reads) - 1 for n, item in enumerate(record.items) if item.pinned}
    return {n: tick for n, tick in last.items() if _is_kept(record, cut, n) or record.items[n].pinned}


def _counts(record: Record) -> list[int]:
    counts = [0] * len(record.items)
    for r in record.reads:
        counts[r] += 1
    return counts


@dataclass
class _Run:
    record: Record
    cut: frozenset[int]
    held: frozenset[int]
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # (item, built, let go) of what is rebuilt
    rebuilt_bytes: int = 0

    def __post_init__(self) -> None:
        self.left = _counts(self.record)
        self.built: dict[int, int] = {}

    def need(self, read: int, tick: int) -> None:
        """Build what ``read`` stands on, and let go of what has no reader left."""
        stack, seen = [read], set()
        while stack:
            n = stack.pop()
            if n in seen or n in self.built or _is_kept(self.record, self.cut, n):
                continue
            seen.add(n)
            item = self.record.items[n]
            if n == read or n in self.held or not item.again:
                self.built[n] = tick
            self.rebuilt_bytes += item.nbytes
            stack.extend(item.sources)
        self.left[read] -= 1
        for n in [n for n in self.built if self.left[n] <= 0]:
            self.spans.append((n, self.built.pop(n), tick))
