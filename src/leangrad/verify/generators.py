"""Saves, restores and compares random generators that a step may use: those of torch, Python and NumPy."""

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["generator_restorer", "global_restorer", "global_states"]


def global_restorer() -> Callable[[], None]:
    """Return a function that restores the current states of the global generators.

    NumPy's global generator is the one behind `np.random.rand` and the like; if the process has not imported NumPy,
    there is nothing to restore.
    """
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if _cuda_in_use() else []
    numpy_state = _numpy_state()

    def restore() -> None:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)

    return restore


def global_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the global generators, by name: Python's, NumPy's, and torch's of the CPU and ``device``."""
    states = {"cpu": torch.get_rng_state(), "python": _as_tensor(random.getstate())}
    if device.type == "cuda":
        states[str(device)] = torch.cuda.get_rng_state(device)
    if (numpy_state := _numpy_state()) is not None:
        states["numpy"] = _as_tensor(numpy_state)
    return states


def generator_restorer(value: object) -> Callable[[], None] | None:
    """Return a function that restores the current state of a generator; None if ``value`` is not a generator."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _set_torch(value, state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        python_state = value.getstate()
        return lambda: value.setstate(python_state)
    return _numpy_restorer(value)


def _numpy_restorer(value: Any) -> Callable[[], None] | None:
    numpy = _numpy()
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        state = value.get_state(legacy=False)
        return lambda: value.set_state(state)
    if isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if not isinstance(value, numpy.random.BitGenerator):
        return None
    inner = value.state
    return lambda: setattr(value, "state", inner)


def _set_torch(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _numpy() -> Any:
    """Return the module NumPy; None if the process has not imported it, so that no code can draw from it."""
    numpy = sys.modules.get("numpy")
    return numpy if numpy is not None and hasattr(numpy, "random") else None


def _numpy_state() -> Any:
    numpy = _numpy()
    return None if numpy is None else numpy.random.get_state(legacy=False)


def _as_tensor(state: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8).clone()


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
