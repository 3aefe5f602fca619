"""A chain of pointwise ops in a recipe, replayed as one kernel.

Where a value is rebuilt, the pointwise ops under it are gathered into one program: its inputs are what is kept, held or
made by other ops, its outputs the value itself and every inner value that readers are still to come for.

[Note: proven before used]
A program is used only after it has been compared: the first ``PROOFS`` times the recipe is replayed op by op as ever,
and the program is run beside it, in pieces, over the same tensors. One different bit and this kind of chain is replayed
op by op for ever. Before that each op was tried by itself ([Note: every op by itself]). So a program that is wrong on
this GPU, this torch or this Triton costs time, not gradients. Steps do not depend on how many elements there are, so a
proof holds for all batch sizes; but a library may choose another kernel for a norm of another shape, so with such a
norm each shape is proven for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from leangrad import _torch, kernels
from leangrad.kernels.pointwise import BLOCK, Kernel, compiled
from leangrad.ledger.exact import is_exact, same_bits
from leangrad.ledger.lowering import LOWERINGS, NORMS, STATIC, VARIANTS, WEIGHTS, Builder, RefusedError, Slot
from leangrad.ledger.rules import RULES
from leangrad.ledger.value import Value, _remember, _stream

PROOFS = 3  # times that a program is compared before it is used
PIECE = 1 << 22  # elements that are compared at once
MIN_BYTES = 32 * 1024  # below this a launch costs more than the passes over memory that it saves
MAX_STEPS = 48

Key = tuple[Any, ...]


class InexactError(Exception):
    """An op has other bits here than ATen's; the argument is its value."""


class Proof:
    """How often a program has yet to be compared."""

    def __init__(self) -> None:
        self.missing = PROOFS
        self.failed = False


_plans: dict[Key, Plan] = {}
_proofs: dict[Any, Proof] = {}
_refused: dict[Key, str] = {}  # why a chain is replayed op by op
_table = set(LOWERINGS)  # the functions that take part in chains; those that are not exact here drop out
_lock = threading.RLock()  # one thread at a time makes and proves programs
_local = threading.local()  # ``off``: this thread replays op by op


@contextmanager
def off() -> Iterator[None]:
    """Replay op by op in this thread: to compare."""
    before = getattr(_local, "off", False)
    _local.off = True
    try:
        yield
    finally:
        _local.off = before


