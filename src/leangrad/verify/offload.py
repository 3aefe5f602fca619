"""Runs plain PyTorch with its saved tensors in the host's memory: a reference for models that do not fit otherwise."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leangrad.ledger import no_regions

__all__ = ["offloaded"]


@contextlib.contextmanager
def offloaded() -> Iterator[None]:
    """Run plain, with every saved tensor copied to the host; backward gets each back with its original strides.

    `torch.autograd.graph.save_on_cpu()` does the same, but returns an expanded tensor with other strides. With these an
    op may choose another kernel and round differently.
    """
    with no_regions(), torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((extent,), (1,))  # keeps the conjugate and negative bits, if they are set
    return memory.to("cpu", copy=True), tensor.device, tensor.shape, tensor.stride()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    memory, device, shape, stride = packed
    tensor: Tensor = memory.to(device).as_strided(shape, stride)
    return tensor
