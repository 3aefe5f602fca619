"""The sentences of the report: what holds the peak, and what would make it smaller."""

from __future__ import annotations

import re
from dataclasses import dataclass

from leangrad.timeline.categories import ACTIVATIONS, PARAMETERS, STATE, TEMPORARIES, Curve
from leangrad.timeline.event import format_bytes

__all__ = ["Advice", "advise", "explain", "name_of_group"]

LARGE = 0.15  # share of the peak from which advice is given
OUTSIDE = "code outside any module"
LEAN = "model = leangrad.lean(model)"
_WHEN = {"forward": "in forward", "backward": "in backward", "other": "after backward"}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Advice:
    """One thing that the user can do next, and the line of code to type, if there is one."""

    text: str
    line: str = ""


def explain(curve: Curve, name: str, kept_bytes: int) -> list[str]:
    """Return sentences that say what holds the peak of a step.

    name: the name of the step.
    kept_bytes: the bytes that the step keeps between forward and backward.
    """
    peak = max(1, curve.peak_bytes)
    at_peak = curve.at(curve.peak_index)
    shares = [f"{what} {count / peak:.0%}" for what, count in at_peak.items() if count >= 0.005 * peak]
    where = ""
    if curve.peak_index >= 0:
        event = curve.timeline[curve.peak_index]
        place = event.op or "no op"
        where = f", {_WHEN[event.phase]} ({place}{f' of {event.module}' if event.module else ''})"
    said = [f"A step peaks at {format_bytes(curve.peak_bytes)} ({name}{where}): {', '.join(shares)}."]
    groups: dict[str, int] = {}
    for event, category in curve.alive_at(curve.peak_index):
        if category == ACTIVATIONS:
            group = name_of_group(event.module)
            groups[group] = groups.get(group, 0) + event.bytes
    largest = sorted(groups.items(), key=lambda item: -item[1])[:3]
    if largest and groups:
        kept = sum(groups.values())
        parts = [f"{count / peak:.0%} is kept by {group}" for group, count in largest if count >= 0.005 * peak]
        if parts:
            said.append(f"At the peak, {', '.join(parts)} (all kept activations: {format_bytes(kept)}).")
    if kept_bytes:
        said.append(f"Between forward and backward the step keeps {format_bytes(kept_bytes)}.")
    return said


def name_of_group(module: str) -> str:
    """The name of the group that ``module`` belongs to: numbers become stars, and deeper parts of a block are cut off.

    >>> name_of_group("GPT.blocks.3.mlp.up"), name_of_group("GPT.head"), name_of_group("")
    ('GPT.blocks.*.mlp', 'GPT.head', 'code outside any module')
    """
    if not module:
        return OUTSIDE
    parts = ["*" if _NUMBER.fullmatch(part) else part for part in module.split(".")]
    last_star = max((n for n, part in enumerate(parts) if part == "*"), default=0)
    return ".".join(parts[: last_star + 2])


def advise(curve: Curve, lean: Curve | None, logits_bytes: int) -> list[Advice]:
    """Return advice that would make the peak of ``curve`` smaller, the largest gain first.

    lean: the curve of a lean step; None: none was measured.
    logits_bytes: the bytes of the logits, and of what their loss keeps, that are alive at the peak.
    """
    peak = max(1, curve.peak_bytes)
    at_peak = curve.at(curve.peak_index)
    found: list[tuple[float, Advice]] = []
    if lean is not None and lean.peak_bytes < 0.97 * peak:
        gain = peak - lean.peak_bytes
        found.append((gain, Advice(f"Save {format_bytes(gain)} with the same gradients:", LEAN)))
    elif lean is None and at_peak[ACTIVATIONS] >= LARGE * peak:
        text = f"{format_bytes(at_peak[ACTIVATIONS])} are kept for backward; see how much of it lean rebuilds:"
        found.append((at_peak[ACTIVATIONS] / 2, Advice(text, LEAN)))
    if logits_bytes >= LARGE * peak:
        text = f"Train without {format_bytes(logits_bytes)} of logits, with plain's error but not plain's bits:"
        found.append((logits_bytes, Advice(text, "model = leangrad.lean(model, exact=False)")))
    if at_peak[STATE] >= LARGE * peak:
        text = (
            f"The optimizer's state is {format_bytes(at_peak[STATE])}. No tool for activations makes that smaller: "
            "shard it (FSDP2), train adapters (PEFT), or take an optimizer with less state."
        )
        found.append((at_peak[STATE] / 4, Advice(text)))
    if at_peak[PARAMETERS] >= 0.5 * peak:
        share = at_peak[PARAMETERS] / peak
        text = f"Parameters are {share:.0%} of the peak: shard them (FSDP2) or train adapters (PEFT)."
        found.append((at_peak[PARAMETERS] / 8, Advice(text)))
    if at_peak[TEMPORARIES] >= LARGE * peak and curve.peak_index >= 0:
        temporaries = [event for event, what in curve.alive_at(curve.peak_index) if what == TEMPORARIES]
        largest = temporaries[0]
        text = (
            f"{format_bytes(at_peak[TEMPORARIES])} of the peak live for a moment only; the largest, "
            f"{format_bytes(largest.bytes)}, is of {largest.op or 'no op'}"
            f"{f' in {largest.module}' if largest.module else ''}."
        )
        found.append((at_peak[TEMPORARIES] / 8, Advice(text)))
    return [advice for _, advice in sorted(found, key=lambda item: -item[0])]
