"""Whose code a frame runs: torch's, Python's own, this package's, or that of a model."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from types import FrameType

import torch

__all__ = ["UntraceableError", "is_of_model", "is_of_torch", "is_ours"]

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(__file__) + os.sep
PYTHON = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class UntraceableError(Exception):
    """The reason why a forward cannot be replaced by its trace."""


def is_of_torch(frame: FrameType) -> bool:
    """Whether a frame runs code of torch."""
    return frame.f_code.co_filename.startswith(TORCH)


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs code of this folder."""
    return frame.f_code.co_filename.startswith(OURS)


def is_of_model(frame: FrameType) -> bool:
    """Whether a frame runs code of a model, or of a library that it uses."""
    return _is_of_model(frame.f_code.co_filename)


@cache
def _is_of_model(file: str) -> bool:
    if file.startswith((TORCH, OURS)):
        return False
    is_pythons = file.startswith((*PYTHON, "<frozen")) and not any(part in file for part in PACKAGES)
    return not is_pythons
