"""The picture of a frontier: a small SVG, made without a plotting library, legible on light and on dark pages."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from leangrad.timeline.event import format_bytes

__all__ = ["Mark", "draw"]

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 76, 56
_KINDS = ("plain", "lean", "checkpoint")
# The picture has its own background, because a notebook's theme may differ from the color scheme of the system.
_STYLE = """
.lgf-ground { fill: #ffffff } .lgf text { fill: #24292f; font: 13px system-ui, sans-serif }
.lgf .lgf-title { font-size: 15px; font-weight: 600 } .lgf .lgf-soft { fill: #57606a } .lgf-grid { stroke: #d8dee4 }
.lgf-plain { fill: #57606a } .lgf-lean { fill: #0969da } .lgf-checkpoint { fill: #bc4c00 }
.lgf-line { stroke: #0969da; stroke-width: 2; fill: none }
@media (prefers-color-scheme: dark) {
.lgf-ground { fill: #0d1117 } .lgf text { fill: #e6edf3 } .lgf .lgf-soft { fill: #9198a1 } .lgf-grid { stroke: #30363d }
.lgf-plain { fill: #b1bac4 } .lgf-lean { fill: #4493f8 } .lgf-checkpoint { fill: #f0883e }
.lgf-line { stroke: #4493f8 } }
"""


@dataclass(frozen=True)
class Mark:
    """A point of the picture.

    - `way`: the name of the way.
    - `peak_bytes`, `height`: its position: the peak on the horizontal axis, the time on the vertical axis.
    - `says`: the text of its tooltip.
    """

    way: str
    peak_bytes: int
    height: float
    says: str

    @property
    def kind(self) -> str:
        """The key of its color and shape: "plain", "lean" (with any budget) or "checkpoint"."""
        return next((kind for kind in _KINDS if self.way.startswith(kind)), "plain")


def draw(title: str, marks: Sequence[Mark], height_name: str) -> str:
    """Return an SVG of the marks: peak bytes to the right, time upwards.

    height_name: the label of the vertical axis.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" class="lgf" role="img">',
        f"<title>{_text(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="lgf-ground" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>',
        f'<text class="lgf-title" x="{_LEFT}" y="30">{_text(title)}</text>',
    ]
    if not marks:
        parts.append(f'<text class="lgf-soft" x="{_LEFT}" y="60">no way has both a time and a peak</text>')
        return "\n".join([*parts, "</svg>"]) + "\n"
    across = _Axis.over([mark.peak_bytes for mark in marks], _LEFT, _WIDTH - _RIGHT)
    up = _Axis.over([mark.height for mark in marks], _HEIGHT - _BOTTOM, _TOP)
    parts += _grid(across, up, height_name) + _legend(marks)
    lean = sorted((mark for mark in marks if mark.kind == "lean"), key=lambda mark: (mark.peak_bytes, mark.height))
    line = " ".join(f"{across.place(mark.peak_bytes)},{up.place(mark.height)}" for mark in lean)
    parts.append(f'<polyline class="lgf-line" points="{line}"/>')
    for mark in marks:
        shape = _shape(mark.kind, across.place(mark.peak_bytes), up.place(mark.height))
        parts.append(f'<g class="lgf-{mark.kind}"><title>{_text(mark.says)}</title>{shape}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class _Axis:
    """An axis: the values from `low` to `high` lie at the coordinates `start` to `end`, with a tick every `step`."""

    low: float
    high: float
    step: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> "_Axis":
        low, high = min(values), max(values)
        room = (high - low) * 0.08 or high * 0.1 or 1.0
        low, high = max(0.0, low - room), high + room
        step = 10 ** math.floor(math.log10((high - low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 7)
        return cls(low, high, step, start, end)

    def place(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        first = math.ceil(self.low / self.step)
        return [n * self.step for n in range(first, math.floor(self.high / self.step) + 1)]


def _grid(across: _Axis, up: _Axis, height_name: str) -> list[str]:
    base, middle = _HEIGHT - _BOTTOM, (_LEFT + _WIDTH - _RIGHT) / 2
    parts = [
        f'<text class="lgf-soft" x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">peak memory of a step</text>'
    ]
    parts.append(
        f'<text class="lgf-soft" x="16" y="{(_TOP + base) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(_TOP + base) / 2})">{_text(height_name)}</text>'
    )
    digits = max(0, -math.floor(math.log10(up.step)))
    for value in up.ticks():
        y = up.place(value)
        parts.append(f'<path class="lgf-grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
        parts.append(
            f'<text class="lgf-soft" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.{digits}f}</text>'
        )
    for value in across.ticks():
        x = across.place(value)
        parts.append(f'<path class="lgf-grid" d="M{x} {base}v5"/>')
        parts.append(f'<text class="lgf-soft" x="{x}" y="{base + 20}" text-anchor="middle">{_tick(value)}</text>')
    return [*parts, f'<path class="lgf-grid" d="M{_LEFT} {base}H{_WIDTH - _RIGHT}"/>']


def _tick(value: float) -> str:
    number, _, unit = format_bytes(round(value)).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def _legend(marks: Sequence[Mark]) -> list[str]:
    parts, x = [], float(_LEFT) + 6
    for kind in _KINDS:
        if any(mark.kind == kind for mark in marks):
            parts.append(f'<g class="lgf-{kind}">{_shape(kind, x, 52)}</g><text x="{x + 12}" y="56">{kind}</text>')
            x += 40 + 8 * len(kind)
    return parts


def _shape(kind: str, x: float, y: float) -> str:
    if kind == "lean":
        return f'<circle cx="{x}" cy="{y}" r="5"/>'
    if kind == "plain":
        return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"/>'
    return f'<path d="M{x} {y - 7:.1f}l7 12h-14z"/>'


def _text(value: str) -> str:
    """Return the text escaped for XML, without control characters, which XML does not allow."""
    return html.escape("".join(letter for letter in value if letter.isprintable()))
