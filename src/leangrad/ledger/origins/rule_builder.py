"""Compiles a rule for the nodes of one type into a function that makes the value of a node's output.

``origin_of`` compiles it when a walk meets the first node of a type, because what a rule reads of a node (which
attributes it has, how many edges) is the same for all nodes of a type. The function is called as
``origin(walk, node, nr, metadata, made)``. ``made`` is the output itself if the caller has it, else None: torch takes
some microseconds to say which shape and dtype the output of a node had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from leangrad._torch import output_facts, output_nbytes
from leangrad.ledger.origins.functions import FUNCTIONS, NoRecipeError
from leangrad.ledger.origins.rules import PRODUCTS, RULES, Rule
from leangrad.ledger.origins.rules.products import FOLLOWS, with_exact_strides
from leangrad.ledger.values.node_metadata import OPAQUE, Node, join
from leangrad.ledger.values.rebuild.replays import fuses
from leangrad.ledger.values.value import Value

Origin = Callable[..., Value]  # called with a walk, a node, the number of its output, its metadata, and that output
# Finds an argument of a rule's function. It is called with a walk, a node, the node's metadata and the node's output.
Getter = Callable[[Any, Node, dict[Any, Any], Any], Any]

LISTED = ("*",)  # the operands of a rule whose op takes a list of tensors
HALF = 1 << 63  # from here on a number of 64 bits is negative


class NodeRule:
    """A compiled rule for the nodes of one type: when it applies, and the function ``origin``."""

    __slots__ = ("origin", "output", "when")

    def __init__(self, rule: Rule, node: Node) -> None:
        self.output = None if rule.numbered else rule.output  # the output that it rebuilds; None: any
        self.when = rule.when  # which nodes of the type it applies to; None: all
        self.origin = _build(rule, node)


_NODE_RULES: dict[type, tuple[NodeRule, ...]] = {}  # by type of node
ONLY: dict[type, Origin] = {}  # the function for output 0, by types of nodes that have one rule, which always applies
_PRODUCT_RULES: dict[type, tuple[NodeRule, ...]] = {}  # by type of node, the rules of products


def origin_of(node: Node, nr: int) -> Origin | None:
    """Returns the function that makes the value of output ``nr`` of ``node``; None: the op is never computed twice."""
    kind = type(node)
    if nr == 0 and kind in ONLY:
        return ONLY[kind]
    rules = _NODE_RULES.get(kind)
    if rules is None:
        known = FUNCTIONS.get(kind)
        if known is not None:
            return known if known.applies(node, nr) else None
        rules = _NODE_RULES[kind] = tuple([NodeRule(rule, node) for rule in RULES.get(kind.__name__, ())])
        if len(rules) == 1 and rules[0].when is None and not rules[0].output:
            ONLY[kind] = rules[0].origin
    return _serving(rules, node, nr)


def product_of(node: Node, nr: int) -> Origin | None:
    """Returns the function that makes the value of output ``nr`` of ``node`` if a rule of a product applies, else None.

    The ledger uses it only where it may compute products twice.
    """
    kind = type(node)
    rules = _PRODUCT_RULES.get(kind)
    if rules is None:
        rules = _PRODUCT_RULES[kind] = tuple([NodeRule(rule, node) for rule in PRODUCTS.get(kind.__name__, ())])
    return _serving(rules, node, nr)


def _serving(rules: tuple[NodeRule, ...], node: Node, nr: int) -> Origin | None:
    for rule in rules:
        if (rule.output is None or rule.output == nr) and (rule.when is None or rule.when(node)):
            return rule.origin
    return None


def forget() -> None:
    """Drop all compiled rules, so that they are compiled again. To be called when a rule has changed."""
    _NODE_RULES.clear()
    _PRODUCT_RULES.clear()
    ONLY.clear()


# ----------------------------------------------------------------------------------------------- the function of a rule


def _build(rule: Rule, node: Node) -> Origin:
    """Compile ``rule`` for the nodes of the type of ``node``."""
    kind, is_listed = type(node), rule.operands == LISTED
    statistics = tuple([name[1:] for name in rule.constants if name[0] in "=~"])
    others = rule.constants[: len(rule.constants) - len(statistics)]
    assert not any(name[0] in "=~" for name in others), f"the statistics of {rule.node} come last"
    # An op with several operands may run in place, in the dtype of the first. A norm does not: its function always
    # gives the dtype that forward gave.
    has_dtype = len(rule.operands) > 1 and not statistics
    asks_output = has_dtype or any(name[0] == "@" for name in (*others, *dict(rule.keywords).values()))
    operands = () if is_listed else tuple([_getter(name, kind) for name in rule.operands])
    constants = tuple([_getter(name, kind) for name in others])
    keywords = tuple([(key, _getter(name, kind)) for key, name in rule.keywords])
    if statistics and rule.constants[-1][0] == "~" and not fuses():  # only fused kernels read "~" statistics
        statistics = ()
    op, function, twins, numbered = rule.node, rule.function, rule.twins, rule.numbered
    is_product, names, follows = rule.product, rule.operands, function in FOLLOWS

    def origin(walk: Any, node: Node, nr: int, metadata: dict[Any, Any], made: Any = None) -> Value:
        if metadata and OPAQUE in metadata:
            raise NoRecipeError(f"the output of {op} was changed under no_grad or through .data")
        walk.count_step()
        value = Value(op)
        if walk.sizes:
            value.nbytes = output_nbytes(node, nr)
        edges = node.next_functions
        if asks_output and made is None:
            made = output_facts(node)
        args = [walk.listed(node, edges, metadata)] if is_listed else []
        for (source, k), get in zip(edges, operands, strict=False):
            args.append(get(walk, node, metadata, made) if source is None else walk.input(source, k))
        if is_product:
            value.is_product, value.settings = True, walk.settings(node)
            args = [with_exact_strides(node, name, a) for name, a in zip(names, args, strict=True)]
        if twins and is_from_elsewhere(args[0], edges[0][0], edges[0][1], made):
            raise NoRecipeError("a copy from another device")
        for get in constants:
            args.append(get(walk, node, metadata, made))
        if statistics:
            args += walk.statistics(node, getattr(node, "_raw_saved_" + statistics[0]), statistics)
        value.function, value.args = function, tuple(args)
        if twins and (twin := twin_of(args[0], value.args, value)) is not None:
            return twin
        if keywords:
            value.kwargs = {key: get(walk, node, metadata, made) for key, get in keywords}
        if walk.max_products:
            value.max_products = walk.max_products
            if follows and args[0].free:  # the cast or view of a weight begins no lineage
                value.free = True
        value.read_arguments()
        if numbered:
            value.part = nr
            join(node, nr, value)
        if has_dtype:
            value.dtype = made.dtype
        return value

    return origin


def _getter(name: str, kind: type) -> Getter:
    """Returns the function that finds an argument of a rule at nodes of type ``kind``.

    name: as it is written in a rule, see ``rules/rule.py``.
    """
    if name == "@dtype":
        return lambda walk, node, metadata, made: made.dtype
    if name[0] == "@":  # ``@shape``, or the end of it: ``@shape[-2:]``
        first = int(name.partition("[")[2].rstrip(":]") or 0)
        return lambda walk, node, metadata, made: tuple(made.shape)[first:]
    raw, saved, noted = "_raw_saved_" + name, "_saved_" + name, name.lstrip("?")
    if hasattr(kind, raw):
        return lambda walk, node, metadata, made: walk.saved(node, getattr(node, raw), name, True)
    if hasattr(kind, saved):
        return lambda walk, node, metadata, made: signed(getattr(node, saved))
    return lambda walk, node, metadata, made: walk.noted(node, noted, metadata)


def signed(constant: Any) -> Any:
    """Returns ``constant`` with its sign: nodes return negative dimensions as unsigned numbers of 64 bits."""
    kind = type(constant)
    if kind is int:
        return constant if constant < HALF else constant - 2 * HALF
    if kind is tuple or kind is list:
        return tuple([c if type(c) is int and c < HALF else signed(c) for c in constant])
    return constant


def is_from_elsewhere(value: Value, node: Node, nr: int, made: Any) -> bool:
    """Whether ``value``, which is output ``nr`` of ``node``, lies on another device than ``made``.

    All ops but copies compute where their operands are, so it is enough to look at one anchor of the recipe. Only a
    tensor without dimensions may lie on the CPU while the op runs elsewhere; then the node is looked up.
    """
    anchor = value
    while anchor.tensor is None and anchor.inputs:
        anchor = anchor.inputs[0]
    tensor = anchor.tensor
    if tensor is not None and tensor.device == made.device and tensor.dim():
        return False
    return bool(output_facts(node, nr).device != made.device)


def twin_of(parent: Value, args: tuple[Any, ...], value: Value) -> Value | None:
    """Returns the value that the same function already made of ``parent`` with the same arguments.

    If there is none, returns None and registers ``value`` for later calls.
    """
    if parent.casts is None:
        parent.casts = {}
    ref = parent.casts.get(args[1:])
    twin = ref() if ref is not None else None
    if twin is None:
        parent.casts[args[1:]] = weakref.ref(value)
    return twin
