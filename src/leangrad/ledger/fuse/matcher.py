"""A pattern as Python code: a function that compares a chain with it, and one that fetches the tensors of its leaves.

[Note: a pattern is code]
A pattern is made once and compared thousands of times, while the device waits for the host. So its rows are not looped
over: they are written out as one function, in which ``a2_1`` is argument 1 of the value of row 2. The text says only
what is connected with what. All that is compared with stands beside it as ``k0``, ``k1``, ..., so chains that differ in
shapes, dtypes or constants share one compiled text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leangrad._codegen import compiled
from leangrad._torch import raw_stream
from leangrad.ledger.fuse.chain import TABLE, Taken, is_number
from leangrad.ledger.values.value import Value

Places = tuple[tuple[int, int], ...]
SINGLE = (type(None), bool, torch.dtype, torch.memory_format, torch.layout)  # equal only where they are one object


class Row(NamedTuple):
    """One value of a chain, and where its arguments are. Who reads it is a row before this one, by number."""

    op: str
    reader: tuple[int, int]  # who reads it first, and as which argument; of the root there is none
    again: Places  # who else reads it
    look: tuple[Any, ...]  # what ``look_at_value`` gives
    dtype: torch.dtype | None
    kwargs: dict[str, Any]
    readers: int
    parents: int
    is_to_come: bool  # readers are to come
    is_held: bool  # for recipes
    length: int  # of its arguments
    numbers: Places  # and which of the chain's each is
    constants: tuple[tuple[int, Any], ...]
    leaves: Places  # and which of the chain's each is


class Kind(NamedTuple):
    """What a program depends on in a tensor that it reads."""

    look: tuple[torch.dtype, torch.Size, torch.device]
    stride: tuple[int, ...] | None  # None: contiguous, which means certain strides here and is sooner asked
    may_be_negated: bool  # it may be a part of a complex tensor, negated only when it is read: no program does that


class Leaf(NamedTuple):
    """What a chain reads."""

    is_kept: bool
    is_op: bool  # its function takes part in chains
    is_made: bool  # it was kept or held, or made in this rebuild, before the leaves were taken
    kind: Kind | None  # of its tensor, where that is known


# The values of a chain from the root down; its leaves and its numbers in the chain's own order.
Found = tuple[tuple[Value, ...], tuple[Value, ...], list[float]]
# The tensors of its leaves, and whether each is owned (None: none is); its numbers; the values to leave tensors with.
Fetched = tuple[tuple[Tensor, ...], tuple[bool, ...] | None, list[float], tuple[Value, ...]]
Match = Callable[[Value, dict[int, Tensor], int], Found | None]
Fetch = Callable[[Found, dict[int, Tensor], int, Taken], Fetched | None]

look_at_value = attrgetter("function", "dtype", "layout", "kwargs", "readers", "parents")
look_at_tensor = attrgetter("dtype", "shape", "device")


def kind_of(tensor: Tensor) -> Kind:
    """The kind of a tensor. A dimension of size 1 may have any stride, and a part of a complex tensor has even ones."""
    stride = tensor.stride()
    contiguous = tensor.is_contiguous() and all(n > 1 for n in tensor.shape)
    return Kind(look_at_tensor(tensor), None if contiguous else stride, not any(s % 2 for s in stride))


class _Text:
    """A function while it is written: its lines, and the constants that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}

    def add(self, *lines: str) -> None:
        """Go on with these lines."""
        self.lines += lines

    def refuse(self, differences: Sequence[str], indent: str = "") -> None:
        """Give None where one of these holds."""
        if differences:
            self.add(f"{indent}if {' or '.join(differences)}:", f"{indent}    return None")

    def name(self, constant: Any) -> str:
        """The name of a constant."""
        name = f"k{len(self.constants)}"
        self.constants[name] = constant
        return name

    def function(self, name: str, parameters: str) -> Any:
        """The function of these lines."""
        scope = {**SCOPE, **self.constants}
        exec(_compiled(f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in self.lines)), scope)
        return scope.pop(name)  # or the function and its scope were a cycle


