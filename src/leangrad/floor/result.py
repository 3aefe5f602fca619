"""What `leangrad.floor` gives: the tensors of the cheapest cut, and a table of them."""

from dataclasses import dataclass

import torch

__all__ = ["Floor", "Kept"]


@dataclass(frozen=True)
class Kept:
    """One tensor of the cut: the op that made it, and the module that was running."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    module: str


@dataclass(frozen=True)
class Floor:
    """The cheapest cut, in the order of the forward. Prints as a table."""

    tensors: tuple[Kept, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the whole cut."""
        return sum(kept.bytes for kept in self.tensors)

    def __str__(self) -> str:
        lines = [f"{'bytes':>15}  {'op':<44} {'dtype':<9} {'shape':<22} module"]
        for kept in self.tensors:
            dtype, shape = str(kept.dtype).removeprefix("torch."), " x ".join(map(str, kept.shape))
            lines.append(f"{kept.bytes:>15,}  {kept.op:<44} {dtype:<9} {shape:<22} {kept.module}".rstrip())
        return "\n".join([*lines, f"{self.bytes:>15,}  the floor: {len(self.tensors)} tensors"])
