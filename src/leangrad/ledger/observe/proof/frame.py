"""What the statements of one function may do, in all of its branches."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from types import FunctionType

from leangrad.ledger.observe.proof.expressions import MOST_TURNS, Expressions, Names, Searcher
from leangrad.ledger.observe.proof.static_values import NOTHING, Group, List, Row, Unproven, Value, join, merge

__all__ = ["Frame"]


class Frame(Expressions):
    """One run of a function, with all that its branches may do."""

    def __init__(self, search: Searcher, function: FunctionType, names: Names) -> None:
        super().__init__(search, function, names)
        self._returned: list[Value] = []
        # For each loop around, the names at its `break` and at its `continue` statements.
        self._loops: list[tuple[list[Names], list[Names]]] = []

    def run(self, tree: ast.FunctionDef | ast.Lambda) -> Value:
        """Return what the function may return."""
        if isinstance(tree, ast.Lambda):
            return self.value(tree.body)
        self._run(tree.body)
        if self.names is not None:
            self._returned.append(NOTHING)
        return join(self._returned)

    # ---------------------------------------------------------------------------------------------------- statements

    def _run(self, statements: Sequence[ast.stmt]) -> None:
        for one in statements:
            if self.names is None:
                return
            self._run_one(one)

    def _run_one(self, one: ast.stmt) -> None:
        match one:
            case ast.Expr():
                self._expression(one)
            case ast.Pass():
                self._pass(one)
            case ast.Delete():
                self._delete(one)
            case ast.Return():
                self._return(one)
            case ast.Raise():
                self._raise(one)
            case ast.Assert():
                self._assert(one)
            case ast.Assign():
                self._assignment(one)
            case ast.AnnAssign():
                self._annotated(one)
            case ast.AugAssign():
                self._update(one)
            case ast.If():
                self._if(one)
            case ast.For():
                self._for(one)
            case ast.While():
                self._while(one)
            case ast.Break():
                self._break(one)
            case ast.Continue():
                self._continue(one)
            case _:
                raise Unproven(f"{type(one).__name__} in line {one.lineno}")

    def _expression(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _pass(self, node: ast.Pass) -> None:
        pass

    def _delete(self, node: ast.Delete) -> None:
        if not all(isinstance(target, ast.Name) for target in node.targets):
            raise Unproven(f"del in line {node.lineno}")

    def _return(self, node: ast.Return) -> None:
        self._returned.append(NOTHING if node.value is None else self.value(node.value))
        self.names = None

    def _raise(self, node: ast.Raise) -> None:
        self.names = None  # no gradient follows

    def _assert(self, node: ast.Assert) -> None:
        self.value(node.test)

    def _assignment(self, node: ast.Assign) -> None:
        if isinstance(node.value, ast.GeneratorExp) and isinstance(node.targets[0], ast.Tuple):
            value = self.comprehension(node.value)  # it runs at once
        else:
            value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value))

    def _update(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Attribute):
            raise Unproven(f"an attribute is assigned in line {node.lineno}")
        held = self.value(ast.copy_location(_read(node.target), node))
        right = self.value(node.value)
        if isinstance(node.op, ast.BitOr):
            raise Unproven(f"a dictionary or a set may be changed in line {node.lineno}")
        if isinstance(held, List) and isinstance(node.op, ast.Add):
            held.add(self._search.elements(right))
            return
        if isinstance(held, Row) and isinstance(right, Row) and isinstance(node.op, ast.Add):
            self.assign(node.target, Row((*held.values, *right.values)))
            return
        before = self._search.read(held)
        if (
            before.is_held
            or isinstance(right, List | Row | Group)
            or merge([before, self._search.read(right)]) != before
        ):
            raise Unproven(f"what others hold may be changed, or stored, in line {node.lineno}")
        self.assign(node.target, before)

    def assign(self, target: ast.expr, value: Value) -> None:
        """Let ``target`` stand for ``value``."""
        match target:
            case ast.Name():
                if target.id not in self._locals:
                    raise Unproven(f"a global is assigned in line {target.lineno}")
                self.known_names[target.id] = value
            case ast.Tuple() | ast.List():
                if isinstance(value, Row) and len(value.values) == len(target.elts):
                    values: Sequence[Value] = value.values
                else:
                    values = [self._search.elements(value)] * len(target.elts)
                for one, found in zip(target.elts, values, strict=True):
                    if isinstance(one, ast.Starred):
                        self.assign(one.value, List(self._search.elements(value)))
                    else:
                        self.assign(one, found)
            case ast.Subscript():
                self._set_item(target, value)
            case _:
                raise Unproven(f"{type(target).__name__} is assigned in line {target.lineno}")

    def _set_item(self, target: ast.Subscript, value: Value) -> None:
        """Assign to ``x[i]``: autograd records it if x is a tensor; a list may get data only."""
        holder = self.value(target.value)
        key = self.value(target.slice)
        self._search.look(key)
        if isinstance(holder, List):
            holder.add(self._search.elements(value) if isinstance(target.slice, ast.Slice) else value)
            return
        held = self._search.read(holder)
        stored = self._search.read(value)
        if held.is_held or merge([held, stored]) != held:
            raise Unproven(f"an item is assigned in line {target.lineno}")

    def _if(self, node: ast.If) -> None:
        self._branch(self.test(node.test), node.body, node.orelse)

    def _branch(self, test: bool | None, body: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> None:
        if test is not None:
            self._run(body if test else other)
            return
        before = dict(self.known_names)
        self._run(body)
        after, self.names = self.names, before
        self._run(other)
        self.names = _joined([after, self.names])

    def _for(self, node: ast.For) -> None:
        iterated = self.value(node.iter)
        if isinstance(iterated, Row) and not node.orelse:  # one turn after another
            self._loops.append(([], []))
            for value in iterated.values:
                if self.names is None:
                    break
                self.assign(node.target, value)
                self._run(node.body)
                self.names = _joined([self.names, *self._loops[-1][1]])
                self._loops[-1][1].clear()
            self.names = _joined([self.names, *self._loops.pop()[0]])
            return
        self._loop(node.body, node.orelse, lambda: self.assign(node.target, self._search.elements(iterated)))

    def _while(self, node: ast.While) -> None:
        self._loop(node.body, node.orelse, lambda: self.test(node.test))

    def _loop(self, body: Sequence[ast.stmt], other: Sequence[ast.stmt], begin: Callable[[], object]) -> None:
        ends: list[Names] = []
        for _ in range(MOST_TURNS):
            before, stored = dict(self.known_names), List.changes
            self._loops.append((ends, []))
            begin()
            self._run(body)
            _, again = self._loops.pop()
            self.names = _joined([before, self.names, *again])
            if self.names == before and List.changes == stored:
                break
        else:
            raise Unproven("a loop that always changes")
        self._run(other)
        self.names = _joined([self.names, *ends])

    def _break(self, node: ast.Break) -> None:
        self._loops[-1][0].append(self.known_names)
        self.names = None

    def _continue(self, node: ast.Continue) -> None:
        self._loops[-1][1].append(self.known_names)
        self.names = None


def _read(target: ast.expr) -> ast.expr:
    """Return the expression that reads what ``target`` assigns."""
    match target:
        case ast.Name():
            return ast.Name(target.id, ast.Load())
        case ast.Subscript():
            return ast.Subscript(target.value, target.slice, ast.Load())
    raise Unproven(f"{type(target).__name__} is assigned")


def _joined(several: Sequence[Names | None]) -> Names | None:
    """Join what is known at the ends of several branches; None for a branch whose end is not reached.

    A name that only one branch has set has that value, because Python raises an error in the others when it is read.
    """
    reached = [names for names in several if names is not None]
    if not reached:
        return None
    found: Names = {}
    for names in reached:
        for name, value in names.items():
            found[name] = value if name not in found else join([found[name], value])
    return found
