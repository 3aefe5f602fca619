"""A rule, written out for the nodes of one type: straight code that makes the value of a node's output.

[Note: a rule as straight code]
A step makes hundreds of recipes, each of several ops, and on many a GPU the host is the limit. What a rule asks of a
node (which attributes, how many edges, which constants) is the same for all nodes of a type. So when
the first node of a type is met, its rules are written out, as ``dataclass`` writes out ``__init__``:

    def origin(walk, node, nr, metadata, made=None):  # LeakyReluBackward0
        if metadata and OPAQUE in metadata:
            raise NoRecipeError(CHANGED)
        walk.steps += 1
        if walk.steps > MAX_WALK:
            raise NoRecipeError(FAR)
        value = Value(OP)
        if walk.sizes:
            value.nbytes = output_nbytes(node, nr)
        edges = node.next_functions
        b0, k = edges[0]
        if b0 is not None:
            a0 = walk.input(b0, k)
        else:
            a0 = walk.saved(node, node._raw_saved_self, 'self', True)
        c0 = node._saved_negative_slope
        if type(c0) not in UNSIGNED:
            c0 = signed(c0)
        value.function, value.args = FUNCTION, (a0, c0)
        if b0 is not None:
            value.read_one(a0)
        else:
            value.read_arguments()
        return value

``made`` is the tensor itself, where it is at hand: torch takes its time to tell what the output of a node was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from leangrad._codegen import compiled
from leangrad._torch import output_facts, output_nbytes
from leangrad.ledger.origins.functions import FUNCTIONS, NoRecipeError
from leangrad.ledger.origins.rules import RULES, Rule
from leangrad.ledger.values.node_metadata import OPAQUE, AccumulateGrad, Node, join
from leangrad.ledger.values.value import Value, fuses

Origin = Callable[..., Value]  # of a walk, a node, the number of its output, its metadata, and the output itself

LISTED = ("*",)
UNSIGNED = (float, bool, str, type(None))  # constants that are what they are
HALF = 1 << 63
MAX_WALK = 64  # nodes between a tensor and its anchors; beyond that the tensor is kept


class Form:
    """A rule for the nodes of one type: when it serves, and the code that it is."""

    __slots__ = ("origin", "output", "when")

    def __init__(self, rule: Rule, node: Node) -> None:
        self.output = None if rule.numbered else rule.output  # None: all of them
        self.when = rule.when
        self.origin = _compile(rule, node)


_FORMS: dict[type, tuple[Form, ...]] = {}
ONLY: dict[type, Origin] = {}  # of output 0, for the types that have one form for that, always


def origin_of(node: Node, nr: int) -> Origin | None:
    """What makes the value of output ``nr`` of ``node``; None: the op is never computed twice."""
    kind = type(node)
    if nr == 0 and kind in ONLY:
        return ONLY[kind]
    forms = _FORMS.get(kind)
    if forms is None:
        known = FUNCTIONS.get(kind)
        if known is not None:
            return known if known.applies(node, nr) else None
        forms = _FORMS[kind] = tuple([Form(rule, node) for rule in RULES.get(kind.__name__, ())])
        if len(forms) == 1 and forms[0].when is None and not forms[0].output:
            ONLY[kind] = forms[0].origin
    for form in forms:
        if (form.output is None or form.output == nr) and (form.when is None or form.when(node)):
            return form.origin
    return None


def forget() -> None:
    """A rule has changed: write all out anew."""
    _FORMS.clear()
    ONLY.clear()


# --------------------------------------------------------------------------------------------------- the code of a rule


def _compile(rule: Rule, node: Node) -> Origin:
    scope: dict[str, Any] = {
        **KNOWN,
        "FUNCTION": rule.function,
        "OP": rule.node,
        "CHANGED": f"the output of {rule.node} was changed under no_grad or through .data",
        "FAR": f"more than {MAX_WALK} ops lie between it and the nearest kept tensors",
    }
    exec(compiled(source(rule, node), f"rule for {rule.node}"), scope)
    return scope["origin"]  # type: ignore[no-any-return]


def source(rule: Rule, node: Node) -> str:
    """The code of ``rule`` for nodes like ``node``: see [Note: a rule as straight code]."""
    lines = [
        "if metadata and OPAQUE in metadata:",
        "    raise NoRecipeError(CHANGED)",
        "walk.steps += 1",
        "if walk.steps > MAX_WALK:",
        "    raise NoRecipeError(FAR)",
        "value = Value(OP)",
        "if walk.sizes:",
        "    value.nbytes = output_nbytes(node, nr)",
        "edges = node.next_functions",
    ]
    operands = _operands(rule, node, lines)
    facts = [*rule.constants, *(name for _, name in rule.keywords)]
    # A norm is never computed in place: its function tells the dtype.
    has_dtype = len(rule.operands) > 1 and not any(name[0] in "=~" for name in facts)
    if has_dtype or any(name[0] == "@" for name in facts):
        lines += ["if made is None:", "    made = output_facts(node)"]
    if rule.twins:
        lines += ["if is_from_elsewhere(a0, b0, k, made):", "    raise NoRecipeError('a copy from another device')"]
    constants, plain, values = [], "", list(operands)  # values: those among the arguments that are values, as a rule
    statistics = tuple(name for name in rule.constants if name[0] in "=~")
    others = rule.constants[: len(rule.constants) - len(statistics)]
    assert others + statistics == rule.constants, f"the statistics of {rule.node} come last"
    for i, name in enumerate(others):
        constants.append(f"c{i}")
        if _assign(f"c{i}", name, node, lines) == UNSURE:
            plain += f" and type(c{i}) is not Value and type(c{i}) is not tuple"
    if statistics and (statistics[0][0] == "=" or fuses()):  # only fused kernels read the others
        read = [f"s{i}" for i in range(len(statistics))]
        names = _tuple([repr(name[1:]) for name in statistics])
        lines.append(f"{_tuple(read)} = walk.statistics(node, node._raw_saved_{statistics[0][1:]}, {names})")
        constants += read
        values += read
        plain += "".join(f" and type({name}) is Value" for name in read)
    arguments = _tuple(operands + constants)
    if rule.twins:
        lines += [
            f"twin = twin_of(a0, {arguments}, value)",
            "if twin is not None:",
            "    return twin",
        ]
    lines.append(f"value.function, value.args = FUNCTION, {arguments}")
    if rule.keywords:
        for i, (_, name) in enumerate(rule.keywords):
            _assign(f"d{i}", name, node, lines)
        keywords = ", ".join(f"{key!r}: d{i}" for i, (key, _) in enumerate(rule.keywords))
        lines.append(f"value.kwargs = {{{keywords}}}")
    lines += _reads(rule, operands, values, operands + constants, plain)
    if rule.numbered:
        lines += ["value.part = nr", "join(node, nr, value)"]
    if has_dtype:
        lines.append("value.dtype = made.dtype")
    lines.append("return value")
    head = f"def origin(walk, node, nr, metadata, made=None):  # {rule.node}\n"
    return head + "".join(f"    {line}\n" for line in lines)


def _tuple(names: list[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def _operands(rule: Rule, node: Node, lines: list[str]) -> list[str]:
    """The names of the inputs along the edges, and the code that finds them."""
    if rule.operands == LISTED:
        lines.append("a0 = walk.listed(edges, metadata)")
        return ["a0"]
    names = []
    for i, name in enumerate(rule.operands[: len(node.next_functions)]):
        lines.append(f"b{i}, k = edges[{i}]")
        if rule.twins:
            cast = "    return walk.cast(value, node, b0.variable, FUNCTION, made)"
            lines += ["if type(b0) is AccumulateGrad:", cast]
        branch = "if"
        if name in ("weight", "bias"):  # most often a parameter
            lines += [f"if type(b{i}) is AccumulateGrad:", f"    a{i} = walk.leaf(b{i}.variable)"]
            branch = "elif"
        lines += [f"{branch} b{i} is not None:", f"    a{i} = walk.input(b{i}, k)", "else:"]
        inner: list[str] = []
        _assign(f"a{i}", name, node, inner)
        lines += ["    " + line for line in inner]
        names.append(f"a{i}")
    return names


def _reads(rule: Rule, operands: list[str], values: list[str], args: list[str], plain: str) -> list[str]:
    """The code that tells the value which values it is made of, where the arguments are what they are as a rule."""
    if rule.operands == LISTED:
        return ["value.read_arguments()"]
    edges = " and ".join(f"b{i} is not None" for i in range(len(operands)))
    lines = [f"if {edges}{plain}:"]
    if len(values) == 1:
        lines.append("    value.read_one(a0)")
    elif values == ["a0", "a1"]:
        lines += ["    value.read_two(a0, a1)", f"elif b0 is not None and type(a1) is not Value{plain}:"]
        lines.append("    value.read_one(a0)")  # the other is a number
    else:
        places = _tuple([str(args.index(v)) for v in values])
        lines.append(f"    value.read_values({_tuple(values)}, {places})")
    return [*lines, "else:", "    value.read_arguments()"]


def _assign(to: str, name: str, node: Node, lines: list[str]) -> str:
    """The code that finds a constant, written as rules write it; and what it may turn out to be."""
    kind = type(node)
    if name[0] == "@":  # ``shape``, ``shape[-2:]`` or ``dtype``
        fact, bracket, part = name[1:].partition("[")
        lines.append(f"{to} = tuple(made.{fact}){bracket}{part}" if fact == "shape" else f"{to} = made.{fact}")
        return PLAIN
    if name[0] != "?" and hasattr(kind, "_raw_saved_" + name):
        lines.append(f"{to} = walk.saved(node, node._raw_saved_{name}, {name!r}, True)")
        return UNSURE
    if name[0] != "?" and hasattr(kind, "_saved_" + name):
        lines += [f"{to} = node._saved_{name}", f"if type({to}) not in UNSIGNED:", f"    {to} = signed({to})"]
        return PLAIN
    lines.append(f"{to} = walk.noted(node, {name.lstrip('?')!r}, metadata)")
    return UNSURE


# What a constant may turn out to be: never a value; a value or a number or several of them.
PLAIN, UNSURE = "plain", "unsure"


def signed(constant: Any) -> Any:
    """Nodes hand out negative dimensions as unsigned numbers."""
    kind = type(constant)
    if kind is int:
        return constant if constant < HALF else constant - 2 * HALF
    if kind is tuple or kind is list:
        return tuple([c if type(c) is int and c < HALF else signed(c) for c in constant])
    return constant


def is_from_elsewhere(value: Value, node: Node, nr: int, made: Any) -> bool:
    """Whether ``value``, output ``nr`` of ``node``, lies on another device than ``made``.

    All ops but copies compute where their operands are, so an anchor of its recipe tells; but for numbers, which lie on
    the CPU.
    """
    anchor = value
    while anchor.tensor is None and anchor.inputs:
        anchor = anchor.inputs[0]
    tensor = anchor.tensor
    if tensor is not None and tensor.device == made.device and tensor.dim():
        return False
    return bool(output_facts(node, nr).device != made.device)


def twin_of(parent: Value, args: tuple[Any, ...], value: Value) -> Value | None:
    """The value that the same function already made of the same input; else ``value`` is entered as that one."""
    if parent.children is None:
        parent.children = {}
    ref = parent.children.get(args[1:])
    twin = ref() if ref is not None else None
    if twin is None:
        parent.children[args[1:]] = weakref.ref(value)
    return twin


# What the code of a rule may name.
KNOWN: dict[str, Any] = {"AccumulateGrad": AccumulateGrad, "MAX_WALK": MAX_WALK, "OPAQUE": OPAQUE, "UNSIGNED": UNSIGNED}
KNOWN |= {
    f.__name__: f for f in (NoRecipeError, Value, is_from_elsewhere, join, output_facts, output_nbytes, signed, twin_of)
}
