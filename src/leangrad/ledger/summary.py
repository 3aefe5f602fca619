"""The printed table of what the ledger did: what was kept and why, what is rebuilt, and how much that saves.

[Note: rows of the summary] Tensors that differ only in which of several similar blocks they belong to share one row:
the numbers in `layers.0.norm`, `layers.1.norm` become `layers.*.norm`. A number stands for a block if its module
contains other modules; in `nn.Sequential(nn.Linear(...), nn.ReLU(), ...)` it names a layer and stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leangrad.ledger.learn.entries import Entry

NO_STEP = (
    "the ledger has recorded no step yet: its forward has not run with gradients. Run one step. If one ran, the code "
    "that is lean was not part of it: put `with leangrad.saving():` around it."
)
ORDER = ("kept", "rebuilt", "shape only", "shared")


def summarize(entries: Sequence[Entry], *, small_bytes: int = 0, status: str = "") -> str:
    """Return a table of ``entries``, the totals below it, and ``status``: a sentence on whether steps follow them.

    small_bytes: the bytes of tensors that were kept without being examined, because they are small.
    """
    if not entries and not small_bytes:
        return "\n".join(filter(None, (NO_STEP, status)))
    rows = sorted(rows_of(entries), key=lambda row: (ORDER.index(row.outcome), -row.nbytes))
    table = [("made by", "op", "read by", "", "n", "MB", "why")]
    table += [(r.made_by, r.op, r.read_by, r.outcome, str(r.count), _megabytes(r.nbytes), r.why) for r in rows]
    lines = [*_aligned(table, right=(4, 5)), ""] if rows else []
    return "\n".join([*lines, *filter(None, (_totals(entries, small_bytes), status))])


@dataclass
class SummaryRow:
    """A row of the table, for a group of similar tensors; see [Note: rows of the summary]."""

    made_by: str
    op: str
    read_by: str
    outcome: str
    why: str
    count: int = 0
    nbytes: int = 0


def rows_of(entries: Iterable[Entry]) -> list[SummaryRow]:
    """Return the rows of the table, unsorted."""
    entries = list(entries)
    blocks = _blocks({name for e in entries for name in (e.made_by, e.module)})
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for e in entries:
        key = (_like(e.made_by, blocks), op_name(e.op), _like(e.module, blocks), e.outcome, in_words(e.why))
        groups.setdefault(key, []).append(e)
    rows = []
    for (_, op, _, outcome, why), group in groups.items():
        made_by, read_by = _common(e.made_by for e in group), _common(e.module for e in group)
        rows.append(SummaryRow(made_by, op, read_by, outcome, why, len(group), sum(e.nbytes for e in group)))
    return rows


def _blocks(names: set[str]) -> set[str]:
    """Return the paths of the modules that contain one of ``names``."""
    found: set[str] = set()
    for name in names:
        while "." in name:
            name = name.rpartition(".")[0]
            found.add(name)
    return found


def _like(name: str, blocks: set[str]) -> str:
    """Return the path of a module with each block number replaced by *."""
    parts = name.split(".")
    paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return ".".join("*" if part.isdigit() and path in blocks else part for part, path in zip(parts, paths, strict=True))


def _common(names: Iterable[str]) -> str:
    """Merge names that differ only in block numbers into one, with * where they differ."""
    columns = zip(*(name.split(".") for name in dict.fromkeys(names)), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in columns)


def _aligned(table: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    """Return the table as aligned lines, columns ``right`` flush right; a column without content is left out."""
    columns = [i for i in range(len(table[0])) if any(row[i] for row in table[1:])]
    widths = {i: max(len(row[i]) for row in table) for i in columns}
    return [
        "  ".join(row[i].rjust(widths[i]) if i in right else row[i].ljust(widths[i]) for i in columns).rstrip()
        for row in table
    ]


def bytes_for_backward(entries: Iterable[Entry], small_bytes: int) -> tuple[int, int]:
    """Return the bytes of these tensors that plain PyTorch keeps for backward, and those that the ledger keeps."""
    plain = lean = small_bytes
    for e in entries:
        if e.outcome != "shared":
            plain += 0 if e.is_extra else e.nbytes
            lean += e.nbytes if e.outcome == "kept" else 0
    return plain, lean


def _totals(entries: Iterable[Entry], small_bytes: int) -> str:
    plain, lean = bytes_for_backward(entries, small_bytes)
    share = f", {(plain - lean) / plain:.0%} less" if plain > lean else ""
    line = f"plain keeps {_megabytes(plain)} MB for backward, lean {_megabytes(lean)} MB{share}"
    if not small_bytes:
        return line
    return f"{line}; {'all' if small_bytes == plain else _megabytes(small_bytes) + ' MB'} of it in small tensors"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3f}"


# --------------------------------------------------------------------------------------------------- in a user's words

# Ops that are never computed twice because they are expensive; any other op with that reason has no rule.
_PRODUCT = re.compile(r"mm$|mv$|^v?dot$|matmul|linear|conv|attention|rnn|lstm|gru|einsum|cdist")
_NODE = re.compile(r"\b(\w+?)Backward(\d*)\b")


def op_name(node: str) -> str:
    """Return an op's name as torch writes it, from the name of its node; for a user's Function, its class name.

    >>> op_name("NativeLayerNormBackward0"), op_name("MyFunctionBackward")
    ('native_layer_norm', 'MyFunction')
    """
    found = _NODE.fullmatch(node)
    if found is None:
        return node
    name, number = found.groups()
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() if number else name


def in_words(why: str) -> str:
    """Return a reason with the names of ops, not nodes, and distinguish products from ops without a rule.

    >>> in_words("AddmmBackward0 is never computed twice")
    'a product is never computed twice'
    """
    why = _NODE.sub(lambda found: op_name(found[0]), why)
    op, _, rest = why.partition(" ")
    if rest != "is never computed twice":
        return why
    return f"a product {rest}" if _PRODUCT.search(op) else f"leangrad has no rule for {op}"
