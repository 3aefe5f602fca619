"""Rules for autograd Functions written in Python, so that the ledger can replay them.

A rule of the table in ``rules`` reads a node of ATen by the names of its saved tensors. The node of a Function written
in Python has other attributes, so the module that defines the Function registers how its output is rebuilt, by
`register_rule`. Functions that are not registered are never computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from leangrad._torch import HOOK_NODE, node_class, output_nbytes
from leangrad.ledger.values.node_metadata import OPAQUE, Node
from leangrad.ledger.values.value import Value

Replay = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments, which may be values


class RuleWalk(Protocol):
    """What the rules in this file need of the walk along the graph: see ``graph_walk.Walk``."""

    sizes: bool  # True: ``nbytes`` of new values is set

    def count_step(self) -> None:
        """Count one more node that was visited."""

    def input(self, node: Any, nr: int) -> Value:
        """Returns the value of output ``nr`` of ``node``."""


class NoRecipeError(Exception):
    """Raised in a walk when a tensor cannot be rebuilt; the argument says why."""


class FunctionRule:
    """How the first output of one Function is rebuilt."""

    __slots__ = ("_applies", "_name", "_replay")

    def __init__(self, name: str, replay: Callable[[Any, Node], Replay], applies: Callable[[Node], bool]) -> None:
        self._name, self._replay, self._applies = name, replay, applies

    def applies(self, node: Node, nr: int) -> bool:
        """Whether output ``nr`` of ``node`` can be rebuilt."""
        return nr == 0 and self._applies(node)

    def __call__(self, walk: RuleWalk, node: Node, nr: int, metadata: dict[Any, Any], made: Any = None) -> Value:
        """Returns the value of output ``nr`` of ``node``, with its recipe.

        metadata: that of ``node``. made: not used; rules for nodes of ATen need it.
        """
        if metadata and OPAQUE in metadata:
            raise NoRecipeError(f"the output of {self._name} was changed behind autograd's back")
        walk.count_step()
        value = Value(self._name)
        if walk.sizes:
            value.nbytes = output_nbytes(node, nr)
        value.set_recipe(*self._replay(walk, node), {})
        return value


class _IdentityRule:
    """The rule of a node that returns its inputs: output ``nr`` is input ``nr``, so both have one value."""

    def applies(self, node: Node, nr: int) -> bool:
        return node.next_functions[nr][0] is not None

    def __call__(self, walk: RuleWalk, node: Node, nr: int, metadata: dict[Any, Any], made: Any = None) -> Value:
        if metadata and OPAQUE in metadata:
            raise NoRecipeError("what a backward hook handed on was changed behind autograd's back")
        walk.count_step()
        return walk.input(*node.next_functions[nr])


FUNCTIONS: dict[type, FunctionRule | _IdentityRule] = {}  # by the class of the node


def register_identity(kind: type | None) -> None:
    """Register a class of nodes that return their inputs: those of full backward hooks, and of FSDP2.

    kind: the class; None: there is no such class, and nothing is registered.
    """
    if kind is not None:
        FUNCTIONS[kind] = _IdentityRule()


register_identity(HOOK_NODE)


def register_rule(
    function: type[torch.autograd.Function],
    replay: Callable[[Any, Node], Replay],
    applies: Callable[[Node], bool] = lambda node: True,
) -> None:
    """Register how the ledger rebuilds the output of ``function``, which must have only one.

    replay: called as ``replay(walk, node)``; returns the function to call and its arguments. It gets the inputs along
        the edges of the node by ``walk.operand(node, i, place)``. The function must give the same bits as forward did,
        and change no state.
    applies: whether the output of a given node can be rebuilt.
    """
    kind = node_class(function)
    if kind is not None:
        FUNCTIONS[kind] = FunctionRule(kind.__name__, replay, applies)
