"""Steps without the function mode: the gradients are those of plain PyTorch, and the mode stays where it is needed."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.errors import ChangedError
from leangrad.ledger import Region
from leangrad.ledger.learn import unwatched as stretch
from leangrad.ledger.learn.early_end import Border, Exit
from leangrad.ledger.learn.trace import TraceMode
from leangrad.ledger.learn.unwatched import Handover, Needs, Span
from leangrad.ledger.observe.proof import Facts, prove
from tests.support import assert_same_bits

Extra = Callable[["Net", Tensor], Tensor]


class Block(nn.Module):
    """What it saves beside the output of its convolution is rebuilt."""

    def __init__(self, width: int = 8, *, inplace: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.act: nn.Module = nn.SiLU(inplace=inplace)
        self.gate = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.conv(x)))
        return x + y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid()


class Net(nn.Module):
    """Blocks, and between them what a test puts there."""

    def __init__(self, first: Extra | None = None, extra: Extra | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.side, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block(inplace=n % 2 == 0) for n in range(4))
        self.first, self.extra = first, extra
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if self.first is not None:
            h = self.first(self, h)
        for n, block in enumerate(self.blocks):
            h = block(h)
            if n == 1 and self.extra is not None:
                h = self.extra(self, h)
        return self.head(h.mean((2, 3)))


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORTH", "PER_SPAN", "PER_MODULE"):
        monkeypatch.setattr(stretch, name, 0)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a step went on without its function mode, counted in its one element."""
    count, go_on = [0], Region._go_on_unwatched

    def counted(self: Region) -> None:
        go_on(self)
        count[0] += 1

    monkeypatch.setattr(Region, "_go_on_unwatched", counted)
    return count


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(1))


def lean(net: nn.Module, **options: Any) -> nn.Module:
    return leangrad.lean(copy.deepcopy(net), min_bytes=0, **options)


def train(net: nn.Module, x: Tensor, *, seed: int = 0) -> list[Tensor | None]:
    net.zero_grad()
    torch.manual_seed(seed)
    net(x).square().sum().backward()
    return [p.grad for p in net.parameters()]


def compare(net: Net, x: Tensor, steps: int = 5) -> nn.Module:
    """Plain and lean for some steps, bit for bit; returns the lean one."""
    plain, made = copy.deepcopy(net), lean(net)
    for step in range(steps):
        for one in (plain, made):
            one.step = step  # type: ignore[assignment]
        for a, b in zip(train(plain, x, seed=step), train(made, x, seed=step), strict=True):
            assert_same_bits(a, b)
    for a, b in zip(plain.buffers(), made.buffers(), strict=True):
        assert_same_bits(a, b)
    return made


def handover_of(net: nn.Module) -> Handover | None:
    trace = leangrad.ledger_of(net).trace
    assert trace is not None
    return trace.handover


# ------------------------------------------------------------------------------------------------ where it is possible


def test_no_call_is_seen(unwatched: list[int], x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compare(Net(), x, 3)
    found = handover_of(made)
    assert found is not None
    assert (found.border, found.back, found.calls[0]) == (None, None, 0)
    seen: list[Any] = []
    monkeypatch.setattr(TraceMode, "__torch_function__", lambda self, func, *args: seen.append(func))
    train(made, x)
    assert unwatched == [3]
    assert not seen


def test_it_keeps_as_little(unwatched: list[int], x: Tensor) -> None:
    made, watched = lean(Net()), lean(Net())
    for _ in range(3):
        train(made, x)
    leangrad.ledger_of(watched).early_ends._failures = 9
    for _ in range(3):
        train(watched, x)
    peaks = [leangrad.measure(lambda net=net: train(net, x), timed_runs=0) for net in (made, watched)]
    assert unwatched[0] >= 2
    assert peaks[0].kept_bytes == peaks[1].kept_bytes
    assert peaks[0].peak_bytes <= peaks[1].peak_bytes
    plain = leangrad.measure(lambda: train(Net(), x), timed_runs=0)
    assert peaks[0].kept_bytes < 0.8 * plain.kept_bytes


def waiting(net: Net, h: Tensor) -> Tensor:
    y = net.side(h)
    z = torch.cat([y[:, :4] * 2.0, h[:, 4:]], 1).cos()  # what it saves waits for the output of the convolution
    return z + y.sin()  # which is saved here


def test_a_recipe_that_waits_for_what_is_saved_later(unwatched: list[int], x: Tensor) -> None:
    made, watched = compare(Net(extra=waiting), x), lean(Net(extra=waiting))
    leangrad.ledger_of(watched).early_ends._failures = 9
    for _ in range(3):
        train(watched, x)
    assert unwatched == [4]
    assert leangrad.ledger_of(made).differences == 0
    kept = [leangrad.measure(lambda net=net: train(net, x), timed_runs=0).kept_bytes for net in (made, watched)]
    assert kept[0] == kept[1]


def test_the_mode_stays_until_no_call_needs_it(unwatched: list[int], x: Tensor) -> None:
    pool = nn.MaxPool2d(2, return_indices=False)
    net = Net()
    net.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(8), pool)  # type: ignore[assignment]
    made = compare(net, x)
    found = handover_of(made)
    assert found is not None
    assert found.border is not None
    assert found.border.module.startswith("stem")
    assert found.back is None
    assert unwatched == [4]


