"""The order of work on CUDA streams.

Autograd runs a node on the stream of its forward, and synchronizes streams when one node passes a gradient to another.
A gradient that an op writes into the buffer is not passed on, so this file synchronizes: the stream on which autograd
accumulates waits for the stream on which the op wrote, and a stream that writes to a range waits for the stream on
which the range was allocated. If everything runs on one stream, as usual, no stream ever waits.
"""

import torch
from torch import Tensor

#: Device types on which work can be ordered here: those without streams, and CUDA.
KNOWN = frozenset({"cpu", "cuda", "mps", "meta"})


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Returns the current stream of this thread, or None if the device has no CUDA streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def is_default(stream: torch.cuda.Stream) -> bool:
    """Whether the stream is the default stream of its device."""
    return bool(stream == torch.cuda.default_stream(stream.device))


def order(first: torch.cuda.Stream | None, then: torch.cuda.Stream | None, memory: Tensor | None = None) -> None:
    """Make later work on the stream `then` wait for the work on `first`; `memory`: a tensor that both streams use."""
    if first is None or then is None or first == then:
        return
    then.wait_stream(first)
    if memory is not None:
        memory.record_stream(then)
