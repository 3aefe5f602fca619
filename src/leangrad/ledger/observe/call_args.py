"""The arguments of one torch function call by name, and the constants that its autograd node does not store.

A handler is called in place of a torch function. It calls the function and records what a recipe will need. The
handlers are in ``handlers.py``, ``random_ops.py`` and ``mutation.py``; ``origins/graph_walk.py`` reads their records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.observe.function_mode import FunctionMode
from leangrad.ledger.origins.graph_walk import UnsavedInput
from leangrad.ledger.values.node_metadata import NOTE
from leangrad.ledger.values.pending_save import PendingSave, claims

Handler = Callable[[FunctionMode, Any, tuple[Any, ...], dict[str, Any]], Any]

# The handlers that report to their region themselves whether a call needed them. A call of any other needs the function
# mode: see [Note: without the function mode].
NOTES_NEED: set[Any] = set()


def notes_need(handler: Handler) -> Handler:
    """Enter ``handler`` in ``NOTES_NEED``."""
    NOTES_NEED.add(handler)
    return handler


def leave_note(out: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store the constants of a call in the metadata of the node that it made, unless gradients are off.

    out: result of the call. names: names of its positional arguments.
    """
    node: Any = out.grad_fn if isinstance(out, Tensor) else None
    if node is not None and torch.is_grad_enabled():
        node.metadata[NOTE] = constants_of(names, args, kwargs)


def constants_of(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the constants of a call by name.

    A tensor is included only if it needs no gradient: any other can be reached through an edge of the node. A tensor
    with the name ``_`` is left out, because the node saves it itself.

    names: names of the positional arguments ``args``.
    """
    note: dict[str, Any] = {}
    for name, a in zip(names, args, strict=False):
        if type(a) in PLAIN:
            note[name] = a
        else:
            note_one(note, name, a)
    for name, a in kwargs.items():
        note_one(note, "self" if name == "input" else name, a)
    return note


PLAIN = frozenset((float, int, bool, str, type(None), torch.memory_format))  # not tensors, and cannot contain one


def note_one(note: dict[str, Any], name: str, a: Any) -> None:
    """Add constant ``a`` to ``note``; a tensor only if it needs no gradient, as an ``UnsavedInput``."""
    if isinstance(a, Tensor):
        if name != "_" and not a.requires_grad:
            note[name] = UnsavedInput(a)
    elif isinstance(a, list | tuple) and any(isinstance(t, Tensor) for t in a):
        note[name] = {i: UnsavedInput(t) for i, t in enumerate(a) if not t.requires_grad}
    else:
        note[name] = a


_PARAMETERS: dict[tuple[Any, str], tuple[int, Any]] = {}


def argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return the argument ``name`` of a call of a Python function, or the default value of that parameter."""
    found = kwargs.get(name, _PARAMETERS)
    if found is not _PARAMETERS:
        return found
    place = _PARAMETERS.get((func, name))
    if place is None:
        parameters = inspect.signature(func).parameters
        place = _PARAMETERS[func, name] = list(parameters).index(name), parameters[name].default
    return args[place[0]] if place[0] < len(args) else place[1]


def deferring(handler: Handler | None = None, *, inplace: bool = False) -> Handler:
    """Return a handler for a function that may make a node listed in ``SHAPE_ONLY``.

    It defers the decisions about the tensors that the call saves until the call has returned.
    See [Note: decided when the call has ended] in ``values/pending_save.py``.

    handler: another handler of the same function, which runs around the call; None if there is none.
    inplace: the function changes its first argument in place. If that argument is a view nothing is deferred, because
        the node of the change belongs to the base of the view.
    """

    def run(mode: FunctionMode, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        region = mode.region
        if region.slots is not None or (inplace and args and args[0]._is_view()):
            return func(*args, **kwargs)
        first = _torch.next_sequence_nr()
        slots: list[PendingSave] = []
        region.slots = slots
        try:
            out = func(*args, **kwargs)
        except BaseException:
            for slot in slots:
                slot.keep()
            raise
        finally:
            region.slots = None
        if slots:
            region.resolve(slots, claims(out, first))
        return out

    def handle(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if handler is None:
            return run(mode, func, *args, **kwargs)
        return handler(mode, partial(run, mode, func), args, kwargs)

    return notes_need(handle) if handler is None or handler in NOTES_NEED else handle
