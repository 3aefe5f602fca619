"""The sentence in the row of a way that could not train the model: it ran out of memory, refused, or failed."""

import torch

from leangrad.errors import LeangradError

__all__ = ["is_out_of_memory", "sentence_of"]

_CPU_WORDS = ("can't allocate memory", "not enough memory")  # in the RuntimeError of torch's CPU allocators


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and any(words in str(error) for words in _CPU_WORDS)


def sentence_of(error: Exception) -> str:
    """Return one line that says why a way has no figures."""
    if is_out_of_memory(error):
        return "ran out of memory"
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, LeangradError):
        return f"refused: {first}"
    return f"failed with {type(error).__name__}: {first}" if first else f"failed with {type(error).__name__}"
