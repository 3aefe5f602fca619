"""What a program asked of the GPU's allocator."""

from typing import Literal

import torch


def requested_bytes(when: Literal["current", "peak"]) -> int:
    """Bytes that tensors asked for; `memory_allocated` adds rests of larger blocks, which hang on what ran before."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])
