"""Shared parts of the commands on a user's own model: their arguments, loading the model, and showing its errors."""

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import torch
import typer

from leangrad.verify.users_code import TargetError, call_factory, own_frames

__all__ = [
    "AutocastOption",
    "Target",
    "TracebackOption",
    "dtype_of",
    "errors_of_the_user",
    "subject_of",
]


class Autocast(StrEnum):
    """The dtypes for autocast, by their long and their short names."""

    bf16 = "bf16"
    bfloat16 = "bfloat16"
    fp16 = "fp16"
    float16 = "float16"

    def dtype(self) -> torch.dtype:
        """Return the torch dtype."""
        return torch.bfloat16 if self in (Autocast.bf16, Autocast.bfloat16) else torch.float16


Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="A file or an importable module, and a function in it that returns (model, batch) or "
        "(model, batch, loss).",
    ),
]
AutocastOption = Annotated[
    Autocast | None, typer.Option(metavar="bf16|fp16", help="Run forward and loss under autocast.")
]
TracebackOption = Annotated[
    bool, typer.Option("--traceback", help="For an error in your code, print all frames, also torch's and ours.")
]


def dtype_of(autocast: Autocast | None) -> torch.dtype | None:
    """Return the dtype that the option `--autocast` names, or None."""
    return None if autocast is None else autocast.dtype()


@contextlib.contextmanager
def errors_of_the_user(traceback: bool) -> Iterator[None]:
    """Print an error raised inside with the frames of the user's code only, and exit with code 2.

    traceback: raise the error instead, so that Python prints all frames.
    """
    try:
        yield
    except typer.BadParameter:
        raise
    except Exception as error:
        if traceback:
            raise
        typer.echo(own_frames(error), err=True, nl=False)
        raise typer.Exit(2) from None


def subject_of(target: str) -> tuple[Any, Any, Any]:
    """Call the factory that `target` names, and return its model, its batch, and its loss or None."""
    try:
        return call_factory(target)
    except TargetError as error:
        raise typer.BadParameter(str(error)) from None
