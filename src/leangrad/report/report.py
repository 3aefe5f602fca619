"""`Report`: the measured steps, and their presentation as text, as JSON and as a page."""

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
    """One measured step.

    - `name`: its name in the report, such as "step 3".
    - `timeline`: every allocation and release, in order.
    - `standing`: the bytes that were allocated before the step, by category; empty if they are not known.
    - `kept_bytes`: the bytes that the step had allocated and not released when its backward began.
    - `is_lean`: whether the model was lean in this step.
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
        """The live bytes of each category over time, as a `Curve`."""
        return Curve(self.timeline, self.standing)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at once, with those that were allocated before the step."""
        return self.curve.peak_bytes


@dataclass(frozen=True)
class Report:
    """Where the memory of a training step went; see `leangrad.profile` and `Measurement.save`.

    - `steps`: the measured steps; `chosen` is the one that the sentences describe.
    - `notes`: sentences on how the steps were measured, for the reader.
    - `ledger`: what lean kept and rebuilt, row by row; empty if no step was lean.
    - `ledger_totals`: a sentence with the totals of these rows.
    - `logits_bytes`: the bytes of the logits, and of what their loss keeps, that were alive at the peak.
    - `made`: the versions and the device that the report was made with.
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
        """The last plain step; if none was plain, the last step; None if there are no steps."""
        plain = [step for step in self.steps if not step.is_lean] or self.steps
        return plain[-1] if plain else None

    @property
    def lean_step(self) -> StepRecord | None:
        """The last lean step, to be compared with `chosen`; None if there is none other than that."""
        chosen = self.chosen
        return next((step for step in reversed(self.steps) if step.is_lean and step is not chosen), None)

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """Sentences that say what holds the memory, and how it was measured."""
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
        """What the user can do next, with the line of code to type."""
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
        """One step as a dict with its events column by column; op, module and line are numbers of ``strings``.

        strings: the number of each string of the report; new strings are added to it.
        """

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
        """The report as an HTML page that needs no other file."""
        return render(self.as_dict())

    def save(self, path: str | Path) -> None:
        """Write the report to a file: a page (.html), JSON (.json) or text (any other ending)."""
        path = Path(path)
        kinds = {".html": self.to_html, ".htm": self.to_html, ".json": self.to_json}
        path.write_text(kinds.get(path.suffix.lower(), self.__str__)(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """The report as an HTML page in a frame of its own, for a notebook."""
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
    """Lines of text with the bytes of each category at the peak, and the ``most`` largest groups of modules in it."""
    curve = step.curve
    lines = [f"  {'peak':<24}{format_bytes(curve.peak_bytes):>12}"]
    lines += [f"  {name:<24}{format_bytes(count):>12}" for name, count in curve.at(curve.peak_index).items() if count]
    groups: dict[str, int] = {}
    for event, _ in curve.alive_at(curve.peak_index):
        group = name_of_group(event.module)
        groups[group] = groups.get(group, 0) + event.bytes
    largest = sorted(groups.items(), key=lambda item: -item[1])[:most]
    return lines + [f"    {format_bytes(count):>12}  {group}" for group, count in largest]
