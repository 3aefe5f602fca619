"""Synchronized statistics: two gloo processes with unequal batches against one process with all of the batch."""

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from leangrad.nn.abn import InPlaceABN, InPlaceABNSync
from tests.support import same_bits
from tests.support.ranks import start_ranks

SIZES = {"unequal": (5, 2), "equal": (3, 3), "one empty": (4, 0)}


def batch(sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dz = (torch.randn(sum(sizes), 3, 4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    return x * 2 + 7, dz


def run(layer: InPlaceABN, x: Tensor, dz: Tensor) -> dict[str, Any]:
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -1.5, 0.0]))
    x = x.clone().requires_grad_()
    z = layer(x * 1)
    z.backward(dz)
    statistics = [b.clone() for b in layer.buffers()]
    return {"z": z.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad, "statistics": statistics}


def worker(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mine: dict[str, Any] = {}
    for case, sizes in SIZES.items():
        x, dz = (t.split(sizes)[rank] for t in batch(sizes))
        for name in ("leaky_relu", "relu"):
            mine[f"{case} {name}"] = run(InPlaceABNSync(3, activation=name, group=dist.group.WORLD), x, dz)
    layer = InPlaceABNSync(3).double()
    parallel = DistributedDataParallel(layer)
    x, dz = (t.split((3, 3))[rank] for t in batch((3, 3)))
    parallel(x.clone().requires_grad_() * 1).backward(dz)
    mine["ddp"] = [layer.weight.grad, layer.bias.grad]
    torch.save(mine, f"{results}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sync")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start_ranks(worker, (port, str(folder)), 2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaky_relu", "relu"])
@pytest.mark.parametrize("case", SIZES)
def test_two_processes_match_one_batch(results: list[dict[str, Any]], case: str, name: str) -> None:
    whole = run(InPlaceABN(3, activation=name), *batch(SIZES[case]))
    first, second = (r[f"{case} {name}"] for r in results)
    for key in ("z", "dx"):
        torch.testing.assert_close(torch.cat((first[key], second[key])), whole[key], rtol=1e-10, atol=1e-12)
    for key in ("dw", "db"):
        # Local: each process has the sum over its own batch, and together they make up the whole.
        torch.testing.assert_close(first[key] + second[key], whole[key], rtol=1e-10, atol=1e-12)
        if case == "unequal":
            assert not same_bits(first[key], second[key])
    for part in (first, second):
        for a, b in zip(part["statistics"], whole["statistics"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_data_parallelism_averages_weight_gradients(results: list[dict[str, Any]]) -> None:
    layer = InPlaceABN(3).double()
    x, dz = batch((3, 3))
    layer(x.requires_grad_() * 1).backward(dz)
    for rank in results:
        for a, b in zip(rank["ddp"], (layer.weight.grad, layer.bias.grad), strict=True):
            torch.testing.assert_close(a, b / 2, rtol=1e-10, atol=1e-12)
