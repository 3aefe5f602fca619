"""The summary of a ledger as a user reads it: columns, rows, totals, reasons."""

import re
from collections.abc import Callable
from textwrap import dedent

import pytest
import torch
from torch import Tensor, nn

import leangrad
from leangrad.ledger.learn.entries import Entry
from leangrad.ledger.summary import in_words, op_name, summarize

STEPS = "steps follow the trace of the recorded one"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Wrapped(nn.Module):
    def __init__(self, name: str, inside: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inside)

    def forward(self, x: Tensor) -> Tensor:
        (inside,) = self.children()
        return inside(x)


def nested(depth: int) -> nn.Module:
    model: nn.Module = Net(layers=2)
    for i in range(depth):
        model = Wrapped(f"an_outer_part_{i}", model)
    return model


def flat() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)
    )


def train(model: nn.Module, steps: int, rows: int = 128) -> str:
    for _ in range(steps):
        model(torch.randn(rows, 64, requires_grad=True)).sum().backward()
    return leangrad.ledger_of(model).summary()


def test_a_flat_model() -> None:
    assert train(leangrad.lean(flat()), 1) == dedent("""\
        made by  op                 read by           n     MB  why
        0        addmm              1        kept     1  0.131  a product is never computed twice
        4        tanh               4        kept     1  0.131  it is made from the output of addmm, which nothing keeps
        1        native_layer_norm  2        rebuilt  1  0.131
        2        gelu               3        rebuilt  1  0.131
        4        tanh               5        shared   1  0.131  kept or rebuilt once for all that read it

        plain keeps 0.524 MB for backward, lean 0.262 MB, 50% less
        no step has followed this one yet""")


def test_blocks_that_are_alike_are_one_row() -> None:
    text = train(leangrad.lean(Net()), 3)
    assert text == dedent("""\
        made by         op                 read by                  n     MB  why
        layers.*.mlp.0  addmm              layers.*.mlp.1  kept     4  0.524  a product is never computed twice
        layers.*        add                layers.*.norm   kept     3  0.098  it is made from the output of addmm, which nothing keeps
        layers.*.mlp.2  mul                layers.*.mlp.3  rebuilt  4  0.524
        layers.*.mlp.2  dropout            layers.*.mlp.2  rebuilt  4  0.524
        layers.*.norm   native_layer_norm  layers.*.mlp.0  rebuilt  4  0.131

        plain keeps 1.802 MB for backward, lean 0.623 MB, 65% less
        steps follow the trace of the recorded one""")  # noqa: E501


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_columns_are_aligned_at_any_depth(depth: int) -> None:
    table = train(leangrad.lean(nested(depth)), 1).split("\n\n")[0].splitlines()
    prefix = "".join(f"an_outer_part_{i}." for i in reversed(range(depth)))
    assert any(line.startswith(f"{prefix}layers.*.mlp.0  addmm") for line in table)
    starts = [table[0].index(name) for name in ("made by", "op", "read by", "why")]
    for line in table[1:]:
        assert all(line[start - 1 : start].strip() == "" and line[start : start + 1].strip() for start in starts[:3])
        assert re.search(r" (kept|rebuilt|shared) +\d+ +\d+\.\d{3}(  \S.*)?$", line)
    megabytes = {re.search(r"\d\.\d{3}", line).end() for line in table[1:]}
    assert megabytes == {table[0].index("MB") + 2}


def test_without_a_module_there_are_no_columns_of_modules() -> None:
    model, x = flat(), torch.randn(128, 64)
    with leangrad.saving() as ledger:
        loss = model(x).sum()
    loss.backward()
    header, *table = ledger.summary().split("\n\n")[0].splitlines()
    assert header.split() == ["op", "n", "MB", "why"]
    assert table[0].split()[:4] == ["addmm", "kept", "1", "0.131"]


def residual_convs() -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.norm(self.conv(x))).relu()

    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 1), *(Residual() for _ in range(6)))


@pytest.mark.parametrize("make", [flat, Net, residual_convs], ids=lambda make: make.__name__)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.sampled(3)
def test_totals_are_what_is_measured(make: Callable[[], nn.Module], steps: int) -> None:
    """To 3%: the loss, statistics and random states are not in the table."""
    model = leangrad.lean(make())
    text = train(model, steps, rows=512)
    x = torch.randn(512, 64, requires_grad=True)
    lean, plain = (
        leangrad.measure(lambda m=m: m(x).sum().backward(), timed_runs=0)
        for m in (leangrad.lean(model) if steps == 1 else model, make())
    )
    said = [float(number) * 1e6 for number in re.findall(r"(?:plain keeps|lean) ([\d.]+) MB", text)]
    assert said == [pytest.approx(found.kept_bytes, rel=0.03) for found in (plain, lean)]


def test_small_tensors_are_counted_in_both() -> None:
    model = leangrad.lean(nn.Sequential(nn.Linear(64, 8), nn.Sigmoid(), nn.Linear(8, 4)))
    text = train(model, 1)  # 128 x 8 floats of the sigmoid
    assert text.splitlines()[0] == "plain keeps 0.004 MB for backward, lean 0.004 MB; all of it in small tensors"


def entry(module: str, **named: object) -> Entry:
    return Entry(module, "AddmmBackward0", "kept", 1_000_000, "", **named)


def test_extra_anchors_are_lean_but_not_plain() -> None:
    text = summarize([entry("a"), entry("b", is_extra=True)])
    assert "plain keeps 1.000 MB for backward, lean 2.000 MB" in text
    assert "less" not in text


def test_status_is_the_last_line() -> None:
    assert summarize([entry("a")], status="call 7 differed: torch.add").splitlines()[-1] == "call 7 differed: torch.add"
    assert summarize([], status=STEPS).endswith(STEPS)


def test_only_numbers_of_blocks_become_stars() -> None:
    table = summarize([entry("1.conv"), entry("2.conv"), entry("7"), entry("8"), entry("h.3.a.0"), entry("h.3.a.1")])
    assert [line.split()[1] for line in table.splitlines()[1:6]] == ["*.conv", "7", "8", "h.3.a.0", "h.3.a.1"]


def test_reasons_name_ops_and_not_nodes() -> None:
    assert in_words("AddmmBackward0 is never computed twice") == "a product is never computed twice"
    assert in_words("ConvolutionBackward0 is never computed twice") == "a product is never computed twice"
    assert in_words("CumsumBackward0 is never computed twice") == "leangrad has no rule for cumsum"
    assert in_words("MyFunctionBackward is never computed twice") == "leangrad has no rule for MyFunction"
    assert in_words("made from MulBackward0, MmBackward0") == "made from mul, mm"
    assert op_name("leaf") == "leaf"


def test_an_op_without_a_rule_is_named() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * 2

    x = torch.randn(128, 64, requires_grad=True)
    with leangrad.saving() as ledger:
        y = Doubled.apply(x.exp()).sin()
    y.sum().backward()
    assert "leangrad has no rule for Doubled" in ledger.summary()
