"""Turns the profiler's trace into a timeline: each change of memory with its op, its module and its phase.

`torch.profiler.profile.export_chrome_trace` writes the trace. Two parts of it are read: the spans of ops and of
`record_function`, and the `[memory]` events. The allocators themselves report these events, so every allocation is
among them, also those inside an op.
"""

import bisect
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from leangrad.errors import LeangradError
from leangrad.timeline.event import BEFORE_THE_STEP, Event, Phase

__all__ = ["LINE_MARK", "MODULE_MARK", "STEP_MARK", "Change", "Trace", "read_trace"]

STEP_MARK = "leangrad.step"
MODULE_MARK = "leangrad.module: "
LINE_MARK = "leangrad.line: "
_NODE = "autograd::engine::evaluate_function: "
_ROOT_GRADIENT = "aten::ones_like"  # the op that makes the gradient `backward()` starts from if it is given none
_CPU, _CUDA = 0, 1  # the "Device Type" of a memory event


@dataclass(frozen=True, slots=True)
class Span:
    """An op or a `record_function` region, which ran from `start_ns` to `end_ns` on a thread."""

    start_ns: int
    end_ns: int
    thread: int
    name: str
    is_op: bool
    sequence: int | None  # autograd's sequence number, the same for an op and for its backward node


@dataclass(frozen=True, slots=True)
class Change:
    """An allocation (`bytes` > 0) or a release (`bytes` < 0) of memory.

    `address` is None for a release that the profiler does not report: of a CPU block from before the step.
    """

    time_ns: int
    thread: int
    device: str
    bytes: int
    address: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the step: the outermost op below the nearest module or backward node, and the phase."""

    op: str = ""
    node: str = ""
    module: str = ""
    in_backward: bool = False
    in_optimizer: bool = False
    in_op: bool = False
    line: str = ""

    def enter(self, span: Span, place_of_sequence: dict[int, "Place"]) -> "Place":
        """Return the place inside `span`, which begins in this place."""
        if span.name.startswith(MODULE_MARK):
            return replace(self, op="", module=span.name.removeprefix(MODULE_MARK))
        if span.name.startswith(LINE_MARK):
            return replace(self, line=self.line or span.name.removeprefix(LINE_MARK))
        if span.name.startswith(_NODE):
            made_at = self if span.sequence is None else place_of_sequence.get(span.sequence, self)
            node = span.name.removeprefix(_NODE)
            return Place("", node, made_at.module, True, self.in_optimizer, True, made_at.line)
        if not span.is_op:
            return replace(self, in_optimizer=self.in_optimizer or span.name.startswith("Optimizer."))
        # The engine's span of a node contains a second span of the same name, for the node itself, which is no op.
        op = self.op or ("" if span.name == self.node else span.name)
        return replace(self, op=op, in_op=True)

    def label(self) -> str:
        """Return the name under which the op is shown: that of its backward node, of the op, or of both."""
        return f"{self.node}: {self.op}" if self.node and self.op else self.node or self.op


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans and changes of one step, in order of time."""

    start_ns: int
    end_ns: int
    spans: list[Span]
    changes: list[Change]

    def device(self) -> str:
        """Return the GPU with the most bytes allocated and released in the step, or "cpu" if there is none."""
        bytes_of: dict[str, int] = {}
        for change in self.changes:
            if change.device != "cpu":
                bytes_of[change.device] = bytes_of.get(change.device, 0) + abs(change.bytes)
        return max(bytes_of, key=bytes_of.__getitem__, default="cpu")

    def timeline(self, device: str, freed_before: Iterable[Change] = ()) -> tuple[tuple[Event, ...], int]:
        """Return all changes on `device`, and the bytes that the step held when its first backward began.

        freed_before: releases of blocks that were allocated before the step; the CPU's allocator does not report them.
        """
        changes = [change for change in self.changes if change.device == device]
        changes += [change for change in freed_before if self.start_ns <= change.time_ns <= self.end_ns]
        changes.sort(key=lambda change: change.time_ns)
        walk = _Walk.over(self.spans, changes)
        builder = _TimelineBuilder(self.start_ns, walk.first_backward_ns)
        for change, place in zip(changes, walk.places, strict=True):
            builder.enter(change, place, walk)
        return tuple(builder.events), builder.kept_bytes()


