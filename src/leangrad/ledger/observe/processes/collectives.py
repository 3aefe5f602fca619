"""Collectives of torch.distributed that write into tensors: a change in place that nobody records.

``dist.all_reduce(h)`` moves no version counter and passes no function override: it goes from Python straight to the
process group. So while a region is open, the methods of process groups that write are watched themselves.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leangrad import _torch
from leangrad.ledger.observe.active_region import open_region
from leangrad.ledger.observe.mutation import after_change, before_change, is_private
from leangrad.ledger.origins.graph_walk import UnsavedInput

_lock = threading.Lock()
_methods: dict[str, Any] = {}  # as they were, while any region watches
_watching = [0]  # regions that do


def watch() -> bool:
    """A region begins: tell it of collectives that write; False: there are none in this process."""
    if not _torch.has_process_groups():
        return False
    with _lock:
        _watching[0] += 1
        if _watching[0] == 1:
            kind: Any = torch.distributed.ProcessGroup
            _methods.update({name: vars(kind)[name] for name in _torch.WRITING_COLLECTIVES if name in vars(kind)})
            for name in _methods:
                setattr(kind, name, _seen(getattr(kind, name)))
    return True


def unwatch() -> None:
    """A region that watched has ended."""
    with _lock:
        _watching[0] -= 1
        if _watching[0] == 0:
            for name, method in _methods.items():
                setattr(torch.distributed.ProcessGroup, name, method)
            _methods.clear()


def _seen(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(group: Any, *args: Any, **kwargs: Any) -> Any:
        region = open_region()
        if region is None or region.packing:
            return method(group, *args, **kwargs)
        written = _exposed(args[0] if args else next(iter(kwargs.values()), None))
        if not written:
            return method(group, *args, **kwargs)
        with torch.no_grad():  # autograd does not record it
            before_change(region, written)
        try:
            return method(group, *args, **kwargs)
        finally:
            after_change(region, written)
            region.fence = _torch.next_sequence_nr()

    return run


def _exposed(written: Any) -> list[Tensor]:
    """Of the tensors that a collective writes into, those whose memory a recipe may read; not a count of its own, say.

    Asked before it runs: afterwards what it returns holds them too.
    """
    if isinstance(written, Tensor):
        return [] if is_private(written) and id(written) not in UnsavedInput.noted else [written]
    return [one for part in written for one in _exposed(part)] if isinstance(written, list | tuple) else []
