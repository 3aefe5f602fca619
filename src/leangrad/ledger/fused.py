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

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from leangrad import _torch, kernels
from leangrad.kernels.launch import stream_for
from leangrad.kernels.pointwise import BLOCK, Kernel, Program, compiled
from leangrad.ledger.builder import Builder, Layout, RefusedError, Slot, numbers_of
from leangrad.ledger.chain import TABLE, Chain, may_chain
from leangrad.ledger.exact import is_exact, same_bits
from leangrad.ledger.lowering import LOWERINGS, NORMS, VARIANTS
from leangrad.ledger.pattern import Pattern, UnlikeError
from leangrad.ledger.rules import RULES
from leangrad.ledger.value import Value, _remember, _stream

PROOFS = 3  # times that a program is compared before it is used
PIECE = 1 << 22  # elements that are compared at once
MIN_BYTES = 32 * 1024  # below this a launch costs more than the passes over memory that it saves
MAX_VARIETY = 32  # programs for one row of ops: beyond that shapes change too often to compile for each
MAX_PLANS = 4096
MAX_ALIKE = 8  # patterns of chains that end in the same op and layout

Key = tuple[Any, ...]


class InexactError(Exception):
    """An op has other bits here than ATen's; the argument is its value."""


class CutError(Exception):
    """A value, whose number is the argument, lies in memory in another order: the chain has to end there."""


class Proof:
    """How often a program has yet to be compared."""

    def __init__(self) -> None:
        self.missing = PROOFS
        self.failed = False


