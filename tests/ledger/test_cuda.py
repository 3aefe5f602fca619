"""What differs on a GPU: backward on another thread, streams, native dropout, cuDNN, autocast's cache."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from tests.support import same_bits

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.norm3, self.linear1, self.linear2 = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        h = F.relu(self.norm2(self.conv2(h)) + h)
        t = h.flatten(2).transpose(1, 2)
        t = t + F.dropout(self.linear2(F.gelu(self.linear1(self.norm3(t)))), 0.2)
        return t.float().log_softmax(-1).square().mean()


class TwoStreams(Net):
    def __init__(self) -> None:
        super().__init__()
        self.side: torch.cuda.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.side is None:
            self.side = torch.cuda.Stream()
        main = torch.cuda.current_stream()
        h = F.silu(self.norm1(self.conv1(x)))
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            h.record_stream(self.side)
            branch = F.gelu(self.norm2(self.conv2(h))).tanh()
        other = h.sigmoid() * h
        main.wait_stream(self.side)
        branch.record_stream(main)
        return (branch * other).square().mean()


@pytest.mark.parametrize("kind", [Net, TwoStreams])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_same_bits(kind: type[Net], autocast: bool, memory_format: torch.memory_format) -> None:
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    try:
        torch.manual_seed(0)
        plain = kind().cuda().to(memory_format=memory_format)
        lean = leangrad.lean(copy.deepcopy(plain))
        x = torch.randn(4, 8, 24, 24, device="cuda").to(memory_format=memory_format)
        for seed in range(4):
            for model in (plain, lean):
                model.zero_grad(set_to_none=True)
                torch.manual_seed(seed)
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = model(x)
                loss.backward()
            torch.cuda.synchronize()
            for (name, p), q in zip(plain.named_parameters(), lean.named_parameters(), strict=True):
                assert p.grad is None or same_bits(p.grad, q[1].grad), (seed, name)
            for p, q in zip(plain.buffers(), lean.buffers(), strict=True):
                assert same_bits(p, q)
        assert leangrad.ledger_of(lean).totals().rebuilt_bytes > 0
    finally:
        torch.backends.cudnn.deterministic = before


def test_less_is_kept() -> None:
    model = Net().cuda()
    x = torch.randn(16, 8, 64, 64, device="cuda")
    kept = {}
    for name in ("plain", "lean"):
        for _ in range(3):
            before = torch.cuda.memory_allocated()
            loss = model(x)
            kept[name] = torch.cuda.memory_allocated() - before
            loss.backward()
            del loss
            model.zero_grad(set_to_none=True)
        leangrad.lean(model)
    assert kept["lean"] < 0.6 * kept["plain"]


class Travelling(nn.Module):
    """Activations that go to the CPU and come back, cast on the way, also through an op of a number there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256).cuda(), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x) * 1.5)
        there = torch.where(h > 0, torch.tensor(0.5), h).cpu().double()
        back = (there * there + h.cpu()).to("cuda", torch.bfloat16)
        return F.silu(self.second(F.silu(back.cpu().float()))).square().mean() + back.float().exp().mean()


def test_copies_between_devices() -> None:
    torch.manual_seed(0)
    plain = Travelling()
    lean = leangrad.lean(copy.deepcopy(plain), min_bytes=0)
    x = torch.randn(128, 64, device="cuda")
    for step in range(4):
        for model in (plain, lean):
            model.zero_grad(set_to_none=True)
            model(x).backward()
        for p, q in zip(plain.parameters(), lean.parameters(), strict=True):
            assert same_bits(p.grad, q.grad), step
