"""Which part of a step may run without the function mode, although tensors are rebuilt in it.

[Note: without the function mode]
Each call of torch under a function mode costs the host 5 to 10 microseconds, and its handler as much again. For a
convolutional net that waits for the host this is half of what a lean step takes longer. Yet most of its calls need no
handler: what they did is in autograd's graph, and the saved-tensor hooks alone see what is saved. So the recorder notes
the calls of the recorded step for which the mode was needed:

- a recipe read a constant that no node stores and no proof knows ([Note: one constant] in ``observe/proof``), or the
  rule of an autograd Function
- a stand-in replaced a tensor of which backward reads only the shape
- random numbers were drawn, or a checkpoint began
- a product was held from which the plan rebuilds something (`RecordedStep.caught_under`)
- an anchor was copied because its memory was about to change
- memory changed that autograd did not record, or memory was changed whose value a recipe might read
- a handler ran that does not say whether it was needed

In the longest stretch between two of these calls later steps have no function mode. When a first module has returned,
the mode is removed (`Region.hand_over`), and when a last one has returned, it takes over again (`Region.take_over`). In
between the hooks are set only in *spans*: from the module that returned before a tensor is saved that is rebuilt, or
that recipes read, up to that tensor. A plan that keeps most tensors has few spans, and costs little in all the rest.

Every recipe still comes from the graph of its own step, so it is right as long as no tensor of the graph is changed
unrecorded. There has to be a proof of that: ``observe/proof``. An anchor that changes later moves its version counter:
backward raises `ChangedError`, and from then on the mode of this model stays, as after [Note: the function mode ends
early].

Nothing but the decisions says here what a saved tensor is. If one has another op than in the recorded step, if a recipe
lacks a constant, if a tensor is no longer small, or if a span ends without its last tensor, the rest of the step is
kept, and the plan is dropped. If that happens twice, the mode of this model stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from leangrad.ledger.learn.early_end import Border, Exit

__all__ = ["WORTH", "Handover", "Needs", "Span"]

# What a stretch has to save at least, and what it takes, as numbers of calls under the mode that cost the host as much:
# a span, whose hook is a forward hook for one step, and a module, which the facts of the proof are compared with.
WORTH, PER_SPAN, PER_MODULE = 32, 6, 0.1
GAP = 8  # saved tensors that are kept anyway: a new span costs as much as the hooks of so many


class Span(NamedTuple):
    """Saved tensors for which the hooks are set, in a stretch without the function mode."""

    border: Border | None  # the module after which they are set; None: where the stretch begins
    first: int  # number of the first tensor that is saved after that
    last: int  # number of the tensor with which they are popped


class Handover(NamedTuple):
    """The stretch of a step that runs without the function mode."""

    border: Border | None  # the module after which the mode is removed; None: it is not set before
    back: Border | None  # the module after which the mode is set again; None: it is not
    calls: tuple[int, int]  # calls that the recorded step had made by these two moments
    saved: tuple[int, int]  # tensors that it had saved by then
    spans: tuple[Span, ...] = ()


class Needs(NamedTuple):
    """The calls of a recorded step that needed the function mode, and the places where it can be removed and set."""

    calls: Sequence[int]  # their numbers
    exits: Sequence[Exit]  # the modules that returned, in order
    firsts: Sequence[int]  # for each call of the step, how many tensors had been saved before it
    saved: int  # how many tensors the step has saved

    def with_calls(self, calls: Iterable[int]) -> Needs:
        """Return these needs, and those of ``calls``: their products have to be held."""
        return Needs([*self.calls, *calls], self.exits, self.firsts, self.saved)

    def longest(self, end: int, bare: Sequence[bool]) -> Handover | None:
        """Return the longest stretch up to call ``end`` that needs no mode; None if none is worth it.

        bare: for each saved tensor, whether it is kept and no recipe reads it.
        """
        needs = sorted({-1, end, *(n for n in self.calls if n < end)})
        found = [one for before, after in pairwise(needs) if (one := self._between(before, after, end)) is not None]
        best = max(found, key=lambda one: one.calls[1] - one.calls[0], default=None)
        if best is None:
            return None
        spans = tuple(self._spans(best, bare))
        saved = best.calls[1] - best.calls[0] - PER_SPAN * len(spans) - PER_MODULE * len(self.exits)
        return Handover(best.border, best.back, best.calls, best.saved, spans) if saved >= WORTH else None

    def _between(self, before: int, after: int, end: int) -> Handover | None:
        """Return the stretch after call ``before`` and before call ``after``; None if no module returns there."""
        inside = [n for n, found in enumerate(self.exits) if before < found.calls <= after]
        if (before >= 0 or after < end) and not inside:
            return None
        first, last = (None if before < 0 else inside[0]), (None if after == end else inside[-1])
        calls = 0 if first is None else self.exits[first].calls, end if last is None else self.exits[last].calls
        return Handover(
            None if first is None else self._border(first),
            None if last is None else self._border(last),
            calls,
            (self._saved_by(calls[0]), self._saved_by(calls[1])),
        )

    def _spans(self, stretch: Handover, bare: Sequence[bool]) -> Iterator[Span]:
        """Yield the spans of a stretch, in order."""
        first, end = stretch.saved
        wanted = [n for n in range(first, end) if not bare[n]]
        at = [n for n, found in enumerate(self.exits) if stretch.calls[0] < found.calls <= stretch.calls[1]]
        saved = [self._saved_by(self.exits[n].calls) for n in at]
        begun: Span | None = None
        nearest = 0  # index in ``at``, after the last module that returned before the tensor was saved
        for n in wanted:
            while nearest < len(at) and saved[nearest] <= n:
                nearest += 1
            if begun is not None and (n - begun.last <= GAP or nearest == 0 or saved[nearest - 1] <= begun.last):
                begun = Span(begun.border, begun.first, n)
                continue
            if begun is not None:
                yield begun
            if nearest == 0 or (begun is None and n - first <= GAP):
                begun = Span(None, first, n)
            else:
                begun = Span(self._border(at[nearest - 1]), saved[nearest - 1], n)
        if begun is not None:
            yield begun

    def _saved_by(self, call: int) -> int:
        """Return how many tensors had been saved before ``call``."""
        return self.firsts[call] if call < len(self.firsts) else self.saved

    def _border(self, at: int) -> Border:
        module = self.exits[at].module
        return Border(module, sum(earlier.module == module for earlier in self.exits[:at]))
