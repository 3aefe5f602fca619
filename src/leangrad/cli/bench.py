"""`leangrad bench` compares all ways to train a model."""

from pathlib import Path
from typing import Annotated

import typer

from leangrad.bench import WAYS, Bench
from leangrad.bench import bench as run_bench
from leangrad.bench.builtin import NAMES
from leangrad.bench.ways import find
from leangrad.cli.memory import bad_parameters, progress_bar
from leangrad.cli.target import AutocastOption, TracebackOption, dtype_of
from leangrad.sizes import parse_size

__all__ = ["bench"]


def bench(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A file or an importable module, and a function in it that returns (model, batch) or "
            "(model, batch, loss). Without it: three small models.",
        ),
    ] = None,
    ways: Annotated[str, typer.Option(metavar="NAME,...", help=f"Which ways: all, or some of {', '.join(WAYS)}.")] = "",
    budget: Annotated[
        str,
        typer.Option(
            metavar="20GB", help="lean_budget's, above what stands before a step. Default: checkpoint's peak."
        ),
    ] = "",
    memory: Annotated[
        str,
        typer.Option(metavar="24GB|plain", help="Also search the largest batch that fits into this, or into plain's."),
    ] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Timing rounds of plain and each way; 0: no times.")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a way is stopped.")] = 900,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows to this file.")] = None,
    autocast: AutocastOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Compare all ways to train your own model with less memory, each in its own process.

    These are plain PyTorch, the memory savers of torch and of other packages, and leangrad's.

    If a way fails or does not apply to your model, its row says why.

    The exit code is 1 if a gradient of lean is not bitwise equal to that of plain PyTorch.

    It is 2 if your code or the arguments raise an error.
    """
    with bad_parameters():
        chosen = None if not ways else list(WAYS) if ways == "all" else [name.strip() for name in ways.split(",")]
        find(chosen or [])
        allowed = parse_size(budget, "--budget") if budget else None
        room = None if not memory else 0 if memory == "plain" else parse_size(memory, "--memory")
    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"found no folder {str(json.parent)!r} to write the rows to")
    dtype = dtype_of(autocast)
    found: list[Bench] = []
    for options in [{}] if target else [{"name": name} for name in NAMES]:
        with progress_bar() as progress:
            one = run_bench(
                target or "leangrad.bench.builtin:make",
                chosen,
                name=target or options["name"],
                options=options,
                autocast="" if dtype is None else str(dtype).removeprefix("torch."),
                rounds=rounds,
                budget=allowed,
                memory=room,
                timeout=timeout,
                whole_traceback=traceback,
                progress=progress,
            )
        if one.rows[0].outcome == "failed":
            typer.echo(one.rows[0].traceback or one.rows[0].note, err=True)
            raise typer.Exit(2)
        typer.echo(f"{one}\n")
        found.append(one)
    if json is not None:
        json.write_text("[" + ",\n".join(one.to_json(indent=1) for one in found) + "]\n", encoding="utf-8")
    raise typer.Exit(1 if any(one.broken_promises for one in found) else 0)
