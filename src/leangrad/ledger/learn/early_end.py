"""Removes the function mode of a step before its forward has ended, where nothing after that needs it.

[Note: the function mode ends early]
A plan for a memory budget or a slowdown bound keeps most tensors, and most of what a convolutional net has to rebuild
lies in its first stages. After the last call that involves a recipe nothing is left to decide; the function mode is
then needed only to detect in-place changes of memory that recipes read. This alone costs a host-bound model 5 to 10%.
So a forward hook removes the function mode as soon as the first module after that call has returned.

The mode stays as long as an in-place change may follow that it has to detect: in the recorded step, a change of memory
that was made before that point, or of memory whose origin is not known. A later step may make a change that the
recorded one did not make. If the change increments the version counter, backward detects it when it reads the tensor,
as it detects changes made after the region, and raises `ChangedError`; from the next step on, the mode of this model
stays to the end of forward. A write that does not increment the version counter, such as one through ``.data``, would
go undetected. So the mode also stays if the model's code may contain such a write (``observe/unseen_writes.py``), if a
parameter or buffer shares its memory with another tensor, which has a version counter of its own, or if the modules,
hooks, training modes or callables of a step differ from those of the recorded step.

The region stays open: no other region begins inside it, and leangrad's own autograd Functions still report their
in-place changes to it. If function modes of other code lie above ours at the border, ours stays. A function mode cannot
remove itself inside a call, because torch restores it when the call ends; hence the forward hook of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from torch import nn
from torch.compiler import is_dynamo_compiling

from leangrad import _torch
from leangrad.ledger.observe.active_region import open_region
from leangrad.ledger.observe.proof import Facts, prove, sizes_of
from leangrad.ledger.observe.unseen_writes import may_write_unseen
from leangrad.ledger.values.saved import Changes

HandoverT = TypeVar("HandoverT")

# Minimum number of calls that must be left: setting a hook and removing the function mode costs as much as the mode
# costs in a few calls.
WORTH = 16


class Exit(NamedTuple):
    """A recorded event: a module has returned."""

    module: str  # path of the module
    calls: int  # calls that the step had recorded by then


class Change(NamedTuple):
    """A recorded event: memory that recipes may read was changed in place."""

    calls: int  # calls that the step had recorded before the change
    number: int  # sequence number of the node that made the changed tensor; -1: not known


class Border(NamedTuple):
    """The module after which the function mode of a step is removed."""

    module: str  # path of the module
    turn: int  # which run of the module in this step: how often it has returned before


class Ends(NamedTuple):
    """The events of a recorded step that determine where the function mode of later steps may be removed."""

    exits: Sequence[Exit]  # in order
    changes: Sequence[Change]  # in order
    numbers: Sequence[int]  # for each call, the sequence number of the first node made since the call began

    def border(self, last: int) -> Border | None:
        """Return the first border after call ``last`` after which no in-place change has to be detected.

        None if there is no such border, or if fewer than ``WORTH`` calls follow it.
        """
        first = last + 1  # the first call that may run without the function mode
        for change in self.changes:
            if change.calls >= first and self._is_of_before(change, first):
                first = change.calls + 1
        for at, found in enumerate(self.exits):
            if found.calls >= first:
                is_worth_it = len(self.numbers) - found.calls >= WORTH
                turn = sum(earlier.module == found.module for earlier in self.exits[:at])
                return Border(found.module, turn) if is_worth_it else None
        return None

    def calls_at(self, border: Border) -> int:
        """Return how many calls the step had recorded when it reached ``border``."""
        return [found.calls for found in self.exits if found.module == border.module][border.turn]

    def _is_of_before(self, change: Change, first: int) -> bool:
        """Whether ``change`` is one of memory that was, or may have been, made before call ``first`` began."""
        return change.number < 0 or first >= len(self.numbers) or change.number < self.numbers[first]


class ForwardCode:
    """The code that a model's forward runs: its modules, their forward hooks, and callables stored as attributes."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_modules())
        modules = list(named.values())
        self._modules = [ref(module) for module in modules]
        self._named = dict(zip(named, self._modules, strict=True))
        self._hooks_and_children = _torch.hooks_and_children(modules)
        attributes = [(ref(module), *item) for module in modules for item in vars(module).items()]
        attributes = [found for found in attributes if found[1] not in OF_EVERY_MODULE]
        self._callables = [(at, name, _reference(value)) for at, name, value in attributes if _may_be_code(value)]
        self._sizes = [(at, name, len(value)) for at, name, value in attributes if type(value) in CONTAINERS]

    def has_changed(self) -> bool:
        """Whether the code has changed since this object was made.

        True if a module or forward hook was added, removed or replaced, if a module has another class or training mode,
        or more names or fewer, if a stored callable was added or replaced, or one may have been added to a list or
        dict, if global module hooks are set, or if torch does not give access to the hooks.
        """
        modules = [module for one in self._modules if (module := one()) is not None]
        found = _torch.hooks_and_children(modules)
        return (
            len(modules) != len(self._modules)
            or found is None
            or found != self._hooks_and_children
            or any(_function(vars(module()).get(name)) is not was() for module, name, was in self._callables)
            or any(len(vars(module()).get(name, ())) != size for module, name, size in self._sizes)
            or _torch.has_global_hooks()
        )

    def module(self, path: str) -> nn.Module | None:
        """Return the module with this path; None if it is no more."""
        module: nn.Module | None = self._named[path]()
        return module