class Chain:
    """The pointwise ops under a value, and what they read. Made for every rebuild, so it is written to be quick."""

    __slots__ = (
        "_at_hand",
        "_codes",
        "key",
        "leaves",
        "made",
        "outputs",
        "scalars",
        "shape",
        "task",
        "uses",
        "values",
        "weight",
    )

    def __init__(self, root: Value, made: dict[int, Tensor], task: int) -> None:
        self.made, self.task = made, task
        self.shape = root.layout[0] if root.layout is not None else None
        self.values: list[Value] = []  # in the order in which they are computed; the root is the last
        self.uses: list[int] = []  # how often each is read in this chain
        self.leaves: list[Value] = []
        self.scalars: list[float] = []
        self.outputs: list[int] = []  # numbers of values that are wanted; the root's is the last
        self.key: list[Any] = []  # what makes two chains one program: a part for each value
        self.weight = 0  # passes over memory that a replay op by op would take
        self._codes: dict[int, int] = {}  # by id: the number of a value, or −1 − that of a leaf
        self._at_hand: dict[int, bool] = {}
        self._visit(root)
        last = len(self.values) - 1
        if len(self.outputs) > 1 or (self.outputs and self.outputs[0] != last):
            self.outputs = [k for k in self.outputs if k != last and self._is_asked_for(k)]
            self.outputs.append(last)
        elif not self.outputs:
            self.outputs.append(last)
        self.key.append(tuple(self.outputs))

    def refusal(self, reason: object) -> str:
        """Why this chain is replayed op by op."""
        return f"{', '.join(v.op for v in self.values)}: {reason}"

    def _visit(self, value: Value) -> None:
        codes, args, function = self._codes, value.args, value.function
        for i in value.order:
            operand = args[i]
            if id(operand) not in codes:
                if operand.tensor is None and operand.function in _table and self._is_inner(operand):
                    self._visit(operand)
                else:
                    self.leaves.append(operand)
                    codes[id(operand)] = -len(self.leaves)
        part: list[Any] = [function, value.dtype, value.layout]
        for a in args:
            kind = type(a)
            if kind is Value:
                code = codes[id(a)]
                part.append(code)
                if code >= 0:
                    self.uses[code] += 1
            elif kind is float or kind is int or (kind is Tensor and a.dim() == 0 and a.is_cpu and not a.is_complex()):
                if function in STATIC:
                    part.append(float(a))
                else:
                    self.scalars.append(float(a))
                    part.append(float)
            else:
                part.append(a)
        if value.kwargs:
            part.extend(value.kwargs.items())
        number = codes[id(value)] = len(self.values)
        self.values.append(value)
        self.uses.append(0)
        self.weight += WEIGHTS[function]
        if value.readers or value.parents > 1:
            self.outputs.append(number)
        self.key.append(tuple(part))

    def _is_asked_for(self, number: int) -> bool:
        """Whether readers or other recipes are still to come for a value: as in ``Value._take``."""
        value = self.values[number]
        if value.readers and (value.reads < value.readers or value.task != self.task):
            return True
        return value._is_held() and self.uses[number] < value.parents

    def _is_inner(self, value: Value) -> bool:
        """Whether ``value``, an op of the table, is computed in this program.

        One that other recipes read too is computed here only if everything under it is at hand. Otherwise it is made
        once and held (``made``), or what lies under it would be rebuilt again and again.
        """
        if self.is_made(value) or len(self.values) >= MAX_STEPS:
            return False
        if (value.readers or value._is_held()) and value.layout is not None and value.layout[0] != self.shape:
            return False
        return value.parents <= 1 or self._has_at_hand(value)

    def is_made(self, value: Value) -> bool:
        """Whether ``value`` need not be rebuilt."""
        memo = value.memo
        if memo is not None and value.memo_stream == _stream(memo):
            return True
        return value.tensor is not None or id(value) in self.made

    def _has_at_hand(self, value: Value) -> bool:
        known = self._at_hand.get(id(value))
        if known is None:
            known = self._at_hand[id(value)] = self.is_made(value) or (
                value.function in _table and all(self._has_at_hand(v) for v in value.inputs)
            )
        return known


class Plan:
    """A program for one kind of chain over tensors of one kind of layout."""

    def __init__(self, chain: Chain, leaves: list[Tensor], variant: int = 0) -> None:
        shape, stride = _layout(chain, leaves)
        builder = Builder(leaves, (shape, stride), variant)
        slots: list[Slot] = []
        scalars = iter(range(len(chain.scalars)))
        for value, (_, _, _, *parts) in zip(chain.values, chain.key, strict=False):
            operands = _operands(builder, value, parts, slots, scalars)
            slots.append(_lower(builder, value, operands))
            if not is_exact(value, operands, chain.scalars, builder):
                raise InexactError(value)
        for k in chain.outputs:
            layout = chain.values[k].layout
            if slots[k].shape != shape or (layout is not None and not _alike(layout[1], stride, shape)):
                raise RefusedError("outputs of different layouts")
        self.n = shape.numel()
        self.leaves = [k for k, _ in builder.inputs]
        self.numbers = builder.numbers
        self.stride = stride
        self.uses = [chain.uses[k] for k in chain.outputs]
        self.outputs = [
            (*(chain.values[k].layout or (shape, stride)), slots[k].dtype or torch.float32) for k in chain.outputs
        ]
        program = builder.program(tuple(slots[k].number for k in chain.outputs))
        wide = max(self.n, *(_reach(leaves[k]) for k in self.leaves)) >= 2**31 - BLOCK
        self.kernel: Kernel = compiled(program, wide)
        self.device = leaves[0].device
        self.over = self._find_over(builder, leaves)
        self.varies = any(step.op in VARIANTS for step in program.steps)
        self.proof = _proofs.setdefault((program, shape, stride) if self.varies else program, Proof())
        self.launches = 0

    def _find_over(self, builder: Builder, leaves: list[Tensor]) -> list[int]:
        """For each output a leaf that it may be written over, if that is owned; else −1."""
        found = []
        for shape, stride, dtype in self.outputs:
            fitting = [
                k
                for k, t in enumerate(leaves)
                if (t.dtype, t.shape, t.stride()) == (dtype, shape, stride)
                and k not in found
                and all(i.terms is None for number, i in builder.inputs if number == k)
            ]
            found.append(fitting[0] if fitting else -1)
        return found

    def run(self, leaves: list[Tensor], owned: list[bool], scalars: list[float]) -> list[Tensor]:
        """The outputs of the program, in memory that nobody else sees."""
        outputs = [
            leaves[k] if k >= 0 and owned[k] else torch.empty_strided(s, t, dtype=d, device=self.device)
            for k, (s, t, d) in zip(self.over, self.outputs, strict=True)
        ]
        self.kernel.launch([leaves[k] for k in self.leaves], self.numbers(scalars), outputs, self.n)
        self.launches += 1
        return outputs

    def agrees(self, leaves: list[Tensor], scalars: list[float], expected: list[Tensor | None]) -> bool:
        """Whether the program gives the bits of ``expected``, tried in pieces; NaN is NaN."""
        inputs, numbers = [leaves[k] for k in self.leaves], self.numbers(scalars)
        flat = []
        for t, (shape, _, dtype) in zip(expected, self.outputs, strict=True):
            if t is None or t.shape != shape or t.dtype != dtype or not _alike(t.stride(), self.stride, shape):
                return False
            flat.append(t.as_strided((self.n,), (1,)))
        for start in range(0, self.n, PIECE):
            n = min(PIECE, self.n - start)
            pieces = [torch.empty(n, dtype=d, device=self.device) for _, _, d in self.outputs]
            self.kernel.launch(inputs, numbers, pieces, n, start)
            if not all(same_bits(mine, f[start : start + n]) for mine, f in zip(pieces, flat, strict=True)):
                return False
        return True


