"""Backward in a thread of its own, as on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["in_autograds_thread"]


def in_autograds_thread(backward: Callable[[], object]) -> None:
    """Run it as autograd runs a backward on a GPU: in a thread that began no autocast and has the caller's."""
    failed: list[BaseException] = []

    def run() -> None:
        torch.set_autocast_enabled("cpu", True)
        try:
            backward()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
