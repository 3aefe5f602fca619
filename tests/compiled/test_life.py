"""The whole life of a compiled model: graph breaks, changing shapes, tied weights, buffers, accumulation, company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.compiled import compile_lean
from leangrad.compiled.partitioner import chosen
from tests.support import assert_same_bits, same_bits
from tests.support.compiling import Block, no_caches
from tests.support.partitions import Partitions
from tests.support.processes import in_a_process

EXACT = {"leangrad.exact": True}
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    chosen.clear()


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(32, 16), Block(), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x.abs().mul(5).long() % 32))).sin()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x.unsqueeze(1))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=False), use_reentrant=False)


def two_steps(model: nn.Module, run: Callable[[Tensor], Tensor], autocast: bool) -> None:
    """Gradients of two batches are added up, each from two micro-batches."""
    torch.manual_seed(3)
    for _ in range(2):
        x = torch.randn(12, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(x).float().square().mean()
        loss.backward()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Broken, Tied, Normed, Checkpointed])
def test_gradients_and_buffers_are_eagers(kind: type[nn.Module], autocast: bool) -> None:
    torch.manual_seed(0)
    ours, plain = kind(), kind()
    plain.load_state_dict(ours.state_dict())
    two_steps(ours, torch.compile(ours, backend=compile_lean, options=EXACT), autocast)
    two_steps(plain, plain, autocast)
    assert len(chosen) == (2 if kind is Broken else 1)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad, name)
    for (name, p), q in zip(ours.named_buffers(), plain.buffers(), strict=True):
        assert_same_bits(p, q, name)


def test_gradients_that_are_packed_are_eagers() -> None:
    torch.manual_seed(0)
    ours, plain = Block(), Block()
    plain.load_state_dict(ours.state_dict())
    packed = leangrad.pack_gradients(ours)
    two_steps(ours, torch.compile(ours, backend=compile_lean, options=EXACT), False)
    two_steps(plain, plain, False)
    assert packed is not None
    for (name, p), q in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert_same_bits(p.grad, q[1].grad, name)
    assert len({p.grad.untyped_storage().data_ptr() for p in ours.parameters()}) == 1  # one buffer holds them


def test_changing_shapes_compile_twice_at_most() -> None:
    """Once for the first batch, once for all others; sizes are hints, never guarded on."""
    model = Block()
    found = Partitions()
    run = torch.compile(model, backend=found.backend)
    for rows in (4, 6, 9, 17, 33):
        model.zero_grad()
        x = torch.randn(rows, 5, 16)
        run(x).square().sum().backward()
        ours = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        for p, q in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(p, q.grad, rtol=1e-3, atol=1e-3)
    assert found.compiles == 2


@pytest.mark.parametrize("dims", [(0,), (0, 1)])
def test_dynamic_shapes_compile_once_or_twice(dims: tuple[int, ...]) -> None:
    model = Block()
    found = Partitions()
    run = torch.compile(model, backend=found.backend, dynamic=True, fullgraph=True)
    for size in (4, 6, 9, 17, 33):
        shape = [size + 2 * d if d in dims else 5 for d in range(2)]
        run(torch.randn(*shape, 16)).square().sum().backward()
    assert found.compiles <= 2  # as with torch's own partition
    assert found.found[0].heavy_twice() == []


def test_blocks_of_leangrad_compile_in_one_graph() -> None:
    model = leangrad.nn.TransformerBlock(32, 2)
    run = torch.compile(model, backend=compile_lean, options=EXACT, fullgraph=True)
    run(torch.randn(2, 8, 32)).sum().backward()
    assert len(chosen) == 1


@pytest.mark.usefixtures("one_rank")
def test_ddp_with_its_graph_splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ours, plain = (nn.Sequential(*(Block() for _ in range(4))) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)  # else one bucket holds all
    parallel = DistributedDataParallel(ours, bucket_cap_mb=0.01)
    two_steps(ours, torch.compile(parallel, backend=compile_lean, options=EXACT), False)
    two_steps(plain, plain, False)
    assert len(chosen) > 1  # it was split
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)


@pytest.mark.usefixtures("one_rank")
def test_fsdp2_per_block() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    ours, plain = (nn.Sequential(*(Block() for _ in range(3))) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    mesh = init_device_mesh("cpu", (1,))
    for block in ours:
        block.compile(backend=compile_lean, options=EXACT)
        fully_shard(block, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    two_steps(ours, ours, False)
    two_steps(plain, plain, False)
    assert chosen
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


CACHED = """
import sys, torch
from torch import nn
from torch._dynamo.utils import counters
from leangrad.compiled import compile_lean
from leangrad.compiled.partitioner import chosen
for slowdown in sys.argv[1:]:
    torch._dynamo.reset()
    counters.clear()
    chosen.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))
    x = torch.ones(4, 8, requires_grad=True)
    y = torch.compile(model, backend=compile_lean, options={"leangrad.slowdown": float(slowdown)})(x)
    y.sum().backward()
    print("hits", counters["aot_autograd"]["autograd_cache_hit"], "chosen", len(chosen))
"""


@pytest.mark.slow
def test_a_second_process_starts_warm_and_other_settings_miss(tmp_path: Path) -> None:
    """With Inductor's own code generation: the caches of torch hold what a process compiled before."""
    first = in_a_process(CACHED, "1.1", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    second = in_a_process(CACHED, "1.1", "1.5", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert first.splitlines() == ["hits 0 chosen 1"]
    assert second.splitlines() == ["hits 1 chosen 0", "hits 0 chosen 1"]


@pytest.mark.slow
def test_masks_with_inductors_own_kernels() -> None:
    """13 sites in one graph, compiled for real: site k multiplies by 2 ** k, so the gradient tells every mask."""

    def step(x: Tensor) -> Tensor:
        return sum(F.dropout(x * 2.0**k, 0.5) for k in range(13))

    x = torch.ones(64, 33, requires_grad=True)
    with no_caches():
        result = torch.compile(step, backend=compile_lean)(x)
        result.sum().backward()
    assert same_bits(x.grad, result.detach())
    assert len(set(x.grad.flatten().tolist())) > 100
    assert chosen[0].choice.outcome.kept_bytes <= 8 * 13
