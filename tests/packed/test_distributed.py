"""Two real processes over gloo: packed gradients under DDP and FSDP2, and reduced with no wrapper, equal plain ones."""

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from leangrad.errors import LeangradError
from leangrad.packed import pack_gradients
from tests.support.ranks import start_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

WORLD = 2


class Branching(nn.Module):
    """A body, and a branch that not every process uses in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.GELU(), nn.Linear(10, 6))
        self.branch = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, x: Tensor, branches: bool = True) -> Tensor:
        h = self.body(x)
        return self.branch(h) if branches else h


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.GELU(), nn.Linear(10, 6), nn.Linear(6, 6, bias=False))


def loss_of(model: nn.Module, rank: int, step: int, *args: object) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, t = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    return (model(x, *args) - t).square().mean()


def assert_same(mine: nn.Module, plain: nn.Module, what: str, exact: bool) -> None:
    for (name, a), (_, b) in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        for x, y in ((a.detach(), b.detach()), (a.grad, b.grad)):
            assert (x is None) == (y is None), (what, name)
            if x is not None:
                tolerance = 0.0 if exact else 1e-6
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=f"{what}: {name}")


def train(
    model: DistributedDataParallel,
    rank: int,
    micro_batches: int,
    after: Callable[[], object] | None = None,
    set_to_none: bool = True,
) -> Iterator[None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        for index in range(micro_batches):
            # The very first backward synchronises: under no_sync torch itself fails for a static graph.
            syncs = index == micro_batches - 1 or (step, index) == (0, 0)
            with nullcontext() if syncs else model.no_sync():
                loss_of(model, rank, 10 * step + index).backward()
        if after is not None:
            after()
        optimizer.step()
        yield
        optimizer.zero_grad(set_to_none=set_to_none)


def under_ddp(rank: int) -> None:
    variants = itertools.product((False, True), (False, True), (1, 3), (True, False))
    for bucket_view, static_graph, micro_batches, pack_first in variants:
        what = f"{bucket_view=} {static_graph=} {micro_batches=} {pack_first=}"
        options = {"gradient_as_bucket_view": bucket_view, "static_graph": static_graph}
        plain, inner = DistributedDataParallel(network(), **options), network()
        packed = pack_gradients(inner) if pack_first else None
        mine = DistributedDataParallel(inner, **options)
        packed = packed or pack_gradients(mine)
        # With and without a pass over the buffer in between: with bucket views it moves the gradients back into it.
        after, set_to_none = (packed.norm, True) if pack_first else (None, False)
        steps = zip(
            train(mine, rank, micro_batches, after, set_to_none),
            train(plain, rank, micro_batches, None, set_to_none),
            strict=True,
        )
        for _ in steps:
            assert_same(mine, plain, what, exact=micro_batches == 1 and set_to_none)
        if pack_first:
            counts = packed.report().rows[0].counts
            # A bucket view is somebody else's tensor in `.grad`: it is moved back into the buffer, and reported.
            assert counts.get("copied", 0) >= 3 if bucket_view else counts == {"written": 3 * micro_batches}, what


def without_wrapper(rank: int) -> None:
    for range_bytes in (256, 600, None):
        for micro_batches in (1, 3):
            plain, mine = DistributedDataParallel(network()), network()
            packed = pack_gradients(mine, range_bytes=range_bytes)
            optimizer = torch.optim.AdamW(mine.parameters(), lr=0.01)
            for step, _ in enumerate(train(plain, rank, micro_batches)):
                for index in range(micro_batches - 1):
                    with packed.reducing() if (step, index) == (0, 0) else nullcontext():
                        loss_of(mine, rank, 10 * step + index).backward()
                with packed.reducing():
                    loss_of(mine, rank, 10 * step + micro_batches - 1).backward()
                optimizer.step()
                assert_same(mine, plain.module, f"{range_bytes} {micro_batches}", exact=micro_batches == 1)
                optimizer.zero_grad()
    # The same after the fact.
    mine, other = network(), network()
    for model in (mine, other):
        packed = pack_gradients(model)
        with packed.reducing() if model is mine else nullcontext():
            loss_of(model, rank, 0).backward()
        if model is other:
            packed.all_reduce()
    assert_same(mine, other, "all_reduce", exact=True)


def with_unused(rank: int) -> None:
    """The branch is used by rank 0 only: both get its gradient. `never` is used by nobody and keeps None."""
    torch.manual_seed(7)
    plain = DistributedDataParallel(Branching(), find_unused_parameters=True)
    mine = copy.deepcopy(plain.module)
    packed = pack_gradients(mine, range_bytes=512)
    for step in range(2):
        loss_of(plain, rank, step, rank == 0).backward()
        with packed.reducing():
            loss_of(mine, rank, step, rank == 0).backward()
        assert mine.never.weight.grad is None
        assert mine.branch.weight.grad is not None
        assert_same(mine, plain.module, f"unused, step {step}", exact=True)
        torch.testing.assert_close(
            packed.norm(), torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        )
        plain.zero_grad()
        mine.zero_grad()


def sent_while_backward_runs(rank: int) -> None:
    """Ranges leave in one order, from the last, before the first layer's backward has run."""
    mine = network()
    packed = pack_gradients(mine, range_bytes=256)
    sent: list[int] = []
    first_layer_saw: list[int] = []
    all_reduce = dist.all_reduce

    def spy(tensor: Tensor, *args: object, **options: object) -> object:
        sent.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    mine[0].register_full_backward_pre_hook(lambda *_: first_layer_saw.append(len(sent)))
    dist.all_reduce = spy
    try:
        with packed.reducing():
            x = torch.randn(4, 6, requires_grad=True)
            mine(x).square().mean().backward()
    finally:
        dist.all_reduce = all_reduce
    sizes = [r.numel for r in packed.ranges]
    assert sent == [*reversed(sizes), len(list(mine.parameters()))]
    assert first_layer_saw[0] >= 3, first_layer_saw


