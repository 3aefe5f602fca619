"""FSDP2 with frozen and large parameters, side outputs, compiled blocks, and lean called in all ways."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from leangrad.compiled import compile_lean
from leangrad.errors import LeangradError
from leangrad.lean import lean, ledger_of, plain
from tests.support.ranks import Scaled, Transformer, loss_of, run_ranks
from tests.support.sharded import assert_same_run, pair, sharded, train

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

train_and_leave = functools.partial(train, leaves_gradients=True)


# ----------------------------------------------------------------------------------------- frozen, large, and side ways


class Frozen(Transformer):
    """Frozen norms and tables, some of them too large to be copied."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        self.wide = nn.Parameter(torch.rand(64, 400), requires_grad=False)  # 100 KiB
        self.widen, self.shrink = nn.Linear(32, 400), nn.Linear(400, 32)
        for block in self.blocks:
            for parameter in (*block.norm1.parameters(), block.scale2):
                parameter.requires_grad_(False)
        self.embedding.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        x = self.shrink(F.gelu((self.widen(x) + self.wide) * self.wide) - self.wide[0])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).clone()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("reshards", [True, False])
def test_frozen_parameters(reshards: bool) -> None:
    def make() -> Any:
        net = Frozen()
        for block in net.blocks:
            fully_shard(block)
        return fully_shard(net, reshard_after_forward=reshards)

    assert_same_run(train_and_leave, make(), lean(make(), min_bytes=0))


class Wide(nn.Module):
    """A block with a table that is too large to be copied; what is made from it is saved here, and after the block."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.rand(300, 64)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (self.linear(x.sin()) * self.table).tanh() + self.table
        return y, y.sin().mean()


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Wide() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y, mean = block(x)
            x = y.cos() + mean
        return x.exp()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("reshards", [True, False])
def test_what_would_need_a_gather_that_nobody_makes_is_kept(reshards: bool) -> None:
    def run(model: Any) -> None:
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(300, 64)).mean().backward()

    first, second = pair(Tables, reshard_after_forward=reshards)
    assert_same_run(run, first, second)
    why = [entry.why for entry in ledger_of(second).entries()]
    assert any("a sharded parameter that is not gathered when it is read" in reason for reason in why), why


@pytest.mark.usefixtures("alone")
def test_a_module_that_backward_does_not_gather() -> None:
    def run(model: Any) -> None:
        for step in range(3):
            loss_of(model, step).backward()

    def make() -> Any:
        net = Transformer()
        fully_shard(net.embedding).set_unshard_in_backward(False)
        return sharded(net)

    first, second = make(), lean(make(), min_bytes=0)
    assert_same_run(run, first, second)


class Aux(Transformer):
    """A loss of each block that leaves the model by a side door."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        self.aux = []
        for block in self.blocks:
            x = block(x)
            self.aux.append(F.gelu(x + self.position).square().mean())
        return self.head(self.norm(x)).clone()


@pytest.mark.usefixtures("alone")
def test_losses_that_do_not_pass_the_output() -> None:
    def run(model: Any) -> None:
        for step in range(3):
            (loss_of(model, step) + sum(model.aux)).backward()

    assert_same_run(run, *pair(Aux))


@pytest.mark.usefixtures("alone")
def test_a_parameter_that_is_gone_is_an_error() -> None:
    """The side door alone: the root is not gathered, and nothing of it is read."""
    _, model = pair(Aux)
    for block in model.blocks:
        block.set_reshard_after_forward(True)
    model.set_reshard_after_forward(True, recurse=False)
    loss_of(model, 0)
    with pytest.raises(LeangradError, match="whose memory was freed"):
        model.aux[0].backward()


@pytest.mark.usefixtures("alone")
def test_the_hooks_of_fsdp_are_as_they_were() -> None:
    net = sharded(lean(Transformer(), min_bytes=0))
    hooks = [dict(m._forward_pre_hooks) | dict(m._forward_hooks) for m in net.modules()]
    loss_of(net, 0).backward()
    with pytest.raises(IndexError):
        net(torch.tensor([[10**6]]))
    assert [dict(m._forward_pre_hooks) | dict(m._forward_hooks) for m in net.modules()] == hooks


# -------------------------------------------------------------------------------------------------- how lean was called


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", ["before", "after", "twice", "one block", "inner part", "late"])
def test_lean_before_and_after(how: str) -> None:
    def make() -> Any:
        net = Transformer(Scaled)
        if how == "before":
            return sharded(lean(net, min_bytes=0))
        if how == "late":  # sharded after it has trained
            lean(net, min_bytes=0)
            for step in range(3):
                loss_of(net, step).backward()
            net.zero_grad()
            return sharded(net)
        sharded(net)
        if how == "after":
            return lean(net, min_bytes=0)
        if how == "twice":
            return lean(lean(net, min_bytes=0), min_bytes=0)
        lean(net.blocks[1] if how == "one block" else net.blocks[1].attention, min_bytes=0)
        return net

    first, second = sharded(Transformer(Scaled)), make()
    assert_same_run(train_and_leave, first, second)
    part = {"one block": second.blocks[1], "inner part": second.blocks[1].attention}.get(how, second)
    assert ledger_of(part).totals().rebuilt_bytes > 0 or how == "inner part"
    plain(part)


def some_ranks(rank: int) -> None:
    first, second = sharded(Transformer(Scaled)), sharded(Transformer(Scaled))
    if rank == 0:
        lean(second, min_bytes=0)

    assert_same_run(functools.partial(train, rank=rank), first, second)


@pytest.mark.slow
def test_lean_on_one_rank_only(tmp_path: Path) -> None:
    run_ranks(some_ranks, 2, tmp_path, copies=True)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_in_a_lean_model() -> None:
    """The hooks of a compiled module run where Dynamo does not look; ours stand in for them there too."""

    def make(*, compiled: bool) -> Any:
        net = Transformer(Scaled, depth=2)
        for block in net.blocks:
            if compiled:
                block.compile(backend=compile_lean, options={"leangrad.exact": True})
            fully_shard(block)
        return fully_shard(net)

    second = lean(make(compiled=True), min_bytes=0)
    assert_same_run(functools.partial(train, steps=3), make(compiled=False), second)
    assert ledger_of(second).totals().rebuilt_bytes > 0  # the norm after the blocks
