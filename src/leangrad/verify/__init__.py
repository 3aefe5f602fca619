"""Compares a plain and a lean training step on the user's own model and batch.

Read in this order: `subject` (a model with its batch and loss, called as one step), `memory` and `generators` (the
state that is restored between runs), `comparison` (the results of a run, and the differences between two), `offload`
(a plain run of a model that does not fit plain), and `verify` itself, here.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from leangrad.ledger import no_regions
from leangrad.measure import Measurement, measure_within
from leangrad.switch import NAME, disabled
from leangrad.timeline.event import format_bytes, format_seconds
from leangrad.verify.comparison import Difference, Outcome, collect, differences, largest
from leangrad.verify.memory import Memory
from leangrad.verify.offload import offloaded
from leangrad.verify.subject import Arguments, Subject

__all__ = ["Difference", "Verification", "verify"]

_TIMED_RUNS = 2  # plus the instrumented run: three plain runs show how far plain PyTorch is from itself

# Plain runs that are further apart than this differ by more than rounding: bfloat16 rounds to 1/256.
LARGE_NOISE = 0.01

Against = Literal["plain", "offload", "itself"]
Region = contextlib.AbstractContextManager[object]


@dataclass(frozen=True)
class Verification:
    """The result of `leangrad.verify`.

    - `equal`: everything is the same bit for bit: the loss, all gradients, buffers, and the random state afterwards.
    - `max_difference`: the largest relative difference, max|plain − lean| / max|plain| of one tensor; 0.0 if equal.
    - `noise`: the same between the plain runs: 0.0 where plain PyTorch is bitwise equal to itself.
    - `differences`: an entry for each tensor or state that differs, largest first.
    - `plain`, `lean`: the Measurements. With `against="offload"`, `plain` is that of the offloaded runs, whose memory
      is not that of plain PyTorch; with `against="itself"` it is None.
    - `against`: what lean was compared with. With "itself", the first lean run replaces the plain run above.
    - `not_finite`: names of the gradients that contain an Inf or a NaN after the first lean run.
    - `was_disabled`: True if LEANGRAD_DISABLE was set, so that the lean runs were plain too.

    True in a condition only if `equal`.
    """

    equal: bool
    max_difference: float
    noise: float
    differences: tuple[Difference, ...]
    plain: Measurement | None
    lean: Measurement
    against: Against = "plain"
    not_finite: tuple[str, ...] = ()
    was_disabled: bool = False  # by LEANGRAD_DISABLE

    @property
    def within_noise(self) -> bool:
        """Whether the lean runs differ from plain by no more than the plain runs differ from each other."""
        return self.equal or self.max_difference <= self.noise < math.inf

    @property
    def conclusive(self) -> bool:
        """Whether an error would have shown: False if the reference runs differ from each other beyond rounding."""
        return not self.was_disabled and (self.equal or self.noise <= LARGE_NOISE)

    @property
    def passed(self) -> bool:
        """Whether no error was found: this decides the exit code of `leangrad verify`."""
        finite = self.against != "itself" or not self.not_finite  # else the plain run left the same values
        return self.within_noise and self.conclusive and finite

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        lines = [*self._table(), self._verdict(), *(f"  {_line(entry)}" for entry in self.differences[:10])]
        if not self.conclusive and not self.was_disabled:
            lines.append(
                f"{'lean' if self.against == 'itself' else 'plain'} is that far from itself by more than rounding, "
                "so this shows nothing: the model draws random numbers, or keeps state between calls, where verify "
                "cannot put it back; seed it inside forward, or verify the model without that part"
            )
        if self.not_finite:
            names = ", ".join(self.not_finite[:3]) + (", ..." if len(self.not_finite) > 3 else "")
            lines.append(f"not finite in lean's gradients: {names}")
        if self.was_disabled:
            lines.append(f"{NAME} is set: the lean run was plain too, and nothing was shown")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        if self.plain is None:
            named = (
                ("peak", format_bytes(self.lean.peak_bytes)),
                ("kept for backward", format_bytes(self.lean.kept_bytes)),
            )
            return [
                f"{name:<18}{value:>12}"
                for name, value in (("", "lean"), *named, ("time", format_seconds(self.lean.seconds)))
            ]
        offload = self.against == "offload"
        rows = [("", "offloaded" if offload else "plain", "lean", "" if offload else "lean / plain")]
        for name, field, form in (
            ("peak", "peak_bytes", format_bytes),
            ("kept for backward", "kept_bytes", format_bytes),
            ("time", "seconds", format_seconds),
        ):
            plain, lean = getattr(self.plain, field), getattr(self.lean, field)
            rows.append((name, form(plain), form(lean), f"{lean / plain:.2f}" if plain and not offload else ""))
        return [f"{row[0]:<18}{row[1]:>12}{row[2]:>12}{row[3]:>14}".rstrip() for row in rows]

    def _verdict(self) -> str:
        if self.against == "itself":
            found = "the same, bit for bit" if self.equal else f"apart by up to {self.noise:.2g}"
            return f"lean's own runs: {found}; not compared with plain"
        if self.equal:
            return "gradients and all else: equal, bit for bit"
        judged = "no more than" if self.within_noise else "MORE than"
        return (
            f"{len(self.differences)} differ, by up to {self.max_difference:.2g}: "
            f"{judged} plain differs from itself ({self.noise:.2g})"
        )


def verify(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    autocast: torch.dtype | None = None,
    against: Against = "plain",
) -> Verification:
    """Train one step plain and lean from the same state, and compare every number.

    The plain and the lean step::

        value = loss(model(*batch))              with leangrad.saving():
        value.backward()                             value = loss(model(*batch))
                                                 value.backward()

    Each is run three times, all from the same parameters, buffers and random state (torch's, Python's and NumPy's),
    with `.grad` None. The loss, the gradients of parameters and of inputs that require one, the buffers and the random
    states afterwards are compared bit for bit. A model that is lean already is run plain first, and then without
    changes.

    Afterwards the model, the batch, `.grad` and the random state are as before, also if the model raises; see
    [Note: What is put back] in `memory.py`, also for the Python state that is not restored. The user's own hooks run:
    if a hook calls an optimizer, the parameters that its steps change are restored, but the optimizer's state is not.

    Args:
        model: a module with at least one parameter that requires a gradient, in the mode it is to be checked in.
        batch: a tensor; a tuple or list of positional arguments; or a mapping of keyword arguments.
        loss: a function of the model's output that returns a scalar. None means: the output itself if it is a scalar,
            its `.loss` or `["loss"]` if it has one, else the sum, over all floating tensors in the output that require
            a gradient, of the mean of their squares in float32.
        autocast: run forward and loss under `torch.autocast` with this dtype.
        against: what lean is compared with; the second and third choice are for models too large to run plain.
            "plain": the plain step. A pass shows that lean computes the numbers of plain PyTorch.
            "offload": the plain step with every saved tensor copied to the host's memory, for a model on a GPU. It
            computes what the plain step computes, so a pass shows the same. The host needs more memory than the plain
            step keeps on the GPU, because a tensor that is saved twice is copied twice. The peak of the plain step is
            not measured.
            "itself": only lean is run. A pass shows that its runs give the same numbers, and finite gradients; the
            first run makes all decisions, and the later ones follow the first. It does not show that these are the
            numbers of plain PyTorch. Peak and kept bytes are lean's.

    Raises:
        TypeError, ValueError: an argument is not as described above; nothing was run, or all state was restored.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    >>> verification = verify(model, torch.randn(3, 4))
    >>> verification.equal
    True
    """
    if against not in get_args(Against):
        raise ValueError(f"expected against to be one of {get_args(Against)}, got {against!r}")
    subject = Subject.of(model, batch, loss, autocast, caller="verify")
    check_trainable(model)
    memory = Memory(model, batch)
    try:
        plain, what = None, "the lean run"
        plain_outcomes: list[Outcome] = []
        if against != "itself":
            region = plain_region(model) if against == "plain" else offloaded
            plain, plain_outcomes = _run(subject, memory, region, "the plain run")
            check_gradients(plain_outcomes[0])
            what = "the lean run; the plain runs before it passed"
        lean, lean_outcomes = _run(subject, memory, lean_region(model), what)
        check_gradients(lean_outcomes[0])
    finally:
        memory.restore()
    reference, *repeats = plain_outcomes or lean_outcomes
    noise = largest(entry for repeat in repeats for entry in differences(reference, repeat))
    found: dict[tuple[str, str], Difference] = {}
    for entry in (entry for outcome in lean_outcomes for entry in differences(reference, outcome)):
        known = found.setdefault((entry.kind, entry.name), entry)
        if entry.max_difference > known.max_difference:
            found[entry.kind, entry.name] = entry
    return Verification(
        equal=not found,
        max_difference=largest(found.values()),
        noise=noise,
        differences=tuple(sorted(found.values(), key=lambda entry: -entry.max_difference)),
        plain=plain,
        lean=lean,
        against=against,
        not_finite=tuple(
            name for (kind, name), value in lean_outcomes[0].items() if kind == "gradient" and _bad(value)
        ),
        was_disabled=disabled(),
    )


def _bad(gradient: Tensor | None) -> bool:
    return gradient is not None and not gradient.to_dense().isfinite().all()


def plain_region(model: nn.Module) -> Callable[[], Region]:
    """Return the context manager in which `model` runs plain, also if it or a part of it is lean."""
    return no_regions


def lean_region(model: nn.Module) -> Callable[[], Region]:
    """Return the context manager in which `model` runs lean; one without effect if any part of it is lean already."""
    from leangrad.lean import is_lean, saving

    if any(is_lean(module) for module in model.modules()):
        return contextlib.nullcontext
    ledger = saving()  # one for all runs: later runs use what the first has recorded, as in training
    return lambda: ledger


def _run(
    subject: Subject, memory: Memory, region: Callable[[], Region], what: str
) -> tuple[Measurement, list[Outcome]]:
    """Measure the step inside `region`, each run from the state in `memory`; also return the outcome of each run.

    what: names these runs in the note that is added to an error.
    """
    outcomes: list[Outcome] = []
    arguments: Arguments
    inputs: dict[str, Tensor]
    value: Tensor | None = None

    @contextlib.contextmanager
    def fresh() -> Iterator[None]:
        nonlocal arguments, inputs, value
        memory.restore()
        memory.clear_gradients()
        torch.clear_autocast_cache()
        arguments, inputs = subject.fresh_arguments()
        try:
            yield
        except Exception as error:
            error.add_note(f"leangrad.verify: this was {what}")
            raise
        assert value is not None
        outcomes.append(collect(subject.model, inputs, value))
        value = None

    def step() -> None:
        nonlocal value
        with torch.enable_grad(), region(), subject.under_autocast():
            result = subject.forward(arguments)
        result.backward()
        value = result.detach()

    return measure_within(step, timed_runs=_TIMED_RUNS, around=fresh), outcomes


def check_trainable(model: nn.Module) -> None:
    """Raise a ValueError unless a parameter of `model` requires a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"expected a model with a parameter that requires a gradient, got {type(model).__name__} with none; "
            "unfreeze what is to be trained, such as with model.requires_grad_(True)"
        )


def check_gradients(outcome: Outcome) -> None:
    """Raise a ValueError unless the run left a gradient in at least one parameter."""
    if all(value is None for (kind, _), value in outcome.items() if kind == "gradient"):
        raise ValueError(
            "expected backward to leave a gradient in at least one parameter, got none: there is nothing to compare; "
            "check that the loss depends on the parameters and that no hook sets .grad to None"
        )


def _line(entry: Difference) -> str:
    return f"{entry.kind} {entry.name}".rstrip() + f": {entry.max_difference:.2g}"
