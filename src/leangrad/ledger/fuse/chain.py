"""Gathers the pointwise ops below a value of the ledger into a ``Chain``, for one program: see ``fused.py``."""

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

MAX_STEPS = 48  # a chain that has visited this many values takes in no more
MAX_STREAMS = 16  # large tensors that a program reads and writes; with 40, memory is read at 0.85 of the speed
NEVER = 1 << 20  # subtracted from the weight of a chain that has a constant which no program supports
FREE = {  # functions of views that end a chain and cost nothing
    RULES[f"{op}Backward0"][0].function
    for op in ("Alias", "Expand", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T", "Unbind", "Unsqueeze")
}
CAST, CLONE = (RULES[f"{op}Backward0"][0].function for op in ("ToCopy", "Clone"))
Taken = dict[Value, tuple[Tensor, bool]]  # by leaf: its tensor, and whether it is owned
TABLE = set(LOWERINGS)  # functions that may be in a chain; ``fused.py`` removes those that are not exact here


def may_chain(root: Value) -> bool:
    """Whether a chain below ``root`` could be worth a program, judged by ``root`` and its inputs alone."""
    function = root.function
    if function not in TABLE:
        return False
    if WEIGHTS[function] > 1 or is_mixed(root):
        return True
    return any(map(_is_computed, root.inputs))


def _is_computed(value: Value) -> bool:
    """Whether ``value``, or its base if it is a view, is not kept and is the output of an op of the table."""
    while value.tensor is None and value.function in VIEWS:
        value = value.inputs[0]
    return value.tensor is None and value.function in TABLE


def is_mixed(value: Value) -> bool:
    """Whether a kept operand has another floating dtype than the result, or is cast to float32.

    ATen's kernels for these ops load element by element: 50 µs instead of 33, and for a cast to float32 40 µs instead
    of 22, on 13 million elements on an H200. Any other op alone runs in ATen as fast as in a program, or faster.
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
    """Whether an argument is a number, or a CPU tensor without dimensions in which autograd wrapped one."""
    kind = type(a)
    return kind is float or kind is int or (kind is Tensor and a.dim() == 0 and a.is_cpu and not a.is_complex())


def elements(value: Value) -> int:
    """The number of elements of ``value``; 0 if only running its op would tell."""
    tensor = value.tensor if value.tensor is not None else value.memo
    if tensor is not None:
        return tensor.numel()
    if value.layout is not None:
        return value.layout[0].numel()
    return max(map(elements, value.inputs), default=0) if value.function in TABLE else 0


class Chain:
    """The pointwise ops below a value, and the tensors that they read."""

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
        self.made, self.task = made, task  # by id: tensors made in this rebuild; the number of the backward pass
        self.ends = ends  # ids of values that have to be leaves
        self.size = elements(root)
        self.values: list[Value] = []  # in the order of computation; the root is last
        self.uses: list[int] = []  # how often this chain reads each value
        self.leaves: list[Value] = []  # the values that this chain reads and does not compute
        self.leaf_uses: list[int] = []  # how often this chain reads each leaf
        self.scalars: list[float] = []  # the numbers among the arguments
        self.outputs: list[int] = []  # indices in ``values`` of those that are written out; the root's is last
        self.key: list[Any] = []  # a part per value, then ``outputs``; with the kinds of leaves it identifies a program
        self.weight = 0  # passes over memory that a replay op by op would take
        self._codes: dict[int, int] = {}  # by id: the index of a value, or −1 − the index of a leaf
        self._at_hand: dict[int, bool] = {}  # by id: the results of ``_has_at_hand``
        self._entered = 0  # values whose visit has begun
        self._streams = 1  # large tensors that these values read, and outputs among them
        self._visit(root)
        last = len(self.values) - 1
        if len(self.outputs) > 1 or (self.outputs and self.outputs[0] != last):
            self.outputs = [k for k in self.outputs if k != last and self._is_asked_for(k)]
            self.outputs.append(last)
        elif not self.outputs:
            self.outputs.append(last)
        self.key.append(tuple(self.outputs))

    def take(self, taken: Taken) -> bool:
        """Take the tensors of the leaves that are not in ``taken`` yet; False if that has changed the chain.

        Rebuilding a leaf may also rebuild values of this chain. These are then held, and are leaves from then on.
        Leaves that are already made are therefore taken last: a held tensor counts how often it was taken.
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
        """For each leaf that the chain reads more than once: its index, and the number of reads after the first."""
        return tuple((k, uses - 1) for k, uses in enumerate(self.leaf_uses) if uses > 1)

    def refusal(self, reason: object) -> str:
        """The names of this chain's ops, and the reason why they are replayed op by op."""
        return f"{', '.join(v.op for v in self.values)}: {reason}"

    def copy(self) -> int | None:
        """The index of the last copy below the root, at which the chain could end; None if there is none."""
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
                ):  # the base of an inner view is inner: ``_is_inner`` has checked it
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
        if value.readers or value.recipe_reads > 1:
            self.outputs.append(number)
        self.key.append(tuple(part))

    def _is_asked_for(self, number: int) -> bool:
        """Whether saved tensors or recipes outside this chain will still read the value, as in ``Value._take``."""
        v = self.values[number]
        return self.will_be_read(v) or (v._is_held() and self.uses[number] < v.recipe_reads)

    def will_be_read(self, v: Value) -> bool:
        """Whether saved tensors will still read ``v`` in this backward pass."""
        return v.readers > 0 and (v.reads < v.readers or v.task != self.task)

    def _is_large(self, v: Value) -> bool:
        return v.tensor is None or 8 * v.tensor.numel() > self.size

    def _is_awaited(self, v: Value) -> bool:
        return self.will_be_read(v) or v._is_held()

    def _is_inner(self, v: Value) -> bool:
        """Whether ``v``, whose function is in the table, is computed in this program, and not read as a leaf.

        A value that other recipes read too is computed here only if it becomes an output, or if no op outside the table
        has to run for it. Otherwise it is rebuilt once and held in ``made``: computing it in each program that reads it
        would rebuild what it is made of each time. A chain of very many tensors ends at a value that would have to be
        written out anyway: that costs only one more read of it.
        """
        if self.is_made(v) or self._entered >= MAX_STEPS or id(v) in self.ends:
            return False
        awaited = self._is_awaited(v)
        if awaited and self._streams >= MAX_STREAMS:
            return False
        if v.function in VIEWS:  # computed here only if its base is; any other view is a leaf
            base = v.inputs[0]
            if base.tensor is not None or base.function not in TABLE or not self._is_inner(base):
                return False
        if (v.readers or v._is_held()) and v.layout is not None and v.layout[0].numel() != self.size:
            return False  # it may be read later; so it would be an output, and outputs have the size of the root
        return v.recipe_reads <= 1 or awaited or self._has_at_hand(v)

    def is_made(self, value: Value) -> bool:
        """Whether ``value`` need not be rebuilt: it is kept, held for the current stream, or in ``made``."""
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
