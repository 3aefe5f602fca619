"""The rows of all ways on one model, as a text table and as JSON."""

import json
from dataclasses import dataclass, field
from typing import Any

from leangrad.bench.job import Row
from leangrad.bench.ways import WAYS
from leangrad.frontier.result import text_table
from leangrad.timeline.event import format_bytes

__all__ = ["Bench"]

_HEADINGS = (
    "way", "peak", "/ plain", "kept", "/ floor", "time / plain", "first step", "gradients", "largest batch", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """The result of `bench`: a row for each way.

    - `name`: the name of the model, as the caller gave it.
    - `rows`: the rows, in the order of `leangrad.bench.WAYS`.
    - `notes`: remarks on the whole comparison, such as ways that were left out.
    """

    name: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())

    def row(self, way: str) -> Row | None:
        """Return the row of the way of this name, or None if there is none."""
        return next((row for row in self.rows if row.way == way), None)

    @property
    def plain(self) -> Row | None:
        """The row of plain."""
        return self.row("plain")

    @property
    def machine(self) -> dict[str, Any]:
        """Hardware and versions of the first row that has them; empty if nothing was measured."""
        return next((row.machine for row in self.rows if row.machine), {})

    @property
    def broken_promises(self) -> list[str]:
        """The ways whose gradients should be bitwise equal to plain PyTorch's, and are not."""
        return [row.way for row in self.rows if WAYS[row.way].promises_bits and row.bitwise is False]

    def as_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each way, with its ratios to plain and to the floor, and without empty values."""
        plain, found = self.plain, []
        for row in self.rows:
            one = {"case": self.name, **row.as_dict()}
            one.pop("machine", None)
            one.pop("traceback", None)
            if plain is not None and plain.peak_bytes and row.peak_bytes is not None:
                one["peak_over_plain"] = row.peak_bytes / plain.peak_bytes
            if plain is not None and plain.floor_bytes and row.kept_bytes is not None:
                one["kept_over_floor"] = row.kept_bytes / plain.floor_bytes
            found.append(one)
        return found

    def to_json(self, **kwargs: Any) -> str:
        """Return machine, notes and rows as JSON; `kwargs` are passed to `json.dumps`."""
        return json.dumps({**self.machine, "notes": list(self.notes), "rows": self.as_rows()}, **kwargs)

    def __str__(self) -> str:
        machine = self.machine
        where = f", {machine['hardware']}, torch {machine['torch']}" if machine else ""
        table = text_table(_HEADINGS, [_cells(row) for row in self.as_rows()], left=("way", "gradients", "note"))
        return "\n".join([f"{self.name}{where}", table, *self.notes])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def sized(name: str) -> str:
        return format_bytes(row[name]) if name in row else ""

    def ratio(name: str) -> str:
        return f"{row[name]:.2f}" if name in row else ""

    first = f"{row['first_seconds']:.1f} s" if "first_seconds" in row else ""
    note = row.get("note", "")
    if row["outcome"] == "not for this":
        note = f"not shown: {note}"
    batch = str(row.get("largest_batch", ""))
    return (
        row["way"],
        sized("peak_bytes"),
        ratio("peak_over_plain"),
        sized("kept_bytes"),
        ratio("kept_over_floor"),
        ratio("ratio"),
        first,
        gradients(row),
        batch,
        note,
    )


def gradients(row: dict[str, Any]) -> str:
    """Return the distance of a row's gradients from plain PyTorch as text, such as "same bits"; "" if not known."""
    if "gradient_error" not in row:
        return ""
    return "same bits" if row.get("bitwise") else f"off by {row['gradient_error']:.1g}"
