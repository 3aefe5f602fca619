"""Loads a user's model, named by a file and a function in it, and formats errors with the user's own frames only."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import ModuleType
from typing import Any

import torch

__all__ = ["TargetError", "call_factory", "own_frames"]


class TargetError(ValueError):
    """The named file or function does not exist, or returns the wrong thing. The message says what was expected."""


def call_factory(target: str, **options: Any) -> tuple[Any, Any, Any]:
    """Call the factory that `target` names with these options; return its model, its batch, and its loss or None.

    Raises TargetError; exceptions of the file and of the factory are not caught.

    >>> model, batch, loss = call_factory("leangrad.bench.builtin:make", name="gpt")
    >>> type(model).__name__, loss
    ('WithLoss', None)
    """
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise TargetError(f"expected MODULE:FACTORY, such as train.py:make or my.module:make, got {target!r}")
    factory = getattr(_load(source), name, None)
    if not callable(factory):
        raise TargetError(f"expected a function {name!r} in {source}, found none")
    made = factory(**options)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise TargetError(f"expected {name}() to return (model, batch) or (model, batch, loss), got {got}")
    model, batch, *loss = made
    return model, batch, loss[0] if loss else None


def _load(source: str) -> ModuleType:
    """Import a file by its path, or a module by its name, found as `python file.py` or `python -m module` finds it."""
    if not source.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise  # the module exists; one that it imports does not
            raise TargetError(f"found no module {source!r} here or among the installed ones") from None
    path = Path(source)
    if not path.is_file():
        raise TargetError(f"found no file {source!r}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look up their module here
    spec.loader.exec_module(module)
    return module


def own_frames(error: BaseException) -> str:
    """Return the traceback of an error without the frames of leangrad, of torch, and of Python's import system."""
    trace = TracebackException.from_exception(error)
    folders = [
        Path(__file__).parent.parent,
        *(Path(file).parent for one in (torch, importlib) if (file := one.__file__)),
    ]
    hidden = tuple(str(folder) + os.sep for folder in folders)
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
