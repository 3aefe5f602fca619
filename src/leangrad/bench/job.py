"""What a process is asked to measure, and what it answers: both travel as JSON."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Job", "Row"]

Outcome = Literal["measured", "not for this", "failed"]


@dataclass(frozen=True)
class Job:
    """One way on one model.

    - `target`, `options`: the factory of the model, as MODULE:FACTORY, and what it is called with.
    - `way`: a name in `ways.WAYS`.
    - `autocast`: "bfloat16", "float16" or nothing.
    - `rounds`, `steps`: plain and the way take so many turns of so many timed steps each. 0 rounds: nothing is timed.
    - `seconds`: of timed turns after which no further one begins; two are taken all the same.
    - `turnstile`: a file that all jobs on one device name which run at the same time. One of them uses the device at a
      time; the first step of a way that has no budget runs beside others, since it is the host that compiles then.
    - `budget`: the peak that lean with a budget may take, above what stands before a step.
    - `others`: names of ways of which is asked whether they are for this model at all.
    - `floor`: find the floor of the model too, and how far plain's gradients are from float64's.
    - `memory`: find the largest batch in so many bytes, which count what `leangrad fit` counts.
    - `whole_traceback`: of an error, with the frames of torch and leangrad too.
    """

    target: str
    way: str
    options: dict[str, Any] = field(default_factory=dict)
    autocast: str = ""
    rounds: int = 5
    steps: int = 2
    seconds: float = 120.0
    turnstile: str = ""
    budget: int | None = None
    others: tuple[str, ...] = ()
    floor: bool = False
    memory: int | None = None
    whole_traceback: bool = False

    def to_json(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Row:
    """What was found out about one way.

    - `outcome`: it was "measured"; it is "not for this" model or device; or it "failed". `note` says why.
    - `peak_bytes`: of a step, above what stands before it.
    - `kept_bytes`: what a step has allocated and still holds when its backward begins.
    - `standing_bytes`: what model and batch take on a GPU; 0 on a CPU, where it does not count.
    - `floor_bytes`: the fewest that could be kept, if the job asked for it.
    - `float64_error`: how far its gradients are from those of the same step in float64, if the job asked for it, on a
      CPU and for a model that draws no random numbers: what other errors are to be compared with.
    - `ratio`: the time of a step over plain's, both in turns in the same process: the median over the turns.
    - `seconds`, `first_seconds`: a step's, and that of the first one, in which a model is compiled or recorded.
    - `gradient_error`: the largest difference of any gradient, or of the loss, from plain's, as a part of the largest
      element of plain's; 0 if all bits are the same. Gradients below a millionth of the largest do not count.
    - `bitwise`: whether all bits are plain's; None where plain's own steps differ.
    - `budget`: what it was allowed.
    - `plan`: what lean foresees of the plan that it has come to, if it has one.
    - `process_seconds`: the processor's time that all this took, and that of compilers that it has started.
    - `largest_batch`: in the memory that the job named.
    - `rows`: of the batch.
    - `traceback`: of an error in the user's own code.
    - `not_for_this`: of the ways that the job asked about, those that are none for this model, and why.
    """

    way: str
    outcome: Outcome = "measured"
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    standing_bytes: int | None = None
    floor_bytes: int | None = None
    float64_error: float | None = None
    ratio: float | None = None
    seconds: float | None = None
    first_seconds: float | None = None
    gradient_error: float | None = None
    bitwise: bool | None = None
    budget: int | None = None
    plan: str = ""
    rows: int | None = None
    largest_batch: int | None = None
    process_seconds: float | None = None
    note: str = ""
    traceback: str = ""
    not_for_this: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Without what is empty."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v not in (None, "", {})}
