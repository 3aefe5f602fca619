"""The order of work on CUDA streams.

Autograd runs a node on the stream of its forward, and orders a gradient that one node hands to another. A gradient that
an op writes into the buffer is handed to nobody, so that order has to be made here: the stream on which autograd
accumulates waits for the stream on which the op wrote, and a stream that meets a range for the first time waits for the
one that allocated it. Where all runs on one stream, which is the rule, nothing is ever waited for.
"""

import torch
from torch import Tensor

#: Device types whose order of work is known: none of their own, or CUDA's streams.
KNOWN = frozenset({"cpu", "cuda", "mps", "meta"})


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that this thread's work goes to, or None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def is_default(stream: torch.cuda.Stream) -> bool:
    """Whether it is the stream of those who never chose one."""
    return bool(stream == torch.cuda.default_stream(stream.device))


def order(first: torch.cuda.Stream | None, then: torch.cuda.Stream | None, memory: Tensor | None = None) -> None:
    """Let the work that `then` is given from here on wait for what `first` was given; `memory` is used by both."""
    if first is None or then is None or first == then:
        return
    then.wait_stream(first)
    if memory is not None:
        memory.record_stream(then)
