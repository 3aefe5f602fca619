"""Replays a chain of pointwise ops in a recipe as one kernel.

When a value is rebuilt, the pointwise ops below it are gathered into one program. Its inputs are tensors that are kept,
held or made by other ops; its outputs are the value itself and every inner value that will still be read.

[Note: proven before used]
A program is used only after it has been compared with ATen: the first ``PROOFS`` times the recipe is replayed op by op
as usual, and the program is run beside it, in pieces, over the same tensors. If a single bit differs, this kind of
chain is always replayed op by op. Before that, each op was compared by itself ([Note: every op by itself]). So a
program that is wrong on this GPU, this torch or this Triton costs time, but never gives a wrong gradient. Steps do not
depend on the number of elements, so a proof holds for all batch sizes. But a library may choose another kernel for a
norm of another shape, so a program with such a norm is proven for each shape.

[Note: what a launch leaves]
A launch writes out an inner value if saved tensors will still read it in this backward pass, or if it is held for
recipes. A replay op by op holds the same tensors at the same time, so a launch uses no more memory. They are not held
for long: the values below a saved tensor are operands of the ops whose backward runs next. Each is released by its last
reader, or at the latest when backward ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from leangrad import _torch
from leangrad._torch import dispatch_modes_active, stream_of
from leangrad.kernels import INTERPRETED
from leangrad.ledger.fuse.builder import RefusedError
from leangrad.ledger.fuse.chain import TABLE, Chain, Taken, may_chain
from leangrad.ledger.fuse.fused_plan import PROOFS, CutError, InexactError, Plan
from leangrad.ledger.fuse.lowering import LOWERINGS, NORMS, VARIANTS, VIEWS
from leangrad.ledger.fuse.matcher import kind_of
from leangrad.ledger.fuse.pattern import AGAIN, Pattern, UnlikeError
from leangrad.ledger.origins.rules import RULES
from leangrad.ledger.values.rebuild.rebuilt_cache import remember
from leangrad.ledger.values.rebuild.replays import Comparisons, replayers
from leangrad.ledger.values.value import Value

MIN_BYTES = 32 * 1024  # below this a launch costs more than the passes over memory that it saves
MAX_PLANS = 4096  # entries of each table below
MAX_ATTEMPTS = 4  # attempts to match a chain and take its leaves: taking them may change the chain
MAX_ALIKE = 8  # patterns for one function and layout of the root

Key = tuple[Any, ...]

_plans: dict[Key, Plan] = {}  # by the key of the chain and the kinds of its leaves
_patterns: dict[Key, tuple[Pattern, ...]] = {}  # by the function and the layout of the root
_refused: dict[Key, str] = {}  # by kind of chain: why it is replayed op by op
_cuts: dict[Key, int] = {}  # by kind of chain: the index of the value at which it has to end
_lock = threading.RLock()  # one thread at a time builds and proves programs


class _Local(threading.local):
    off = False  # whether this thread replays op by op


_local = _Local()


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Replay op by op in this thread, to have a result with which a program is compared."""
    before = _local.off
    _local.off = True
    try:
        yield
    finally:
        _local.off = before


