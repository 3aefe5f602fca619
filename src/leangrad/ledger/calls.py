"""One call of a torch function, as a handler sees it: its arguments by name, and the constants its node forgets.

A handler runs the function in the stead of the caller and writes down what it must. ``notes.py``, ``draws.py`` and
``changes.py`` hold the handlers; ``origins.py`` reads what they wrote.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leangrad.ledger.nodes import NOTE
from leangrad.ledger.origins import Operand

if TYPE_CHECKING:
    from leangrad.ledger.notes import Notes

Handler = Callable[["Notes", Any, tuple[Any, ...], dict[str, Any]], Any]


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
            note[name] = Operand(a)
    elif isinstance(a, list | tuple) and any(isinstance(t, Tensor) for t in a):
        note[name] = {i: Operand(t) for i, t in enumerate(a) if not t.requires_grad}
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
