"""What the commands on a user's own model have in common: how it is named and loaded, and how its errors are shown."""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import ModuleType
from typing import Annotated, Any

import torch
import typer

import leangrad

__all__ = [
    "AutocastOption",
    "Target",
    "TracebackOption",
    "dtype_of",
    "errors_of_the_user",
    "subject_of",
]


class Autocast(StrEnum):
    """The dtypes that autocast takes, by their long and their short names."""

    bf16 = "bf16"
    bfloat16 = "bfloat16"
    fp16 = "fp16"
    float16 = "float16"

    def dtype(self) -> torch.dtype:
        """The dtype itself."""
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
    """The dtype that an option names, or None."""
    return None if autocast is None else autocast.dtype()


@contextlib.contextmanager
def errors_of_the_user(traceback: bool) -> Iterator[None]:
    """Print an error in the user's code with their own frames only, and exit with 2; or raise it, with all frames."""
    try:
        yield
    except typer.BadParameter:
        raise
    except Exception as error:
        if traceback:
            raise
        typer.echo(_own_frames(error), err=True, nl=False)
        raise typer.Exit(2) from None


def _own_frames(error: BaseException) -> str:
    """The traceback of an error without the frames of leangrad, of torch, and of what Python does to import a file."""
    trace = TracebackException.from_exception(error)
    packages = [package.__file__ for package in (leangrad, torch, importlib)]
    hidden = tuple(str(Path(file).parent) + os.sep for file in packages if file is not None)
    left_out = 0
    waiting: list[TracebackException | None] = [trace]
    while waiting:
        part = waiting.pop()
        if part is None:
            continue
        own = [f for f in part.stack if not f.filename.startswith((*hidden, "<frozen "))]
        left_out += len(part.stack) - len(own)
        part.stack = StackSummary.from_list(own)
        waiting += [part.__cause__, part.__context__]
    text = "".join(trace.format())
    note = f"({left_out} frames of torch and leangrad are left out; --traceback prints all)\n"
    return text + (note if left_out else "")


def subject_of(target: str) -> tuple[Any, Any, Any]:
    """What the factory that `target` names returns: a model, a batch, and a loss or None."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise typer.BadParameter(f"expected MODULE:FACTORY, such as train.py:make or my.module:make, got {target!r}")
    factory = getattr(_load(source), name, None)
    if not callable(factory):
        raise typer.BadParameter(f"expected a function {name!r} in {source}, found none")
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise typer.BadParameter(f"expected {name}() to return (model, batch) or (model, batch, loss), got {got}")
    model, batch, *loss = made
    return model, batch, loss[0] if loss else None


def _load(source: str) -> ModuleType:
    """Import a file by its path, or a module by its name, as `python file.py` and `python -m module` would find it."""
    if not source.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise  # the module is there; something that it imports is not
            raise typer.BadParameter(f"found no module {source!r} here or among the installed ones") from None
    path = Path(source)
    if not path.is_file():
        raise typer.BadParameter(f"found no file {source!r}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
