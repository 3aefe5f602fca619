"""`leangrad frontier` measures time against peak memory; `leangrad fit` searches the largest batch."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import leangrad
from leangrad.cli.target import AutocastOption, Target, TracebackOption, dtype_of, errors_of_the_user, subject_of
from leangrad.frontier.fit import MOST_ROWS
from leangrad.frontier.fit import fit as search_fit
from leangrad.frontier.fit.rows import count_rows
from leangrad.sizes import parse_size

__all__ = ["bad_parameters", "fit", "frontier", "progress_bar"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def frontier(
    target: Target,
    points: Annotated[int, typer.Option(min=0, help="How many budgets to try.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each way.")] = 10,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write a picture of time against peak to this file.")
    ] = None,
    json: JsonOption = False,
    autocast: AutocastOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Measure the time and the peak memory of a training step of your own model, for several ways to train it.

    These are plain PyTorch, a checkpoint per block, and lean with budgets from the plain peak down to the smallest.

    The exit code is 1 if a gradient of lean is not bitwise equal to that of plain PyTorch.

    It is 2 if your code or the arguments raise an error.
    """
    if picture is not None and picture.suffix.lower() != ".svg":
        raise typer.BadParameter(f"expected --picture to name an SVG file, such as frontier.svg, got {str(picture)!r}")
    if picture is not None and not picture.absolute().parent.is_dir():
        raise typer.BadParameter(f"found no folder {str(picture.parent)!r} to write the picture to")
    with errors_of_the_user(traceback):
        model, batch, loss = subject_of(target)
        with progress_bar() as progress:
            found = leangrad.frontier(
                model, batch, loss, autocast=dtype_of(autocast), points=points, steps=steps, progress=progress
            )
    if picture is not None:
        found.save(picture)
    typer.echo(found.to_json(indent=2) if json else str(found))
    raise typer.Exit(1 if any(point.bitwise is False and point.way.startswith("lean") for point in found.points) else 0)


def fit(
    target: Target,
    memory: Annotated[str, typer.Option(metavar="24GB|24GiB", help="How much memory there is.")],
    most: Annotated[int, typer.Option(min=1, help="The largest batch to try.")] = MOST_ROWS,
    json: JsonOption = False,
    autocast: AutocastOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Search the largest batch of your own model that fits into the given memory, for several ways to train it.

    These are plain PyTorch, a checkpoint around each block, lean, and lean with the given memory as its budget.

    The size of dimension 0 of every tensor in the batch is changed. For each size, a few real steps are run.

    The exit code is 2 if your code or the arguments raise an error.
    """
    with bad_parameters():
        nbytes = parse_size(memory, "--memory")
    with errors_of_the_user(traceback):
        model, batch, loss = subject_of(target)
        with bad_parameters():
            count_rows(batch)
        with progress_bar() as progress:
            found = search_fit(
                model, batch, loss, memory=nbytes, most=most, autocast=dtype_of(autocast), progress=progress
            )
    typer.echo(found.to_json(indent=2) if json else str(found))


@contextlib.contextmanager
def bad_parameters() -> Iterator[None]:
    """Turn a TypeError or ValueError about an argument into an error of the command line."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr until the context ends, and yield a function that updates it.

    The function's arguments are the current activity, the number of finished units, and the total.
    """
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def move(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield move
