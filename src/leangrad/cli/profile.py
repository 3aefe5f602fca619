"""`leangrad profile` runs a training script and writes a report of where its memory goes."""

import os
from pathlib import Path
from typing import Annotated

import typer

from leangrad.profile.script import Script, profile_script

__all__ = ["profile"]


def profile(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="Your training script, as after `python`.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The report: a page (.html), .json, or text.")
    ] = Path("report.html"),
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as after `python -m`.")] = False,
    compare: Annotated[bool, typer.Option(help="Run the script a second time, lean from its first step on.")] = False,
    lean: Annotated[bool, typer.Option(help="Run four of its steps lean, with the same numbers; measure one.")] = True,
    private: Annotated[bool, typer.Option(help="Leave out the script's name, arguments, folders and errors.")] = False,
) -> None:
    """Run your training script and write a report on what its memory is used for.

    The script runs unchanged; its output and its exit code pass through.

    Three of its steps are measured: the first, the third, and the seventh, which runs lean.

    Put leangrad's options before SCRIPT.
    """
    name, *arguments = script
    if not module and not Path(name).is_file():
        raise typer.BadParameter(f"found no file {name!r}; to run a module write `leangrad profile -m {name}`")
    if not output.absolute().parent.is_dir():
        raise typer.BadParameter(f"found no folder {str(output.parent)!r} to write the report to")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # each process of torchrun writes its own report
        output = output.with_stem(f"{output.stem}.rank{os.environ.get('RANK', '0')}")
    called = Script(name, tuple(arguments), module)
    title = "Where the memory goes" if private else f"Where the memory of {called} goes"
    report, code = profile_script(called, output, title, tries_lean=lean, compares=compare, is_private=private)
    typer.echo("", err=True)
    for sentence in report.sentences:
        typer.echo(f"leangrad: {sentence}", err=True)
    typer.echo(f"leangrad: the report is in {output}", err=True)
    raise typer.Exit(code)
