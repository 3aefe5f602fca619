"""The command line: `leangrad demo`, `verify`, `floor`, `frontier`, `fit`, `bench`, `profile`, `doctor`."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import leangrad
from leangrad import demo as demo_models
from leangrad.cli.bench import bench
from leangrad.cli.doctor import examine
from leangrad.cli.memory import fit, frontier
from leangrad.cli.profile import profile
from leangrad.cli.target import AutocastOption, Target, TracebackOption, dtype_of, errors_of_the_user, subject_of

__all__ = ["app"]

app = typer.Typer(
    name="leangrad",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # an error in the user's own model should look as Python shows it
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"leangrad {leangrad.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train the same model, with the same gradients, in a fraction of the memory."""


# ----------------------------------------------------------------------------------------------------------------- demo


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model, plain and lean.")] = 20,
) -> None:
    """Train three small models, each plain and lean, and print the memory and the time of both.

    Needs no network and no GPU. The exit code is 1 if a gradient differs.
    """
    console = Console()
    comparisons = []
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=steps * len(demo_models.CASES))
        for case in demo_models.CASES:
            progress.update(task, description=case.name)
            comparisons.append(demo_models.compare(case, steps, on_step=lambda: progress.advance(task)))
    console.print(_demo_table(comparisons, steps))
    equal = all(comparison.gradient_difference is None for comparison in comparisons)
    if equal:
        console.print("Every gradient of every step was the same, bit for bit.")
    else:
        console.print("[bold red]Gradients differ. This must not be: please report it with `leangrad doctor`.")
    console.print("Next: `leangrad verify FILE.py:FACTORY` on your own model; see README.md.")
    raise typer.Exit(0 if equal else 1)


def _demo_table(comparisons: list[demo_models.Comparison], steps: int) -> Table:
    """Return the table of the demo, with a column for each model, so that it fits into 80 characters."""
    title = f"{steps} training steps from one seed; memory above what stands before a step"
    table = Table("", *(comparison.name for comparison in comparisons), box=box.HORIZONTALS, title=title)
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, cell: Callable[[demo_models.Comparison], str], *, last: bool = False) -> None:
        table.add_row(name, *map(cell, comparisons), end_section=last)

    row("peak, plain", lambda c: _megabytes(c.plain.peak_bytes))
    row("peak, lean", lambda c: _megabytes(c.lean.peak_bytes), last=True)
    row("kept, plain", lambda c: _megabytes(c.plain.kept_bytes))
    row("kept, lean", lambda c: _megabytes(c.lean.kept_bytes))
    row("floor of kept", lambda c: _megabytes(c.floor_bytes), last=True)
    row("time, lean / plain", lambda c: f"{c.time_ratio:.2f}", last=True)
    row("gradients off by", _distance)
    row("last loss, plain", lambda c: f"{c.plain_loss:.6f}")
    row("last loss, lean", lambda c: f"{c.lean_loss:.6f}")
    return table


def _distance(comparison: demo_models.Comparison) -> str:
    distance = comparison.gradient_difference
    if distance is None:
        return "0"
    return f"{distance:.2g}" if distance > 0 else "0, not bitwise"  # 0.0 where the other is -0.0


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


# --------------------------------------------------------------------------------------------------------------- verify


class Against(StrEnum):
    """The reference that lean is compared with; see `leangrad.verify`."""

    plain = "plain"
    offload = "offload"
    itself = "itself"


@app.command()
def verify(
    target: Target,
    autocast: AutocastOption = None,
    against: Annotated[
        Against,
        typer.Option(
            help="What lean is compared with, if the model does not fit plain: 'offload', plain with its saved tensors "
            "in the host's memory; or 'itself', lean's own runs with one another, which shows less."
        ),
    ] = Against.plain,
    traceback: TracebackOption = False,
) -> None:
    """Run one training step of your own model, plain and lean, and compare all results.

    The exit code is 1 if lean differs more from plain than two plain runs differ, or if the comparison shows nothing.

    It is 2 if your code or the arguments raise an error.
    """
    with errors_of_the_user(traceback):
        model, batch, loss = subject_of(target)
        verification = leangrad.verify(model, batch, loss, autocast=dtype_of(autocast), against=against.value)
    typer.echo(str(verification))
    raise typer.Exit(0 if verification.passed else 1)


# ---------------------------------------------------------------------------------------------------------------- floor


@app.command()
def floor(target: Target, autocast: AutocastOption = None, traceback: TracebackOption = False) -> None:
    """Print the fewest bytes that a step of your own model can keep for backward, and the tensors they consist of.

    This is the minimum without computing a matmul, convolution or attention twice.

    The step is run once, on your model's device.

    The exit code is 2 if your code or the arguments raise an error.
    """
    with errors_of_the_user(traceback):
        model, batch, loss = subject_of(target)
        found = leangrad.floor(model, batch, loss, autocast=dtype_of(autocast))
    typer.echo(str(found))


# ----------------------------------------------------------------------------------------------------- frontier and fit

app.command()(frontier)
app.command()(fit)

# ---------------------------------------------------------------------------------------------------------------- bench

app.command()(bench)

# -------------------------------------------------------------------------------------------------------------- profile

app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(profile)


# --------------------------------------------------------------------------------------------------------------- doctor


@app.command()
def doctor() -> None:
    """Check this machine: print versions, devices, and whether the parts of torch that leangrad uses are there.

    A failed check is marked with `!`: because of it leangrad, or a part of it, may do no more than plain PyTorch.

    The exit code is 1 if a check fails.
    """
    findings = examine()
    for finding in findings:
        mark = " " if finding.good else "!"
        typer.echo(f"{mark} {finding.name:<20} {finding.found}")
        if finding.hint and (not finding.good or finding.name == "CPU memory"):
            typer.echo(f"{'':23}{finding.hint}")
    raise typer.Exit(0 if all(finding.good for finding in findings) else 1)
