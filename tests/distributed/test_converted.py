"""Models that `convert_abn` has converted, under DDP and FSDP2: the bits of the converted model alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from leangrad import lean
from leangrad.nn.abn import ABN
from leangrad.nn.convert import convert_abn
from tests.support import same_bits
from tests.support.converted import Base, has_layer, image

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


class Block(Base):
    def __init__(self) -> None:
        super().__init__()
        del self.many  # DDP wants every parameter to get a gradient

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)) + self.last(x))


class NormAct(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics, scales = (self.running_mean, self.running_var), (self.weight, self.bias)
        return F.silu(F.batch_norm(x, *statistics, *scales, self.training, self.momentum, self.eps))


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), Block(), NormAct(3), nn.Conv2d(3, 3, 1))


def sharded(model: nn.Module) -> nn.Module:
    for block in (model[3], model[4]):  # type: ignore[index]
        fully_shard(block)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": nn.parallel.DistributedDataParallel,
    "lean under DDP": lambda model: nn.parallel.DistributedDataParallel(lean(model)),
    "FSDP2": sharded,
    "lean over FSDP2": lambda model: lean(sharded(model)),
}


def whole(t: Any) -> Tensor:
    out: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return out.clone()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_converted_model_under_data_parallelism(name: str) -> None:
    alone = convert_abn(net()).double()
    assert alone.abn_conversions.converted() == 3  # type: ignore[union-attr, operator]
    wrapped = WRAPPERS[name](copy.deepcopy(alone))
    assert sum(isinstance(module, ABN) for module in wrapped.modules()) == 3
    for _ in range(3):
        x, found = image(), []
        for model in (alone, wrapped):
            model.zero_grad()
            out = model(x)
            out.square().sum().backward()
            assert has_layer(out)
            found.append([out, *(whole(parameter.grad) for parameter in model.parameters())])
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
