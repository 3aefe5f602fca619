"""Static proof that autograd records every change that a forward makes to a tensor.

A step that runs without the function mode (``learn/unwatched.py``) does not see what changes a tensor. A recipe that
runs through a tensor of the graph is then right only if autograd has recorded every change of it: not one made while
gradients are disabled, through a detached alias, through memory that has left torch, or by code in another language. A
search for names by which code does such things cannot be complete: there is always another name. So this search is the
opposite one. It follows the forward of a model through its syntax trees, knows which module, function or number each
name stands for, and admits only what it knows: functions of torch and methods of tensors that are listed in
``allowed.py``, layers of `torch.nn`, and functions and modules in Python, which it follows in turn. If anything else
occurs, in any branch that no fact excludes, there is no proof.

The proof is one for any numbers and tensors: it does not depend on shapes, on the numbers that a model holds, or on
branches that these decide. What it does depend on are its `Facts`: the function that a name of a file stands for, the
code of the functions that were followed, switches and other objects that modules hold. They are compared in each step.

[Note: running statistics] A batch norm changes its running mean and variance without moving their version counters. In
training nothing in backward reads them. So they may be arguments of norms, but of no other op.

[Note: what others hold] Whatever a caller passes to forward has to be data: tensors of torch's own class, numbers, and
lists of such. Others may hold an argument, a parameter or a buffer under another version counter, as ``x.data`` does.
So a forward with a proof changes none of them in place, nor what may be a view of one.

[Note: one constant] The node of a layer norm does not store its eps, nor that of a copy its memory format, so a recipe
needs them from the call, which only the function mode sees. But if all calls in the forward that make nodes of one type
have the same constant, a node has that one, whichever call it was. So the search notes the constant of every such call:
a number in the code, or the eps of a module, whose value is then a fact. Where calls have several, the mode stays.
(Copies that torch makes by itself, as in a ``reshape``, are contiguous; a group norm's are not always.) And the bias of
a batch norm that has no edge in the graph is None, and not frozen, if no batch norm of the model has one.

    prove, Facts        the proof of a model; what it relies on
    sizes_of            the sizes of the arguments of a forward, if they are what a proof assumes
    search, Search      the search: what calls of functions, methods and modules may do
    lookups, Lookups    its base class: attributes, elements and truth of the objects that a forward names
    python_calls        what Python's own functions return: isinstance, zip, getattr
    frame, Frame        the statements of one function, in all of its branches
    expressions, Expressions, Searcher  its base class: the expressions; the protocol of the search that they need
    static_values, Value  what is known of a value: data, one of some objects, a row or a group of values
    Data, Known, Row, Group, List, ListMethod, Method, OfTensor, Parent, NoKeywords  the kinds of values
    Unproven            raised where the code does something that the proof does not know
    source, tree_of     the syntax tree of a function, checked against its code
    allowed             the functions, methods and layers that are admitted
"""

from __future__ import annotations

from typing import Any

from torch import nn

from leangrad.ledger.observe.proof.facts import EXACT, PLAIN, Facts
from leangrad.ledger.observe.proof.search import Search
from leangrad.ledger.observe.proof.static_values import Unproven

__all__ = ["Facts", "prove", "sizes_of", "why_not"]


def prove(module: nn.Module) -> Facts | None:
    """Return the facts on which the proof for the forward of ``module`` rests; None if there is no proof."""
    found = why_not(module)
    return found if isinstance(found, Facts) else None


def why_not(module: nn.Module) -> Facts | str:
    """Return the facts of the proof, or why there is none."""
    search = Search()
    try:
        search.run(module)
    except Unproven as why:
        return str(why.args[0])
    except Exception as error:  # the attributes of a user's class may raise anything when they are looked into
        return repr(error)
    return search.facts


def sizes_of(batch: Any) -> list[int] | None:
    """Return how many elements each tensor among the arguments of a forward has; None if others than data are there.

    See [Note: what others hold].
    """
    found: list[int] = []
    return found if _add_sizes(batch, found) else None


def _add_sizes(batch: Any, found: list[int]) -> bool:
    kind = type(batch)
    if kind in EXACT:
        found.append(0 if batch is None else batch.numel())
        return True
    if kind is dict:
        return all(kind_ in PLAIN for kind_ in map(type, batch)) and _add_sizes(list(batch.values()), found)
    return kind in PLAIN or (kind in (tuple, list) and False not in [_add_sizes(one, found) for one in batch])
