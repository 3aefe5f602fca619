"""The pointwise ops under a value of the ledger, gathered for one program: see ``fused.py``."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from leangrad._torch import stream_of
from leangrad.ledger.fuse.builder import FLOATS
from leangrad.ledger.fuse.lowering import LOWERINGS, STATIC, VIEWS, WEIGHTS
from leangrad.ledger.origins.rules import RULES
from leangrad.ledger.values.value import Value

MAX_STEPS = 48
MAX_STREAMS = 16  # tensors that a program reads and writes: with 40, memory is read at 0.85 of the speed
NEVER = 1 << 20  # taken off the weight of a chain that no program serves
FREE = {  # views that end a chain, and cost nothing
    RULES[f"{op}Backward0"][0].function
    for op in ("Alias", "Expand", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T", "Unbind", "Unsqueeze")
}
CAST, CLONE = (RULES[f"{op}Backward0"][0].function for op in ("ToCopy", "Clone"))
Taken = dict[Value, tuple[Tensor, bool]]  # the tensors of leaves, and whether each is owned
TABLE = set(LOWERINGS)  # the functions that take part in chains; those that are not exact here drop out


def may_chain(root: Value) -> bool:
    """Whether a chain could be worth a program, at a glance."""
    function = root.function
    if function not in TABLE:
        return False
    if WEIGHTS[function] > 1 or is_mixed(root):
        return True
    return any(map(_is_computed, root.inputs))


def _is_computed(value: Value) -> bool:
    """Whether an op of the table, or a view of what one made, has to be replayed; a view of what is kept is no work."""
    while value.tensor is None and value.function in VIEWS:
        value = value.inputs[0]
    return value.tensor is None and value.function in TABLE


def is_mixed(value: Value) -> bool:
    """Whether an operand at hand is of another floating dtype than the result, or is cast up.

    ATen's kernels for that load element by element: 50 µs for 33, and a cast up 40 for 22, on 13 million elements on an
    H200. All others alone are as fast as a program, or faster.
    """
    dtype = value.dtype
    if value.function is CAST and value.args[1] is torch.float32:
        dtype = torch.float32
    if dtype is None:
        return False
    for v in value.inputs:
        while v.tensor is None and (v.function in VIEWS or v.function in FREE):
            v = v.inputs[0]
        if v.tensor is not None and v.tensor.dtype is not dtype and v.tensor.dtype in FLOATS:
            return True
    return False


def is_number(a: Any) -> bool:
    """Whether an argument is a number, or one that autograd wrapped."""
    kind = type(a)
    return kind is float or kind is int or (kind is Tensor and a.dim() == 0 and a.is_cpu and not a.is_complex())


def elements(value: Value) -> int:
    """How many elements a value has; 0 where only its op knows."""
    tensor = value.tensor if value.tensor is not None else value.memo
    if tensor is not None:
        return tensor.numel()
    if value.layout is not None:
        return value.layout[0].numel()
    return max(map(elements, value.inputs), default=0) if value.function in TABLE else 0


class Chain:
    """The pointwise ops under a value, and what they read."""

    __slots__ = (
        "_at_hand",
        "_codes",
        "_entered",
        "_streams",
        "ends",
        "key",
        "leaf_uses",
        "leaves",
        "made",
        "outputs",
        "scalars",
        "size",
        "task",
        "uses",
        "values",
        "weight",
    )

    def __init__(self, root: Value, made: dict[int, Tensor], task: int, ends: Set[int] = frozenset()) -> None:
        self.made, self.task = made, task
        self.ends = ends  # ids of values that have to be leaves
        self.size = elements(root)
        self.values: list[Value] = []  # in the order in which they are computed; the root is the last
        self.uses: list[int] = []  # how often each is read in this chain
        self.leaves: list[Value] = []
        self.leaf_uses: list[int] = []  # how often each is read in this chain
        self.scalars: list[float] = []
        self.outputs: list[int] = []  # numbers of values that are wanted; the root's is the last
        self.key: list[Any] = []  # what makes two chains one program: a part for each value
        self.weight = 0  # passes over memory that a replay op by op would take
        self._codes: dict[int, int] = {}  # by id: the number of a value, or −1 − that of a leaf
        self._at_hand: dict[int, bool] = {}
        self._entered = 0  # values that were visited, or are about to be
        self._streams = 1  # the large tensors that they read or are
        self._visit(root)
        last = len(self.values) - 1
        if len(self.outputs) > 1 or (self.outputs and self.outputs[0] != last):
            self.outputs = [k for k in self.outputs if k != last and self._is_asked_for(k)]
            self.outputs.append(last)
        elif not self.outputs:
            self.outputs.append(last)
        self.key.append(tuple(self.outputs))

    def take(self, taken: Taken) -> bool:
        """Take the leaves that are not ``taken`` yet; False if the chain is another one now.

        To rebuild a leaf, values of this very chain may have been rebuilt, and are held: they are leaves from then on.
        What is made already is therefore taken last: a tensor that is held counts how often it was taken.
        """
        for v in self.leaves:
            if v not in taken and not self.is_made(v):
                taken[v] = v._take(self.made, self.task)
                if any(map(self.is_made, self.values)):
                    return False
        for v in self.leaves:
            if v not in taken:
                taken[v] = v._take(self.made, self.task)
        return True

    def read_again(self) -> tuple[tuple[int, int], ...]:
        """The leaves that several values of the chain read, by their number: how often beside the first time."""
        return tuple((k, uses - 1) for k, uses in enumerate(self.leaf_uses) if uses > 1)

    def refusal(self, reason: object) -> str:
        """Why this chain is replayed op by op."""
        return f"{', '.join(v.op for v in self.values)}: {reason}"

    def copy(self) -> int | None:
        """The number of the last value below the root that is a copy, at which the chain could end."""
        return next((k for k in reversed(range(len(self.values) - 1)) if self.values[k].function is CLONE), None)

    def _visit(self, value: Value) -> None:
        codes, args, function = self._codes, value.args, value.function
        self._entered += 1
        self._streams += sum(map(self._is_large, value.inputs)) - 1 + self._is_awaited(value)
        for i in value.order:
            operand = args[i]
            if id(operand) not in codes:
                if function in VIEWS or (
                    operand.tensor is None and operand.function in TABLE and self._is_inner(operand)
                ):  # a view is inner where its base is
                    self._visit(operand)
                else:
                    self.leaves.append(operand)
                    self.leaf_uses.append(0)
                    codes[id(operand)] = -len(self.leaves)
        part: list[Any] = [function, value.dtype, value.layout]
        for a in args:
            kind = type(a)
            if kind is Value:
                code = codes[id(a)]
                part.append(code)
                if code >= 0:
                    self.uses[code] += 1
                else:
                    self.leaf_uses[-1 - code] += 1
            elif is_number(a):
                if function in STATIC:
                    part.append(float(a))
                else:
                    self.scalars.append(float(a))
                    part.append(float)
            else:
                part.append(a)
                if kind is Tensor or kind is complex:
                    self.weight -= NEVER
        if value.kwargs:
            part.extend(value.kwargs.items())
        number = codes[id(value)] = len(self.values)
        self.values.append(value)
        self.uses.append(0)
        self.weight += WEIGHTS[function] + is_mixed(value)
        if value.readers or value.parents > 1:
            self.outputs.append(number)
        self.key.append(tuple(part))

    def _is_asked_for(self, number: int) -> bool:
        """Whether somebody is still to come for a value: as in ``Value._take``."""
        v = self.values[number]
        return self.is_to_come(v) or (v._is_held() and self.uses[number] < v.parents)

    def is_to_come(self, v: Value) -> bool:
        """Whether saved tensors will still ask for ``v`` in this backward pass."""
        return v.readers > 0 and (v.reads < v.readers or v.task != self.task)

    def _is_large(self, v: Value) -> bool:
        return v.tensor is None or 8 * v.tensor.numel() > self.size

    def _is_awaited(self, v: Value) -> bool:
        return self.is_to_come(v) or v._is_held()

    def _is_inner(self, v: Value) -> bool:
        """Whether ``v``, an op of the table, is computed in this program.

        One that other recipes read too is computed here only if it is an output, or if everything under it is at hand.
        Otherwise it is made once and held (``made``), or what lies under it would be rebuilt again and again. A chain
        of very many tensors ends at an output, which costs no more than to read that again.
        """
        if self.is_made(v) or self._entered >= MAX_STEPS or id(v) in self.ends:
            return False
        awaited = self._is_awaited(v)
        if awaited and self._streams >= MAX_STREAMS:
            return False
        if v.function in VIEWS:  # of what is computed here; any other view is taken as it is
            base = v.inputs[0]
            if base.tensor is not None or base.function not in TABLE or not self._is_inner(base):
                return False
        if (v.readers or v._is_held()) and v.layout is not None and v.layout[0].numel() != self.size:
            return False  # it may be asked for, and would have to be an output
        return v.parents <= 1 or awaited or self._has_at_hand(v)

    def is_made(self, value: Value) -> bool:
        """Whether ``value`` need not be rebuilt."""
        memo = value.memo
        if memo is not None and value.memo_stream == stream_of(memo):
            return True
        return value.tensor is not None or id(value) in self.made

    def _has_at_hand(self, value: Value) -> bool:
        known = self._at_hand.get(id(value))
        if known is None:
            cheap = value.function in TABLE or value.function in FREE
            known = self.is_made(value) or (cheap and all(self._has_at_hand(v) for v in value.inputs))
            self._at_hand[id(value)] = known
        return known