@dataclass(slots=True)
class _Walk:
    """A pass over spans and changes in order of time, which finds the place of every change and when backward runs."""

    places: list[Place] = field(default_factory=list)
    top_ops: list[tuple[Span, bool]] = field(default_factory=list)  # outermost ops; True: in backward
    first_backward_ns: int | None = None
    last_backward_ns: int | None = None
    # By thread: the starts of its outermost ops, and whether each is in backward.
    _of_thread: dict[int, tuple[list[int], list[bool]]] = field(default_factory=dict)

    @classmethod
    def over(cls, spans: list[Span], changes: list[Change]) -> "_Walk":
        walk = cls()
        stacks: dict[int, list[tuple[Span, Place]]] = {}
        place_of_sequence: dict[int, Place] = {}
        # Order within one nanosecond: spans before changes, and the longer of two spans first, as the outer one.
        steps: list[tuple[int, int, int, Span | Change]] = [(s.start_ns, 0, -s.end_ns, s) for s in spans]
        steps += [(c.time_ns, 1, 0, c) for c in changes]
        for time_ns, _, _, step in sorted(steps, key=lambda entry: entry[:3]):
            stack = stacks.setdefault(step.thread, [])
            while stack and stack[-1][0].end_ns < time_ns:
                stack.pop()
            place = stack[-1][1] if stack else Place()
            if isinstance(step, Change):
                walk.places.append(place)
                continue
            inside = place.enter(step, place_of_sequence)
            stack.append((step, inside))
            if inside.in_op and not place.in_op:
                walk.top_ops.append((step, inside.in_backward))
            if inside.in_backward and not place.in_backward:
                walk.first_backward_ns = walk.first_backward_ns or step.start_ns
                walk.last_backward_ns = max(walk.last_backward_ns or 0, step.end_ns)
            if step.sequence is not None and not inside.in_backward:
                # An op that calls others is listed with the number that the innermost op gets: the last entry is right.
                place_of_sequence[step.sequence] = inside
        walk._claim_starts()
        return walk

    def _claim_starts(self) -> None:
        """Count the gradient of ones that `backward()` makes for each of its roots as part of backward."""
        for i in range(len(self.top_ops) - 2, -1, -1):
            span, in_backward = self.top_ops[i]
            if self.top_ops[i + 1][1] and not in_backward and span.name == _ROOT_GRADIENT:
                self.top_ops[i] = (span, True)
                if self.first_backward_ns is None or span.start_ns < self.first_backward_ns:
                    self.first_backward_ns = span.start_ns
        for span, in_backward in self.top_ops:
            starts, flags = self._of_thread.setdefault(span.thread, ([], []))
            starts.append(span.start_ns)
            flags.append(in_backward)

    def phase(self, change: Change, place: Place, is_root_gradient: bool = False) -> Phase:
        """Return the phase of a change: see `leangrad.measure`."""
        if place.in_backward:
            return "backward"
        if place.in_optimizer:
            return "other"
        starts, flags = self._of_thread.get(change.thread, ([], []))
        after = bisect.bisect_right(starts, change.time_ns)
        if after and flags[after - 1]:
            # In the op that makes the root's gradient, between two nodes, or when backward() returns and drops that
            # gradient.
            between_nodes = after < len(flags) and flags[after]
            if place.in_op or between_nodes or is_root_gradient:
                return "backward"
        if place.module or self.last_backward_ns is None or change.time_ns < self.last_backward_ns:
            return "forward"
        return "other"


