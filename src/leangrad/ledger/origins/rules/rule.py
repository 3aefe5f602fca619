"""What a line of the table means.

A rule names a node of autograd, the node's tensor inputs in the order of its edges, the function that autograd's op is,
and the constants that the node remembers (``_saved_<name>``). Replaying calls that very function on the very inputs
below autocast, so the result has the same bits.

    rule("LeakyReluBackward0", "self", F.leaky_relu, "negative_slope")

means ``F.leaky_relu(self, node._saved_negative_slope)``. Where a node forgets a constant (``x + 1``, the eps of a layer
norm) the constant is written ``?name`` and comes from the note that ``handlers.py`` left on the node; where there is no
note there is no recipe, and the tensor is kept. An input without an edge (it needs no gradient) is looked up by its
name in the same way: ``other`` is what the node saved, ``?other`` is for nodes that save it only at times. ``@shape``
and ``@dtype`` are those of the op's output. ``~result1`` is a statistic that the node saved (a mean, a 1/deviation):
the function does not need it, but a fused kernel applies a norm from it (``fused.py``); ``=result1`` is one that the
function reads itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leangrad._torch import output_facts


@dataclass(frozen=True, eq=False)
class Rule:
    """How one kind of node replays."""

    node: str
    operands: tuple[str, ...]  # one per edge; ``("*",)``: a list of tensors, one per edge
    function: Callable[..., Any]
    constants: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]
    # The output that this rule rebuilds; None: the only one.
    output: int | None = None
    numbered: bool = False  # ``function`` gives all outputs of the node, and the value is one of them
    # Two such nodes over one input with the same constants are the same tensor: kept or rebuilt once.
    twins: bool = False
    when: Callable[[Any], bool] | None = None  # the nodes that this rule is for
    product: bool = False  # it is a product: run twice only where the ledger was told so


RULES: dict[str, list[Rule]] = {}
PRODUCTS: dict[str, list[Rule]] = {}  # those of products


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
    """Enter one op in the table. See the head of this file."""
    names = tuple(operands.split())
    entry = Rule(node, names, function, constants, tuple(keywords.items()), output, numbered, twins, when, product)
    (PRODUCTS if product else RULES).setdefault(node, []).append(entry)


def on_cpu(node: Any) -> bool:
    """For ops that give the same bits twice on a CPU only: see [Note: the same bits]."""
    return bool(output_facts(node).device.type == "cpu")
