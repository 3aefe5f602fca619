"""`Job`, the input of a worker process, and `Row`, its output; both are sent as JSON."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Job", "Row"]

Outcome = Literal["measured", "not for this", "failed"]


@dataclass(frozen=True)
class Job:
    """A request to measure one way on one model.

    - `target`, `options`: the factory of the model, as MODULE:FACTORY, and its keyword arguments.
    - `way`: a name in `ways.WAYS`.
    - `autocast`: "bfloat16", "float16", or "" for no autocast.
    - `rounds`, `steps`: the number of timing rounds, and the timed steps that plain and the way each run in a round.
      With 0 rounds nothing is timed.
    - `seconds`: no further round begins after this many seconds of timing, but at least two of the rounds are run.
    - `turnstile`: path of a lock file, the same for all jobs that run on one device at the same time, so that one of
      them uses the device at a time; "" for no lock. The first step of a way that compiles runs without the lock,
      because the host is busy then, not the device.
    - `budget`: the budget of the way ``lean_budget``: the allowed peak in bytes above the memory allocated before it.
    - `others`: names of other ways; the row names those of them that do not apply to this model.
    - `floor`: also compute the floor of the model, and the distance of plain PyTorch's gradients from
      those in float64.
    - `memory`: also search the largest batch that fits into this many bytes, counted as `leangrad fit` counts them.
    - `whole_traceback`: report an error with all frames, those of torch and leangrad included.
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
        """Return the job as JSON text."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Row:
    """The measurements of one way; an attribute is None or empty if it was not measured.

    - `outcome`: "measured"; "not for this" if the way does not apply to this model or device; or "failed". `note` says
      why.
    - `peak_bytes`: the peak of one step above the memory allocated before the step (on a GPU: before the way was set
      up).
    - `kept_bytes`: the bytes that a step has allocated and still holds when its backward pass begins.
    - `standing_bytes`: the bytes of model and batch on a GPU; 0 on a CPU, where they are not counted.
    - `floor_bytes`: the fewest bytes that could be kept; only if the job asked for the floor.
    - `float64_error`: the distance of loss and gradients in plain PyTorch from those of the same step in float64,
      measured like `gradient_error`, which is to be compared with it. Only if the job asked for the floor, on a CPU,
      without autocast, and if the model draws no random numbers.
    - `ratio`: the time of a step over that of a plain step in the same process: the median over the rounds.
    - `seconds`, `first_seconds`: the time of a step, and of the first step, in which a model is compiled or recorded.
    - `gradient_error`: the largest difference of the loss or of any gradient from plain PyTorch, relative to the
      largest element of the tensor in plain PyTorch; 0 if all are bitwise equal. Gradients below a millionth of the
      model's largest gradient do not count.
    - `bitwise`: whether loss and gradients are bitwise equal to plain PyTorch; None if two plain steps differ.
    - `budget`: the peak that the way was allowed, in bytes; None without a budget.
    - `plan`: the ledger's sentence on the plan of a lean model, with its predicted peak; empty if there is none.
    - `process_seconds`: the CPU time of the worker process, including the compiler processes that it started.
    - `largest_batch`: the rows of the largest batch that fits into the memory that the job named.
    - `rows`: the rows of the batch.
    - `traceback`: the traceback of an error, if the way failed.
    - `not_for_this`: for those of `Job.others` that do not apply to this model, the reason.
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
        """Return the row as a dict, without empty values."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v not in (None, "", {})}