@dataclass(slots=True)
class _TimelineBuilder:
    """Collects the events of the timeline, and tracks the live blocks."""

    start_ns: int
    first_backward_ns: int | None
    events: list[Event] = field(default_factory=list)
    live_bytes: int = 0
    _kept: int | None = None
    _alive: dict[int, Event] = field(default_factory=dict)  # by address
    _blocks: int = 0

    def enter(self, change: Change, place: Place, walk: _Walk) -> None:
        if self._kept is None and self.first_backward_ns is not None and change.time_ns >= self.first_backward_ns:
            self._kept = self._own_bytes()
        born = None if change.address is None else self._alive.pop(change.address, None)
        if change.bytes > 0:
            if born is not None:
                # The address is in use again: a thread that the profiler does not see has released the old block.
                self._append(change, -born.bytes, born.block, place, walk.phase(change, place))
            event = self._append(change, change.bytes, self._blocks, place, walk.phase(change, place))
            self._blocks += 1
            assert change.address is not None
            self._alive[change.address] = event
        elif born is not None:
            is_root_gradient = born.phase == "backward" and born.op == _ROOT_GRADIENT
            self._append(change, -born.bytes, born.block, place, walk.phase(change, place, is_root_gradient))
        elif change.device != "cpu" or change.address is None:
            # On the CPU such a report is skipped: it may refer to an earlier block that had the same address.
            self._append(change, change.bytes, BEFORE_THE_STEP, place, walk.phase(change, place))

    def kept_bytes(self) -> int:
        if self.first_backward_ns is None:
            return 0
        return self._own_bytes() if self._kept is None else self._kept

    def _own_bytes(self) -> int:
        return sum(event.bytes for event in self._alive.values())

    def _append(self, change: Change, count: int, block: int, place: Place, phase: Phase) -> Event:
        self.live_bytes += count
        seconds = (change.time_ns - self.start_ns) / 1e9
        event = Event(seconds, count, self.live_bytes, block, place.label(), place.module, phase, place.line)
        self.events.append(event)
        return event


def read_trace(path: str) -> Trace:
    """Read the trace file that the profiler wrote, and return the part inside the step mark."""
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    spans: list[Span] = []
    changes: list[Change] = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            spans.append(_span(event, base_ns))
        elif event.get("name") == "[memory]" and (change := _change(event, base_ns)) is not None:
            changes.append(change)
    step = next((span for span in spans if span.name == STEP_MARK), None)
    if step is None or not any(change.time_ns < step.start_ns for change in changes):
        raise LeangradError(
            "this torch's profiler did not report the marks and allocations that leangrad.measure makes to check it; "
            "expected a build of torch with Kineto and no other profiler running in the process"
        )

    def inside(time_ns: int) -> bool:
        return step.start_ns <= time_ns <= step.end_ns

    return Trace(
        step.start_ns,
        step.end_ns,
        sorted((s for s in spans if s is not step and inside(s.start_ns)), key=lambda s: s.start_ns),
        sorted((c for c in changes if inside(c.time_ns)), key=lambda c: c.time_ns),
    )


def _nanoseconds(event: dict[str, Any], key: str) -> int:
    return round(float(event[key]) * 1000)


def _span(event: dict[str, Any], base_ns: int) -> Span:
    start_ns = base_ns + _nanoseconds(event, "ts")
    sequence = event.get("args", {}).get("Sequence number")
    is_op = event["cat"] == "cpu_op"
    return Span(start_ns, start_ns + _nanoseconds(event, "dur"), event["tid"], event["name"], is_op, sequence)


def _change(event: dict[str, Any], base_ns: int) -> Change | None:
    args = event["args"]
    if args["Device Type"] not in (_CPU, _CUDA):
        return None
    device = "cpu" if args["Device Type"] == _CPU else f"cuda:{args['Device Id']}"
    return Change(base_ns + _nanoseconds(event, "ts"), event["tid"], device, args["Bytes"], args["Addr"])
