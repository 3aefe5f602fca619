"""FSDP2 with what goes wrong elsewhere: shards that change, modules called twice, side outputs. Bits, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.compiled import compile_lean
from leangrad.errors import ChangedError, LeangradError
from leangrad.lean import lean, ledger_of, plain
from leangrad.measure import measure
from tests.support import same_bits
from tests.support.ranks import PostNorm, PreNorm, Scaled, Transformer, group, local, loss_of, run_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one: FSDP2 gathers, frees and reduces there as it does among many."""
    with group(0, 1, str(tmp_path / "store")):
        yield


def sharded(net: Any, **options: Any) -> Any:
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net)


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    return sharded(make(), **options), sharded(lean(make(), min_bytes=0), **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)  # which moves no version of a DTensor


def state(model: nn.Module) -> list[Tensor]:
    found = [local(p.detach()).clone() for p in model.parameters()]
    return found + [local(p.grad).clone() for p in model.parameters() if p.grad is not None]


def assert_same_run(run: Callable[[Any], object], *models: Any) -> None:
    expected, *others = ((run(model), state(model)) for model in models)
    for result, values in others:
        assert len(values) == len(expected[1])
        for n, (a, b) in enumerate(zip(values, expected[1], strict=True)):
            assert same_bits(a, b), n
        assert (result is None) == (expected[0] is None)


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
        optimizer = optimizer_of(model)
        with leangrad.saving(min_bytes=0) if model is second else contextless():
            for step in range(4):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()

    first, second = (sharded(NoTables(Scaled), reshard_after_forward=reshards) for _ in range(2))
    assert_same_run(run, first, second)


@contextmanager
def contextless() -> Iterator[None]:
    yield


@pytest.mark.usefixtures("alone")
def test_a_graph_over_a_step_inside_of_one_region() -> None:
    """The second forward reads what the first has made, with other parameters: no recipe reaches back beyond it."""

    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        torch.manual_seed(1)
        x = torch.randn(4, 8, 32)
        with leangrad.saving(min_bytes=0) if model is second else contextless():
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
    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, 9).backward()

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
        for pair in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(nn.Sequential.forward, pair, x, use_reentrant=False)
        return self.head(self.norm(x)).clone()


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_around_two_blocks() -> None:
    """The segment that is run again is as lean as on one device."""

    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    first, second = pair(lambda: Pairs(PostNorm))
    assert_same_run(run, first, second)
    alone = Pairs(PostNorm), lean(Pairs(PostNorm), min_bytes=0)
    for model in alone:
        run(model)
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
    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_same_run(run, *pair(Tied))


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

    def run(model: Any) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, 9).backward()

    assert_same_run(run, make(), lean(make(), min_bytes=0))


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

    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, 9).backward()

    first, second = sharded(Transformer(Scaled)), make()
    assert_same_run(run, first, second)
    part = {"one block": second.blocks[1], "inner part": second.blocks[1].attention}.get(how, second)
    assert ledger_of(part).totals().rebuilt_bytes > 0 or how == "inner part"
    plain(part)


def some_ranks(rank: int) -> None:
    first, second = sharded(Transformer(Scaled)), sharded(Transformer(Scaled))
    if rank == 0:
        lean(second, min_bytes=0)

    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        for step in range(3):
            loss_of(model, 10 * step + rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_same_run(run, first, second)


@pytest.mark.slow
def test_lean_on_one_rank_only(tmp_path: Path) -> None:
    run_ranks(some_ranks, 2, tmp_path)


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

    def run(model: Any) -> None:
        optimizer = optimizer_of(model)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    second = lean(make(compiled=True), min_bytes=0)
    assert_same_run(run, make(compiled=False), second)
    assert ledger_of(second).totals().rebuilt_bytes > 0  # the norm after the blocks
