"""What is rebuilt how often: the exact ops that a backward pass replays, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leangrad.lean import saving
from leangrad.ledger.fuse import fused
from leangrad.ledger.ledger import Ledger
from leangrad.ledger.observe import random_ops
from leangrad.ledger.values.value import Value
from tests.support.ledger_programs import backward, leaf


@contextmanager
def replayed() -> Iterator[list[str]]:
    """The ops that are replayed meanwhile, one by one, as they end."""
    ops: list[str] = []
    rebuild = Value._rebuild

    def counted(self: Value, made: dict[int, Tensor], task: int) -> tuple[Tensor, bool]:
        result = rebuild(self, made, task)
        ops.append(self.op)
        return result

    with pytest.MonkeyPatch.context() as patch, fused.off():
        patch.setattr(Value, "_rebuild", counted)
        yield ops


def steps(forward: Callable[[], Tensor], ledger: Ledger, n: int = 3) -> list[list[str]]:
    """The replays of some steps; the first is recorded, the later ones follow the plan."""
    found = []
    for _ in range(n):
        with ledger:
            y = forward()
        with replayed() as ops:
            backward(y)
        found.append(ops)
    return found


def test_what_several_products_see_as_views_is_rebuilt_once() -> None:
    """Query, key and value: each product saves a view of the one norm, flattened for it."""
    x, norm, weights = leaf(2, 4, 16), leaf(16, seed=1), [leaf(16, 16, seed=n) for n in (2, 3, 4)]

    def forward() -> Tensor:
        normed = F.layer_norm(x.exp(), (16,), norm)
        return torch.cat([F.linear(normed, w).sin() for w in weights])

    for ops in steps(forward, saving(min_bytes=0)):
        assert ops.count("NativeLayerNormBackward0") == 1


def test_links_that_only_recipes_read_are_rebuilt_once() -> None:
    """A residual stream of which autograd saves only casts: its sums must not grow as the square of its length."""
    links = 12
    weights = [leaf(16, 16, seed=n) for n in range(links)]
    first = leaf(8, 16, seed=99)

    def forward() -> Tensor:
        x = (first * 2).bfloat16()
        for w in weights:
            normed = x.float().pow(3)  # saves the cast, and nobody saves x
            x = x + (normed @ w).bfloat16()
        return x.float()

    for ops in steps(forward, saving(min_bytes=0)):
        assert ops.count("AddBackward0") <= links


def test_the_input_of_a_loop_is_rebuilt_once() -> None:
    rate, x = leaf(10, 32), leaf(10, 32, seed=1)

    def forward() -> Tensor:
        decay = F.softplus(rate @ torch.eye(32)).neg().exp()
        h = torch.zeros(32)
        for t in range(10):
            h = decay[t] * h + x[t] * 2
        return h

    for ops in steps(forward, saving(min_bytes=0)):
        assert ops.count("SoftplusBackward0") <= 1
        assert ops.count("ExpBackward0") <= 1


def test_statistics_are_kept_where_summing_again_is_dear() -> None:
    """Four bytes a row against three passes over the row."""
    w, x = leaf(1024, 1024), leaf(32, 1024, seed=1)
    ledger = saving(min_bytes=64)

    def forward() -> Tensor:
        h = x @ w
        return h * 2 * torch.rsqrt((h * 2).pow(2).mean(-1, keepdim=True) + 1e-6) @ w

    recorded, *later = steps(forward, ledger)
    assert recorded.count("MeanBackward1") == 1
    for ops in later:
        assert "MeanBackward1" not in ops
        assert "MulBackward0" in ops  # what is large is rebuilt as before


def test_both_outputs_of_an_op_are_rebuilt_at_once() -> None:
    """The output of log-sigmoid is saved by the product, its buffer by the op itself: one replay gives both."""
    w, x = leaf(16, 16), leaf(8, 16, seed=1)

    def forward() -> Tensor:
        return F.logsigmoid(x @ w) * x

    for ops in steps(forward, saving(min_bytes=0)):
        assert ops.count("LogSigmoidBackward0") == 1


def test_a_larger_other_output_is_not_held() -> None:
    """The indices of a pooling are twice its values: they are rebuilt when they are asked for."""
    w, x = leaf(4, 4, 3, 3), leaf(2, 4, 12, 12, seed=1)

    def forward() -> Tensor:
        return F.conv2d(F.max_pool2d(F.conv2d(x, w).relu(), 2), w)

    for ops in steps(forward, saving(min_bytes=0)):
        assert ops.count("MaxPool2DWithIndicesBackward0") == 2


def test_attention_is_asked_once_how_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first dropout of a form is compared with its drawing, the next ones are taken at its word."""
    monkeypatch.setattr(random_ops, "_PROVEN", {})
    drawn = 0
    factor = random_ops.DropoutMask.factor

    def counted(self: random_ops.DropoutMask) -> Tensor:
        nonlocal drawn
        drawn += 1
        return factor(self)

    monkeypatch.setattr(random_ops.DropoutMask, "factor", counted)
    q = leaf(1, 2, 8, 4)
    ledger = saving(min_bytes=0)
    seen = []
    for _ in range(3):
        with ledger:
            y = F.scaled_dot_product_attention(q * 1, q * 2, q * 3, dropout_p=0.5)
        seen.append(drawn)
        backward(y)
    assert seen[0] == 1
    assert seen[1] - seen[0] == 1  # backward's own
    assert seen[2] - seen[1] == 1
