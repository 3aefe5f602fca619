"""Tensor parallelism, two real processes: bits as plain's there; inputs of split layers are rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from leangrad.lean import lean, ledger_of
from leangrad.measure import measure
from tests.support import same_bits
from tests.support.ranks import PostNorm, PreNorm, Scaled, Transformer, local, loss_of, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

STEPS = 4


def split(net: Any, mesh: Any, **outputs: Any) -> Any:
    """The heads of attention and the units of each MLP."""
    for block in net.blocks:
        columns = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
        rows = {name: RowwiseParallel(**outputs) for name in ("attention.proj", "down")}
        parallelize_module(block, mesh, {**columns, **rows})
    return net


class Sequences(Transformer):
    """The residual stream is split along the tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.embedding(tokens) + self.position).chunk(2, 1)[dist.get_rank()]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)).clone()
        return out


def split_sequences(net: Any, mesh: Any) -> Any:
    along = Shard(1)
    for block in net.blocks:
        plan: dict[str, Any] = {name: SequenceParallel() for name in ("norm1", "norm2")}
        plan["attention"] = PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(Replicate(),))
        plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {
            "up": ColwiseParallel(input_layouts=along)
        }
        plan |= {name: RowwiseParallel(output_layouts=along) for name in ("attention.proj", "down")}
        parallelize_module(block, mesh, plan)
    head = ColwiseParallel(input_layouts=along, output_layouts=Replicate())
    return parallelize_module(net, mesh, {"norm": SequenceParallel(), "head": head})


def split_and_sharded(net: Any, mesh: Any) -> Any:
    """FSDP2 over a mesh of one beside the split: parameters are DTensors when they are gathered, too."""
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "split"))
    split(net, both["split"])
    for block in net.blocks:
        fully_shard(block, mesh=both["data"])
    return fully_shard(net, mesh=both["data"])


def checkpointed(net: Any, mesh: Any) -> Any:
    net.around = lambda block, x: checkpoint(block, x, use_reentrant=False)
    return split(net, mesh)


class ByHand(nn.Module):
    """DTensors made, viewed and transposed by hand, in ways that a layer does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16))
        self.mesh: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        h = F.gelu(self.first(tokens[:, :16] / 640))
        whole = DTensor.from_local(h, self.mesh, [Replicate()], run_check=False)
        turned = DTensor.from_local(h.t().tanh(), self.mesh, [Shard(0)], run_check=False)
        part = DTensor.from_local(F.silu(h)[:2], self.mesh, [Shard(0)], run_check=False)
        weight = DTensor.from_local(self.weight.sin(), self.mesh, [Replicate()], run_check=False)
        outs = [whole.view(-1).exp(), whole.t() @ whole.cos(), part @ weight, (turned * 2).sigmoid()]
        outs += [turned.reshape(-1).sin(), part.view(4, 4, 4).exp()]
        own = F.gelu(self.first(tokens[:, :16] / 640) * (1 + dist.get_rank()))  # of which the other rank's is taken
        outs.append(DTensor.from_local(own, self.mesh, [Replicate()], run_check=True).sin().exp())
        return torch.cat([out.full_tensor().flatten() for out in outs]).square()


def by_hand(net: Any, mesh: Any) -> Any:
    net.mesh = mesh
    return net


def loss_by_hand(model: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    loss: Tensor = model(torch.randint(0, 640, (4, 16), generator=generator)).mean()
    return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "split": (Transformer, split),
    "split, norms last": (lambda: Transformer(PostNorm), split),
    "split, scaled branches": (lambda: Transformer(Scaled), split),
    "split sequences": (lambda: Sequences(PreNorm), split_sequences),
    "split and sharded": (Transformer, split_and_sharded),
    "split and checkpointed": (Transformer, checkpointed),
    "by hand": (ByHand, by_hand),
}


def train(model: nn.Module, loss: Callable[[Any, int], Tensor]) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    seen = []
    for step in range(STEPS):
        found = loss(model, step)
        found.backward()
        seen += [found.detach().clone(), *(local(p.grad).clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [local(p.detach()).clone() for p in model.parameters()]


def without_dropout(net: nn.Module) -> nn.Module:
    """Ranks draw different numbers, as torch leaves it to them."""
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


def kept(model: nn.Module) -> int:
    return measure(lambda: loss_of(model, 99).backward(), timed_runs=0).kept_bytes


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, (make, wrap) in CASES.items():
        loss = loss_by_hand if name == "by hand" else loss_of
        plain, net = wrap(without_dropout(make()), mesh), lean(without_dropout(make()), min_bytes=0)
        model = wrap(net, mesh)
        expected, found = train(plain, loss), train(model, loss)
        for n, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert same_bits(a, b), (name, n)
        ledger = ledger_of(net)
        assert ledger.differences == 0, (name, ledger.trace_status)
        if name == "split":
            assert kept(model) < 0.65 * kept(plain), (kept(plain), kept(model))
            rebuilt = {entry.op for entry in ledger.entries() if entry.outcome == "rebuilt"}
            assert {"NativeLayerNormBackward0", "GeluBackward0"} <= rebuilt, rebuilt
        if name == "split sequences":  # what is gathered on the way is kept
            assert kept(model) <= kept(plain)
            assert "leangrad has no rules for tensors of class DTensor" in ledger.summary()


def test_two_processes(tmp_path: Path) -> None:
    run_ranks(work, 2, tmp_path, copies=True)
