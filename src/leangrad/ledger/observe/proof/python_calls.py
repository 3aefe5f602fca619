"""What Python's own functions return in a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from leangrad.ledger.observe.proof.lookups import Lookups
from leangrad.ledger.observe.proof.static_values import DATA, Group, Known, List, Row, Unproven, Value, freeze, known

__all__ = ["SPECIAL"]


def _isinstance(search: Lookups, args: list[Value], kwargs: dict[str, Value]) -> Value:
    match args:
        case [value, Known() as kinds]:
            every = kinds.values
        case [value, Row(rows)] if all(isinstance(row, Known) and len(row.values) == 1 for row in rows):
            every = tuple(one for row in rows if isinstance(row, Known) for one in row.values)
        case _:
            raise Unproven("isinstance")
    if not all(isinstance(kind, type) and _is_asked_by_torch_or_python(kind) for kind in every):
        raise Unproven("isinstance runs code of the user's")
    if isinstance(args[1], Known) and len(every) != 1:
        return DATA  # one of these classes, and not known which
    if isinstance(value, List | Row):
        return known(issubclass(list if isinstance(value, List) else tuple, every))
    if isinstance(value, Known):
        found = {isinstance(one, every) for one in value.values}
        return known(found.pop()) if len(found) == 1 else DATA
    return DATA


def _is_asked_by_torch_or_python(kind: type) -> bool:
    """Whether the class of ``kind``, which decides what its instances are, is torch's or Python's."""
    return type(kind).__module__.partition(".")[0] in ("builtins", "abc", "enum", "torch", "typing")


def _hasattr(search: Lookups, args: list[Value], kwargs: dict[str, Value]) -> Value:
    match args:
        case [Known((nn.Module() as module,)), Known((str() as name,))]:
            search.check(module)
            try:
                search.attribute(args[0], name)
            except Unproven:
                own = vars(module)
                registries = (own["_parameters"], own["_buffers"], own["_modules"])
                if hasattr(type(module), name) or name in own or any(name in one for one in registries):
                    raise
                return known(False)  # the facts say that it is not there
            if isinstance(getattr(type(module), name, None), property):
                raise Unproven("hasattr of a property")
            return known(True)
    raise Unproven("hasattr")


def _getattr(search: Lookups, args: list[Value], kwargs: dict[str, Value]) -> Value:
    match args:
        case [Known((nn.Module(),)) as module, Known((str() as name,))]:
            return search.attribute(module, name)
        case [Known((nn.Module(),)) as module, Known((str() as name,)), other]:
            return search.attribute(module, name) if _hasattr(search, args[:2], {}) == known(True) else other
    raise Unproven("getattr")


def _zip(search: Lookups, args: list[Value], kwargs: dict[str, Value]) -> Value:
    for one in args:
        freeze(one)  # the iterator reads its elements later
    return Group(Row(tuple(map(search.elements, args))))


def _enumerate(search: Lookups, args: list[Value], kwargs: dict[str, Value]) -> Value:
    freeze(args[0])
    return Group(Row((DATA, search.elements(args[0]))))


def _list(search: Lookups, args: list[Value], kwargs: dict[str, Value]) -> Value:
    match args:
        case []:
            return List()
        case [one]:
            return List(search.elements(one))
    raise Unproven("a list of several")


def _iterated(search: Lookups, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """``tuple`` or ``reversed``."""
    for one in args:
        freeze(one)
    return Group(search.elements(args[0])) if args else Row(())


def _len(search: Lookups, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if not isinstance(args[0], Row | Group | List):
        search.elements(args[0])
    return DATA


SPECIAL: dict[Any, Callable[[Lookups, list[Value], dict[str, Value]], Value]] = {
    isinstance: _isinstance,
    hasattr: _hasattr,
    getattr: _getattr,
    zip: _zip,
    enumerate: _enumerate,
    list: _list,
    tuple: _iterated,
    reversed: _iterated,
    len: _len,
}
