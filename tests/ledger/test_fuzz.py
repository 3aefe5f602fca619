"""Random programs, plain and through a ledger: the same gradients, bit for bit, or both raise.

A program is a list of steps over a pool of small tensors. Each step makes a tensor from one or two earlier ones or
changes one in place: pointwise ops with scalars, norms, softmax, views, in-place ops on tensors and on views, dropout,
joins and splits, products with parameters, casts and mixed dtypes, masks, detached branches, and edits that autograd
does not record. Part of the program may run before the region and part of it after. It runs three times through one
ledger, with other scalars and sometimes without one of its steps: what the first run taught is used, and misleads.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from leangrad.errors import ChangedError
from leangrad.ledger import Goal, Ledger
from leangrad.ledger.learn import early_end
from leangrad.ledger.learn import unwatched as unwatched_stretch
from leangrad.ledger.learn.recorded_step import RecordedStep
from leangrad.ledger.learn.trace import TraceMode
from leangrad.ledger.observe.proof import Facts
from leangrad.ledger.origins.rules import PRODUCTS as PRODUCT_NODES
from leangrad.ledger.region import Region
from leangrad.ledger.tune.goal import StepMode
from leangrad.ledger.tune.tuner import Tuner
from leangrad.policy.replay import Replay
from tests.support import assert_same_bits
from tests.support.fuzz import fuzz_settings
from tests.support.fuzz_steps import PRODUCTS, RECORDED, UNRECORDED, Run

pytestmark = pytest.mark.fuzz

Step = tuple[str, int, int, float]


@dataclass(frozen=True)
class Program:
    """What to run, where the region lies in it, which step the third run leaves out, and how backward runs."""

    steps: tuple[Step, ...]
    seed: int
    enter: int
    leave: int
    skip: int
    backward: str
    autocast: bool = False

    @property
    def edits(self) -> bool:
        return any(name in UNRECORDED for name, *_ in self.steps)


class Stage(nn.Module):
    """A module around one step."""

    def forward(self, make: Any, *args: Any) -> Any:
        return make(*args)


class Stages(nn.Module):
    """A module for each step of a program: between any two of them the override may end."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Stage() for _ in range(count))


def forward(
    program: Program, run: Run, region: Any, turn: int, outputs: int = 4, stages: Stages | None = None
) -> list[Tensor]:
    def play(steps: tuple[tuple[int, Step], ...]) -> None:
        if steps and not run.pool:
            run.pool += [run.p * 1.0, run.p + run.b]
        for n, (name, i, j, c) in steps:
            if turn == 2 and n == program.skip:
                continue
            make = RECORDED.get(name) or UNRECORDED.get(name) or PRODUCTS[name]
            args = (run, run.pick(i), run.pick(j), c * (1 + turn / 8))
            made = make(*args) if stages is None else stages.steps[n](make, *args)
            if made is not None:
                run.pool.append(made)

    numbered = tuple(enumerate(program.steps))
    play(numbered[: program.enter])
    if stages is not None and isinstance(region, Ledger):
        region = region.region(stages, ((), {})) or nullcontext()
    with region:
        play(numbered[program.enter : program.leave])
    play(numbered[program.leave :])
    return [t for t in run.pool[-outputs:] if t.requires_grad]


def gradients(program: Program, run: Run, outputs: list[Tensor]) -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(program.seed)
    seeds = [torch.randn(t.shape, generator=draw).to(t.dtype) for t in outputs]
    if program.backward == "create_graph":
        first = torch.autograd.grad(outputs, run.leaves, seeds, create_graph=True, allow_unused=True)
        graded = [g for g in first if g is not None and g.requires_grad]
        if graded:
            torch.autograd.backward([g.float().square().sum() for g in graded])
        return [*(g.detach() if g is not None else None for g in first), *(t.grad for t in run.leaves)]
    if program.backward == "partial":
        torch.autograd.backward(outputs[:1], seeds[:1], inputs=[run.w, run.p], retain_graph=True)
    torch.autograd.backward(outputs, seeds, retain_graph=program.backward == "twice")
    if program.backward == "twice":
        torch.autograd.backward(outputs, seeds)
    return [t.grad for t in run.leaves]


Result = list[Tensor | None] | Exception


def result(
    program: Program, ledger: Ledger | None, turn: int, outputs: int = 4, stages: Stages | None = None
) -> Result:
    """The outputs and gradients of one run, or its error."""
    torch.manual_seed(program.seed + turn)
    run = Run(program.seed + turn)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
            made = forward(program, run, ledger if ledger is not None else nullcontext(), turn, outputs, stages)
        return [t.detach().clone() for t in made] + gradients(program, run, made)
    except (RuntimeError, IndexError) as error:
        return error


