"""Where the function override of a step is taken away before forward has ended.

[Note: the override ends early]
A plan for a budget or a bound on the time keeps much, and most of what a convolutional net has to rebuild lies in its
first stages. After the last call that has to do with a recipe nothing is left to decide; only changes in place have to
be seen, of memory that recipes read. An override that only watches for these costs a model that is bound by the host 5
to 10%. So it is taken away, when the first module after that call has run.

Not while a change may follow that has to be seen: in the recorded step, one of memory that was made before, or of
memory that nobody knows. A later step may do otherwise. A change that moves a version is then found out when backward
reads what was changed, as one after the region is: `ChangedError`. One that moves none, a write through ``.data``,
would not be; a model whose code may make such is watched to the end (``observe/unseen_writes.py``).

The region itself stays open: no other begins inside it, and our own Functions tell it of their changes as ever. If
others' function modes lie over the override at the border it stays. An override cannot take itself away inside of a
call, because torch puts it back when the call has ended: hence a module's forward hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.compiler import is_dynamo_compiling

from leangrad.ledger.observe.active_region import open_region

WORTH = 16  # calls that must be left: to set a hook and take the override away costs as much as it does for a few


class Exit(NamedTuple):
    """A module has run."""

    module: str
    calls: int  # that the step had made by then


class Change(NamedTuple):
    """A change in place of memory that recipes may read."""

    calls: int  # that the step had made before it
    number: int  # of the node that had made the tensor; -1: not known


class Border(NamedTuple):
    """After which module the override ends."""

    module: str
    turn: int  # how often it has run before, in this step


class Ends(NamedTuple):
    """What a recorded step tells of where its override may end."""

    exits: Sequence[Exit]
    changes: Sequence[Change]
    numbers: Sequence[int]  # of each call: that of the first node since it began

    def border(self, last: int) -> Border | None:
        """The first border after call ``last`` with no change after it that has to be seen; None: there is none."""
        first = last + 1  # call that need not be seen
        for change in self.changes:  # in the order in which they came
            if change.calls >= first and self._is_of_before(change, first):
                first = change.calls + 1
        for at, found in enumerate(self.exits):
            if found.calls >= first:
                is_worth_it = len(self.numbers) - found.calls >= WORTH
                turn = sum(earlier.module == found.module for earlier in self.exits[:at])
                return Border(found.module, turn) if is_worth_it else None
        return None

    def _is_of_before(self, change: Change, first: int) -> bool:
        """Whether it changes what was made before call ``first`` began."""
        return change.number < 0 or first >= len(self.numbers) or change.number < self.numbers[first]


class EndingRegion(Protocol):
    """What an early end asks of its region."""

    def end_early(self) -> None:
        """Take the override away, if nothing is rebuilt from here on."""


class EarlyEnd:
    """The forward hook of the module at the border, while the region is open."""

    is_leangrads = True

    def __init__(self, region: EndingRegion, border: Border, root: nn.Module) -> None:
        self._region, self._border, self._root = region, border, root
        self._handle: Any = None
        self._ran = 0  # how often the module has

    def wait(self) -> None:
        """The region begins."""
        try:
            module = self._root.get_submodule(self._border.module)
        except AttributeError:  # the model was changed: the override stays to the end
            return
        self._handle = module.register_forward_hook(self)

    def remove(self) -> None:
        """The region ends."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module has run, in this region or in that of another thread."""
        if is_dynamo_compiling() or open_region() is not self._region:
            return
        self._ran += 1
        if self._ran > self._border.turn:
            self._region.end_early()