_plans: dict[Key, Plan] = {}
_patterns: dict[Key, tuple[Pattern, ...]] = {}  # by the function and the layout of the root
_proofs: dict[Any, Proof] = {}
_refused: dict[Key, str] = {}  # why a chain is replayed op by op
_cuts: dict[Key, int] = {}  # the number of the value at which a chain has to end
_variety: defaultdict[tuple[str, ...], set[Program]] = defaultdict(set)  # the programs for each row of ops
_lock = threading.RLock()  # one thread at a time makes and proves programs
_local = threading.local()  # ``off``: this thread replays op by op


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Replay op by op in this thread: to compare."""
    before = getattr(_local, "off", False)
    _local.off = True
    try:
        yield
    finally:
        _local.off = before


class Plan:
    """A program for one kind of chain over tensors of one kind of layout."""

    def __init__(self, chain: Chain, leaves: list[Tensor], variant: int = 0) -> None:
        if not any(kernels.serves(t) for t in leaves) or any(t.device != leaves[0].device for t in leaves):
            raise RefusedError("not on one device that Triton serves")
        builder = Builder(leaves, variant)
        slots: list[Slot] = []
        scalars = iter(range(len(chain.scalars)))
        for value, (_, _, _, *parts) in zip(chain.values, chain.key, strict=False):
            operands = _operands(builder, value, parts, slots, scalars)
            slots.append(_lower(builder, value, operands))
            if not is_exact(value, operands, chain.scalars, builder):
                raise InexactError(value)
        shape, stride = _layout(chain.values[-1], slots[-1])
        program = builder.program(tuple(slots[k].number for k in chain.outputs), (shape, stride))
        layouts = [_output_layout(k, chain.values[k], slots[k], builder) for k in chain.outputs]
        self.n = shape.numel()
        self.leaves = [k for k, _ in builder.inputs]
        self.scalars = builder.scalars  # and not the builder, which holds the leaves
        self.uses = [chain.uses[k] for k in chain.outputs]
        self.outputs = [(*layouts[j], slots[k].dtype or torch.float32) for j, k in enumerate(chain.outputs)]
        wide = max(self.n, *(_reach(leaves[k]) for k in self.leaves)) >= 2**31 - BLOCK
        self.kernel: Kernel = _compiled(chain, program, wide)
        self.device = leaves[0].device
        self.launch = self.kernel.launcher(self.device, self.n)
        self.over = self._find_over(builder, leaves)
        varies = any(step.op in VARIANTS for step in program.steps)
        self.proof = _proofs.setdefault((program, shape, stride) if varies else program, Proof())
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
        tensors = (*(leaves[k] for k in self.leaves), *outputs)
        self.launch(stream_for(self.device), tensors, tuple(numbers_of(self.scalars, scalars)))
        self.launches += 1
        return outputs

    def agrees(self, leaves: list[Tensor], scalars: list[float], expected: list[Tensor | None]) -> bool:
        """Whether the program gives the bits of ``expected``, tried in pieces; NaN is NaN."""
        inputs, numbers = [leaves[k] for k in self.leaves], numbers_of(self.scalars, scalars)
        flat = []
        for t, (shape, stride, dtype) in zip(expected, self.outputs, strict=True):
            if t is None or t.shape != shape or t.dtype != dtype or not _alike(t.stride(), stride, shape):
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
    if not may_chain(root) or (root.layout is not None and root.nbytes < MIN_BYTES):
        return None
    if getattr(_local, "off", False) or _torch.dispatch_modes_active():
        return None
    taken: dict[int, tuple[Tensor, bool]] = {}
    for pattern in _patterns.get((root.function, root.layout), ()):
        found = pattern.match(root, made, task)
        if found is not None:
            plan = pattern.plan
            if plan is None:
                return None
            if not plan.proof.missing and pattern.take(found, made, task, taken):
                leaves, owned = zip(*(taken[id(v)] for v in found.leaves), strict=True)
                outputs = plan.run(leaves, owned, found.scalars)
                _hold([found.values[k] for k in pattern.outputs], plan.uses, outputs, task)
                return outputs[-1], True
            break
    return _gather(root, made, task, taken)


def _gather(
    root: Value, made: dict[int, Tensor], task: int, taken: dict[int, tuple[Tensor, bool]]
) -> tuple[Tensor, bool] | None:
    """The same for a chain that is not known again: see [Note: known again]."""
    chain = first = Chain(root, made, task)
    kind = _kind_of(chain)
    while kind in _cuts:
        chain = first = Chain(root, made, task, {id(chain.values[_cuts[kind]]), *chain.ends})
        kind = _kind_of(chain)
    at_hand = [chain.is_made(v) for v in chain.leaves]
    if chain.weight < 2 or not chain.leaves or kind in _refused:
        _know(chain, at_hand, [v.tensor for v in chain.leaves], None)
        return None
    while not chain.take(taken):
        chain = Chain(root, made, task, chain.ends)
    leaves = [taken[id(v)][0] for v in chain.leaves]
    if leaves[0].is_cuda and leaves[0].device.index != torch.cuda.current_device():
        return None  # Triton launches on the current device
    is_known = chain is first and all(v.tensor is not None for v in chain.leaves)
    key = kind if is_known else (*chain.key, *[_kind(t) for t in leaves])
    plan = _plans.get(key)
    if plan is None or plan.proof.missing:
        return _prove(chain, leaves, kind, key)
    outputs = plan.run(leaves, [taken[id(v)][1] for v in chain.leaves], chain.scalars)
    if chain is first:
        _know(chain, at_hand, leaves, plan)
    _hold([chain.values[k] for k in chain.outputs[:-1]], plan.uses, outputs, task)
    return outputs[-1], True


def _hold(values: list[Value], uses: list[int], outputs: list[Tensor], task: int) -> None:
    """Leave the outputs of a program, but for the last, with the values whose readers are still to come."""
    for value, used, tensor in zip(values, uses, outputs, strict=False):
        value.memo, value.memo_stream, value.takes = tensor, _stream(tensor), used
        _remember(value, task)


def _know(chain: Chain, at_hand: list[bool], leaves: Sequence[Tensor | None], plan: Plan | None) -> None:
    """Leave a pattern of ``chain``, the second time that one of its function and layout comes."""
    root = chain.values[-1]
    key = root.function, root.layout
    known = _patterns.get(key)
    if known is None:
        _put(_patterns, key, ())
    elif chain.weight >= 0:
        with contextlib.suppress(UnlikeError):
            _patterns[key] = (Pattern(chain, at_hand, leaves, plan), *known[: MAX_ALIKE - 1])


def _prove(chain: Chain, leaves: list[Tensor], kind: Key, key: Key) -> tuple[Tensor, bool] | None:
    """Replay op by op, and compare the program with that: see [Note: proven before used]."""
    if _torch.transforms_active() or (leaves[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return None  # no numbers can be drawn under vmap, and nothing be compared while a graph is captured
    with _lock:
        try:
            plans = [_plans[key]] if key in _plans else _candidates(chain, leaves)
        except InexactError as error:
            TABLE.discard(error.args[0].function)  # without that op it will be another chain
            _patterns.clear()
            return None
        except CutError as error:
            if _kind_of(chain) == kind:
                _put(_cuts, kind, error.args[0])
            else:  # the chain was gathered again, and would not be known by this kind
                _put(_refused, kind, chain.refusal("outputs of different layouts"))
            return None
        except torch.OutOfMemoryError:
            return None  # another time
        except Exception as reason:  # RefusedError, or whatever Triton raises: the chain works without it
            _put(_refused, kind, chain.refusal(reason))
            return None
        v = chain.values[-1]
        with off():
            rebuilt = v._rebuild(chain.made, chain.task)
        expected = [*(chain.values[k].memo for k in chain.outputs[:-1]), rebuilt[0]]
        try:
            for plan in plans:
                if plan.agrees(leaves, chain.scalars, expected):
                    plan.proof.missing = max(0, plan.proof.missing - 1)
                    _put(_plans, key, plan)
                    return rebuilt
                plan.proof.missing, plan.proof.failed = PROOFS, True
            _put(_refused, kind, chain.refusal("other bits"))
        except torch.OutOfMemoryError:
            pass  # another time
        except Exception as reason:
            _put(_refused, kind, chain.refusal(reason))
        return rebuilt


def _put(table: dict[Key, Any], key: Key, value: Any) -> None:
    """Enter a finding; a table that is full is of shapes that never come again."""
    if len(table) >= MAX_PLANS:
        table.clear()
    table[key] = value


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


def _layout(root: Value, slot: Slot) -> Layout:
    """The layout of the root: as it was when it was saved, else what can be told from its operands."""
    layout = root.layout or (slot.shape, slot.stride)
    if layout[0] != slot.shape or len(layout[1]) != len(layout[0]):
        raise RefusedError("a layout that only ATen knows")
    if layout[0].numel() * 2 < MIN_BYTES:
        raise RefusedError("too small")
    return layout


def _output_layout(number: int, value: Value, slot: Slot, b: Builder) -> Layout:
    """How an output lies in memory: as it did when it was saved, which must be as the program lays it."""
    layout = b.layouts[slot.number]
    if layout is None or slot.shape != layout[0]:
        raise RefusedError("an output that is broadcast")
    if value.layout is None:
        return layout
    if value.layout[0] != layout[0] or not _alike(value.layout[1], layout[1], layout[0]):
        raise CutError(number)
    return value.layout


def _alike(a: tuple[int, ...], b: tuple[int, ...], shape: torch.Size) -> bool:
    """Whether two rows of strides lay out ``shape`` alike."""
    return a == b or all(n == 1 or x == y for x, y, n in zip(a, b, shape, strict=True))


def _compiled(chain: Chain, program: Program, wide: bool) -> Kernel:
    """The kernel of a program, unless there are too many such already."""
    alike = _variety[tuple(v.op for v in chain.values)]
    if program not in alike and len(alike) >= MAX_VARIETY:
        raise RefusedError("too many shapes")
    alike.add(program)
    return compiled(program, wide)


def _reach(tensor: Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _kind_of(chain: Chain) -> Key:
    """What is known of a chain before its leaves are taken."""
    return (*chain.key, *[_kind(v.tensor) if v.tensor is not None else v.layout for v in chain.leaves])


def _kind(tensor: Tensor) -> Key:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_neg()


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
    return set(LOWERINGS) - TABLE


def summarize() -> str:
    """The report in words."""
    found = report()
    lines = [f"{found['programs']} kinds of chains are rebuilt by one kernel each, {found['launches']} times so far"]
    lines += [f"not exact on this device, and so left to ATen: {name}" for name in found["inexact"]]
    lines += [f"op by op: {why}" for why in dict.fromkeys(found["refused"])]
    return "\n".join(lines)
