"""The random state of an op, taken before it runs and put back to run it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = Tensor | tuple[int, int]


def state_of(device: torch.device) -> State | None:
    """The state of the default generator of ``device``, or None where it cannot be put back later.

    5 KB on a CPU (a Mersenne twister), two integers on CUDA (Philox seed and offset). While a CUDA graph is captured the
    offset is not known to the host, so there is none.
    """
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        generator = _cuda_generator(device)
        return generator.initial_seed(), generator.get_offset()
    return None


def with_state(state: State, device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` as it ran under ``state``; the generator is left as it was found."""
    before = state_of(device)
    assert before is not None
    _set_state(device, state)
    try:
        return function(*args)
    finally:
        _set_state(device, before)


def _set_state(device: torch.device, state: State) -> None:
    if isinstance(state, Tensor):
        torch.set_rng_state(state)
        return
    generator = _cuda_generator(device)
    generator.manual_seed(state[0])
    generator.set_offset(state[1])


def _cuda_generator(device: torch.device) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
