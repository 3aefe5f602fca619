"""FSDP2 where shards change, modules are called twice, and forwards come before backwards: bits, or an error."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.errors import ChangedError
from leangrad.lean import lean
from leangrad.measure import measure
from tests.support.ranks import PostNorm, PreNorm, Scaled, Transformer, local, loss_of
from tests.support.sharded import assert_same_run, optimizer_of, pair, sharded, train

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


# ------------------------------------------------------------------------------------------------ shards that change


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("block", [PreNorm, PostNorm, Scaled])
def test_an_optimizer_step_between_forward_and_backward(block: type[PreNorm]) -> None:
    """Norms are rebuilt from copies, which are what forward has read; what is read in place raises."""

    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        for step in range(3):
            early = loss_of(model, step)
            loss_of(model, 10 + step).backward()
            optimizer.step()
            optimizer.zero_grad()
            early.backward()  # plain reads new weights here, and says nothing

    assert_same_run(run, *pair(lambda: NoTables(block)))
    _, model = pair(lambda: Transformer(block))
    with pytest.raises(ChangedError, match=r"a sharded parameter.* was changed between forward and backward"):
        run(model)


class NoTables(Transformer):
    """Without an embedding, whose output is rebuilt from its weight in place."""

    def __init__(self, block: type[PreNorm]) -> None:
        super().__init__(block)
        self.embedding, self.position = nn.Identity(), None  # type: ignore[assignment]
        self.first = nn.Linear(1, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens.unsqueeze(-1) / 640)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).clone()


@pytest.mark.usefixtures("alone")
def test_another_optimizer_may_step() -> None:
    """One that has none of the parameters which backward reads."""
    net = sharded(lean(Transformer(), min_bytes=0))
    other = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters(), foreach=True)
    loss = loss_of(net, 0)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    loss.backward()


@pytest.mark.usefixtures("alone")
def test_loaded_parameters_between_forward_and_backward() -> None:
    net = sharded(lean(Transformer(), min_bytes=0))
    loss_of(net, 0).backward()
    loss = loss_of(net, 1)
    net.load_state_dict({name: t * 2 for name, t in net.state_dict().items()})
    with pytest.raises(ChangedError, match="was changed between forward and backward"):
        loss.backward()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", ["in place", "local parts", "local parts at once"])
def test_an_optimizer_by_hand_between_forward_and_backward(how: str) -> None:
    net = sharded(lean(Transformer(), min_bytes=0))
    loss_of(net, 0).backward()
    parameters = [*net.parameters()]  # as an optimizer has them; after forward some are gathered
    loss = loss_of(net, 1)
    with torch.no_grad():
        if how == "in place":
            for parameter in parameters:
                parameter.add_(1.0)
        elif how == "local parts":
            for parameter in parameters:
                local(parameter).add_(1.0)
        else:
            torch._foreach_add_([*map(local, parameters)], 1.0)
    with pytest.raises(ChangedError, match="was changed between forward and backward"):
        loss.backward()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("reshards", [True, False])
def test_steps_inside_of_one_region(reshards: bool) -> None:
    """A region around the whole loop: each forward has copies of its own."""

    def run(model: Any) -> None:
        with leangrad.saving(min_bytes=0) if model is second else nullcontext():
            train(model)

    first, second = (sharded(NoTables(Scaled), reshard_after_forward=reshards) for _ in range(2))
    assert_same_run(run, first, second)


@pytest.mark.usefixtures("alone")
def test_a_graph_over_a_step_inside_of_one_region() -> None:
    """The second forward reads what the first has made, with other parameters: no recipe reaches back beyond it."""

    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        torch.manual_seed(1)
        x = torch.randn(4, 8, 32)
        with leangrad.saving(min_bytes=0) if model is second else nullcontext():
            for _ in range(3):
                y = model(x)
                y.detach().requires_grad_().square().mean().backward()
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                optimizer.zero_grad()
                model(y).square().mean().backward()
                optimizer.step()

    def make() -> nn.Module:
        torch.manual_seed(3)
        net = nn.Sequential(nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32))
        return fully_shard(net)

    first, second = make(), make()
    assert_same_run(run, first, second)


# ---------------------------------------------------------------------------------- modules called twice, many forwards


class Twice(Transformer):
    """The first block runs three times, once on what the last has made."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2], self.blocks[0]):
            x = block(x)
        a, b = self.blocks[1](x), self.blocks[1](F.gelu(x))
        return self.head(self.norm(a + b)).clone()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("block", [PreNorm, PostNorm, Scaled])
def test_a_block_that_is_called_many_times(block: type[PreNorm], reshards: bool) -> None:
    run = functools.partial(train, leaves_gradients=True)
    assert_same_run(run, *pair(lambda: Twice(block), reshard_after_forward=reshards))


@pytest.mark.usefixtures("alone")
def test_several_forwards_before_a_backward() -> None:
    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        for step in range(4):
            losses = [loss_of(model, 3 * step + i) for i in range(3)]
            losses[1].backward()
            (losses[0] + losses[2]).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = loss_of(model, 99)
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same_run(run, *pair(lambda: Transformer(PostNorm)))


@pytest.mark.usefixtures("alone")
def test_parameters_that_stay_gathered_between_micro_batches() -> None:
    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        for step in range(4):
            for batch in range(3):
                model.set_is_last_backward(batch == 2)
                model.set_reshard_after_backward(batch == 2)
                model.set_requires_gradient_sync(batch == 2)
                loss_of(model, 3 * step + batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_same_run(run, *pair(lambda: Transformer(Scaled)))


@pytest.mark.usefixtures("alone")
def test_resharding_by_hand() -> None:
    def run(model: Any) -> None:
        for step in range(3):
            loss = loss_of(model, step)
            model.reshard()
            for block in model.blocks:
                block.unshard()
                block.reshard()
            loss.backward()

    assert_same_run(run, *pair(lambda: Transformer(PostNorm), reshard_after_forward=False))


class Pairs(Transformer):
    """A checkpoint around each two blocks: backward gathers the first of them while it runs the segment again."""

    def __init__(self, block: type[PreNorm]) -> None:
        super().__init__(block, depth=4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for two in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(nn.Sequential.forward, two, x, use_reentrant=False)
        return self.head(self.norm(x)).clone()


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_around_two_blocks() -> None:
    """The segment that is run again is as lean as on one device."""
    first, second = pair(lambda: Pairs(PostNorm))
    assert_same_run(train, first, second)
    alone = Pairs(PostNorm), lean(Pairs(PostNorm), min_bytes=0)
    for model in alone:
        train(model)
    peaks = [
        measure(lambda: loss_of(model, 9).backward(), timed_runs=0).peak_bytes  # noqa: B023
        for model in (first, second, *alone)
    ]
    assert peaks[0] - peaks[1] > 0.97 * (peaks[2] - peaks[3]) > 0, peaks


class Tied(Transformer):
    """The head is the embedding; one norm serves all blocks."""

    def __init__(self, block: type[PreNorm] = PreNorm) -> None:
        super().__init__(block)
        self.head = nn.Linear(32, 640, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[..., :40].clone()


@pytest.mark.usefixtures("alone")
def test_shared_parameters() -> None:
    assert_same_run(train, *pair(Tied))
