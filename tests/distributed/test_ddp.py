"""DDP in its forms, and FSDP's first kind, two real processes, lean inside and around: bits as plain's there."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from leangrad.lean import lean, ledger_of
from leangrad.nn.abn import InPlaceABNSync
from leangrad.packed import pack_gradients
from tests.support import same_bits
from tests.support.ranks import PostNorm, Scaled, Transformer, loss_of, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "small buckets": {"bucket_cap_mb": 0.01},
}
STEPS = 4


class Unused(Transformer):
    """A block that no step uses, and one that every other step does."""

    def __init__(self, block: Any) -> None:
        super().__init__(block)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens) + self.position
        for block in self.blocks[: 1 + self.calls % 2]:
            x = block(x)
        return self.head(self.norm(x))


def train(model: Any, loss: Callable[[Any, int], Tensor], rank: int, after: Any = None) -> list[Tensor]:
    """Three micro-batches a step, of which the last reduces gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapper = model if isinstance(model, DistributedDataParallel) else None
    seen = []
    for step in range(STEPS):
        for batch in range(3):
            # The very first backward synchronises: under no_sync torch itself fails for a static graph.
            syncs = batch == 2 or (step, batch) == (0, 0)
            with nullcontext() if syncs or wrapper is None else wrapper.no_sync():
                found = loss(model, 100 * step + 10 * batch + rank)
                found.backward()
                seen.append(found.detach().clone())
        if after is not None:
            after()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [p.detach().clone() for p in model.parameters()]


def assert_same(found: list[Tensor], expected: list[Tensor], what: object) -> None:
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(a, b), (what, n)


def forms(rank: int) -> None:
    for name, options in FORMS.items():
        make = Unused if name == "unused parameters" else Transformer
        block = Scaled if "b" in name else PostNorm
        expected = train(DistributedDataParallel(make(block), **options), loss_of, rank)
        alone = lean(make(block), min_bytes=0)
        train(alone, loss_of, rank)
        for order in ("inside", "around"):
            net = make(block)
            if order == "inside":
                model = DistributedDataParallel(lean(net, min_bytes=0), **options)
                ledger = ledger_of(net)
            else:
                model = lean(DistributedDataParallel(net, **options), min_bytes=0)
                ledger = ledger_of(model)
            assert_same(train(model, loss_of, rank), expected, (name, order))
            if make is Transformer:
                assert ledger.differences == 0, (name, order, ledger.trace_status)
                assert ledger.bytes_for_backward() == ledger_of(alone).bytes_for_backward(), (name, order)


class Images(nn.Module):
    """A residual net of ``InPlaceABNSync``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(InPlaceABNSync(8, group=dist.group.WORLD) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + norm(convolution(x))
        return x.sigmoid().mean((2, 3))


def loss_of_images(model: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (model(torch.randn(2 + seed % 2, 3, 8, 8, generator=generator)) * torch.arange(8)).square().mean()


def synchronized_norms(rank: int) -> None:
    for options in (FORMS["plain"], FORMS["bucket views"]):
        expected = train(DistributedDataParallel(Images(), **options), loss_of_images, rank)
        for order in ("inside", "around"):
            if order == "inside":
                model: Any = DistributedDataParallel(lean(Images(), min_bytes=0), **options)
            else:
                model = lean(DistributedDataParallel(Images(), **options), min_bytes=0)
            assert_same(train(model, loss_of_images, rank), expected, (options, order))


def packed(rank: int) -> None:
    """Lean, packed and DDP together: as packed and DDP without lean, and as DDP alone to rounding of sums."""
    for views, pack_first in itertools.product((False, True), (False, True)):
        runs = []
        for is_lean in (False, True):
            net = Transformer(Scaled)
            if is_lean:
                lean(net, min_bytes=0)
            gradients = pack_gradients(net) if pack_first else None
            model = DistributedDataParallel(net, gradient_as_bucket_view=views)
            gradients = gradients or pack_gradients(model)
            runs.append(train(model, loss_of, rank, gradients.norm))
        assert_same(runs[1], runs[0], ("packed", views, pack_first))


def first_fsdp(rank: int) -> None:
    """FSDP's first kind, whose parameters no recipe reads."""
    for uses_originals in (True, False):
        options: Any = {"use_orig_params": uses_originals, "device_id": torch.device("cpu")}
        options["auto_wrap_policy"] = ModuleWrapPolicy({Scaled})
        expected = train(FullyShardedDataParallel(Transformer(Scaled), **options), loss_of, rank)
        net = lean(Transformer(Scaled), min_bytes=0)
        inside = FullyShardedDataParallel(net, **options)
        around = lean(FullyShardedDataParallel(Transformer(Scaled), **options), min_bytes=0)
        assert_same(train(inside, loss_of, rank), expected, ("FSDP inside", uses_originals))
        assert_same(train(around, loss_of, rank), expected, ("FSDP around", uses_originals))
        for ledger in (ledger_of(net), ledger_of(around)):
            assert ledger.totals().rebuilt_bytes > 0
            rebuilt = {entry.op for entry in ledger.entries() if entry.outcome == "rebuilt"}
            assert "NativeLayerNormBackward0" not in rebuilt, rebuilt


def work(rank: int) -> None:
    warnings.filterwarnings("ignore", message="FullyShardedDataParallel|.*FSDP.*")
    first_fsdp(rank)
    forms(rank)
    synchronized_norms(rank)
    packed(rank)


def test_two_processes(tmp_path: Path) -> None:
    run_ranks(work, 2, tmp_path, copies=True)