def test_the_mode_is_set_again(unwatched: list[int], x: Tensor) -> None:
    net = Net()
    net.head = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))  # type: ignore[assignment]
    made = compare(net, x)
    found = handover_of(made)
    assert found is not None
    assert found.border is None
    assert found.back is not None
    assert found.back.module in ("blocks.3", "blocks.3.gate", "head.0")
    assert unwatched == [4]
    assert leangrad.ledger_of(made).differences == 0


NEEDS: dict[str, Extra] = {
    "a constant that no node stores": lambda net, h: F.gelu(F.layer_norm(h, h.shape[1:]) + 1.5).sin(),
    "random numbers": lambda net, h: F.dropout(h.sin(), 0.5).cos(),
    "only a shape": lambda net, h: F.avg_pool2d(h.sin(), 3, 1, 1).cos(),
    "indices": lambda net, h: F.max_pool2d(h.sin(), 3, 1, 1).cos(),
    "a change that autograd does not record": lambda net, h: unrecorded(h.sin()).cos(),
    "a change of an anchor": lambda net, h: changed(h.sin() * 2.0).cos(),
    "a checkpoint": lambda net, h: checkpoint(torch.sin, h, use_reentrant=False).cos(),
    "a frozen operand": lambda net, h: (h + net.head.weight.detach().sum()).sin().cos(),
}


