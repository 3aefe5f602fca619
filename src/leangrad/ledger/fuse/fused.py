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

[Note: what a launch leaves]
An inner value is written out where saved tensors will still ask for it in this backward pass, or recipes that hold it.
A replay op by op holds the very same tensors at the same time, so a launch takes no more memory. And they are not held
for long: what lies under the tensor that was asked for are operands of the ops whose backward comes next. Each is let
go by its last reader, or else at the end of backward.
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
from leangrad.ledger.values.rebuilt_cache import remember
from leangrad.ledger.values.value import Comparisons, Value, replayers

MIN_BYTES = 32 * 1024  # below this a launch costs more than the passes over memory that it saves
MAX_PLANS = 4096
MAX_TURNS = 4  # that a chain may take until its leaves are at hand
MAX_ALIKE = 8  # patterns of chains that end in the same op and layout

Key = tuple[Any, ...]

_plans: dict[Key, Plan] = {}
_patterns: dict[Key, tuple[Pattern, ...]] = {}  # by the function and the layout of the root
_refused: dict[Key, str] = {}  # why a chain is replayed op by op
_cuts: dict[Key, int] = {}  # the number of the value at which a chain has to end
_lock = threading.RLock()  # one thread at a time makes and proves programs


class _Local(threading.local):
    off = False  # this thread replays op by op


_local = _Local()


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Replay op by op in this thread: to compare."""
    before = _local.off
    _local.off = True
    try:
        yield
    finally:
        _local.off = before


def replay(root: Value, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool] | None:
    """Rebuild ``root`` by one kernel for its chain; None where it has to be replayed op by op.

    A chain that is like one before is known by that one's pattern: see [Note: known again].
    """
    if _local.off or dispatch_modes_active():
        return None
    taken: Taken = {}
    key = root.function, root.layout
    for _ in range(MAX_TURNS):  # to take a leaf that is not kept may make the chain another one
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
        if pattern.hits > known[0].hits:  # what is met most often is tried first
            _patterns[key] = (pattern, *[p for p in known if p is not pattern])
        plan = pattern.plan
        if plan is None:
            _give_back(taken, task)
            return None
        if plan is not AGAIN and plan.proof.missing:
            break
        fetched = pattern.fetch(found, made, task, taken)
        if fetched is not None:
            if taken:
                _give_back(taken, task)
            leaves, owned, scalars, held = fetched
            outputs = plan.run(leaves, owned, scalars)
            for k, more in pattern.read_again:
                found[1][k].count_takes(more)
            if held:
                _hold(held, plan.uses, outputs, task)
            return outputs[-1], True
    return _gather(root, made, task, taken)


def _may_pay(root: Value) -> bool:
    """Whether a chain could be worth a program, at a glance. What matches a pattern has passed this before."""
    return may_chain(root) and (root.layout is None or root.nbytes >= MIN_BYTES)


def _gather(root: Value, made: dict[int, Tensor], task: int, taken: Taken) -> tuple[Tensor, bool] | None:
    """The same for a chain that no pattern knows."""
    chain = first = Chain(root, made, task)
    kind = _kind_of(chain)
    while kind in _cuts:
        chain = first = Chain(root, made, task, {id(chain.values[_cuts[kind]]), *chain.ends})
        kind = _kind_of(chain)
    at_hand = [chain.is_made(v) for v in chain.leaves]
    if chain.weight < 2 or not chain.leaves or kind in _refused:
        _know(chain, at_hand, [v.tensor for v in chain.leaves], None)
        _give_back(taken, task)
        return None
    while not chain.take(taken):
        _know(chain, at_hand, [v.tensor for v in chain.leaves], AGAIN)
        chain = Chain(root, made, task, chain.ends)
        at_hand = [chain.is_made(v) for v in chain.leaves]
    leaves = [taken[v][0] for v in chain.leaves]
    if not leaves[0].is_cuda and not INTERPRETED:
        _put(_refused, kind, chain.refusal("on a CPU"))
        _give_back(taken, task)
        return None
    if leaves[0].is_cuda and leaves[0].device.index != torch.cuda.current_device():
        _give_back(taken, task)
        return None  # Triton launches on the current device
    is_known = chain is first and all(v.tensor is not None for v in chain.leaves)
    key = kind if is_known else (*chain.key, *[kind_of(t) for t in leaves])
    plan = _plans.get(key)
    if plan is None or plan.proof.missing:
        _give_back(taken, task)  # the replay op by op will take them
        return _prove(chain, leaves, kind, key)
    owned = [taken.pop(v)[1] for v in chain.leaves]
    _give_back(taken, task)
    outputs = plan.run(leaves, owned, chain.scalars)
    for k, more in chain.read_again():
        chain.leaves[k].count_takes(more)
    _know(chain, at_hand, leaves, plan)
    if len(outputs) > 1:
        _hold([chain.values[k] for k in chain.outputs[:-1]], plan.uses, outputs, task)
    return outputs[-1], True


def _give_back(taken: Taken, task: int) -> None:
    """Leaves that were taken for a chain that became another one."""
    for value, (tensor, _) in taken.items():
        value.give_back(tensor, task)


def _hold(values: Sequence[Value], uses: list[int], outputs: list[Tensor], task: int) -> None:
    """Leave the outputs of a program, but for the last, with their values: see [Note: what a launch leaves]."""
    stream = stream_of(outputs[-1])
    for value, used, tensor in zip(values, uses, outputs, strict=False):
        value.memo, value.memo_stream, value.takes = tensor, stream, used
        remember(value, task)


def _know(chain: Chain, at_hand: list[bool], leaves: Sequence[Tensor | None], plan: Any) -> None:
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
        Comparisons.count += 1
        try:
            plans = [_plans[key]] if key in _plans else _candidates(chain, leaves)
        except InexactError as error:
            TABLE.discard(error.args[0].function)  # without that op it will be another chain
            _patterns.clear()
            return None
        except (CutError, RefusedError) as reason:
            cut = reason.args[0] if type(reason) is CutError else chain.copy()
            if cut is not None and _kind_of(chain) == kind:
                _put(_cuts, kind, cut)
            else:  # nowhere to end; or the chain was gathered again, and would not be known by this kind
                _put(_refused, kind, chain.refusal(reason))
            return None
        except torch.OutOfMemoryError:
            return None  # another time
        except Exception as reason:  # whatever Triton raises: the chain works without it
            _put(_refused, kind, chain.refusal(reason))
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
                    _put(_plans, key, plan)
                    return rebuilt
                plan.proof.missing, plan.proof.failed = PROOFS, True
            _put(_refused, kind, chain.refusal("other bits"))
        except torch.OutOfMemoryError:
            pass  # another time
        except Exception as reason:
            _put(_refused, kind, chain.refusal(reason))
        return rebuilt


def _memo_of(v: Value, chain: Chain) -> Tensor:
    """What a replay left of ``v``; it is made once more if all who were to read it have done so by now."""
    return v.memo if v.memo is not None else v._rebuild(chain.made, chain.task)[0]


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
    if plans[0].n * 2 < MIN_BYTES:
        raise RefusedError("too small")
    return plans


def _kind_of(chain: Chain) -> Key:
    """What is known of a chain before its leaves are taken."""
    return (*chain.key, *[kind_of(v.tensor) if v.tensor is not None else v.layout for v in chain.leaves])


def register() -> None:
    """From now on recipes are replayed as one kernel where they can be."""
    replayers.update(dict.fromkeys(LOWERINGS.keys() - VIEWS, replay))


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
