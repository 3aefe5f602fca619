"""`leangrad.profile`: where the memory of a training program goes, as a report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from leangrad.profile.watcher import Watcher
from leangrad.report import Report

__all__ = ["Profile", "made_with", "profile"]


class Profile:
    """What `with profile() as found` gives: `found.report` has what is known so far, and all of it after the region."""

    def __init__(self) -> None:
        self.report = Report("leangrad", ())

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    def __str__(self) -> str:
        return str(self.report)


@contextlib.contextmanager
def profile(
    path: str | Path | None = None, *, title: str = "Where the memory goes", lean: bool = True
) -> Iterator[Profile]:
    """Measure the memory of some training steps in this region of code, and write a report.

    Put it around a training loop, with all its steps. It measures the first step, the third, and if there are seven,
    the seventh, which runs lean, so that the report shows what lean saves. Training goes on with the same numbers.

    path: the file to write the report to; its ending selects the format: a page (.html), JSON (.json) or text (any
        other). The file is written when a step was measured, and at the end, also if the region ends by an exception.
    title: the title of the report.
    lean: whether to run some steps lean.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with profile() as found:
    ...     for _ in range(7):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(256, 8)).square().mean().backward()
    ...         optimizer.step()
    >>> found.report.chosen.name, found.report.lean_step.name
    ('step 3', 'step 7 (lean)')
    """
    found = Profile()

    def tell(report: Report) -> None:
        found.report = report

    with watching(path, title, tell, tries_lean=lean):
        yield found


@contextlib.contextmanager
def watching(
    path: str | Path | None,
    title: str,
    tell: Callable[[Report], None],
    *,
    tries_lean: bool,
    is_lean: bool = False,
    is_private: bool = False,
) -> Iterator[None]:
    """Do what `profile` does, and call ``tell`` with each report.

    tries_lean: run some steps lean, as `profile` does.
    is_lean: run every step lean.
    is_private: leave out folders and the texts of errors.
    """
    target = None if path is None else Path(path)
    if target is not None and not target.absolute().parent.is_dir():
        raise ValueError(f"expected a folder to write the report to, found none at {str(target.parent)!r}")

    def changed(report: Report) -> None:
        tell(report)
        if target is not None:
            report.save(target)

    watcher = Watcher(title, made_with(), changed, tries_lean=tries_lean, is_lean=is_lean, is_private=is_private)
    watcher.start()
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        watcher.stop(error)
        if watcher.is_here:
            changed(watcher.report())


def made_with() -> str:
    """The versions of leangrad, torch and Python and the device, as one line of text for a report."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("leangrad")
        return f"leangrad {version}, torch {torch.__version__}, Python {platform.python_version()}, {device}"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {device}"