def may_refuse(program: Program, error: Exception, turn: int) -> bool:
    """Whether a ChangedError is fair where plain gives gradients.

    After an edit that nobody records it is (the second law). After recorded ones it is if plain refuses too as soon as
    everything that was computed takes part in backward: then a tensor that some backward needs was changed.
    """
    if not isinstance(error, ChangedError):
        return False
    return program.edits or isinstance(result(program, None, turn, outputs=99), Exception)


class AnyPlan(Tuner):
    """Instead of a course: every step keeps the least and some of the rest, by chance."""

    def __init__(self, seed: int) -> None:
        super().__init__(Goal(budget=2**60))
        self._chance = random.Random(seed)
        self.kept_more = 0  # steps

    def start(self, step: RecordedStep, replay: Replay, kept: frozenset[int] | None, outputs_nbytes: int) -> None:
        self._least, self._all = (step.kept_items() if kept is None else kept), range(len(step.items))

    def next_step_mode(self) -> StepMode:
        share = self._chance.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        more = frozenset(n for n in self._all if self._chance.random() < share) - self._least
        self.kept_more += bool(more)
        return StepMode(None if self._chance.random() < 0.1 else self._least | more)


def check(
    program: Program, depth: Any, products: int = 0, *, plans: int = 0, stages: Stages | None = None
) -> Counter[str]:
    """Compare plain with lean; count what happened. ``plans``: so many steps more, each with another plan."""
    seen: Counter[str] = Counter()
    ledger = Ledger(residual_depth=depth, min_bytes=0, products=products, goal=Goal(budget=2**60) if plans else None)
    tuner = AnyPlan(program.seed)
    if plans:
        ledger._tuner, ledger.products = tuner, products  # which a budget would choose itself
    for turn in range(3 + plans):
        plain, lean = result(program, None, turn), result(program, ledger, turn, stages=stages)
        if isinstance(plain, Exception):
            # Where plain refuses, lean may refuse too, or rebuild what was changed and be right.
            seen["refused"] += 1
        elif isinstance(lean, Exception):
            if not may_refuse(program, lean, turn):
                raise AssertionError(f"turn {turn}: plain gives gradients, lean raises") from lean
            seen["changed"] += 1
        else:
            seen["same"] += 1
            for n, (a, b) in enumerate(zip(plain, lean, strict=True)):
                assert_same_bits(a, b, f"turn {turn}, tensor {n}", nans="any", strides=True)
    seen["rebuilt"] += ledger.totals().rebuilt_bytes > 0
    seen["plans"] += tuner.kept_more
    seen["products"] += any(e.outcome == "rebuilt" and e.op in PRODUCT_NODES for e in ledger.entries())
    return seen


SCALARS = (0.5, 1.5, -0.7, 2.0, 1.0)
BACKWARDS = ("once", "once", "twice", "create_graph", "partial")
DEPTHS = (0, 1, 2, "auto")


@st.composite
def programs(draw: st.DrawFn, *, edits: bool, products: bool = False) -> Program:
    names = st.sampled_from(sorted(RECORDED))
    if products:
        names = st.one_of(names, st.sampled_from(sorted(PRODUCTS)))
    if edits:
        names = st.one_of(names, names, names, names, st.sampled_from(sorted(UNRECORDED)))
    number = st.integers(0, 15)
    steps = draw(st.lists(st.tuples(names, number, number, st.sampled_from(SCALARS)), min_size=2, max_size=14))
    n = len(steps)
    enter = draw(st.sampled_from([0, 0, 0, 1, 2]))
    leave = draw(st.sampled_from([n, n, n, max(enter, n - 2)]))
    skip = draw(st.integers(0, 2 * n))
    backward, autocast = draw(st.sampled_from(BACKWARDS)), draw(st.sampled_from([False, False, False, True]))
    return Program(tuple(steps), draw(st.integers(0, 99)), enter, leave, skip, backward, autocast)


def random_program(seed: int, *, products: bool = False) -> Program:
    """The same kind of program from a plain seed, where nothing needs to shrink."""
    choose = random.Random(seed)
    names = sorted(RECORDED) + (sorted(PRODUCTS) * 3 if products else [])
    steps = tuple(
        (choose.choice(names), choose.randrange(16), choose.randrange(16), choose.choice(SCALARS))
        for _ in range(choose.randint(4, 16))
    )
    return Program(steps, seed, choose.choice([0, 0, 2]), len(steps), choose.randrange(30), choose.choice(BACKWARDS))


@given(program=programs(edits=False), depth=st.sampled_from(DEPTHS))
@fuzz_settings(200, 6_000)
def test_recorded_programs_give_the_same_bits(program: Program, depth: Any) -> None:
    check(program, depth)