def replay(root: Value, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool] | None:
    """Rebuild ``root`` with one kernel for its chain; None if it has to be replayed op by op.

    Returns the tensor and whether it is owned, as ``Value._take`` does. A chain that is like an earlier one is
    recognized by the pattern of that one: see [Note: known again].

    made: by id, the tensors that this rebuild has made so far
    task: the number of the backward pass
    """
    if _local.off or dispatch_modes_active():
        return None
    taken: Taken = {}
    key = root.function, root.layout
    for _ in range(MAX_ATTEMPTS):  # taking a leaf that is not kept may change the chain
        known = _patterns.get(key, ())
        for pattern in known:
            found = pattern.match(root, made, task)
            if found is not None:
                break
        else:
            if not taken and not _may_pay(root):
                return None
            break
        pattern.hits += 1
        if pattern.hits > known[0].hits:  # the pattern with the most hits is tried first
            _patterns[key] = (pattern, *[p for p in known if p is not pattern])
        plan = pattern.plan
        if plan is None:
            _memoize_again(taken, task)
            return None
        if plan is not AGAIN and plan.proof.missing:
            break
        fetched = pattern.fetch(found, made, task, taken)
        if fetched is not None:
            if taken:
                _memoize_again(taken, task)
            leaves, owned, scalars, held = fetched
            outputs = plan.run(leaves, owned, scalars)
            for k, more in pattern.read_again:
                found[1][k].count_takes(more)
            if held:
                _hold(held, plan.uses, outputs, task)
            return outputs[-1], True
    return _gather(root, made, task, taken)


def _may_pay(root: Value) -> bool:
    """Whether a chain below ``root`` could be worth a program: a cheap check for chains that match no pattern."""
    return may_chain(root) and (root.layout is None or root.nbytes >= MIN_BYTES)


def _gather(root: Value, made: dict[int, Tensor], task: int, taken: Taken) -> tuple[Tensor, bool] | None:
    """Rebuild ``root`` as ``replay`` does, if its chain matches no pattern or its program is not proven yet."""
    chain = first = Chain(root, made, task)
    kind = _kind_of(chain)
    while kind in _cuts:
        chain = first = Chain(root, made, task, {id(chain.values[_cuts[kind]]), *chain.ends})
        kind = _kind_of(chain)
    at_hand = [chain.is_made(v) for v in chain.leaves]
    if chain.weight < 2 or not chain.leaves or kind in _refused:
        _store_pattern(chain, at_hand, [v.tensor for v in chain.leaves], None)
        _memoize_again(taken, task)
        return None
    while not chain.take(taken):
        _store_pattern(chain, at_hand, [v.tensor for v in chain.leaves], AGAIN)
        chain = Chain(root, made, task, chain.ends)
        at_hand = [chain.is_made(v) for v in chain.leaves]
    leaves = [taken[v][0] for v in chain.leaves]
    if not leaves[0].is_cuda and not INTERPRETED:
        _store(_refused, kind, chain.refusal("on a CPU"))
        _memoize_again(taken, task)
        return None
    if leaves[0].is_cuda and leaves[0].device.index != torch.cuda.current_device():
        _memoize_again(taken, task)
        return None  # Triton launches on the current device
    is_known = chain is first and all(v.tensor is not None for v in chain.leaves)
    key = kind if is_known else (*chain.key, *[kind_of(t) for t in leaves])
    plan = _plans.get(key)
    if plan is None or plan.proof.missing:
        _memoize_again(taken, task)  # the replay op by op will take them again
        return _prove(chain, leaves, kind, key)
    owned = [taken.pop(v)[1] for v in chain.leaves]
    _memoize_again(taken, task)
    outputs = plan.run(leaves, owned, chain.scalars)
    for k, more in chain.read_again():
        chain.leaves[k].count_takes(more)
    _store_pattern(chain, at_hand, leaves, plan)
    if len(outputs) > 1:
        _hold([chain.values[k] for k in chain.outputs[:-1]], plan.uses, outputs, task)
    return outputs[-1], True


def _memoize_again(taken: Taken, task: int) -> None:
    """Give back leaves that were taken and not used, because the chain has changed or is replayed op by op."""
    for value, (tensor, _) in taken.items():
        value.memoize_again(tensor, task)


def _hold(values: Sequence[Value], uses: list[int], outputs: list[Tensor], task: int) -> None:
    """Set the outputs of a program, except for the last, as memos of their values: [Note: what a launch leaves]."""
    stream = stream_of(outputs[-1])
    for value, used, tensor in zip(values, uses, outputs, strict=False):
        value.memo, value.memo_stream, value.memo_reads = tensor, stream, used
        remember(value, task)