def unrecorded(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(1.5)
    return h


def changed(h: Tensor) -> Tensor:
    y = h.sin() + h
    z = (y * 3.0).cos()
    return z + y.add_(1.0)


@pytest.mark.parametrize("need", NEEDS)
def test_a_call_that_needs_the_mode(
    need: str, unwatched: list[int], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after block 1, so some stretch before or after that has no mode, whatever the code could do."""
    # The code may contain what the recorded step shows.
    monkeypatch.setattr("leangrad.ledger.learn.early_end.prove", lambda module: Facts())
    made = compare(Net(extra=NEEDS[need]), x)
    found, step = leangrad.ledger_of(made).trace, leangrad.ledger_of(made).last_recorder.step  # type: ignore[union-attr]
    assert step is not None
    assert step.needs is not None
    assert step.needs.calls
    if found is not None and found.handover is not None:
        first, end = found.handover.calls
        assert not [n for n in step.needs.calls if first <= n < end]
    assert leangrad.ledger_of(made).differences == 0


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


def sometimes(net: Net, h: Tensor) -> Tensor:
    y = h.sin()
    if net.step == 3:
        with torch.no_grad():
            y.mul_(2.0)
    return y.cos()


def through_an_alias(net: Net, h: Tensor) -> Tensor:
    y = h.sin()
    if net.step == 3:
        y.detach().mul_(2.0)
    return y.cos()


CODE: dict[str, Extra] = {
    "no_grad": sometimes,
    "detach": through_an_alias,
    "a Function": lambda net, h: Double.apply(h) if net.step == 3 else h,
    "by name": lambda net, h: getattr(h, "detach")().sin() * h if net.step == 3 else h,  # noqa: B009
}


@pytest.mark.parametrize("code", CODE)
def test_code_that_may_change_a_tensor_unrecorded(code: str, unwatched: list[int], x: Tensor) -> None:
    """In the recorded step it did not."""
    made = compare(Net(extra=CODE[code]), x)
    assert prove(made) is None
    assert unwatched == [0]


# --------------------------------------------------------------------------------------- the eps that no node stores


class Normed(nn.Module):
    """Layer norms of torch, and one by its function; what reads them is rebuilt from their inputs."""

    def __init__(self, *eps: float, own: float = 1e-3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(16, 16) for _ in eps)
        self.norms = nn.ModuleList(nn.LayerNorm(16, eps=one) for one in eps)
        self.weight, self.eps, self.step = nn.Parameter(torch.rand(16)), own, 0

    def forward(self, x: Tensor) -> Tensor:
        for up, norm in zip(self.up, self.norms, strict=True):
            x = x + norm(up(x)).sin().cos()
        return F.layer_norm(x, (16,), self.weight, None, self.eps).sin().cos()


def normed(net: Normed, rows: Tensor, steps: int = 5, change: Callable[[nn.Module, int], None] | None = None) -> Any:
    """Plain and lean for some steps, bit for bit, with inputs so small that eps is in each bit of the result."""
    plain, made = copy.deepcopy(net), lean(net)
    for step in range(steps):
        for one in (plain, made):
            if change is not None:
                change(one, step)
        for a, b in zip(train(plain, rows, seed=step), train(made, rows, seed=step), strict=True):
            assert_same_bits(a, b)
    return made


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(32, 16) * 0.03


def test_one_eps_for_all_norms_needs_no_mode(
    unwatched: list[int], rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = normed(Normed(1e-3, 1e-3, 1e-3), rows)
    assert leangrad.ledger_of(made).early_ends.constants["NativeLayerNormBackward0", "eps"] == 1e-3
    assert unwatched == [4]
    rebuilt = [one for one in leangrad.ledger_of(made).entries(planned=True) if one.outcome == "rebuilt"]
    assert {one.op for one in rebuilt} >= {"NativeLayerNormBackward0", "SinBackward0"}
    seen: list[Any] = []
    handle = TraceMode.__torch_function__

    def counted(self: TraceMode, func: Any, *args: Any) -> Any:
        seen.append(func)
        return handle(self, func, *args)

    monkeypatch.setattr(TraceMode, "__torch_function__", counted)
    train(made, rows)
    assert unwatched == [5]
    assert seen.count(F.layer_norm) <= 1  # of four: the mode holds the first products


@pytest.mark.parametrize("way", ["packed", "checkpoint", "autocast"])
def test_norms_without_the_mode_in_company(way: str, unwatched: list[int], rows: Tensor) -> None:
    plain, made = Normed(1e-3, 1e-3, 1e-3), lean(Normed(1e-3, 1e-3, 1e-3))
    if way == "packed":
        leangrad.pack_gradients(made)

    def step(net: nn.Module, n: int) -> list[Tensor]:
        net.zero_grad(set_to_none=False)
        for part in rows.chunk(2):  # two micro-batches
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                out = checkpoint(net, part, use_reentrant=False) if way == "checkpoint" else net(part)
            (out.square().sum() * (n + 1)).backward()
        return [p.grad for p in net.parameters()]  # type: ignore[misc]

    for n in range(5):
        for a, b in zip(step(plain, n), step(made, n), strict=True):
            assert_same_bits(a, b)
    assert leangrad.ledger_of(made).differences == 0
    assert unwatched[0] > 0 or way != "autocast"


@pytest.mark.parametrize("eps", [(1e-3, 1e-5, 1e-3), (1e-5, 1e-5, 1e-5)])
def test_several_eps_need_the_mode(eps: tuple[float, ...], unwatched: list[int], rows: Tensor) -> None:
    made = normed(Normed(*eps), rows)  # the last one, by its function, has 1e-3
    assert ("NativeLayerNormBackward0", "eps") not in leangrad.ledger_of(made).early_ends.constants
    step = leangrad.ledger_of(made).last_recorder.step  # type: ignore[union-attr]
    assert step is not None
    assert step.needs is not None
    norms = {n for n, call in enumerate(step.calls) if call.function is F.layer_norm}
    assert len(norms) == 4
    assert norms <= {*step.needs.calls}


def of_torchs_norm(net: Any, step: int) -> None:
    net.norms[1].eps = 1e-3 if step < 3 else 2e-3


def of_all(net: Any, step: int) -> None:
    for norm in (net, *net.norms):
        norm.eps = 1e-3 * 2**step


def of_the_function(net: Any, step: int) -> None:
    net.eps = 1e-3 if step < 3 else 1


class Parts(nn.Module):
    """Parts that hold one eps, which each passes to the same function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.step, eps = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), 0, 1e-3
        for part in self.up:
            part.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        for part in self.up:
            x = x + by_function(part(x), part.eps).sin()  # type: ignore[arg-type]
        return x


def by_function(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (16,), None, None, eps).cos()


def of_a_part(net: Any, step: int) -> None:
    net.up[2].eps = 1e-3 if step < 3 else 0.5


def test_an_eps_that_a_later_part_shares(unwatched: list[int], rows: Tensor) -> None:
    normed(Parts(), rows, 6, of_a_part)  # type: ignore[arg-type]
    assert unwatched[0] == 2


@pytest.mark.parametrize("change", [of_torchs_norm, of_all, of_the_function])
def test_an_eps_that_changes_between_steps(
    change: Callable[[nn.Module, int], None], unwatched: list[int], rows: Tensor
) -> None:
    made = normed(Normed(1e-3, 1e-3), rows, 6, change)
    assert unwatched[0] == (0 if change is of_all else 2)
    assert leangrad.ledger_of(made).differences == 0


class Mixed(nn.Module):
    """Layers across the tokens: a linear layer of a transposed input copies it, below every function mode."""

    def __init__(self, extra: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.channels = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.extra, self.step = extra, 0

    def forward(self, x: Tensor) -> Tensor:
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(x.sin().transpose(1, 2)).cos().transpose(1, 2)
            x = x + channels(x.cos()).sin()
            if self.extra is not None:
                x = self.extra(self, x)
        return x.mean(1)


class Standardized(nn.Module):
    """A convolution whose weight is standardized by a batch norm without a bias, as in nets without other norms."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(8, 8, 3, 3)), nn.Parameter(torch.rand(8))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, 8, -1), None, None, self.gain, self.bias, True, 0.0, 1e-3)
        return F.silu(F.conv2d(x, weight.view_as(self.weight), padding=1))


def standardized() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Standardized() for _ in range(4)), nn.Flatten())


def gets_a_frozen_bias(net: Any, step: int) -> None:
    if step == 3:
        net[1].bias = nn.Parameter(torch.linspace(0, 1, 8), requires_grad=False)


@pytest.mark.parametrize("change", [None, gets_a_frozen_bias])
def test_a_batch_norm_without_a_bias_needs_no_mode(
    change: Callable[[nn.Module, int], None] | None, unwatched: list[int]
) -> None:
    plain, made = standardized(), lean(standardized())
    images = torch.randn(2, 8, 6, 6)
    for step in range(6):
        for one in (plain, made):
            if change is not None:
                change(one, step)
            one.zero_grad()
            one(images).square().sum().backward()
        for a, b in zip(plain.parameters(), made.parameters(), strict=True):
            assert (a.grad is None) is (b.grad is None)
            if a.grad is not None:
                assert_same_bits(a.grad, b.grad)
    assert prove(made) is not None
    assert unwatched[0] == (5 if change is None else 2)
    assert any(one.op == "NativeBatchNormBackward0" for one in leangrad.ledger_of(made).entries(planned=True))


COPIES: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "reshape": (lambda net, x: x.sin().transpose(1, 2).reshape(-1, 6).cos().view(-1, 8, 6).transpose(1, 2), True),
    "contiguous": (lambda net, x: x.sin().transpose(1, 2).contiguous().cos().transpose(1, 2), True),
    "clone": (lambda net, x: x.sin().transpose(1, 2).clone().cos().transpose(1, 2), False),
    "clone in some steps": (lambda net, x: (x.sin().mT.clone() if net.step > 2 else x.sin().mT).cos().mT, False),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_one_memory_format_need_no_mode(name: str, unwatched: list[int]) -> None:
    extra, is_one = COPIES[name]
    made = compare(Mixed(extra), torch.randn(4, 6, 8), 6)  # type: ignore[arg-type]
    assert prove(made) is not None
    assert (("CloneBackward0", "memory_format") in leangrad.ledger_of(made).early_ends.constants) is is_one
    step = leangrad.ledger_of(made).last_recorder.step  # type: ignore[union-attr]
    assert step is not None
    assert step.needs is not None
    assert (len(step.needs.calls) <= 1) is is_one  # the first sum reads the batch, which has no node
    if is_one:
        assert unwatched[0] == 5
        assert leangrad.ledger_of(made).differences == 0


# ------------------------------------------------------------------------------------- steps that differ from the first


DIFFERENT: dict[str, Extra] = {
    "another op": lambda net, h: h.sin() * h if net.step < 3 else h.tanh() * h,
    "a constant": lambda net, h: (h * (1.0 + net.step)).sin().cos(),
    "fewer ops": lambda net, h: h.sin().cos().tanh() if net.step != 3 else h,
    "more ops": lambda net, h: h if net.step != 3 else h.sin().cos().tanh(),
    "an operand without gradient": lambda net, h: (h + (h if net.step < 3 else torch.ones(()))).sin().cos(),
    "a norm": lambda net, h: h.sin().cos() if net.step < 3 else F.layer_norm(h.sin(), h.shape[1:]).cos(),
    "a dropout": lambda net, h: F.dropout(h.sin(), 0.0 if net.step < 3 else 0.5).cos(),
    "a copy": lambda net, h: (h if net.step < 3 else h.clone(memory_format=torch.channels_last)).sin().sum(3, True) + h,
    "an operand with more rows": lambda net, h: (h[:, :, : 2 + net.step].sin().cos()).mean() + h,
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_step_that_differs(difference: str, unwatched: list[int], x: Tensor) -> None:
    compare(Net(extra=DIFFERENT[difference]), x, 8)
    assert unwatched[0] > 0


def test_after_two_differences_the_mode_stays(unwatched: list[int], x: Tensor) -> None:
    made = compare(Net(extra=lambda net, h: h.sin().cos() if net.step % 3 else h), x, 40)
    ledger = leangrad.ledger_of(made)
    assert ledger.early_ends._failures == 2
    before = unwatched[0]
    for _ in range(3):
        train(made, x)
    assert unwatched[0] == before


def test_a_tensor_that_is_no_longer_small(unwatched: list[int]) -> None:
    plain, made = Net(), leangrad.lean(copy.deepcopy(Net()), min_bytes=8 * 1024)
    for rows in (2, 2, 2, 32, 32, 2):
        x = torch.randn(rows, 3, 8, 8)
        for a, b in zip(train(plain, x), train(made, x), strict=True):
            assert_same_bits(a, b)
    assert unwatched[0] > 0
    assert leangrad.ledger_of(made).differences


def test_an_anchor_that_changes_later(unwatched: list[int], x: Tensor) -> None:
    """Watched, it would be copied before: a clear error, and then the mode stays."""

    def extra(net: Net, h: Tensor) -> Tensor:
        y = net.side(h)  # an anchor: nothing saves it
        z = (y + h).sin()
        z = net.blocks[2](z).cos()
        return z + (y.add_(1.0) if net.step == 3 else y)

    plain, made = Net(extra=extra), lean(Net(extra=extra))
    errors = 0
    for step in range(6):
        plain.step = made.step = step  # type: ignore[assignment]
        wanted = train(plain, x)
        try:
            found = train(made, x)
        except ChangedError:
            errors += 1
            continue
        for a, b in zip(wanted, found, strict=True):
            assert_same_bits(a, b)
    assert errors <= 1
    assert unwatched[0] > 0


# --------------------------------------------------------------------------------------------------------- in company


def test_backward_twice_and_double_backward(unwatched: list[int], x: Tensor) -> None:
    def second(net: nn.Module) -> list[Tensor | None]:
        net.zero_grad()
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True, allow_unused=True)
        torch.autograd.backward([g.square().sum() for g in grads if g is not None])
        return [p.grad for p in net.parameters()]

    plain, made = Net(), lean(Net())
    for _ in range(4):
        for a, b in zip(second(plain), second(made), strict=True):
            assert_same_bits(a, b)
    assert unwatched == [3]


def test_micro_batches_and_several_losses(unwatched: list[int], x: Tensor) -> None:
    def step(net: nn.Module) -> list[Tensor | None]:
        net.zero_grad()
        out = net(x)
        out.square().sum().backward(retain_graph=True)
        (out.sum() * 2).backward()
        net(x[:2]).sum().backward()
        net(x).sum().backward()
        return [p.grad for p in net.parameters()]

    plain, made = Net(), lean(Net())
    for _ in range(4):
        for a, b in zip(step(plain), step(made), strict=True):
            assert_same_bits(a, b)
    assert unwatched[0] > 5


def test_shared_modules_tied_weights_and_autocast(unwatched: list[int], x: Tensor) -> None:
    net = Net()
    net.blocks[2] = net.blocks[0]
    net.blocks[3].conv.weight = net.blocks[1].conv.weight  # type: ignore[union-attr,assignment]
    plain, made = copy.deepcopy(net), lean(net)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            for a, b in zip(train(plain, x), train(made, x), strict=True):
                assert_same_bits(a, b)
    assert unwatched == [3]


def test_an_error_in_forward_leaves_no_hooks(unwatched: list[int], x: Tensor) -> None:
    def extra(net: Net, h: Tensor) -> Tensor:
        if net.step == 2:
            raise ValueError("step 2")
        return h

    net = Net(extra=extra)
    plain, made = copy.deepcopy(net), lean(net)
    for step in range(5):
        plain.step = made.step = step  # type: ignore[assignment]
        if step == 2:
            with pytest.raises(ValueError, match="step 2"):
                made(x)
            y = (torch.randn(3, requires_grad=True) * 2).sin()
            assert y.grad_fn._raw_saved_self.unpack_hook is None  # type: ignore[union-attr]
            continue
        for a, b in zip(train(plain, x), train(made, x), strict=True):
            assert_same_bits(a, b)
    assert unwatched == [4]
    assert leangrad.ledger_of(made).differences == 0


def test_other_hooks_inside_the_model(unwatched: list[int], x: Tensor) -> None:
    def extra(net: Net, h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return h.sin().cos()

    made = compare(Net(extra=extra), x)
    assert leangrad.ledger_of(made).differences <= 2


def test_threads(unwatched: list[int], x: Tensor) -> None:
    plain, made = Net(), lean(Net())
    wanted = train(plain, x)
    for _ in range(3):
        train(made, x)
    made.zero_grad()
    threads = [threading.Thread(target=lambda: made(x).square().sum().backward()) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(wanted, made.parameters(), strict=True):
        assert (a is None) == (b.grad is None)
        if a is not None:
            torch.testing.assert_close(4 * a, b.grad)
    assert unwatched[0] >= 3  # the temporary hooks of one thread are another's reason to watch


def test_nothing_is_left_of_a_step(unwatched: list[int], x: Tensor) -> None:
    made = lean(Net())
    for _ in range(3):
        train(made, x)
    gc.collect()
    gc.disable()
    try:
        held = len([o for o in gc.get_objects() if isinstance(o, Region)])
        train(made, x)
        made(x)
        assert len([o for o in gc.get_objects() if isinstance(o, Region)]) == held
    finally:
        gc.enable()
    assert unwatched[0] > 3


def test_the_longest_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretch, "WORTH", 2)
    exits = [Exit("a", 2), Exit("b", 5), Exit("a", 7), Exit("c", 9)]
    firsts = [2 * n for n in range(10)]

    def longest(*needs: int, end: int = 10) -> Handover | None:
        return Needs(needs, exits, firsts, 20).longest(end, [True] * 20)

    assert longest() == Handover(None, None, (0, 10), (0, 20))
    assert longest(end=8) == Handover(None, None, (0, 8), (0, 16))
    assert longest(1) == Handover(Border("a", 0), None, (2, 10), (4, 20))
    assert longest(8) == Handover(None, Border("a", 1), (0, 7), (0, 14))
    assert longest(1, 8) == Handover(Border("a", 0), Border("a", 1), (2, 7), (4, 14))
    assert longest(8, end=6) == Handover(None, None, (0, 6), (0, 12))
    assert longest(3, 4, 6, 9) == Handover(None, Border("a", 0), (0, 2), (0, 4))
    assert longest(*range(10)) is None
    assert longest(end=0) is None


def test_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    exits = [Exit("a", 2), Exit("b", 5), Exit("a", 7), Exit("c", 9)]  # by then 4, 10, 14 and 18 tensors were saved
    needs = Needs((), exits, [2 * n for n in range(10)], 20)

    def spans(*wanted: int) -> tuple[Span, ...]:
        found = needs.longest(10, [n not in wanted for n in range(20)])
        assert found is not None
        return found.spans

    assert spans() == ()
    assert spans(0) == spans(0, 0) == (Span(None, 0, 0),)
    assert spans(11, 12) == (Span(Border("b", 0), 10, 12),)
    monkeypatch.setattr(stretch, "GAP", 4)
    assert spans(6, 13) == (Span(Border("a", 0), 4, 6), Span(Border("b", 0), 10, 13))
    assert spans(11, 15) == (Span(Border("b", 0), 10, 15),)  # the gap is small
    monkeypatch.setattr(stretch, "GAP", 0)
    assert spans(11, 15) == (Span(Border("b", 0), 10, 11), Span(Border("a", 1), 14, 15))
    assert spans(11, 13) == (Span(Border("b", 0), 10, 13),)  # no module returns in between
    assert spans(2) == (Span(None, 0, 2),)
    monkeypatch.setattr(stretch, "PER_SPAN", 5)
    assert needs.longest(10, [n not in (11,) for n in range(20)]) is not None
    assert needs.longest(10, [n not in (5, 11, 15) for n in range(20)]) is None  # it would take more than it saves
