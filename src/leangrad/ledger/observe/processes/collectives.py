"""In-place changes by collectives of torch.distributed, which autograd does not record.

``dist.all_reduce(h)`` moves no version counter and passes no function mode: it calls the process group directly from
Python. So while any region is open, the writing methods of ``ProcessGroup`` are replaced by wrappers that report the
change to the region of the calling thread.
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
from leangrad.ledger.origins.graph_walk import noted

_lock = threading.Lock()
_methods: dict[str, Any] = {}  # the original methods by name, while any region watches
_watching = [0]  # how many regions watch


def watch() -> bool:
    """Watch collectives that write, for a region that begins; False if this process has no process groups."""
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
    """Stop watching for one region; the last one restores the original methods."""
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
        if region is None or region.is_packing:
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
            region.distrust()

    return run


def _exposed(written: Any) -> list[Tensor]:
    """Return those of the tensors that a collective writes into whose memory a recipe may read.

    A private counter, for example, is not among them. To be called before the collective runs, because the ``Work``
    that it returns holds the tensors, too, and then none looks private.
    """
    if isinstance(written, Tensor):
        return [] if is_private(written) and not noted.are_any(written) else [written]
    return [one for part in written for one in _exposed(part)] if isinstance(written, list | tuple) else []
