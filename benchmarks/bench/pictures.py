"""Pictures of the rows: SVG, made without a plotting library, legible on light and on dark pages."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import Any

WIDTH = 760
# The pictures have their own background, because a page's theme may differ from the color scheme of the system.
STYLE = """
.ground { fill: #ffffff } text { fill: #24292f; font: 13px system-ui, sans-serif } .title { font-weight: 600 }
.soft { fill: #57606a } .grid { stroke: #d8dee4 } .one { stroke: #57606a; stroke-dasharray: 3 3 }
.ours { fill: #0969da; stroke: #0969da } .others { fill: #bc4c00; stroke: #bc4c00 }
.plain { fill: #57606a; stroke: #57606a } .dot { stroke: none; opacity: 0.55 } .middle { stroke-width: 3 }
.line { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117 } text { fill: #e6edf3 } .soft { fill: #9198a1 } .grid { stroke: #30363d }
.one { stroke: #9198a1 } .ours { fill: #4493f8; stroke: #4493f8 } .others { fill: #f0883e; stroke: #f0883e }
.plain { fill: #b1bac4; stroke: #b1bac4 } text.ours, text.others, text.plain { stroke: none } .line { fill: none } }
text.ours, text.others, text.plain { stroke: none }
.line { fill: none }
"""
OURS = ("lean", "lean_budget", "no_logits", "compile_leangrad", "convert_abn", "packed")


def kind_of(way: str) -> str:
    """Return the key of a way's color: "plain", "ours" for a way of leangrad, or "others"."""
    return "plain" if way == "plain" else "ours" if way in OURS else "others"


def page(title: str, height: int, parts: list[str]) -> str:
    """Return an SVG picture of these parts, with a title."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>',
            text(20, 28, title, "title"),
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """Return an SVG text element at a position."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


class Scale:
    """An axis: the values `low` to `high` lie at the coordinates `start` to `end`, values beyond at the edge."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        inside = min(max(value, self.low), self.high)
        return self.start + (inside - self.low) / (self.high - self.low) * (self.end - self.start)


def dots(title: str, rows: Sequence[dict[str, Any]], ways: Sequence[str]) -> str:
    """Return a picture with a line for each way: a dot for each model and a bar at the median.

    The left panel shows the peak, the right one the time, both relative to plain.
    """
    panels = (
        ("peak_over_plain", "peak, / plain", Scale(0, 1.2, 150, 430), (0.25, 0.5, 0.75, 1.0)),
        ("ratio", "time, / plain", Scale(0.5, 2.5, 470, 740), (0.5, 1.0, 1.5, 2.0, 2.5)),
    )
    top, step = 64, 26
    bottom = top + step * len(ways)
    parts = []
    for _, name, scale, ticks in panels:
        parts.append(text((scale.start + scale.end) / 2, bottom + 34, name, "soft", "middle"))
        for tick in ticks:
            style = "one" if tick == 1 else "grid"
            parts.append(f'<path class="{style}" d="M{scale(tick):.1f} {top - 8}V{bottom - 6}"/>')
            beyond = "≥ " if tick == scale.high else ""
            parts.append(text(scale(tick), bottom + 12, f"{beyond}{tick:g}", "soft", "middle"))
    for n, way in enumerate(ways):
        y = top + step * n + 8
        parts.append(text(20, y + 4, way, kind_of(way)))
        for key, _, scale, _ in panels:
            mine = [row for row in rows if row["way"] == way and key in row]
            for row in mine:
                says = html.escape(f"{way}, {row['case']}: {row[key]:.2f}")
                place = f'cx="{scale(row[key]):.1f}" cy="{y}"'
                parts.append(f'<circle class="{kind_of(way)} dot" {place} r="4"><title>{says}</title></circle>')
            if mine:
                x = scale(statistics.median(row[key] for row in mine))
                parts.append(f'<path class="{kind_of(way)} middle" d="M{x:.1f} {y - 9}v18"/>')
    return page(title, bottom + 48, parts)


def curves(title: str, rows: Sequence[dict[str, Any]], ways: Sequence[str], axes: Sequence[str]) -> str:
    """Return a picture with a panel for each axis along which a model grows.

    It shows the peak of each way relative to the plain peak for the base shape.
    """
    base = next(row["peak_bytes"] for row in rows if row["axis"] == "base" and row["way"] == "plain")
    factors = sorted({row["factor"] for row in rows})
    top, bottom, room = 74, 250, 180
    most = max(row["peak_bytes"] / base for row in rows)
    up = Scale(0, most, bottom, top)
    parts = []
    for n, axis in enumerate(axes):
        across = Scale(factors[0], factors[-1], 56 + room * n, 56 + room * n + room - 44)
        parts.append(text((across.start + across.end) / 2, top - 16, axis, "soft", "middle"))
        for tick in (0, round(most / 2), round(most)):
            parts.append(f'<path class="grid" d="M{across.start:.1f} {up(tick):.1f}H{across.end:.1f}"/>')
            parts.append(text(across.start - 6, up(tick) + 4, f"{tick}", "soft", "end"))
        for factor in factors:
            parts.append(text(across(factor), bottom + 18, f"×{factor}", "soft", "middle"))
        for way in ways:
            mine = [row for row in rows if row["way"] == way and row["axis"] in ("base", axis)]
            points = sorted((row["factor"], row["peak_bytes"] / base) for row in mine)
            line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
            parts.append(f'<polyline class="{kind_of(way)} line" style="fill: none" points="{line}"/>')
            for x, y in points:
                says = html.escape(f"{way}, {axis} ×{x}: {y:.2f}")
                place = f'cx="{across(x):.1f}" cy="{up(y):.1f}"'
                parts.append(f'<circle class="{kind_of(way)}" {place} r="3"><title>{says}</title></circle>')
    x = 56.0
    for way in ways:
        parts.append(f'<rect class="{kind_of(way)}" x="{x}" y="{bottom + 34}" width="10" height="10"/>')
        parts.append(text(x + 16, bottom + 43, way))
        x += 40 + 8 * len(way)
    return page(title, bottom + 60, parts)
