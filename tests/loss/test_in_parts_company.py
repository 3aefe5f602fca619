"""The loss in parts beside packed gradients, DDP and FSDP2: plain's bits, and no more memory than without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import leangrad
from leangrad.ops import cross_entropy as ops
from tests.support import assert_same_bits
from tests.support.ranks import run_ranks

ROWS, WIDTH, WORDS, STEPS = 300, 16, 515, 4


class Language(nn.Module):
    """A projection to a vocabulary, whose logits are cast from half precision, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        logits = self.head(x + F.gelu(self.inner(x)))
        return F.cross_entropy(logits.half().float(), words.roll(-1))


def words_of(rank: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (ROWS,), generator=torch.Generator().manual_seed(rank))


def small_parts() -> Any:
    """Parts of a few rows, so that small logits have several; counts the backward passes in parts."""
    backward, count = ops.backward, [0]

    def counted(*args: Any) -> Tensor:
        count[0] += 1
        return backward(*args)

    return patch.multiple(ops, PART_BYTES=1 << 16, LARGE_BYTES=1 << 16, _rows=lambda x: 32, backward=counted), count


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        found.append((grad.full_tensor() if isinstance(grad, DTensor) else grad).clone())
    return found


def train(model: nn.Module, rank: int = 0) -> list[Tensor]:
    """The gradients of two micro-batches in each step, then a step of an optimizer."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            model(words_of(2 * rank + part)).backward()
        found += gradients(model)
        optimizer.step()
    return found


def assert_alike(plain: list[Tensor], lean: list[Tensor]) -> None:
    for number, (a, b) in enumerate(zip(plain, lean, strict=True)):
        assert_same_bits(a, b, f"gradient {number}")


def test_packed_gradients() -> None:
    parts, count = small_parts()
    with parts:
        plain, lean = Language(), leangrad.lean(Language(), min_bytes=256)
        for one in (plain, lean):
            leangrad.pack_gradients(one)
        assert_alike(train(plain), train(lean))
        assert count[0] == 2 * STEPS
        alone, words = leangrad.lean(Language(), min_bytes=256), words_of()
        train(alone)

        def peak(model: nn.Module) -> int:
            return leangrad.measure(lambda: model(words).backward(), timed_runs=0).peak_bytes

        assert peak(lean) <= peak(alone)


def _with_ddp(rank: int) -> None:
    parts, count = small_parts()
    with parts:
        plain, lean = Language(), leangrad.lean(Language(), min_bytes=256)
        assert_alike(*(train(DistributedDataParallel(one), rank) for one in (plain, lean)))
        assert count[0] == 2 * STEPS


def _with_fsdp(rank: int) -> None:
    parts, count = small_parts()
    with parts:
        found = []
        for is_lean in (False, True):
            model = Language()
            for part in (model.inner, model):
                fully_shard(part)
            found.append(train(leangrad.lean(model, min_bytes=256) if is_lean else model, rank))
        assert_alike(*found)
        assert count[0] == 2 * STEPS


@pytest.mark.parametrize("work", [_with_ddp, _with_fsdp])
def test_several_ranks(work: Any, tmp_path: Path) -> None:
    run_ranks(work, 2, tmp_path, copies=True)


def test_a_copy_of_a_lean_model() -> None:
    parts, count = small_parts()
    with parts:
        plain, lean = Language(), leangrad.lean(Language(), min_bytes=256)
        assert_alike(train(plain), train(lean))
        assert_alike(train(copy.deepcopy(plain)), train(copy.deepcopy(lean)))
        assert count[0] == 4 * STEPS