def second_backward_is_refused(rank: int) -> None:
    mine = network()
    packed = pack_gradients(mine)

    def backward_twice() -> None:
        with packed.reducing():
            loss_of(mine, rank, 0).backward()
            loss_of(mine, rank, 1).backward()

    with pytest.raises(LeangradError, match="one backward inside reducing"):
        backward_twice()
    dist.barrier()
    mine.zero_grad()
    with packed.reducing():
        loss_of(mine, rank, 0).backward()


def under_fsdp2(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))

    def sharded() -> nn.Module:
        model = network()
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    plain, mine = sharded(), sharded()
    packed = pack_gradients(mine)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, mine)]
    for step in range(3):
        for model in (plain, mine):
            for index in range(2):
                model.set_requires_gradient_sync(index == 1)
                loss_of(model, rank, 10 * step + index).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        torch.testing.assert_close(packed.clip_norm_(0.05), expected.full_tensor())
        assert packed.all_finite()
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.to_local(), b.grad.to_local(), rtol=1e-6, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.to_local(), b.to_local(), rtol=1e-5, atol=1e-6)
    assert {row.how for row in packed.report().rows} == {"plain"}
    with pytest.raises(LeangradError, match="its wrapper reduces it"):
        packed.all_reduce()
    # Sharded after packing: the packed parameters are gone, which is said; training itself is plain.
    late = network()
    packed = pack_gradients(late)
    fully_shard(late, mesh=mesh)
    loss_of(late, rank, 0).backward()
    with pytest.raises(LeangradError, match="repack"):
        packed.norm()
    packed.repack()
    assert torch.isfinite(packed.norm())


def _work(rank: int, store: str, tasks: tuple[Callable[[int], None], ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    try:
        for task in tasks:
            task(rank)
    finally:
        dist.destroy_process_group()


def in_two_processes(folder: Path, *tasks: Callable[[int], None]) -> None:
    start_ranks(_work, (str(folder / "store"), tasks), WORLD)


@pytest.mark.slow
def test_under_ddp(tmp_path: Path) -> None:
    in_two_processes(tmp_path, under_ddp)


@pytest.mark.slow
def test_without_a_wrapper(tmp_path: Path) -> None:
    in_two_processes(tmp_path, without_wrapper, with_unused, sent_while_backward_runs, second_backward_is_refused)


@pytest.mark.slow
def test_under_fsdp2(tmp_path: Path) -> None:
    in_two_processes(tmp_path, under_fsdp2)