@cache
def _compiled(text: str) -> CodeType:
    return compiled(text, "pattern")


def _row_of(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _names_of(rows: Sequence[Row]) -> list[str]:
    """The names of values: the root's, and those of the arguments as which the others are read first."""
    return ["root", *("a{}_{}".format(*row.reader) for row in rows[1:])]


# ---- comparing -------------------------------------------------------------------------------------------------------


def write_match(rows: Sequence[Row], leaves: Sequence[Leaf]) -> Match:
    """``match(root, made, task)``: the values of the chain under ``root`` if it is like this one, else None."""
    text, names = _Text(), _names_of(rows)
    read: dict[int, str] = {}  # the leaves
    scalars: dict[int, str] = {}
    for k, (row, name) in enumerate(zip(rows, names, strict=True)):
        arguments = [f"a{k}_{i}" for i in range(row.length)]
        text.add(f"# {row.op}")
        text.refuse(_unlike_value(text, row, name) if k else _unlike_root(text, row))
        text.add(f"{_row_of(arguments)} = {name}.args")
        text.refuse(_unlike_constants(text, row, arguments))
        for i, n in row.leaves:
            if n in read:
                text.refuse([f"{arguments[i]} is not {read[n]}"])
            else:
                read[n] = arguments[i]
                text.refuse(_unlike_leaf(text, leaves[n], arguments[i]))
        scalars |= {n: f"float({arguments[i]})" for i, n in row.numbers}
    ordered = [read[n] for n in range(len(leaves))]
    if len(leaves) > 1:
        text.refuse([f"len({{{', '.join(ordered)}}}) != {len(leaves)}"])
    text.add(f"return {_row_of(names)}, {_row_of(ordered)}, [{', '.join(scalars[n] for n in sorted(scalars))}]")
    lines = [f"    {line}" for line in text.lines]
    otherwise = "except (AttributeError, ValueError):  # an argument that is no value; more arguments, or fewer"
    text.lines = ["try:", *lines, otherwise, "    return None"]
    match: Match = text.function("match", "root, made, task")
    return match


def _unlike_root(text: _Text, row: Row) -> list[str]:
    """Its function and layout are the key under which the pattern stands."""
    return [f"root.dtype is not {text.name(row.dtype)}", f"root.kwargs != {text.name(row.kwargs)}"]


def _unlike_value(text: _Text, row: Row, name: str) -> list[str]:
    """What it is; and what decides whether it is worth making here: who still reads it, and whether it is held."""
    unlike = [
        f"{name}.tensor is not None",
        f"{name}.memo is not None",
        f"look_at_value({name}) != {text.name(row.look)}",
    ]
    if row.readers:
        is_done = f"{name}.reads >= {row.readers} and {name}.task == task"
        unlike.append(is_done if row.is_to_come else f"not ({is_done})")
    if row.parents > 1:
        unlike += [f"{name}._is_held() is not {row.is_held}", f"id({name}) in made"]
    return unlike + [f"a{user}_{i} is not {name}" for user, i in row.again]


def _unlike_constants(text: _Text, row: Row, arguments: list[str]) -> list[str]:
    unlike = [f"not is_number({arguments[i]})" for i, _ in row.numbers]
    for i, constant in row.constants:
        if type(constant) in SINGLE:
            unlike.append(f"{arguments[i]} is not {text.name(constant)}")
        else:  # True, 1 and 1.0 are equal
            unlike.append(f"type({arguments[i]}) is not {text.name(type(constant))}")
            unlike.append(f"{arguments[i]} != {text.name(constant)}")
    return unlike


def _unlike_leaf(text: _Text, leaf: Leaf, name: str) -> list[str]:
    """Of what kind a kept one is; of any other, whether it is no more and no less at hand."""
    if leaf.is_kept:
        tensor = f"t{name[1:]}"
        return [f"({tensor} := {name}.tensor) is None", *_unlike_kind(text, leaf.kind, tensor)]
    is_made = f"{name}.memo is not None or id({name}) in made"
    return [
        f"{name}.tensor is not None",
        f"({name}.function in TABLE) is not {leaf.is_op}",
        f"not ({is_made})" if leaf.is_made else is_made,
    ]


def _unlike_kind(text: _Text, kind: Kind | None, tensor: str) -> list[str]:
    assert kind is not None
    return [
        f"look_at_tensor({tensor}) != {text.name(kind.look)}",
        f"not {tensor}.is_contiguous()" if kind.stride is None else f"{tensor}.stride() != {text.name(kind.stride)}",
        *([f"{tensor}.is_neg()"] if kind.may_be_negated else []),
    ]


# ---- fetching --------------------------------------------------------------------------------------------------------


def write_fetch(
    rows: Sequence[Row], leaves: Sequence[Leaf], outputs: Sequence[int], device: torch.device | None
) -> Fetch:
    """``fetch(found, made, task, taken)``: what a launch needs; None if the chain is another one now.

    To rebuild a leaf, values of this very chain may have been rebuilt, and are held: they are leaves from then on.
    What is made already is therefore taken last, as in ``Chain.take``: a tensor that is held counts how often it was
    taken. ``outputs``: the rows whose tensors are left with them. ``device`` None: it is another one each time.
    """
    text, names = _Text(), _names_of(rows)
    text.add(f"{_row_of(names)}, {_row_of(f'x{n}' for n in range(len(leaves)))}, scalars = found")
    # What nobody reads but the next value of the chain is never held.
    held = [name for name, row in zip(names[1:], rows[1:], strict=True) if row.readers or row.parents > 1]
    for n, leaf in enumerate(leaves):
        if not leaf.is_made:
            text.add(f"if x{n} not in taken:", f"    taken[x{n}] = x{n}._take(made, task)")
            text.refuse([f"{name}.memo is not None or id({name}) in made" for name in held], "    ")
    if device is None:
        text.add("return None")
    else:
        _write_tensors(text, leaves, device)
        owned = _row_of("False" if leaf.is_kept else f"owned{n}" for n, leaf in enumerate(leaves))
        is_any = not all(leaf.is_kept for leaf in leaves)
        tensors = _row_of(f"t{n}" for n in range(len(leaves)))
        text.add(f"return {tensors}, {owned if is_any else None}, scalars, {_row_of(names[k] for k in outputs)}")
    fetch: Fetch = text.function("fetch", "found, made, task, taken")
    return fetch


def _write_tensors(text: _Text, leaves: Sequence[Leaf], device: torch.device) -> None:
    unkept = [n for n, leaf in enumerate(leaves) if not leaf.is_kept]
    for n in unkept:
        if leaves[n].is_made:
            text.add(f"if x{n} not in taken:", f"    taken[x{n}] = x{n}._take(made, task)")
        text.add(f"t{n}, owned{n} = taken[x{n}]")
        text.refuse(_unlike_kind(text, leaves[n].kind, f"t{n}"))
    text.add(*(f"del taken[x{n}]" for n in unkept))
    text.add(f"stream = raw_stream({text.name(device)})" if device.type == "cuda" else "stream = 0")
    for n, leaf in enumerate(leaves):
        if leaf.is_kept:  # most often ``anchor`` would find nothing to say
            text.add(
                f"t{n} = x{n}.tensor",
                f"if x{n}.before is not None or t{n}._version != x{n}.version or "
                f"(not t{n}.untyped_storage().nbytes() if x{n}.op == 'leaf' else x{n}.stream != stream):",
                f"    t{n} = x{n}.anchor(stream)",
            )


SCOPE: dict[str, Any] = {
    "TABLE": TABLE,
    "is_number": is_number,
    "look_at_tensor": look_at_tensor,
    "look_at_value": look_at_value,
    "raw_stream": raw_stream,
}