def replay(root: Value, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool] | None:
    """Rebuild ``root`` by one kernel for its chain; None where it has to be replayed op by op."""
    if root.layout is not None and root.nbytes < MIN_BYTES:
        return None
    if root.function not in _table or getattr(_local, "off", False) or _torch.dispatch_modes_active():
        return None
    chain = Chain(root, made, task)
    if chain.weight < 2 or not chain.leaves:
        return None
    kind = (*chain.key, *[_kind(v.tensor) if v.tensor is not None else v.layout for v in chain.leaves])
    if kind in _refused:
        return None
    taken = {id(v): v._take(made, task) for v in chain.leaves}
    if any(v.tensor is None for v in chain.leaves) and any(chain.is_made(v) for v in chain.values):
        # To rebuild a leaf, values of this very chain were rebuilt and are held: they are leaves now.
        chain = Chain(root, made, task)
        taken |= {id(v): v._take(made, task) for v in chain.leaves if id(v) not in taken}
    leaves = [taken[id(v)][0] for v in chain.leaves]
    key = (*chain.key, *[_kind(t) for t in leaves])
    plan = _plans.get(key)
    if plan is None or plan.proof.missing:
        return _prove(chain, leaves, kind, key)
    outputs = plan.run(leaves, [taken[id(v)][1] for v in chain.leaves], chain.scalars)
    if len(outputs) > 1:
        stream = _stream(leaves[0])
        for k, uses, tensor in zip(chain.outputs[:-1], plan.uses, outputs, strict=False):
            value = chain.values[k]
            value.memo, value.memo_stream, value.takes = tensor, stream, uses
            _remember(value, task)
    return outputs[-1], True


