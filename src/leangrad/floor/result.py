"""The result of `leangrad.floor`: the tensors of the cheapest cut, and a table of them."""

from dataclasses import dataclass

import torch

__all__ = ["Floor", "Kept"]


@dataclass(frozen=True)
class Kept:
    """One tensor of the cut: the op that made it, and the module that was running then."""

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
        rows = [
            (f"{kept.bytes:,}", kept.op, str(kept.dtype).removeprefix("torch."), " x ".join(map(str, kept.shape)))
            for kept in self.tensors
        ]
        modules = ["module", *(kept.module for kept in self.tensors)]
        rows = [("bytes", "op", "dtype", "shape"), *rows]
        total, count = f"{self.bytes:,}", len(self.tensors)
        size, op, dtype, shape = (max(map(len, column)) for column in zip(*rows, strict=True))
        size = max(size, len(total))
        lines = [
            f"{row[0]:>{size}}  {row[1]:<{op}}  {row[2]:<{dtype}}  {row[3]:<{shape}}  {module}".rstrip()
            for row, module in zip(rows, modules, strict=True)
        ]
        return "\n".join([*lines, f"{total:>{size}}  the floor: {count} tensor{'s' * (count != 1)}"])