CONTAINERS = (list, dict)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes of torch's own: see `_torch.hooks_and_children`


def _may_be_code(value: Any) -> bool:
    """Whether an attribute is a callable, or None, which a callable may replace; a child module is none."""
    return value is None or (callable(value) and not isinstance(value, nn.Module))


def _function(value: Any) -> Any:
    """Return the function of a bound method, or ``value`` itself if it is none."""
    return value.__func__ if isinstance(value, MethodType) else value


def _reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference to the function of ``value``; for None, a function that returns None."""
    try:
        return (lambda: None) if value is None else ref(_function(value))
    except TypeError:  # it takes no weak references: never found to be the same
        return object


class EarlyEnds:
    """Decides where the steps of one ledger may run without their function mode.

    - `has_ended`: whether the last step ran without it at its end or before.
    """

    def __init__(self) -> None:
        self.has_ended = False
        # True once backward found a tensor changed in place after an early end; then later modes stay to the end.
        self._is_watched = False
        self._changes = Changes.count  # ``Changes.count`` at the start of the last step
        self._code: ForwardCode | None = None  # the code of the recorded step's forward; None: the mode stays
        self._may_end = False  # whether no write that moves no version counter can follow
        self._facts: Facts | None = None  # what the proof rests on that autograd records all changes; None: no proof
        self._sizes: list[int] = []  # of the tensors of the largest batch whose small tensors are known to stay small
        self._larger: list[int] | None = None  # of a larger one, until the step that watches it has ended
        self._failures = 0  # how often a step without the function mode differed from the recorded one

    def allowed(
        self, handover: HandoverT | None, border: Border | None, batch: Any
    ) -> tuple[HandoverT | None, Border | None]:
        """Return which of the two a step may use whose forward has the arguments ``batch``; None: they are not known.

        handover: where its function mode is not set: see [Note: without the function mode].
        border: where its function mode ends early.
        """
        handover, border = handover if self._is_data(batch) else None, border if self._may_end else None
        if (handover is None and border is None) or self._code is None or self._code.has_changed():
            return None, None
        if handover is not None and (_torch.function_modes_active() or self._facts is None or not self._facts.hold()):
            handover = None
        return handover, border

    def _is_data(self, batch: Any) -> bool:
        """Whether ``batch`` holds nothing but data, and no more than a batch whose small tensors stayed small."""
        sizes = None if batch is None or self._facts is None else sizes_of(batch)
        if sizes is None:
            return False
        if not _covers(self._sizes, sizes):
            self._larger = sizes
            return False
        return True

    def module(self, border: Border) -> nn.Module | None:
        """Return the module of ``border``."""
        return None if self._code is None else self._code.module(border.module)

    def begin_step(self) -> bool:
        """Start a step; return False if the early end of the previous step may have missed an in-place change.

        That is so if the function mode of the previous step was removed early, and backward has since found a tensor
        that was changed in place.
        """
        has_changed, self._changes = Changes.count != self._changes, Changes.count
        is_unseen, self.has_ended = self.has_ended and has_changed, False
        self._is_watched = self._is_watched or is_unseen
        if self._larger is not None:
            self._sizes, self._larger = self._larger, None
        return not is_unseen

    def record(self, module: nn.Module, batch: Any) -> None:
        """Note that a step of ``module`` with the arguments ``batch`` is being recorded, and look into its code."""
        self._sizes, self._larger = sizes_of(batch) or [], None
        self._code, self._facts, self._may_end = None, None, False
        if self._is_watched or not _can_set_hooks(module):
            return
        self._code, self._may_end = ForwardCode(module), not may_write_unseen(module)
        if self._failures < MOST_FAILURES:
            self._facts = prove(module)

    @property
    def may_end(self) -> bool:
        """Whether later steps may end their function mode early."""
        return self._may_end

    @property
    def has_proof(self) -> bool:
        """Whether later steps may run without the function mode while tensors are rebuilt."""
        return self._facts is not None

    @property
    def constants(self) -> Mapping[tuple[str, str], Any]:
        """By type of node and name, the one value of a constant that no node stores; see [Note: one constant]."""
        return {} if self._facts is None else self._facts.of_nodes

    def note_failure(self) -> None:
        """Note that a step differed from the recorded one where it ran without its function mode."""
        self._failures += 1


def _covers(larger: list[int], sizes: list[int]) -> bool:
    return len(larger) == len(sizes) and all(map(int.__ge__, larger, sizes))


MOST_FAILURES = 2  # after so many the function mode is no longer removed while tensors are rebuilt


def _can_set_hooks(module: nn.Module) -> bool:
    """Whether a forward hook may be set on any part of ``module``, and version counters show all of its changes.

    False if a part of it is compiled (a forward hook would make it compile again), if it is a replica made by
    DataParallel, or if a parameter or buffer shares its memory with a tensor that has another version counter.
    """
    if any(_torch.is_compiled(part) for part in module.modules()) or _torch.is_replica(module):
        return False
    return not any(_torch.has_aliases(tensor) for tensor in (*module.parameters(), *module.buffers()))


class InertHook:
    """Replaces a temporary hook of leangrad in a copy of the model; does nothing."""

    is_leangrads = True

    def __call__(self, *args: Any) -> None:
        """Do nothing when the module runs."""


class EarlyEnd:
    """A forward hook that changes how a region watches, after one module has returned; ``wait`` sets it."""

    is_leangrads = True

    def __init__(self, region: object, change: Callable[[], None], border: Border, module: nn.Module | None) -> None:
        self._region, self._change, self._border, self._module = region, change, border, module
        self._handle: Any = None
        self._ran = 0  # how often the module has returned in this region

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the hook as an InertHook: a copy of the model made during its own forward must not end the mode."""
        return InertHook, ()

    def wait(self) -> None:
        """Set the hook on the border's module; called when the region begins."""
        if self._module is not None:
            self._handle = self._module.register_forward_hook(self)

    def remove(self) -> None:
        """Remove the hook; called when the region ends."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Count the runs of the module in this region, and make the change after the border's one.

        Does nothing if the module ran in the region of another thread.
        """
        if is_dynamo_compiling() or open_region() is not self._region:
            return
        self._ran += 1
        if self._ran > self._border.turn:
            self._change()
