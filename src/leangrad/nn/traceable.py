"""Checks, from its source, whether a module's forward may be replaced by its trace: `why_not_traceable`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["why_not_traceable"]

# Code that uses one of these may depend on values that a trace does not see, or have effects that it does not record.
NAMES = {"isinstance", "type", "hasattr", "print", "random", "np", "numpy", "super", "locals", "globals", "id"}
ATTRIBUTES = {"training", "is_grad_enabled", "requires_grad", "is_autocast_enabled", "rand", "data", "item", "detach_"}
STATEMENTS = (ast.With, ast.AsyncWith, ast.Global, ast.Nonlocal, ast.Try, ast.Delete, ast.Assert, ast.Yield, ast.Import)


def why_not_traceable(module: nn.Module) -> str:
    """Returns why the forward of `module` may do more than its trace shows; an empty string if no reason is found.

    >>> why_not_traceable(nn.Bilinear(1, 1, 1))
    ''
    """
    if "forward" in vars(module):
        return "its parent's forward was replaced on the instance"
    return _why_not(type(module).forward, type(module), set())


def _why_not(function: Callable[..., Any], owner: type, seen: set[Any]) -> str:
    """Does the check of `why_not_traceable` for `function`, and for functions outside of torch that it calls.

    owner: class whose methods `self` has. seen: functions that were checked already.
    """
    seen.add(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return "its parent's forward has no source to read"
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        return "its parent's forward is decorated"
    for node in ast.walk(tree):
        if word := _obstacle(node):
            return f"its parent's forward has {word} in line {node.lineno}, which a trace does not see"  # type: ignore[attr-defined]
    for called in _called(tree, function, owner):
        if called not in seen and (reason := _why_not(called, owner, seen)):
            return reason
    return ""


def _obstacle(node: ast.AST) -> str:
    if isinstance(node, STATEMENTS):
        return f"a {type(node).__name__.lower()} statement"
    if isinstance(node, ast.Name) and node.id in NAMES:
        return f"`{node.id}`"
    if isinstance(node, ast.Attribute):
        if node.attr in ATTRIBUTES:
            return f"`.{node.attr}`"
        if isinstance(node.ctx, ast.Store):
            return f"a write to `.{node.attr}`"
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return "a write to an element"
    return ""


def _called(tree: ast.AST, function: Callable[..., Any], owner: type) -> list[Callable[..., Any]]:
    """Returns the methods of `owner` and the global functions, except torch's own, that `function` calls by name."""
    scope = getattr(function, "__globals__", {})
    targets = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [getattr(owner, t.attr, None) for t in targets if isinstance(t, ast.Attribute) and _is_self(t.value)]
    found += [scope.get(t.id) for t in targets if isinstance(t, ast.Name)]
    return [f for f in found if inspect.isfunction(f) and not f.__module__.startswith("torch.")]


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
