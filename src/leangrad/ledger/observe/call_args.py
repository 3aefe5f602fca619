"""One call of a torch function, as a handler sees it: its arguments by name, and the constants its node forgets.

A handler runs the function in the stead of the caller and writes down what it must. ``handlers.py``, ``random_ops.py``
and ``mutation.py`` hold the handlers; ``graph_walk.py`` reads what they wrote.
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


def leave_note(out: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the constants of a call into the metadata of the node that it made."""
    node: Any = out.grad_fn if isinstance(out, Tensor) else None
    if node is not None and torch.is_grad_enabled():
        node.metadata[NOTE] = constants_of(names, args, kwargs)


def constants_of(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The constants of a call by name; tensors among them only if they need no gradient: others have a node.

    A tensor by the name of ``_`` is one that the node keeps itself.
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


PLAIN = frozenset((float, int, bool, str, type(None), torch.memory_format))  # never a tensor, nor holding one


def note_one(note: dict[str, Any], name: str, a: Any) -> None:
    """Enter one constant."""
    if isinstance(a, Tensor):
        if name != "_" and not a.requires_grad:
            note[name] = UnsavedInput(a)
    elif isinstance(a, list | tuple) and any(isinstance(t, Tensor) for t in a):
        note[name] = {i: UnsavedInput(t) for i, t in enumerate(a) if not t.requires_grad}
    else:
        note[name] = a


_PARAMETERS: dict[tuple[Any, str], tuple[int, Any]] = {}


def argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a Python function by its name, given or default."""
    found = kwargs.get(name, _PARAMETERS)
    if found is not _PARAMETERS:
        return found
    place = _PARAMETERS.get((func, name))
    if place is None:
        parameters = inspect.signature(func).parameters
        place = _PARAMETERS[func, name] = list(parameters).index(name), parameters[name].default
    return args[place[0]] if place[0] < len(args) else place[1]


def deferring(handler: Handler | None = None, *, inplace: bool = False) -> Handler:
    """A handler of a function that may make a node of ``SHAPE_ONLY``.

    See [Note: decided when the call has ended] in ``slot.py``.

    handler: what else has to be done around the call.
    inplace: the function changes its first argument. One that is a view is left alone: its node is that of its base.
    """

    def run(notes: FunctionMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        book = notes.book
        if book.slots is not None or (inplace and args and args[0]._is_view()):
            return func(*args, **kwargs)
        first = _torch.next_sequence_nr()
        slots: list[PendingSave] = []
        book.slots = slots
        try:
            out = func(*args, **kwargs)
        except BaseException:
            for slot in slots:
                slot.keep()
            raise
        finally:
            book.slots = None
        if slots:
            book.resolve(slots, claims(out, first))
        return out

    def handle(notes: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if handler is None:
            return run(notes, func, *args, **kwargs)
        return handler(notes, partial(run, notes, func), args, kwargs)

    return handle
