"""The syntax tree of a function, checked against the code that Python runs."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import NamedTuple, TypeAlias

Tree: TypeAlias = "ast.FunctionDef | ast.Lambda"
Place: TypeAlias = tuple[str, int]  # the name and the first line of a function


class _Source(NamedTuple):
    """The functions of a file."""

    trees: dict[Place, list[Tree]]
    codes: frozenset[CodeType]


def tree_of(function: FunctionType) -> Tree | None:
    """Return the syntax tree of ``function``; None if its source is not there or has changed, or if it is not known.

    Code objects are equal if their names, constants, instructions and lines are. Two lambdas in one line are not told
    apart.
    """
    code = function.__code__
    source = _source_of(code.co_filename, "".join(linecache.getlines(code.co_filename)))
    trees = source.trees.get((code.co_name, code.co_firstlineno), [])
    return trees[0] if len(trees) == 1 and code in source.codes else None


@cache
def _source_of(file: str, text: str) -> _Source:
    try:
        tree = ast.parse(text, file)
        code = compile(tree, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return _Source({}, frozenset())
    trees: dict[Place, list[Tree]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            trees.setdefault((node.name, first), []).append(node)
        elif isinstance(node, ast.Lambda):
            trees.setdefault(("<lambda>", node.lineno), []).append(node)
    return _Source(trees, frozenset(_codes_in(code)))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes_in(one)
