"""`Report`: the steps that were measured, and how they read as text, as JSON and as a page."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from leangrad.report.page import render
from leangrad.report.sentences import Advice, advise, explain, name_of_group
from leangrad.timeline.categories import CATEGORIES, Curve
from leangrad.timeline.event import Event, Phase, format_bytes, format_seconds

__all__ = ["Report", "StepRecord"]

PHASES: tuple[str, ...] = get_args(Phase)


@dataclass(frozen=True)
class StepRecord:
    """One step that was measured.

    - `name`: what it is called in the report, such as "step 3".
    - `timeline`: every allocation and release, in order.
    - `standing`: the bytes that stood before it, by category; empty where nobody knows.
    - `kept_bytes`: what it had allocated and not released when its backward began.
    - `is_lean`: the model was lean in it.
    """

    name: str
    timeline: tuple[Event, ...] = field(repr=False)
    standing: Mapping[str, int]
    kept_bytes: int
    seconds: float
    device: str
    is_lean: bool = False

    @cached_property
    def curve(self) -> Curve:
        """The live bytes of each category over time."""
        return Curve(self.timeline, self.standing)

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once, with what stood before the step."""
        return self.curve.peak_bytes


@dataclass(frozen=True)
class Report:
    """Where the memory of a training step went; see `leangrad.profile` and `Measurement.save`.

    - `steps`: those that were measured; `chosen` is the one that the sentences speak of.
    - `notes`: what the reader must know of how it was measured, in sentences.
    - `ledger`: what lean kept and rebuilt, row by row; empty where no step was lean.
    - `logits_bytes`: of what was alive at the peak, the logits and what their loss keeps.
    """

    title: str
    steps: tuple[StepRecord, ...]
    notes: tuple[str, ...] = ()
    ledger: tuple[Mapping[str, Any], ...] = ()
    ledger_totals: str = ""
    logits_bytes: int = 0
    made: str = ""

    @property
    def chosen(self) -> StepRecord | None:
        """The last step that was plain; if none was, the last one."""
        plain = [step for step in self.steps if not step.is_lean] or self.steps
        return plain[-1] if plain else None

    @property
    def lean_step(self) -> StepRecord | None:
        """The last step that was lean, beside one that was not."""
        chosen = self.chosen
        return next((step for step in reversed(self.steps) if step.is_lean and step is not chosen), None)

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """What holds the memory, and how that was measured."""
        step, lean = self.chosen, self.lean_step
        said = [] if step is None else explain(step.curve, step.name, step.kept_bytes)
        if step is not None and lean is not None:
            less = 1 - lean.peak_bytes / max(1, step.peak_bytes)
            said.append(
                f"Lean peaks at {format_bytes(lean.peak_bytes)}, {less:.0%} less ({lean.name}): it keeps "
                f"{format_bytes(lean.kept_bytes)} for backward where plain keeps {format_bytes(step.kept_bytes)}, and "
                "rebuilds the rest, bit for bit."
            )
        if step is not None and self.logits_bytes:
            said.append(
                f"The logits and what their loss keeps are {format_bytes(self.logits_bytes)} of the peak: "
                "exact=False never makes them."
            )
        return (*said, *self.notes)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What to do next, with the line to type."""
        step, lean = self.chosen, self.lean_step
        if step is None:
            return ()
        return tuple(advise(step.curve, None if lean is None else lean.curve, self.logits_bytes))

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain dicts, lists, numbers and strings, with every event of every step."""
        strings: dict[str, int] = {"": 0}
        steps = [self._columns(step, strings) for step in self.steps]
        return {
            "title": self.title,
            "made": self.made,
            "sentences": list(self.sentences),
            "advice": [asdict(one) for one in self.advice],
            "categories": list(CATEGORIES),
            "phases": list(PHASES),
            "steps": steps,
            "ledger": [dict(row) for row in self.ledger],
            "ledger_totals": self.ledger_totals,
            "strings": list(strings),
        }

    def _columns(self, step: StepRecord, strings: dict[str, int]) -> dict[str, Any]:
        """One step, its events column by column: op, module and line by their number among the strings."""

        def numbers(words: Sequence[str]) -> list[int]:
            return [strings.setdefault(word, len(strings)) for word in words]

        curve = step.curve
        events = curve.timeline
        return {
            "name": step.name,
            "is_lean": step.is_lean,
            "is_chosen": step is self.chosen,
            "is_compared": step is self.lean_step,
            "device": step.device,
            "seconds": step.seconds,
            "kept_bytes": step.kept_bytes,
            "peak_bytes": step.peak_bytes,
            "at_peak": curve.at(curve.peak_index),
            "standing": dict(curve.standing),
            "microseconds": [round(1e6 * event.seconds, 1) for event in events],
            "bytes": [event.bytes for event in events],
            "block": [event.block for event in events],
            "op": numbers([event.op for event in events]),
            "module": numbers([event.module for event in events]),
            "line": numbers([event.line for event in events]),
            "phase": [PHASES.index(event.phase) for event in events],
            "category": [CATEGORIES.index(category) for category in curve.categories],
        }

    def to_json(self, **kwargs: Any) -> str:
        """`as_dict()` as JSON; ``kwargs`` go to `json.dumps`."""
        return json.dumps(self.as_dict(), **kwargs)

    def to_html(self) -> str:
        """The page: one file that needs nothing beside itself."""
        return render(self.as_dict())

    def save(self, path: str | Path) -> None:
        """Write the report to a file: a page (.html), JSON (.json) or text (any other ending)."""
        path = Path(path)
        kinds = {".html": self.to_html, ".htm": self.to_html, ".json": self.to_json}
        path.write_text(kinds.get(path.suffix.lower(), self.__str__)(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """The page in a notebook, in a frame of its own."""
        page = html.escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="900" style="border:0"></iframe>'

    def __str__(self) -> str:
        lines = [self.title, ""]
        lines += [f"- {sentence}" for sentence in self.sentences]
        for step in self.steps:
            lines += [
                "",
                f"{step.name}: {format_seconds(step.seconds)} under the profiler, on {step.device}",
                *_table(step),
            ]
        if self.advice:
            lines += ["", "What to do next:"]
            lines += [f"- {one.text}{'  ' + one.line if one.line else ''}" for one in self.advice]
        return "\n".join(lines)


def _table(step: StepRecord, most: int = 8) -> list[str]:
    """The categories at the peak, and the groups of modules that hold most of it."""
    curve = step.curve
    lines = [f"  {'peak':<24}{format_bytes(curve.peak_bytes):>12}"]
    lines += [f"  {name:<24}{format_bytes(count):>12}" for name, count in curve.at(curve.peak_index).items() if count]
    groups: dict[str, int] = {}
    for event, _ in curve.alive_at(curve.peak_index):
        group = name_of_group(event.module)
        groups[group] = groups.get(group, 0) + event.bytes
    largest = sorted(groups.items(), key=lambda item: -item[1])[:most]
    return lines + [f"    {format_bytes(count):>12}  {group}" for group, count in largest]
