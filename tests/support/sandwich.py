"""One op or module between cheap producers and consumers, plain and lean: outputs, gradients and states are compared.

The producers leave every number as it is, so that what an op must be given (a positive definite matrix, a number above
1) stays that, and yet autograd saves their results, and a ledger rebuilds them. The consumers save what the op gave.
Their constants change from step to step: what was learned of one must not be applied to another.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import leangrad
from tests.support.bits import difference

PRODUCERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: (x * 0.5) * 2.0,
    lambda x: x.neg().neg(),
    lambda x: (x / 4.0) * 4.0,
    lambda x: (x + x) * 0.5,
]
STEPS = 3  # recorded, learned, followed
REPEATS = 32  # of plain, where lean differs: does plain differ from itself?

Function = Callable[[Any], Any]  # of a tree of tensors and constants; a module has parameters and buffers too


@dataclass
class Counts:
    """What was compared over many samples."""

    names: set[str] = field(default_factory=set)  # of ops or modules that were compared at least once
    rebuilding: set[str] = field(default_factory=set)  # of those: where bytes were rebuilt
    samples: int = 0
    followed: int = 0  # of the samples: those that the ledger knew in the last step
    tensors: int = 0
    unsteady: set[str] = field(default_factory=set)  # names of what differs in plain from run to run
    failures: list[str] = field(default_factory=list)


def compare(name: str, function: Function, tree: Any, counts: Counts) -> None:
    """Run three steps plain and lean. What plain refuses is no sample; what plain computes in two ways may differ."""
    ledger = leangrad.saving(min_bytes=0)
    twin = copy.deepcopy(function) if isinstance(function, nn.Module) else function
    for n in range(STEPS):
        before = copy.deepcopy(function) if isinstance(function, nn.Module) else function
        try:
            plain = step(function, tree, nullcontext(), n)
        except Exception:
            return
        if plain is None:
            return
        try:
            lean = step(twin, tree, ledger, n)
        except Exception as error:
            counts.failures.append(f"{name}, step {n}: {type(error).__name__}: {error}")
            return
        for k, found in differences(lean, plain).items():
            if not any(k in differences(again, plain) for again in repeats(before, tree, n)):
                counts.failures.append(f"{name}, step {n}, tensor {k}: {found}")
                return
            counts.unsteady.add(name)
        counts.tensors += len(plain)
    counts.names.add(name)
    counts.samples += 1
    counts.followed += ledger.decisions is not None
    if ledger.totals().rebuilt_bytes:
        counts.rebuilding.add(name)


def repeats(function: Function, tree: Any, n: int) -> Iterator[list[Tensor | None] | None]:
    """The same plain step again and again, each time in other memory.

    LAPACK's least squares, for one, read memory that nobody has written.
    """
    for seed in range(REPEATS):
        choose = random.Random(seed)
        held = [torch.empty(choose.randrange(1, 400)) for _ in range(choose.randrange(20))]
        yield step(copy.deepcopy(function), tree, nullcontext(), n)
        del held


def differences(a: list[Tensor | None] | None, b: list[Tensor | None] | None) -> dict[int, str]:
    """Which tensors differ, by their place, and how."""
    if a is None or b is None or len(a) != len(b):
        return {-1: "not as many tensors"}
    found = {k: difference(x, y, nans="any", strides=True) for k, (x, y) in enumerate(zip(a, b, strict=True))}
    return {k: words for k, words in found.items() if words}


def step(function: Function, tree: Any, region: AbstractContextManager[Any], n: int) -> list[Tensor | None] | None:
    """One step: random state, outputs, gradients and buffers. None: ``function`` gives nothing that has a gradient."""
    leaves, fresh = _fresh(tree)
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    for p in parameters:
        p.grad = None
    torch.manual_seed(n)
    with region:
        outputs = [y for y in pytree.tree_leaves(function(_produce(leaves, fresh))) if isinstance(y, Tensor)]
        consumed = [_consume(y, n) for y in outputs if y.requires_grad and _is_plain(y)]
    if not consumed:
        return None
    draw = torch.Generator().manual_seed(n)
    seeds = [torch.randn(y.shape, generator=draw).to(y.device, y.dtype) for y in consumed]
    torch.autograd.backward(consumed, seeds)
    state = torch.cuda.get_rng_state() if consumed[0].is_cuda else torch.get_rng_state()
    buffers = [b.detach().clone() for b in function.buffers()] if isinstance(function, nn.Module) else []
    gradients = [leaf.grad for leaf in (*leaves, *parameters)]
    return [state, *(y.detach() for y in (*outputs, *consumed)), *gradients, *buffers]


def _produce(leaves: list[Tensor], tree: Any) -> Any:
    """The same tree, in which the leaves have been through a producer each."""
    made = {id(leaf): PRODUCERS[k % len(PRODUCERS)](leaf) for k, leaf in enumerate(leaves) if _is_plain(leaf)}
    return pytree.tree_map_only(Tensor, lambda t: made.get(id(t), t), tree)


def _consume(y: Tensor, n: int) -> Tensor:
    c = 1.5 + n / 8
    return (y * c).sin() + (y + c).tanh() * y


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided


def _fresh(tree: Any) -> tuple[list[Tensor], Any]:
    """A copy of each tensor of ``tree``; and those of the copies that need a gradient."""
    copies: dict[int, Tensor] = {}

    def fresh(t: Tensor) -> Tensor:
        if id(t) not in copies:
            copies[id(t)] = t.detach().clone().requires_grad_(t.requires_grad)
        return copies[id(t)]

    made = pytree.tree_map_only(Tensor, fresh, tree)
    return [t for t in copies.values() if t.requires_grad], made
