"""Autograd Functions that are written in Python and that the ledger can replay, each by a recipe of its own.

A rule of the table reads a node of ATen by the names of its saved tensors. A Function written in Python has other
attributes, so whoever wrote it says how its output is made again (``know``). Functions that nobody has made known are
never computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from leangrad._torch import HOOK_NODE, node_class, output_nbytes
from leangrad.ledger.values.node_metadata import OPAQUE, Node
from leangrad.ledger.values.value import Value

Replay = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments, values among them


class Walk(Protocol):
    """What is asked here of the walk along the graph, which ``graph_walk.py`` has."""

    sizes: bool  # whether the bytes of outputs are asked for

    def count_step(self) -> None:
        """One node more."""

    def input(self, node: Any, nr: int) -> Value:
        """The value of output ``nr`` of ``node``."""


class NoRecipeError(Exception):
    """This tensor cannot be rebuilt; the argument says why."""


class FunctionRule:
    """How the first output of one Function is made again."""

    __slots__ = ("_applies", "_name", "_replay")

    def __init__(self, name: str, replay: Callable[[Any, Node], Replay], applies: Callable[[Node], bool]) -> None:
        self._name, self._replay, self._applies = name, replay, applies

    def applies(self, node: Node, nr: int) -> bool:
        """Whether output ``nr`` of ``node`` can be made again."""
        return nr == 0 and self._applies(node)

    def __call__(self, walk: Walk, node: Node, nr: int, metadata: dict[Any, Any], made: Any = None) -> Value:
        """The value of that output."""
        if metadata and OPAQUE in metadata:
            raise NoRecipeError(f"the output of {self._name} was changed behind autograd's back")
        walk.count_step()
        value = Value(self._name)
        if walk.sizes:
            value.nbytes = output_nbytes(node, nr)
        value.set_recipe(*self._replay(walk, node), {})
        return value


class _HandedOn:
    """A node that hands on what it is given, output ``nr`` being input ``nr``: both are one value."""

    def applies(self, node: Node, nr: int) -> bool:
        return node.next_functions[nr][0] is not None

    def __call__(self, walk: Walk, node: Node, nr: int, metadata: dict[Any, Any], made: Any = None) -> Value:
        if metadata and OPAQUE in metadata:
            raise NoRecipeError("what a backward hook handed on was changed behind autograd's back")
        walk.count_step()
        return walk.input(*node.next_functions[nr])


FUNCTIONS: dict[type, FunctionRule | _HandedOn] = {}  # by the class of the node


def hands_on(kind: type | None) -> None:
    """Nodes of this class hand on what they are given: full backward hooks, and FSDP2 before a module."""
    if kind is not None:
        FUNCTIONS[kind] = _HandedOn()


hands_on(HOOK_NODE)


def know(
    function: type[torch.autograd.Function],
    replay: Callable[[Any, Node], Replay],
    applies: Callable[[Node], bool] = lambda node: True,
) -> None:
    """Let the ledger rebuild the output of ``function``, the only one, where ``applies(node)``.

    replay: reads off a node which function to call with which arguments; inputs along its edges are
        ``walk.operand(node, i, place)``. The function must give the very bits of the forward, and touch no state.
    """
    kind = node_class(function)
    if kind is not None:
        FUNCTIONS[kind] = FunctionRule(kind.__name__, replay, applies)
