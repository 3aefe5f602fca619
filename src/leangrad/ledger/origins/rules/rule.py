"""`rule`: adds one line to the table of rules, and what such a line means.

A rule names a node of autograd, the node's tensor inputs in the order of its edges, the function that the node's op
ran in forward, and the constants that the node saves (``_saved_<name>``). A replay calls the same function on the same
inputs with autocast off, so the result has the same bits.

    rule("LeakyReluBackward0", "self", F.leaky_relu, "negative_slope")

means ``F.leaky_relu(self, node._saved_negative_slope)``. The names of constants are written in these forms:

``name``      what the node saved as ``name``. If nodes of this type save nothing by that name, as ``?name``.
``?name``     a constant that the node does not save (the eps of a layer norm), or does not save in every case. It is
              read from the note that ``handlers.py`` stored in the node's metadata. Without a note there is no recipe,
              and the tensor is kept.
``@shape``    the shape of the op's output, and ``@dtype`` its dtype; ``@shape[-2:]`` is the end of the shape.
``~result1``  a statistic that the node saved (a mean, a 1/deviation). The function does not need it, but a fused kernel
              applies a norm from it (``fused.py``).
``=result1``  a statistic that the function reads itself.

An input has no edge if it needs no gradient. It is then looked up by its name in the same way: ``other`` is the tensor
that the node saved, or else what the note has (the 1 of ``x + 1``); ``?other`` is what the note has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leangrad._torch import output_facts


@dataclass(frozen=True, eq=False)
class Rule:
    """How one type of autograd node is replayed."""

    node: str  # the type name of the node
    operands: tuple[str, ...]  # names of the tensor inputs, one per edge; ``("*",)``: a list of tensors, one per edge
    function: Callable[..., Any]  # called with the operands, the constants and the keywords
    constants: tuple[str, ...]  # names of further arguments, in the forms above
    keywords: tuple[tuple[str, str], ...]  # keyword arguments: each a keyword, and a name in the forms above
    # The output that this rule rebuilds; None: any.
    output: int | None = None
    numbered: bool = False  # True: ``function`` returns all outputs of the node, and the rule rebuilds any of them
    # True: two such nodes with the same input and constants have one value, which is kept or rebuilt once.
    twins: bool = False
    when: Callable[[Any], bool] | None = None  # whether the rule applies to a given node; None: to all
    product: bool = False  # True: the op is a product, and runs again only where the ledger may run products again


RULES: dict[str, list[Rule]] = {}  # by the type name of the node: rules of all ops but products
PRODUCTS: dict[str, list[Rule]] = {}  # the same for products


def rule(
    node: str,
    operands: str,
    function: Callable[..., Any],
    *constants: str,
    output: int | None = 0,
    numbered: bool = False,
    twins: bool = False,
    when: Callable[[Any], bool] | None = None,
    product: bool = False,
    **keywords: str,
) -> None:
    """Add one op to the table. The head of this file explains the names; the arguments are those of `Rule`."""
    names = tuple(operands.split())
    entry = Rule(node, names, function, constants, tuple(keywords.items()), output, numbered, twins, when, product)
    (PRODUCTS if product else RULES).setdefault(node, []).append(entry)


def on_cpu(node: Any) -> bool:
    """Whether ``node`` ran on a CPU, for ops that give the same bits twice only there: see [Note: the same bits]."""
    return bool(output_facts(node).device.type == "cpu")
