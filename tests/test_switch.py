"""`LEANGRAD_DISABLE=1`: everything runs plain, bit for bit, and whoever asks is told."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import leangrad
from leangrad.cli import app
from leangrad.ledger import Ledger
from leangrad.nn import ABN, MLP, Dense, DiffusionBlock, InPlaceABN, MambaBlock, RGLRUBlock, TransformerBlock
from leangrad.switch import disabled


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")


@pytest.mark.parametrize(
    ("value", "is_off"), [("1", True), ("yes", True), ("00", True), ("0", False), ("", False), (None, False)]
)
def test_values(monkeypatch: pytest.MonkeyPatch, value: str | None, is_off: bool) -> None:
    monkeypatch.delenv("LEANGRAD_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("LEANGRAD_DISABLE", value)
    assert disabled() is is_off


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


def nodes(output: Tensor) -> set[str]:
    """The nodes of a graph."""
    found, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions]
    return {type(node).__name__ for node in found}


def is_plain(output: Tensor) -> bool:
    """Whether every node is one of torch's own C++ ops: those of a Function of Python's have no number."""
    return all(name == "AccumulateGrad" or name[-1].isdigit() for name in nodes(output))


def test_lean_and_saving_keep_what_plain_keeps(off: None) -> None:
    x = torch.randn(256, 64)

    def kept(model: nn.Module, region: Ledger | None = None) -> int:
        def step() -> None:
            with region or nullcontext():
                loss = model(x).sum()
            loss.backward()

        return leangrad.measure(step, timed_runs=1).kept_bytes

    plain = kept(net())
    model = leangrad.lean(net())
    assert kept(model) == plain
    assert kept(net(), leangrad.saving()) == plain
    assert leangrad.is_lean(model)
    assert "LEANGRAD_DISABLE is set: everything runs plain" in leangrad.ledger_of(model).summary()


def test_it_may_change_while_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = leangrad.lean(net()), torch.randn(256, 64)
    kept = []
    for value in ("0", "1", "0"):
        monkeypatch.setenv("LEANGRAD_DISABLE", value)
        kept.append(leangrad.measure(lambda: model(x).sum().backward(), timed_runs=0).kept_bytes)
    assert kept[0] < 0.7 * kept[1]
    assert kept[2] < 0.7 * kept[1]


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "TransformerBlock": (lambda: TransformerBlock(64, 4), (8, 256, 64)),
    "DiffusionBlock": (lambda: DiffusionBlock(64, 4, condition_width=16), (8, 256, 64)),
    "MambaBlock": (lambda: MambaBlock(16), (2, 8, 16)),
    "RGLRUBlock": (lambda: RGLRUBlock(16), (2, 8, 16)),
    "MLP": (lambda: MLP([16, 32, 8]), (4, 16)),
    "Dense": (lambda: Dense(16, 8, activation="gelu"), (4, 16)),
    "ABN": (lambda: ABN(4, activation="relu"), (2, 4, 8, 8)),
    "InPlaceABN": (lambda: InPlaceABN(4), (2, 4, 8, 8)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_modules_run_their_plain_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    model = make()
    x = torch.randn(shape, requires_grad=True)
    extra = (torch.randn(8, 16),) if name == "DiffusionBlock" else ()

    def run() -> tuple[Tensor, list[Tensor]]:
        out = copy.deepcopy(model)(x * 1, *extra)
        out = out if isinstance(out, Tensor) else out[0]
        grads = torch.autograd.grad(out.square().sum(), [x])
        return out, list(grads)

    out, grads = run()
    assert not is_plain(out), "this test would show nothing"
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    plain_out, plain_grads = run()
    assert is_plain(plain_out)
    torch.testing.assert_close([out, *grads], [plain_out, *plain_grads])


def test_convert_abn_converts_nothing_and_says_so(off: None, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    assert leangrad.nn.convert_abn(model) is model
    assert [type(child) for child in model] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    assert str(model.abn_conversions[0]) == "1: not converted, LEANGRAD_DISABLE is set"
    assert "LEANGRAD_DISABLE is set" in caplog.text


def test_a_converted_model_runs_plain_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = leangrad.nn.convert_abn(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)))
    x = torch.randn(2, 3, 8, 8)
    assert not is_plain(model(x))
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    assert is_plain(model(x))


def test_packed_gradients_are_plain_ones_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    models, x = [net().eval(), net().eval()], torch.randn(8, 64)
    packed = leangrad.pack_gradients(models[0])
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    assert is_plain(models[0](x))
    for model in models:
        for _ in range(2):
            model(x).square().sum().backward()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert len(packed.flats()) == 1
    assert not any(row.how == "written" for row in packed.report().rows)


def test_verify_says_that_nothing_was_shown(off: None) -> None:
    found = leangrad.verify(net(), torch.randn(32, 64))
    assert not found.conclusive
    assert "LEANGRAD_DISABLE is set: the lean run was plain too, and nothing was shown" in str(found)


def test_doctor_says_so(off: None) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "! switch" in result.output
    assert "LEANGRAD_DISABLE=1: everything runs plain" in result.output
