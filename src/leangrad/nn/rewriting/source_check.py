"""Looks in the source of a function for what a trace of it does not show: `why_not_traceable`."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections import Counter
from types import CodeType, FunctionType, ModuleType
from typing import Any

from leangrad.nn.rewriting.guards import Global

__all__ = ["global_functions", "why_not_traceable"]

# Code that uses one of these may depend on values that a trace does not see, or have effects that it does not record.
NAMES = {
    "isinstance",
    "type",
    "hasattr",
    "issubclass",
    "dir",
    "callable",
    "print",
    "open",
    "input",
    "super",
    "id",
    "hash",
}
NAMES |= {"locals", "globals", "vars", "eval", "exec", "setattr", "delattr", "random", "np", "numpy"}
ATTRIBUTES = {"requires_grad", "rand", "data", "item", "detach_", "__class__", "__dict__"}
STATEMENTS = (ast.With, ast.AsyncWith, ast.Global, ast.Nonlocal, ast.Try, ast.Delete, ast.Assert, ast.Yield, ast.Import)
STATEMENTS += (ast.ImportFrom, ast.Match, ast.Await, ast.ClassDef)  # type: ignore[assignment]
# Functions of torch that return a setting, which may be another one when the trace is used, or that set one.
SETTING = re.compile(
    r"(is|get|are|has|current|set|use|enable|disable|manual|initial|fork)_|seed|no_grad|inference_mode"
)
NO_SETTING = ("is_scripting",)
BINDINGS = ("property", "staticmethod")  # decorators that leave the function as it is


def why_not_traceable(code: CodeType, scope: dict[str, Any], *, is_forward: bool = False) -> str:
    """Returns why a function may do more than a trace of it shows; an empty string if no reason is found.

    code: the code of the function. scope: its globals. is_forward: it is the forward that is traced, whose arguments
        without a default are tensors, and whose others have their default.

    >>> from torch import nn
    >>> forward = nn.Bilinear.forward
    >>> why_not_traceable(forward.__code__, forward.__globals__)
    ''
    """
    name = "its parent's forward" if is_forward else f"`{code.co_name}`"
    tree = _tree(code)
    if tree is None:
        return f"{name} has no source to read"
    if not isinstance(tree, ast.FunctionDef):
        return f"{name} is no function with a name"
    if any(not isinstance(d, ast.Name) or d.id not in BINDINGS for d in tree.decorator_list):
        return f"{name} is decorated"
    if code.co_freevars:
        return f"{name} uses variables of the function around it"
    if not is_forward and not all(map(_is_constant, (*tree.args.defaults, *tree.args.kw_defaults))):
        return f"{name} has a default that may change"
    tree.args.defaults, tree.args.kw_defaults, tree.decorator_list = [], [], []  # not run by a call
    arguments, stored = _names(tree)
    own = _local_names(tree, scope)
    as_passed = arguments - stored.keys() | _replaced_if_none(tree, arguments, stored) if is_forward else set()
    for node in _executed(tree):
        word = _obstacle(node, own) or _identity_check(node, as_passed) or _global_value(node, own, scope)
        if word:
            return f"{name} has {word} in line {node.lineno}, which a trace does not see"  # type: ignore[attr-defined]
    return ""


def global_functions(code: CodeType, scope: dict[str, Any]) -> list[Global]:
    """Returns the functions outside of torch that a function finds by global names, those in modules included."""
    tree, found = _tree(code), []
    if tree is None:
        return []
    local = _local_names(tree, scope)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in local and node.id in scope:
            value, place = scope[node.id], Global(scope.get("__name__", ""), node.id, scope[node.id])
        elif isinstance(node, ast.Attribute) and (owner := _module_of(node.value, local, scope)) is not None:
            value = getattr(owner, node.attr, None)
            place = Global(owner.__name__, node.attr, value)
        else:
            continue
        if isinstance(value, FunctionType) and not value.__module__.startswith("torch"):
            found.append(place)
    return found


def _tree(code: CodeType) -> Any:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None


def _is_constant(node: ast.expr | None) -> bool:
    """Whether the expression of a default is a constant."""
    if isinstance(node, ast.Tuple):
        return all(map(_is_constant, node.elts))
    return (
        node is None or isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and _is_constant(node.operand))
    )


def _executed(tree: ast.AST) -> list[ast.AST]:
    """Returns the nodes below `tree`, except those of annotations."""
    found: list[ast.AST] = []
    for name, value in ast.iter_fields(tree):
        if name not in ("annotation", "returns"):
            for node in value if isinstance(value, list) else [value]:
                if isinstance(node, ast.AST):
                    found += [node, *_executed(node)]
    return found


def _names(tree: ast.AST) -> tuple[set[str], Counter[str]]:
    """Returns the names of arguments in `tree`, nested functions included; and how often a name is assigned to."""
    nodes = list(ast.walk(tree))
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return arguments, stored + Counter(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def _local_names(tree: ast.AST, scope: dict[str, Any]) -> set[str]:
    """Returns the names that are no globals in `tree`.

    One that only a comprehension or a nested function binds may be a global outside of it, if there is such a global.
    """
    inner_nodes = (ast.comprehension, ast.FunctionDef, ast.Lambda)
    inside: list[ast.AST] = []
    for node in ast.walk(tree):
        if node is not tree and isinstance(node, inner_nodes):
            inside += ast.walk(node.target if isinstance(node, ast.comprehension) else node)
    hidden = {id(node) for node in inside}
    own: set[str] = set()
    inner: set[str] = set()
    for node in ast.walk(tree):
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        if name and (isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)):  # type: ignore[attr-defined]
            (inner if id(node) in hidden else own).add(name)
        elif isinstance(node, ast.FunctionDef) and node is not tree:
            own.add(node.name)
    return own | (inner - scope.keys())


def _replaced_if_none(tree: ast.FunctionDef, arguments: set[str], stored: Counter[str]) -> set[str]:
    """Returns the arguments that are assigned to only by `if a is None: a = ...` or `a = ... if a is None else ...`.

    Only statements of the function itself count: in a loop the second round may see what the first one assigned.
    """
    found = set()
    for statement in tree.body:
        inner = statement.body[0] if isinstance(statement, ast.If) and len(statement.body) == 1 else statement
        match inner:
            case ast.Assign(targets=[ast.Name(id=name)]) if name in arguments and stored[name] == 1:
                tests = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and _is_name(node.left, name)]
                if len(tests) == 1 and tests[0].lineno <= inner.lineno:
                    found.add(name)
    return found


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _obstacle(node: ast.AST, local: set[str]) -> str:
    if isinstance(node, STATEMENTS):
        return f"a {type(node).__name__.lower()} statement"
    if isinstance(node, ast.Name) and node.id in NAMES and node.id not in local:
        return f"`{node.id}`"
    if isinstance(node, ast.Attribute):
        if node.attr in ATTRIBUTES:
            return f"`.{node.attr}`"
        if isinstance(node.ctx, ast.Store):
            return f"a write to `.{node.attr}`"
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return "a write to an element"
    return ""


def _identity_check(node: ast.AST, arguments: set[str]) -> str:
    """Finds `a is b`, except `self.a is None` and `argument is None`: what ops return is never None in a trace.

    arguments: the names of those that are what the caller has passed.
    """
    if not isinstance(node, ast.Compare) or not any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
        return ""
    of_self = isinstance(node.left, ast.Attribute) and _is_name(node.left.value, "self")
    known = of_self or (isinstance(node.left, ast.Name) and node.left.id in arguments)
    if known and all(isinstance(other, ast.Constant) for other in node.comparators):
        return ""
    return "an `is`"


def _global_value(node: ast.AST, local: set[str], scope: dict[str, Any]) -> str:
    """Finds a global that may have another value when the trace is used, and a function that returns a setting."""
    if isinstance(node, ast.Name) and node.id not in local:
        name, value = node.id, scope.get(node.id, getattr(builtins, node.id, None))
    elif isinstance(node, ast.Attribute) and _is_global_function(node.value, local, scope):
        return "an attribute of a function"
    elif isinstance(node, ast.Attribute) and (owner := _module_of(node.value, local, scope)) is not None:
        name, value = f"{owner.__name__}.{node.attr}", getattr(owner, node.attr, None)
        if isinstance(owner, type):
            return "" if isinstance(value, (FunctionType, owner)) else f"the class attribute `{name}`"
        if owner.__name__ in ("torch", "math") and not callable(value):
            return ""  # `torch.float32`, `math.pi`
    else:
        return ""
    word = getattr(value, "__name__", "")
    of_torch = (getattr(value, "__module__", None) or "torch").startswith("torch")
    if callable(value) and of_torch and SETTING.match(word) and word not in NO_SETTING:
        return f"`{name}`"
    return "" if _is_fixed(value) else f"the global `{name}`"


def _module_of(node: ast.AST, local: set[str], scope: dict[str, Any]) -> ModuleType | type | None:
    """Returns the Python module, or the class, that an expression such as `torch.nn.functional` stands for."""
    if isinstance(node, ast.Name) and node.id not in local:
        value = scope.get(node.id)
    elif isinstance(node, ast.Attribute):
        owner = _module_of(node.value, local, scope)
        value = None if owner is None else getattr(owner, node.attr, None)
    else:
        return None
    return value if isinstance(value, (ModuleType, type)) else None


def _is_global_function(node: ast.AST, local: set[str], scope: dict[str, Any]) -> bool:
    return isinstance(node, ast.Name) and node.id not in local and isinstance(scope.get(node.id), FunctionType)


def _is_fixed(value: object) -> bool:
    """Whether a global of this value is a function, a class, or a Python module."""
    return isinstance(value, (FunctionType, ModuleType, type)) or type(value).__name__ in (
        "builtin_function_or_method", "OpOverload", "OpOverloadPacket", "_OpNamespace", "_Ops",
    )  # fmt: skip
