"""Runs a user's training script under a profile, as `python SCRIPT` would; its output and exit code pass through.

    python -m leangrad.profile.script RESULT SCRIPT [ARGS...]

runs it lean from its first call on, for a comparison, and writes the report, pickled, to the file RESULT.
"""

from __future__ import annotations

import atexit
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from leangrad.profile import watching
from leangrad.report import Report

__all__ = ["Script", "profile_script"]


@dataclass(frozen=True)
class Script:
    """A script to run: a file, or a module as after ``python -m``, with its arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __str__(self) -> str:
        return " ".join((*(("-m",) if self.is_module else ()), self.name, *self.arguments))

    def run(self) -> None:
        """Run the script in this process, as the main program."""
        argv, path = sys.argv, list(sys.path)
        sys.argv = [self.name, *self.arguments]
        sys.path[0] = str(Path.cwd() if self.is_module else Path(self.name).resolve().parent)
        try:
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.name, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = argv, path


def profile_script(
    script: Script, path: Path, title: str, *, tries_lean: bool = True, compares: bool = False, is_private: bool = False
) -> tuple[Report, int]:
    """Run ``script`` under a profile, write the report to ``path``, and return the report and the script's exit code.

    tries_lean: run some steps lean, as `profile` does; not with ``compares``.
    compares: run the script once more in another process, lean from its first call on, and show both in the report.
    is_private: leave out folders and the texts of errors.
    """
    process, reports = os.getpid(), list[Report]()
    options = {"tries_lean": tries_lean and not compares, "is_private": is_private}
    code = _exit_code(lambda: _watch(script, path, title, reports.append, **options))
    if os.getpid() != process:  # the script has forked, and this is the child
        _leave(code)
    report = reports[-1]
    if compares:
        report = _with_lean(report, script)
        report.save(path)
    return report, code


def _watch(script: Script, path: Path | None, title: str, tell: Callable[[Report], None], **options: Any) -> None:
    with watching(path, title, tell, **options):
        script.run()


def _exit_code(run: Callable[[], None]) -> int:
    """Call ``run`` and return the exit code with which Python would end after it; errors are printed as Python does."""
    try:
        run()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        traceback.print_exception(type(error), error, _users_part(error.__traceback__))
        return 1
    return 0


def _leave(code: int) -> None:
    """End a forked child as Python would, but without C's exit handlers: the profiler's waits for a lost thread."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the script on, without the frames that have started it."""
    ours = str(Path(__file__).parent)
    part = trace
    while part is not None:
        file = part.tb_frame.f_code.co_filename
        if not (file.startswith((ours, "<frozen runpy>")) or file.endswith(("runpy.py", "contextlib.py"))):
            return part
        part = part.tb_next
    return trace


def _with_lean(report: Report, script: Script) -> Report:
    """Run the script once more, lean, in another process; returns the report with the steps of that run added."""
    with tempfile.TemporaryDirectory(prefix="leangrad-") as folder:
        result = Path(folder) / "report.pickle"
        print("leangrad: the script runs once more, lean", file=sys.stderr)
        flags = ["-m"] if script.is_module else []
        command = [sys.executable, "-m", "leangrad.profile.script", str(result), *flags, script.name, *script.arguments]
        code = subprocess.run(command, check=False).returncode
        if not result.exists():
            return replace(report, notes=(*report.notes, f"The lean run left no figures: its exit code is {code}."))
        lean: Report = pickle.loads(result.read_bytes())
    steps = tuple(replace(step, name=f"{step.name}, second run") for step in lean.steps)
    return replace(
        report,
        steps=(*report.steps, *steps),
        notes=(*report.notes, *lean.notes),
        ledger=lean.ledger,
        ledger_totals=lean.ledger_totals,
    )


def _run_lean(arguments: Sequence[str]) -> int:
    result, *rest = arguments
    is_module = rest[0] == "-m"
    name, *others = rest[1:] if is_module else rest
    reports: list[Report] = []
    script = Script(name, tuple(others), is_module)
    code = _exit_code(lambda: _watch(script, None, "", reports.append, tries_lean=False, is_lean=True))
    Path(result).write_bytes(pickle.dumps(reports[-1]))
    return code


if __name__ == "__main__":
    sys.exit(_run_lean(sys.argv[1:]))