@given(program=programs(edits=True), depth=st.sampled_from(DEPTHS))
@fuzz_settings(120, 4_000)
def test_unrecorded_edits_are_never_silently_wrong(program: Program, depth: Any) -> None:
    check(program, depth)


@given(program=programs(edits=False, products=True), depth=st.sampled_from(DEPTHS), products=st.sampled_from((1, 2, 8)))
@fuzz_settings(150, 6_000)
def test_products_that_run_again_give_the_same_bits(program: Program, depth: Any, products: int) -> None:
    check(program, depth, products)


@given(program=programs(edits=True, products=True), depth=st.sampled_from(DEPTHS), products=st.sampled_from((1, 8)))
@fuzz_settings(80, 4_000)
def test_unrecorded_edits_under_products_are_never_silently_wrong(program: Program, depth: Any, products: int) -> None:
    check(program, depth, products)


@given(program=programs(edits=True, products=True), products=st.sampled_from((0, 8)))
@fuzz_settings(120, 6_000)
def test_a_plan_that_keeps_any_part_gives_the_same_bits(program: Program, products: int) -> None:
    check(program, "auto", products, plans=4)


def check_early_ends(program: Program, products: int) -> Counter[str]:
    """The same with overrides that end early, wherever a plan allows it.

    A model in whose code an edit may hide that moves no version is watched to the end, unless all its steps are alike.
    """
    is_alike = program.skip >= len(program.steps)
    ends, end = [0], TraceMode.end_early

    def counted(mode: TraceMode, **how: bool) -> None:
        end(mode, **how)
        ends[0] += mode.has_ended

    may_end = is_alike or not program.edits
    with (
        patch.object(early_end, "WORTH", 0),
        patch.object(early_end, "may_write_unseen", lambda _: not may_end),
        patch.object(early_end, "prove", lambda _: None),
        patch.object(TraceMode, "end_early", counted),
    ):
        seen = check(program, "auto", products, plans=4, stages=Stages(len(program.steps)))
    seen["ends"] += ends[0]
    return seen


def check_unwatched(program: Program, *, plans: int) -> Counter[str]:
    """The same with steps that run without their function mode, wherever the recorded step did not need it.

    Edits that autograd does not record are in every step or in none, as the proof has to make sure.
    """
    is_alike = program.skip >= len(program.steps)
    unwatched, go_on = [0], Region._go_on_unwatched

    def counted(region: Region) -> None:
        go_on(region)
        unwatched[0] += 1

    hides = program.edits and not is_alike
    with (
        patch.object(early_end, "WORTH", 0),
        patch.multiple(unwatched_stretch, WORTH=0, PER_SPAN=0, PER_MODULE=0),
        patch.object(unwatched_stretch, "GAP", plans % 3),
        patch.object(early_end, "may_write_unseen", lambda _: hides),
        patch.object(early_end, "prove", lambda _: None if hides else Facts()),
        patch.object(Region, "_go_on_unwatched", counted),
    ):
        seen = check(program, "auto", plans=plans, stages=Stages(len(program.steps)))
    seen["unwatched"] += unwatched[0]
    return seen


@given(program=programs(edits=True), plans=st.sampled_from((0, 4)))
@fuzz_settings(150, 8_000)
def test_steps_without_the_function_mode_give_the_same_bits(program: Program, plans: int) -> None:
    check_unwatched(program, plans=plans)


def test_the_fuzz_runs_without_the_function_mode() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += check_unwatched(random_program(seed), plans=4 * (seed % 2))
    assert seen["same"] > 60, seen
    assert seen["unwatched"] > 30, seen


@given(program=programs(edits=True, products=True), products=st.sampled_from((0, 8)))
@fuzz_settings(120, 6_000)
def test_an_override_that_ends_early_gives_the_same_bits(program: Program, products: int) -> None:
    check_early_ends(program, products)


def test_the_fuzz_ends_early() -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        seen += check_early_ends(random_program(seed, products=True), 8 * (seed % 2))
    assert seen["same"] > 60, seen
    assert seen["ends"] > 30, seen


def test_the_fuzz_keeps_parts() -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        seen += check(random_program(seed, products=True), "auto", 8 * (seed % 2), plans=4)
    assert seen["same"] > 60, seen
    assert seen["plans"] > 30, seen


def test_the_fuzz_runs_products_again() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += check(random_program(seed, products=True), DEPTHS[seed % 4], 8)
    assert seen["same"] > 40, seen
    assert seen["products"] > 20, seen


def test_the_fuzz_is_not_vacuous() -> None:
    """Most random programs train, and the ledger rebuilds something in most of them."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += check(random_program(seed), DEPTHS[seed % 4])
    assert seen["same"] > 60, seen
    assert seen["rebuilt"] > 25, seen
