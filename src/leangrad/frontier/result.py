"""`Frontier`, the result of `leangrad.frontier`, as text, as JSON, as a picture and in a notebook."""

import dataclasses
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leangrad.frontier.picture import Mark, draw
from leangrad.timeline.event import format_bytes, format_seconds

__all__ = ["Frontier", "Point", "text_table"]

_HEADINGS = ("way", "budget", "peak", "kept", "time", "× plain", "gradients", "note")
_LEFT = ("way", "gradients", "note")  # columns of text, aligned to the left; the others hold numbers


@dataclass(frozen=True)
class Point:
    """One way to train the model, with its memory and its time; a figure is None if it was not measured.

    - `way`: "plain", "lean" (the floor), "lean, budget" or "checkpoint".
    - `budget`: the peak that it was allowed, in bytes; None without a budget.
    - `peak_bytes`: on a GPU the peak of allocated memory; on a CPU the peak of the step above what was allocated before
      it. See [Note: what a peak counts] in `meter.py`.
    - `kept_bytes`: the bytes that a step has allocated and still holds when its backward pass begins.
    - `seconds`: the median time of its timed steps.
    - `ratio`: its time over that of plain PyTorch: the median of the ratios of single steps.
    - `bitwise`: whether loss and gradients are bitwise equal to plain PyTorch; None for plain itself, and if that could
      not be determined.
    - `note`: a remark, such as why a way has no figures; may be empty.
    """

    way: str
    budget: int | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    seconds: float | None = None
    ratio: float | None = None
    bitwise: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Frontier:
    """Time against peak memory, from plain down to the smallest peak; see `leangrad.frontier`.

    - `model`: the name of the model's class.
    - `device`: the device whose memory is counted, such as "cpu" or "cuda:0".
    - `points`: plain, lean from its largest budget to the smallest, and checkpoint.
    - `note`: a remark on the whole comparison; may be empty.
    """

    model: str
    device: str
    points: tuple[Point, ...]
    note: str = ""

    def table(self) -> str:
        """Return the points as a text table."""
        return text_table(_HEADINGS, [_cells(point) for point in self.points], left=_LEFT)

    def __str__(self) -> str:
        return "\n".join(line for line in (self.table(), self.note) if line)

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes as dicts, lists, numbers and strings."""
        return {**dataclasses.asdict(self), "points": [dataclasses.asdict(point) for point in self.points]}

    def to_json(self, **kwargs: Any) -> str:
        """Return `as_dict()` as JSON; `kwargs` are passed to `json.dumps`."""
        return json.dumps(self.as_dict(), **kwargs)

    def svg(self) -> str:
        """Return the picture as SVG text: peak to the right, time upwards, a line through the points of lean."""
        has_ratio = any(point.ratio is not None for point in self.points)
        marks = []
        for point in self.points:
            height = point.ratio if has_ratio else point.seconds and point.seconds * 1000
            if point.peak_bytes is not None and height is not None:
                says = f"{point.way}: {format_bytes(point.peak_bytes)}, {format_seconds(point.seconds or 0)}"
                marks.append(Mark(point.way, point.peak_bytes, height, says))
        return draw(f"{self.model} on {self.device}", marks, "time, × plain" if has_ratio else "time, ms")

    def save(self, path: str | Path) -> None:
        """Write the picture to an SVG file, such as "frontier.svg"."""
        if Path(path).suffix.lower() != ".svg":
            raise ValueError(f"expected the name of an SVG file, such as 'frontier.svg', got {str(path)!r}")
        Path(path).write_text(self.svg(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """Return the picture and the table as HTML, for a notebook."""
        head = "".join(f"<th>{html.escape(heading)}</th>" for heading in _HEADINGS)
        rows = [_cells(point) for point in self.points]
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div><div style="max-width: 720px">{self.svg()}</div>{table}{note}</div>'


def _cells(point: Point) -> tuple[str, ...]:
    gradients = {None: "", True: "same bits", False: "DIFFER"}[point.bitwise]
    sizes = (point.budget, point.peak_bytes, point.kept_bytes)
    return (
        point.way,
        *("" if size is None else format_bytes(size) for size in sizes),
        "" if point.seconds is None else format_seconds(point.seconds),
        "" if point.ratio is None else f"{point.ratio:.2f}",
        gradients,
        point.note,
    )


def text_table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, left: tuple[str, ...]) -> str:
    """Return rows as a text table; the columns named in `left` are aligned to the left, and empty ones are left out.

    >>> print(text_table(("way", "peak", "note"), [("plain", "9 B", ""), ("lean", "10 B", "")], left=("way",)))
    way    peak
    plain   9 B
    lean   10 B
    """
    lines = [headings, *rows]
    shown = [n for n in range(len(headings)) if any(row[n] for row in rows)]
    widths = {n: max(len(line[n]) for line in lines) for n in shown}
    return "\n".join(
        "  ".join(line[n].ljust(widths[n]) if headings[n] in left else line[n].rjust(widths[n]) for n in shown).rstrip()
        for line in lines
    )
