"""One training step as a plain graph: its values in the order in which they are made, forward first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Graph", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """What one op of the step makes.

    A value of backward is one that depends on the incoming gradient: it can never be kept from forward.
    """

    nbytes: int  # of memory, if it is held
    inputs: tuple[int, ...] = ()  # the values that its op reads
    is_backward: bool = False
    is_fixed: bool = False  # not made again in backward
    is_forced: bool = False  # made again in backward, whatever that costs: the user has said so
    can_be_kept: bool = True  # a view cannot, its base is; nor can what is no tensor
    view_of: int | None = None  # the value whose memory it shows
    is_inlined: bool = False  # computed inside the kernels that read it, if these can do so: pointwise ops
    can_inline: bool = False  # its kernel computes pointwise inputs itself
    is_standing: bool = False  # there before the step and after it: a parameter, a batch of the caller's
    is_output: bool = False  # handed out: a value of forward to the caller, a value of backward as a gradient
    is_asked_for: bool = False  # a value of forward that backward hands out, or has to have for another reason
    price: int = 0  # the bytes that are moved to make it again
    scratch: int = 0  # bytes that are taken while it is being made, beside itself
    may_end_chain: bool = True  # keeping it may be of use where a chain of values that are made again is too long
    is_repeatable: bool = False  # one cheap pass in the memory of its input: may be let go, and made again once more
    work: int = 0  # of an op with a kernel of its own, in bytes moved: arithmetic counts as the bytes that take as long
    across: tuple[int, ...] = ()  # those of its inputs whose memory has its rows along another dimension than its own
    windows: tuple[int, ...] = ()  # those of its inputs whose elements it reads several times: by windows that overlap
    products: int = 0  # how many products are run to make it again from its inputs, its own included


@dataclass(frozen=True)
class Graph:
    """The values of a step. The inputs of a value come before it."""

    values: Sequence[Value]

    def __post_init__(self) -> None:
        for n, value in enumerate(self.values):
            if any(i >= n for i in value.inputs) or (value.view_of is not None and value.view_of >= n):
                raise ValueError(f"expected the inputs of value {n} to come before it, got {value.inputs}")

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, those that are made from it."""
        found: list[list[int]] = [[] for _ in self.values]
        for n, value in enumerate(self.values):
            for i in dict.fromkeys(value.inputs):
                found[i].append(n)
        return tuple(map(tuple, found))

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """The values of forward that backward reads."""
        values = self.values
        return tuple(
            n
            for n, value in enumerate(values)
            if not value.is_backward and (value.is_asked_for or any(values[r].is_backward for r in self.readers[n]))
        )

    @cached_property
    def asked_for(self) -> tuple[int, ...]:
        """The values of forward that backward hands out, or has to have for another reason."""
        return tuple(n for n, value in enumerate(self.values) if value.is_asked_for and not value.is_backward)

    @cached_property
    def handed_out(self) -> frozenset[int]:
        """The values whose memory forward hands out to the caller."""
        values = self.values
        return frozenset(self.base(n) for n, value in enumerate(values) if value.is_output and not value.is_backward)

    def base(self, n: int) -> int:
        """The value that owns the memory of value ``n``."""
        while (below := self.values[n].view_of) is not None:
            n = below
        return n

    def kept_bytes(self, kept: frozenset[int]) -> int:
        """What a set of kept values takes, each memory counted once, and nothing for what stands anyway."""
        return sum(self.values[b].nbytes for b in {self.base(n) for n in kept} if not self.values[b].is_standing)
