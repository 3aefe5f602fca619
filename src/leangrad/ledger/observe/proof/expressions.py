"""What the expressions of one function may be, with what is known about its names."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from enum import Enum
from types import FunctionType
from typing import Any, Protocol

from torch import nn

from leangrad.ledger.observe.proof.facts import MISSING
from leangrad.ledger.observe.proof.static_values import (
    DATA,
    GIVEN,
    Data,
    Group,
    Known,
    List,
    NoKeywords,
    Parent,
    Row,
    Unproven,
    Value,
    join,
    known,
    merge,
)

__all__ = ["MOST_TURNS", "Expressions", "Names", "Searcher"]

Names = dict[str, Value]
MOST_TURNS = 20  # of a loop, until what is known about the names no longer changes


class Searcher(Protocol):
    """What a Frame needs from the search."""

    def read(self, value: Value) -> Data:
        """Return ``value`` as data, for something that may hold it, or what is in it, from now on."""

    def look(self, value: Value) -> Data:
        """Return ``value`` as data, for something that does not hold it."""

    def takes_any(self, callee: Value) -> bool:
        """Whether a call of ``callee`` returns the same for any number of arguments."""

    def attribute(self, holder: Value, name: str) -> Value:
        """Return the attribute ``name`` of ``holder``."""

    def call(self, callee: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Return what a call of ``callee`` returns."""

    def elements(self, value: Value) -> Value:
        """Return what an iteration over ``value`` yields: any of its elements."""

    def item(self, holder: Value, key: Value) -> Value:
        """Return ``holder[key]``."""

    def truth(self, value: Value) -> bool | None:
        """Whether ``value`` counts as true; None: it may or may not."""

    def is_equal(self, left: Value, right: Value) -> bool | None:
        """Whether the two are equal; None: they may or may not be."""

    def note_global(self, mapping: Mapping[str, Any], name: str, value: Any) -> None:
        """Note that the global ``name`` of ``mapping`` is ``value``."""