def _prove(chain: Chain, leaves: list[Tensor], kind: Key, key: Key) -> tuple[Tensor, bool] | None:
    """Replay op by op, and compare the program with that: see [Note: proven before used]."""
    if leaves[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # nothing can be compared while a graph is captured
    with _lock:
        try:
            plans = [_plans[key]] if key in _plans else _candidates(chain, leaves)
        except InexactError as error:
            _table.discard(error.args[0].function)  # without that op it will be another chain
            return None
        except torch.OutOfMemoryError:
            return None  # another time
        except Exception as reason:  # RefusedError, or whatever Triton raises: the chain works without it
            _refused[kind] = chain.refusal(reason)
            return None
        with off():
            rebuilt = chain.values[-1]._rebuild(chain.made, chain.task)
        expected = [*(chain.values[k].memo for k in chain.outputs[:-1]), rebuilt[0]]
        try:
            for plan in plans:
                if plan.agrees(leaves, chain.scalars, expected):
                    plan.proof.missing = max(0, plan.proof.missing - 1)
                    _plans[key] = plan
                    return rebuilt
                plan.proof.missing, plan.proof.failed = PROOFS, True
            _refused[kind] = chain.refusal("other bits")
        except torch.OutOfMemoryError:
            pass  # another time
        except Exception as reason:
            _refused[kind] = chain.refusal(reason)
        return rebuilt


def _candidates(chain: Chain, leaves: list[Tensor]) -> list[Plan]:
    """A plan for each formula that the library may have used."""
    plans = []
    for variant in range(len(VARIANTS) if any(v.op == "CudnnBatchNormBackward0" for v in chain.values) else 1):
        try:
            plans.append(Plan(chain, leaves, variant))
        except InexactError as error:
            if error.args[0].function not in NORMS:
                raise
    plans = [plan for plan in plans if not plan.proof.failed]
    if not plans:
        raise RefusedError("other bits")
    return plans


def _operands(b: Builder, value: Value, parts: list[Any], slots: list[Slot], scalars: Iterator[int]) -> list[Any]:
    """The arguments of one op, with slots for tensors and numbers; ``slots``: the results of the ops before it."""
    operands: list[Any] = []
    for part, a in zip(parts, value.args, strict=False):
        if type(a) is Value:
            operands.append(slots[part] if part >= 0 else b.leaf(-1 - part))
        else:
            operands.append(Slot("scalar", next(scalars)) if part is float else part)
    return operands


def _lower(b: Builder, value: Value, operands: list[Any]) -> Slot:
    """The steps of one op."""
    try:
        slot = LOWERINGS[value.function](b, *operands, **value.kwargs)
    except (TypeError, AttributeError, RuntimeError) as error:  # an operand is missing, or of another kind or shape
        raise RefusedError(f"{value.op}: {error}") from error
    return slot if value.dtype is None or value.dtype == slot.dtype else b.step("cast", value.dtype, slot)


def _layout(chain: Chain, leaves: list[Tensor]) -> tuple[torch.Size, tuple[int, ...]]:
    """The layout of the root: noted, or that of all inputs of its size."""
    if not kernels.serves(leaves[0]) or any(t.device != leaves[0].device for t in leaves):
        raise RefusedError("not on one device that Triton serves")
    layout = chain.values[-1].layout
    if layout is None:
        shape = max((t.shape for t in leaves), key=torch.Size.numel)
        strides = {t.stride() for t in leaves if t.shape == shape}
        if len(strides) != 1:
            raise RefusedError("a layout that only ATen knows")
        layout = shape, strides.pop()
    if layout[0].numel() * 2 < MIN_BYTES:
        raise RefusedError("too small")
    return layout


def _alike(a: tuple[int, ...], b: tuple[int, ...], shape: torch.Size) -> bool:
    """Whether two rows of strides lay out ``shape`` alike."""
    return a == b or all(n == 1 or x == y for x, y, n in zip(a, b, shape, strict=True))


def _reach(tensor: Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _kind(tensor: Tensor) -> Key:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def report() -> dict[str, Any]:
    """How many kinds of chains are fused and how often they ran; and why others are replayed op by op.

    >>> sorted(report())
    ['inexact', 'launches', 'programs', 'refused', 'unproven']
    """
    plans = list(_plans.values())
    return {
        "programs": sum(not p.proof.missing for p in plans),
        "unproven": sum(p.proof.missing > 0 and not p.proof.failed for p in plans),
        "launches": sum(p.launches for p in plans),
        "refused": list(_refused.values()),
        "inexact": sorted(rule.node for rules in RULES.values() for rule in rules if rule.function in _inexact()),
    }


def _inexact() -> set[Any]:
    return set(LOWERINGS) - _table


def summarize() -> str:
    """The report in words."""
    found = report()
    lines = [f"{found['programs']} kinds of chains are rebuilt by one kernel each, {found['launches']} times so far"]
    lines += [f"not exact on this device, and so left to ATen: {name}" for name in found["inexact"]]
    lines += [f"op by op: {why}" for why in dict.fromkeys(found["refused"])]
    return "\n".join(lines)
