"""Whole blocks on a GPU: the same bits as plain PyTorch, with their chains replayed as one kernel each."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from tests.support import same_bits
from tests.support.gpu_memory import requested_bytes

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

STEPS = 8  # the first is recorded, and a program is compared three times before it is used


class Gpt(nn.Module):
    """GELU in its tanh form, written out, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + F.dropout(self.down(h.view(-1, 512)).view_as(x), 0.1)  # the cast comes after the view


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(128), nn.LayerNorm(128)
        self.mix, self.up, self.down = nn.Linear(128, 128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x).transpose(0, 1)).transpose(0, 1)  # as attention with batch_first has it
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Llama(nn.Module):
    """RMS norm and SwiGLU, written out, and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale1, self.scale2 = nn.Parameter(torch.ones(128)), nn.Parameter(torch.ones(128))
        self.query, self.mix = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
        self.gate, self.up = nn.Linear(128, 256, bias=False), nn.Linear(128, 256, bias=False)
        self.down = nn.Linear(256, 128, bias=False)

    def norm(self, x: Tensor, scale: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scale * h.to(x.dtype)

    def rotate(self, q: Tensor) -> Tensor:
        angles = torch.arange(q.shape[2], device=q.device)[:, None] * torch.linspace(1, 0, 16, device=q.device)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return q * cos + torch.cat((-q[..., 16:], q[..., :16]), -1) * sin

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(self.norm(x, self.scale1)).unflatten(-1, (4, 32)).transpose(1, 2)
        x = x + self.mix(self.rotate(q).transpose(1, 2).flatten(2))
        h = self.norm(x, self.scale2)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.conv2, self.norm2 = nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(h)) + x, inplace=True)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


CASES = {
    "gpt": (Gpt, (8, 64, 128), torch.float32, True),
    "vit": (Vit, (8, 65, 128), torch.float32, True),
    "llama": (Llama, (8, 64, 128), torch.bfloat16, False),
    "llama in float16": (Llama, (8, 64, 128), torch.float16, False),
    "resnet": (ResNet, (8, 64, 28, 28), torch.float32, False),
    "resnet under autocast": (ResNet, (8, 64, 28, 28), torch.float32, True),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_blocks(case: str, channels_last: bool) -> None:
    from leangrad.ledger.fuse import fused

    kind, shape, dtype, autocast = CASES[case]
    if channels_last and len(shape) != 4:
        return
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    torch.manual_seed(0)
    plain = nn.Sequential(*[kind() for _ in range(3)]).to("cuda", dtype, memory_format=memory_format)
    lean = leangrad.lean(copy.deepcopy(plain))
    before = fused.report()["launches"]
    kept: list[int] = []
    for seed in range(STEPS):
        for model in (plain, lean):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(seed)
            x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=memory_format)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                y = model(x)
            y.backward(torch.randn_like(y))
        for (name, p), q in zip(plain.named_parameters(), lean.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert same_bits(p.grad, q.grad), (seed, name)
        for p, q in zip(plain.buffers(), lean.buffers(), strict=True):
            assert same_bits(p, q)
        kept.append(requested_bytes("current"))
    assert kept[-1] == kept[-2], "something of a step is held"
    assert fused.report()["launches"] > before + 3, fused.report()