class Expressions:
    """The expressions of one function, at a place where its names stand for what `names` says."""

    def __init__(self, search: Searcher, function: FunctionType, names: Names) -> None:
        self._search, self._function = search, function
        self.names: Names | None = names  # None: no statement is reached here
        code = function.__code__
        self._cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        self._locals = frozenset((*code.co_varnames, *code.co_cellvars))

    def assign(self, target: ast.expr, value: Value) -> None:
        """Let ``target`` stand for ``value``."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> Value:
        """Return what is known about the value of an expression."""
        try:
            return self._value(node)
        except Unproven as why:
            if len(why.args) == 1:
                why.args = (f"{self._function.__qualname__}, line {node.lineno}: {why}", "")
            raise

    def _value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                return self._binary(node)
            case ast.UnaryOp():
                return self._unary(node)
            case ast.BoolOp():
                return self._and_or(node)
            case ast.Compare():
                return self._comparison(node)
            case ast.IfExp():
                return self._if_else(node)
            case ast.Subscript():
                return self._subscript(node)
            case ast.Slice():
                return self._slice(node)
            case ast.Tuple():
                return self._tuple(node)
            case ast.List():
                return self._list(node)
            case ast.Dict():
                return self._dict(node)
            case ast.JoinedStr():
                return self._text(node)
            case ast.ListComp():
                return self.comprehension(node)
        raise Unproven(f"{type(node).__name__} in line {node.lineno}")

    @property
    def known_names(self) -> Names:
        """What each name stands for, where a statement is reached."""
        assert self.names is not None
        return self.names

    def _data(self, *nodes: ast.expr | None) -> Data:
        return merge([self._search.look(self.value(node)) for node in nodes if node is not None])

    def _constant(self, node: ast.Constant) -> Value:
        return known(node.value)

    def _name(self, node: ast.Name) -> Value:
        name = node.id
        if name in self.known_names:
            return self.known_names[name]
        if name in self._locals:
            raise Unproven(f"{name} has no value")
        if name in self._cells:
            try:
                return known(self._cells[name].cell_contents)
            except ValueError:
                raise Unproven(f"{name} has no value") from None
        mapping = self._function.__globals__
        if name in mapping:
            self._search.note_global(mapping, name, mapping[name])
            return known(mapping[name])
        self._search.note_global(mapping, name, MISSING)
        if hasattr(builtins, name):
            found = getattr(builtins, name)
            self._search.note_global(vars(builtins), name, found)
            return known(found)
        raise Unproven(f"{name} is not known")

    def _attribute(self, node: ast.Attribute) -> Value:
        return self._search.attribute(self.value(node.value), node.attr)

    def _call(self, node: ast.Call) -> Value:
        callee = self.value(node.func)
        if callee == known(super) and not node.args:
            return self._parent()
        args: list[Value] = []
        if len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp) and not node.keywords:
            if not isinstance(callee, Known) or not all(any(one is f for f in EAGER) for one in callee.values):
                raise Unproven("a generator that may run later")
            return self._search.call(callee, [self.comprehension(node.args[0])], {})
        for one in node.args:
            if not isinstance(one, ast.Starred):
                args.append(self.value(one))
                continue
            found = self.value(one.value)
            if not isinstance(found, Row):
                if not self._search.takes_any(callee):
                    raise Unproven("any number of arguments")
                found = Row((self._search.elements(found),))
            args += found.values
        kwargs: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif value != NoKeywords():
                raise Unproven("keywords that are not known")
        return self._search.call(callee, args, kwargs)

    def _parent(self) -> Value:
        try:
            kind = self._cells["__class__"].cell_contents
        except (KeyError, ValueError):
            raise Unproven("super()") from None
        owner = self.known_names.get(self._function.__code__.co_varnames[0])
        if not isinstance(owner, Known):
            raise Unproven("super()")
        return Parent(kind, owner)

    def _binary(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, Row) and isinstance(right, Row):
            return Row((*left.values, *right.values))
        if isinstance(node.op, ast.Add) and isinstance(left, List) and isinstance(right, List):
            return List(join([self._search.elements(one) for one in (left, right)]))
        found = merge([self._search.read(left), self._search.read(right)])
        return found  # a list of the same elements, if it is one

    def _unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            test = self.test(node.operand)
            return DATA if test is None else known(not test)
        return self._data(node.operand)

    def _and_or(self, node: ast.BoolOp) -> Value:
        found: list[Value] = []
        for one in node.values:
            value = self.value(one)
            test = self._search.truth(value)
            if test is isinstance(node.op, ast.And) and one is not node.values[-1]:
                continue  # the next one decides
            found.append(value)
            if test is isinstance(node.op, ast.Or):
                break
        return join(found)

    def _comparison(self, node: ast.Compare) -> Value:
        values = [self.value(one) for one in (node.left, *node.comparators)]
        if len(values) == 2:
            found = self._compared(node.ops[0], *values)
            if found is not None:
                return known(found)
        for op, left, right in zip(node.ops, values, values[1:], strict=False):
            if isinstance(op, ast.In | ast.NotIn):
                self._search.look(right)
            if not isinstance(op, ast.Is | ast.IsNot):
                for value in (left, right):
                    if not _is_plain_object(value):
                        self._search.look(value)
        return DATA

    def _compared(self, op: ast.cmpop, left: Value, right: Value) -> bool | None:
        match op:
            case ast.Is() | ast.IsNot():
                if isinstance(left, Known) and isinstance(right, Known):
                    found = {_is_same(a, b) for a in left.values for b in right.values}
                    if len(found) == 1 and None not in found:
                        return found.pop() is isinstance(op, ast.Is)
            case ast.Eq() | ast.NotEq():
                same = self._search.is_equal(left, right)
                return None if same is None else same is isinstance(op, ast.Eq)
            case ast.In() | ast.NotIn():
                if isinstance(right, Row):
                    every = {self._search.is_equal(left, one) for one in right.values}
                    same = True if True in every else None if None in every else False
                    return None if same is None else same is isinstance(op, ast.In)
        return None

    def test(self, node: ast.expr) -> bool | None:
        """Whether ``node`` is true; None: it may or may not be."""
        if not isinstance(node, ast.BoolOp):
            return self._search.truth(self.value(node))
        decides, found = isinstance(node.op, ast.Or), set()
        for one in node.values:
            test = self.test(one)
            if test is decides:  # whatever those before it are
                return decides
            found.add(test)
        return None if None in found else not decides

    def _if_else(self, node: ast.IfExp) -> Value:
        test = self.test(node.test)
        if test is not None:
            return self.value(node.body if test else node.orelse)
        return join([self.value(node.body), self.value(node.orelse)])

    def _subscript(self, node: ast.Subscript) -> Value:
        return self._search.item(self.value(node.value), self.value(node.slice))

    def _slice(self, node: ast.Slice) -> Value:
        self._data(node.lower, node.upper, node.step)
        return known(slice(None))

    def _tuple(self, node: ast.Tuple) -> Value:
        values: list[Value] = []
        for one in node.elts:
            if not isinstance(one, ast.Starred):
                values.append(self.value(one))
                continue
            found = self.value(one.value)
            if not isinstance(found, Row):
                return self._list(node)
            values += found.values
        return Row(tuple(values))

    def _list(self, node: ast.List | ast.Tuple) -> Value:
        values = []
        for one in node.elts:
            value = self.value(one.value if isinstance(one, ast.Starred) else one)
            values.append(self._search.elements(value) if isinstance(one, ast.Starred) else value)
        if not isinstance(node, ast.List):
            return Group(join(values))
        return List(join(values)) if values else List()

    def _dict(self, node: ast.Dict) -> Value:
        values = []
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                raise Unproven("a dictionary of others")
            self._search.read(self.value(key))
            values.append(self._search.read(self.value(value)))
        return merge(values) if values else GIVEN

    def _text(self, node: ast.JoinedStr) -> Value:
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                self._data(one.value)
        return DATA

    def comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> Value:
        """Return what a comprehension, or a generator that runs at once, yields."""
        if len(node.generators) != 1 or node.generators[0].is_async:
            raise Unproven(f"{type(node).__name__} in line {node.lineno}")
        found = node.generators[0]
        iterated = self.value(found.iter)
        # Its names are its own; Python 3.11 runs it as a function inside.
        outside = self.names, self._locals
        self.names = dict(self.known_names)
        self._locals |= {one.id for one in ast.walk(found.target) if isinstance(one, ast.Name)}
        try:
            for _ in range(MOST_TURNS):
                stored = List.changes
                self.assign(found.target, self._search.elements(iterated))
                for test in found.ifs:
                    self.test(test)
                value = self.value(node.elt)
                if List.changes == stored:
                    return List(value) if isinstance(node, ast.ListComp) else Group(value)
            raise Unproven("a comprehension that always changes")
        finally:
            self.names, self._locals = outside


EAGER = (list, tuple, sum, all, any, min, max, sorted)  # they run a generator at once
EQUALS: tuple[Any, ...] = (object.__eq__, type.__eq__, str.__eq__)


def _is_same(a: Any, b: Any) -> bool | None:
    """Whether two objects are one; None if equal ones may be one or two, such as numbers and strings."""
    if a is None or b is None:
        return a is b
    kinds = (bool, FunctionType, type, nn.Module, Enum)
    return a is b if isinstance(a, kinds) and isinstance(b, kinds) else None


def _is_plain_object(value: Value) -> bool:
    """Whether comparing these objects runs no code of the user's."""
    return isinstance(value, Known) and all(
        one is None or isinstance(one, FunctionType) or type(one).__eq__ in EQUALS for one in value.values
    )
