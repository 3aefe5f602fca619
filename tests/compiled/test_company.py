"""The compiled engine with the rest of leangrad: blocks of leangrad.nn, packed gradients, checkpoints, lean models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.compiled import compile_lean
from leangrad.measure import Measurement
from leangrad.nn import MLP, Dense, InPlaceABN, TransformerBlock, convert_abn, transformer
from tests.support import assert_same_bits
from tests.support.compiling import DYNAMOS_OWN, Block
from tests.support.transformer import LLAMA

pytestmark = DYNAMOS_OWN
EXACT = {"leangrad.exact": True}
SCRATCH = 64 * 1024  # of ops that allocate inside themselves
NEAR = 1.02


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(transformer, "_NODE_MIN_BYTES", 0)


class PlainForms(nn.Sequential):
    """The same blocks by their plain forms."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block.plain(x)
        return x


class Residual(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


Case = tuple[nn.Module, nn.Module, Tensor]  # with blocks of leangrad.nn, the plain model with the same weights, a batch


def gpt() -> Case:
    blocks = [TransformerBlock(64, 4, causal=True) for _ in range(3)]
    return nn.Sequential(*blocks), PlainForms(*copy.deepcopy(blocks)), torch.randn(8, 64, 64)


def llama() -> Case:
    blocks = [TransformerBlock(64, 4, **LLAMA) for _ in range(3)]
    return nn.Sequential(*blocks), PlainForms(*copy.deepcopy(blocks)), torch.randn(8, 64, 64)


def mlp(activation: str, plain_activation: type[nn.Module]) -> Case:
    model = MLP([64, 256, 256, 256, 8], activation)
    layers = [nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 8)]
    plain = nn.Sequential(*(one for layer in layers for one in (layer, plain_activation())))[:-1]
    plain.load_state_dict(model.state_dict())
    return model, plain, torch.randn(512, 64)


def dense() -> Case:
    pairs = [(Dense(64, 256, activation="gelu"), Dense(256, 64)) for _ in range(3)]
    model = nn.Sequential(*(Residual(*pair) for pair in pairs))
    plain = nn.Sequential(*(Block(64) for _ in pairs))
    plain.load_state_dict(model.state_dict())
    return model, plain, torch.randn(512, 64)


def norms(width: int = 16) -> nn.Sequential:
    layers = [(nn.Conv2d(width if n else 3, width, 3, bias=False), nn.BatchNorm2d(width)) for n in range(4)]
    return nn.Sequential(*(one for conv, norm in layers for one in (conv, norm, nn.LeakyReLU(0.01))))


def converted() -> Case:
    plain = norms()
    return convert_abn(copy.deepcopy(plain)), plain, torch.randn(8, 3, 32, 32)


def in_place() -> Case:
    plain = norms()
    pairs = zip(copy.deepcopy(plain)[0::3], copy.deepcopy(plain)[1::3], strict=True)
    layers = [(conv, InPlaceABN(16, activation="leaky_relu", activation_param=0.01)) for conv, _ in pairs]
    return nn.Sequential(*(one for pair in layers for one in pair)), plain, torch.randn(8, 3, 32, 32)


CASES: dict[str, Callable[[], Case]] = {
    "gpt": gpt,
    "llama": llama,
    "mlp, gelu": lambda: mlp("gelu", nn.GELU),
    "mlp, relu": lambda: mlp("relu", nn.ReLU),
    "dense": dense,
    "convert_abn": converted,
    "InPlaceABN": in_place,
}
# The gradient of an activation is written over the one that it is made from, or over the activation: the nodes of these
# blocks do that in eager, ops of a graph that are run one by one do not.
OVERWRITES = {"gpt", "llama", "mlp, relu", "convert_abn", "InPlaceABN"}
# A batch norm is one op here, and has changed its buffers: it does not run twice, and what it gave is kept beside its
# input.
KEEPS_MORE = {"convert_abn", "InPlaceABN"}


def stepped(model: nn.Module, x: Tensor, **options: Any) -> Measurement:
    """A measured step, compiled if there are options for that."""

    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    torch._dynamo.reset()  # which looks at no hooks: what it has compiled for a plain model it would run for a lean one
    run = torch.compile(loss_of, backend=compile_lean, fullgraph=True, **options) if options else loss_of

    def step() -> None:
        model.zero_grad()
        run(x).backward()

    return leangrad.measure(step, timed_runs=1)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_a_compiled_block_is_as_lean_as_the_plain_model(name: str) -> None:
    model, plain, x = CASES[name]()
    eager = stepped(model, x)
    expected = [p.grad.clone() for p in model.parameters()]
    mine = stepped(model, x, options=EXACT | {"leangrad.slowdown": 2.0})
    other = stepped(plain, x, options=EXACT | {"leangrad.slowdown": 2.0})
    for one, two, three in zip(gradients(model), gradients(plain), expected, strict=True):
        assert_same_bits(one, two)
        torch.testing.assert_close(one, three, rtol=1e-4, atol=1e-5)
    lowest = other.peak_bytes if name in OVERWRITES else min(eager.peak_bytes, other.peak_bytes)
    assert mine.peak_bytes <= NEAR * lowest + SCRATCH
    if name not in KEEPS_MORE:
        assert mine.kept_bytes <= eager.kept_bytes


def test_a_compiled_block_under_inductor() -> None:
    model, _, x = CASES["mlp, gelu"]()
    eager = stepped(model, x)
    expected = [p.grad.clone() for p in model.parameters()]
    mine = stepped(model, x, options={"fx_graph_cache": True})
    for one, other in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert mine.peak_bytes <= NEAR * eager.peak_bytes + SCRATCH


def residual() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Block(64) for _ in range(3))), torch.randn(256, 64)


def test_packed_gradients_of_a_compiled_model() -> None:
    plain, x = residual()
    packed = copy.deepcopy(plain)
    flat = leangrad.pack_gradients(packed)
    unpacked = stepped(plain, x, options=EXACT)
    measured = stepped(packed, x, options=EXACT)
    for mine, other in zip(gradients(packed), gradients(plain), strict=True):
        assert_same_bits(mine, other)
    assert flat is not None
    assert measured.peak_bytes <= NEAR * unpacked.peak_bytes + SCRATCH


def test_a_lean_model_is_compiled_as_the_plain_one() -> None:
    plain, x = residual()
    lean = leangrad.lean(copy.deepcopy(plain))
    unlean = stepped(plain, x, options=EXACT)
    measured = stepped(lean, x, options=EXACT)
    for mine, other in zip(gradients(lean), gradients(plain), strict=True):
        assert_same_bits(mine, other)
    assert measured.peak_bytes <= unlean.peak_bytes + SCRATCH


class Checkpointed(nn.Module):
    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(
    "block", [lambda: Block(64), lambda: TransformerBlock(64, 4)], ids=["plain", "TransformerBlock"]
)
@pytest.mark.sampled(2)
def test_a_checkpoint_inside_keeps_less(block: Callable[[], nn.Module]) -> None:
    blocks, x = nn.Sequential(*(block() for _ in range(3))), torch.randn(4, 64, 64)
    inside = Checkpointed(copy.deepcopy(blocks))
    without = stepped(blocks, x, options=EXACT)
    measured = stepped(inside, x, options=EXACT)
    for mine, other in zip(gradients(inside), gradients(blocks), strict=True):
        assert_same_bits(mine, other)
    assert measured.kept_bytes < without.kept_bytes
    assert measured.peak_bytes <= without.peak_bytes + SCRATCH
