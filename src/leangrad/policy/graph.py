"""One training step as a plain graph: its values in the order in which they are computed, forward first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Graph", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """The result of one op of the step.

    A value of backward depends on the incoming gradient, so it can never be kept from forward. Fields that refer
    to other values hold their indices in `Graph.values`.
    """

    nbytes: int  # size in memory, if it is held
    inputs: tuple[int, ...] = ()  # the values that its op reads
    is_backward: bool = False
    is_fixed: bool = False  # never recomputed in backward
    is_forced: bool = False  # always recomputed in backward, at any cost: the user has said so
    can_be_kept: bool = True  # False for a tuple, for instance; views are never kept either, only their bases
    view_of: int | None = None  # the value whose memory it shares; None if it is no view
    is_inlined: bool = False  # a pointwise op: computed inside the kernels that read it, if these can inline
    can_inline: bool = False  # its kernel can compute pointwise inputs itself
    is_standing: bool = False  # allocated before and after the step: a parameter, a batch of the caller's
    is_output: bool = False  # returned: a value of forward to the caller, a value of backward as a gradient
    is_asked_for: bool = False  # a value of forward that backward returns, or needs though no value here reads it
    price: int = 0  # bytes that are moved to recompute it
    scratch: int = 0  # bytes that are allocated while it is computed, beside its own
    may_end_chain: bool = True  # keeping it may help where a chain of recomputed values is too long
    is_repeatable: bool = False  # one cheap pass in the memory of its input: may be freed, and recomputed once more
    overwrites: bool = False  # an op of backward that writes its result over what it reads, if that was recomputed
    work: int = 0  # of an op with its own kernel, in bytes moved: arithmetic counts as the bytes that take as long
    across: tuple[int, ...] = ()  # the inputs whose memory has its rows along another dimension than its own
    windows: tuple[int, ...] = ()  # the inputs whose elements it reads several times, by windows that overlap
    products: int = 0  # number of products that run to recompute it from its inputs, its own included


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
        """For each value, the values that are computed from it."""
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
        """The values of forward that backward returns, or needs for a reason other than its ops in this graph."""
        return tuple(n for n, value in enumerate(self.values) if value.is_asked_for and not value.is_backward)

    @cached_property
    def handed_out(self) -> frozenset[int]:
        """The values whose memory forward returns to the caller."""
        values = self.values
        return frozenset(self.base(n) for n, value in enumerate(values) if value.is_output and not value.is_backward)

    def base(self, n: int) -> int:
        """Return the value that owns the memory of value ``n``."""
        while (below := self.values[n].view_of) is not None:
            n = below
        return n

    def kept_bytes(self, kept: frozenset[int]) -> int:
        """Return the bytes of a set of kept values; each memory counts once, standing values count nothing."""
        return sum(self.values[b].nbytes for b in {self.base(n) for n in kept} if not self.values[b].is_standing)