def _store_pattern(chain: Chain, at_hand: list[bool], leaves: Sequence[Tensor | None], plan: Any) -> None:
    """Store a pattern of ``chain``, unless it is the first chain whose root has this function and layout."""
    root = chain.values[-1]
    key = root.function, root.layout
    known = _patterns.get(key)
    if known is None:
        _store(_patterns, key, ())
    elif chain.weight >= 0:
        with contextlib.suppress(UnlikeError):
            _patterns[key] = (Pattern(chain, at_hand, leaves, plan), *known[: MAX_ALIKE - 1])


def _prove(chain: Chain, leaves: list[Tensor], kind: Key, key: Key) -> tuple[Tensor, bool] | None:
    """Replay op by op, and compare the program with the result: see [Note: proven before used]."""
    if _torch.transforms_active() or (leaves[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return None  # under vmap no random numbers can be drawn; during graph capture nothing can be compared
    with _lock:
        Comparisons.count += 1
        try:
            plans = [_plans[key]] if key in _plans else _candidates(chain, leaves)
        except InexactError as error:
            TABLE.discard(error.args[0].function)  # without this op it will be a different chain
            _patterns.clear()
            return None
        except (CutError, RefusedError) as reason:
            cut = reason.args[0] if type(reason) is CutError else chain.copy()
            if cut is not None and _kind_of(chain) == kind:
                _store(_cuts, kind, cut)
            else:  # no value to end at; or the chain was gathered again, so that its kind is another one
                _store(_refused, kind, chain.refusal(reason))
            return None
        except torch.OutOfMemoryError:
            return None  # to be tried again
        except Exception as reason:  # whatever Triton raises: the replay op by op does not need it
            _store(_refused, kind, chain.refusal(reason))
            return None
        v = chain.values[-1]
        with off():
            rebuilt = v._rebuild(chain.made, chain.task)
            expected = [_memo_of(chain.values[k], chain) for k in chain.outputs[:-1]]
        expected.append(rebuilt[0])
        try:
            for plan in plans:
                if plan.agrees(leaves, chain.scalars, expected):
                    plan.proof.missing = max(0, plan.proof.missing - 1)
                    _store(_plans, key, plan)
                    return rebuilt
                plan.proof.missing, plan.proof.failed = PROOFS, True
            _store(_refused, kind, chain.refusal("other bits"))
        except torch.OutOfMemoryError:
            pass  # to be tried again
        except Exception as reason:
            _store(_refused, kind, chain.refusal(reason))
        return rebuilt


def _memo_of(v: Value, chain: Chain) -> Tensor:
    """The tensor of ``v`` after a replay op by op; rebuilt once more if its last reader has already released it."""
    return v.memo if v.memo is not None else v._rebuild(chain.made, chain.task)[0]


def _store(table: dict[Key, Any], key: Key, value: Any) -> None:
    """Store ``value`` in ``table``, cleared first if it is full: then most of its shapes will not occur again."""
    if len(table) >= MAX_PLANS:
        table.clear()
    table[key] = value


def _candidates(chain: Chain, leaves: list[Tensor]) -> list[Plan]:
    """The plans to compare with ATen: one for each formula that the library may have used."""
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
    if plans[0].n * 2 < MIN_BYTES:
        raise RefusedError("too small")
    return plans


def _kind_of(chain: Chain) -> Key:
    """What identifies a chain before its leaves are taken: its key, and what is known of each leaf."""
    return (*chain.key, *[kind_of(v.tensor) if v.tensor is not None else v.layout for v in chain.leaves])


def register() -> None:
    """Enter ``replay`` in ``replayers``: from now on rebuilds call it for each function that has a lowering."""
    replayers.update(dict.fromkeys(LOWERINGS.keys() - VIEWS, replay))


def report() -> dict[str, Any]:
    """Returns how many kinds of chains are fused, how often they ran, and why others are replayed op by op.

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
