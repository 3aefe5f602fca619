"""The layers that write into the buffer give plain's output and plain's gradients, bit for bit."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from leangrad.nn.dense import MLP, Dense
from leangrad.packed import PackedGradients, pack_gradients
from tests.support import same_bits


def leading(*shape: int) -> Callable[[int], Tensor]:
    return lambda width: torch.randn(*shape, width)


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "2d": leading(7),
    "3d": leading(3, 5),
    "4d": leading(2, 3, 4),
    "one row": leading(1),
    "no rows": leading(0),
    "no rows 3d": leading(2, 0),
    "3d strided": lambda width: torch.randn(5, 3, width).transpose(0, 1),
    "4d strided": lambda width: torch.randn(2, 4, 3, width).transpose(1, 2),
    "by columns": lambda width: torch.randn(width, 7).t(),
    "every second column": lambda width: torch.randn(7, 2 * width)[:, ::2],
    "expanded": lambda width: torch.randn(1, 1, width).expand(2, 3, width),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(12, 9),
    "linear without bias": lambda: nn.Linear(12, 9, bias=False),
    "linear to one": lambda: nn.Linear(12, 1),
    "linear from one": lambda: nn.Linear(1, 5),
    "conv1d": lambda: Conv1D(9, 12),
}


def width_of(layer: nn.Module) -> int:
    return layer.nx if isinstance(layer, Conv1D) else layer.in_features


def twins(layer: nn.Module) -> tuple[nn.Module, nn.Module, PackedGradients]:
    packed_layer = copy.deepcopy(layer)
    return layer, packed_layer, pack_gradients(packed_layer)


def run(layer: nn.Module, x: Tensor, times: int = 1) -> list[Tensor | None]:
    """Output, gradient of the input, gradients of the parameters, after `times` backward passes."""
    x = x.detach().requires_grad_()
    for _ in range(times):
        y = layer(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    return [y, x.grad, *(p.grad for p in layer.parameters())]


def assert_same(mine: list[Tensor | None], plain: list[Tensor | None]) -> None:
    for index, (a, b) in enumerate(zip(mine, plain, strict=True)):
        assert (a is None) == (b is None), index
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            assert a.stride() == b.stride() or a.numel() <= 1 or 1 in a.shape, index
            assert same_bits(a, b), (index, (a - b).abs().max())


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_one_backward_is_bitwise_plain(name: str, kind: str) -> None:
    plain, mine, packed = twins(LAYERS[name]())
    x = INPUTS[kind](width_of(plain))
    if name == "conv1d" and not x.is_contiguous():
        pytest.skip("plain Conv1D itself refuses a strided input")
    assert_same(run(mine, x), run(plain, x))
    assert {row.how for row in packed.report().rows} == {"written"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_other_dtypes_are_bitwise_plain(name: str, dtype: torch.dtype) -> None:
    plain, mine, packed = twins(LAYERS[name]().to(dtype))
    x = torch.randn(3, 8, width_of(plain)).to(dtype)
    assert_same(run(mine, x), run(plain, x))
    assert {row.how for row in packed.report().rows} == {"written"}


@pytest.mark.parametrize("shape", [(6,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("name", LAYERS)
def test_autocast_is_bitwise_plain(name: str, shape: tuple[int, ...]) -> None:
    plain, mine, packed = twins(LAYERS[name]())
    x = torch.randn(*shape, width_of(plain))
    with torch.autocast("cpu", torch.bfloat16):
        mine_result, plain_result = run(mine, x), run(plain, x)
    assert plain_result[0] is not None
    assert plain_result[0].dtype == torch.bfloat16
    assert_same(mine_result, plain_result)
    assert {row.how for row in packed.report().rows} == {"written"}


def test_autocast_of_a_plain_use_beside_a_packed_one() -> None:
    # Autocast's cache must not hold a cast without history: the plain use would get no gradient.
    def use(layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x) + torch.nn.functional.linear(x, layer.weight)

    plain, mine, _ = twins(nn.Linear(6, 6, bias=False))
    x = torch.randn(4, 6)
    for model in (plain, mine):
        with torch.autocast("cpu", torch.bfloat16):
            y = use(model, x)
        y.backward(torch.ones_like(y))
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad, rtol=1e-2, atol=1e-2)
    assert same_bits(mine.weight.grad, 2 * torch.ones(4, 6).bfloat16().t().mm(x.bfloat16()).float())


def test_second_order_under_autocast() -> None:
    plain, mine, _ = twins(nn.Linear(6, 4))
    results = []
    for model in (plain, mine):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(4), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        (gx,) = torch.autograd.grad(y.float().tanh().sum(), x, create_graph=True)
        gx.square().sum().backward()
        results.append([gx, x.grad, *(p.grad for p in model.parameters())])
    assert_same(results[1][:2], results[0][:2])
    for a, b in zip(results[1][2:], results[0][2:], strict=True):
        # The weight is used twice: plain adds the two in bfloat16, the slot in float32.
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_autocast_keeps_two_casts_of_a_layer_called_often() -> None:
    # One of the first use, one of autocast's own cache, which all later uses share; not one for each use.
    plain, mine, _ = twins(nn.Linear(64, 64, bias=False))
    x = torch.randn(2, 64, requires_grad=True)
    for model in (plain, mine):
        with torch.autocast("cpu", torch.bfloat16):
            y = x
            for _ in range(6):
                y = model(y)
        y.backward(torch.ones_like(y))
    nodes, node = [], y.grad_fn
    while node is not None and len(nodes) < 50:
        nodes.append(node.name())
        node = next((n for n, _ in node.next_functions if n is not None and "Accumulate" not in n.name()), None)
    assert sum("PackedProduct" in name for name in nodes) == 1
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad, rtol=2e-2, atol=2e-2)


def test_the_weight_changes_after_an_autocast_forward() -> None:
    # Plain autocast keeps the cast, so the old graph still works after a step; so must the packed one.
    plain, mine, _ = twins(nn.Linear(5, 4))
    x = torch.randn(3, 5)
    results = []
    for model in (plain, mine):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(leaf)
        with torch.no_grad():
            model.weight.mul_(3)
        y.backward(torch.ones_like(y))
        results.append([leaf.grad, model.weight.grad])
    assert_same(results[1], results[0])


def test_the_weight_changes_after_a_plain_forward() -> None:
    _, mine, _ = twins(nn.Linear(5, 4))
    y = mine(torch.randn(3, 5, requires_grad=True))
    with torch.no_grad():
        mine.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_kept_bytes_are_plain() -> None:
    def kept_bytes(model: nn.Module, x: Tensor) -> int:
        kept: dict[int, int] = {}
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in parameters:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(x)
        bytes_ = sum(kept.values())
        del y
        return bytes_

    plain, mine, _ = twins(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
    x = torch.randn(5, 16)
    assert kept_bytes(plain, x) == kept_bytes(mine, x) == 4 * (5 * 16 + 5 * 32)


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("trains", ["both", "weight", "bias"])
def test_every_requires_grad(needs_x: bool, trains: str) -> None:
    layer = nn.Linear(5, 4)
    layer.weight.requires_grad_(trains != "bias")
    layer.bias.requires_grad_(trains != "weight")
    plain, mine, _ = twins(layer)
    results = []
    for model in (plain, mine):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(3)).requires_grad_(needs_x)
        y = model(x)
        y.backward(torch.linspace(-1, 1, 12).view(3, 4))
        results.append([y, x.grad, model.weight.grad, model.bias.grad])
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", ["linear", "linear without bias", "conv1d"])
def test_gradcheck_and_gradgradcheck(name: str) -> None:
    _, mine, _ = twins(LAYERS[name]().double())
    x = torch.randn(4, width_of(mine), dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *_: Tensor) -> Tensor:
        return mine(x).square()

    inputs = (x, *mine.parameters())
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding_index", [None, 3])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_embedding_is_bitwise_plain(dtype: torch.dtype, padding_index: int | None, index_dtype: torch.dtype) -> None:
    plain, mine, packed = twins(nn.Embedding(20, 6, padding_idx=padding_index).to(dtype))
    indices = torch.randint(0, 5, (4, 9), dtype=index_dtype)
    results = []
    for model in (plain, mine):
        y = model(indices)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
        results.append([y, model.weight.grad])
    assert_same(results[1], results[0])
    assert packed.report()["weight"].how == "written"


def test_embedding_padding_row_keeps_what_another_use_gave_it() -> None:
    def step(table: nn.Embedding) -> None:
        rows = table(torch.tensor([[0, 1, 3]]))
        (rows @ table.weight.t()).square().sum().backward()

    plain, mine, _ = twins(nn.Embedding(5, 4, padding_idx=3).double())
    for model in (plain, mine):
        nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(2))
        step(model)
        step(model)
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)
    assert mine.weight.grad[3].abs().sum() > 0


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embedding_with_rare_options_is_plain(options: dict[str, object]) -> None:
    plain, mine, packed = twins(nn.Embedding(8, 4, **options))
    indices = torch.tensor([1, 1, 2, 5])
    for model in (plain, mine):
        y = model(indices)
        y.backward(torch.arange(16.0).view(4, 4))
    assert same_bits(mine.weight.grad, plain.weight.grad)
    assert packed.report()["weight"].how == "added"


@pytest.mark.parametrize("layout", ["transposed", "every second column"])
def test_weights_that_do_not_lie_row_by_row(layout: str) -> None:
    layer = nn.Linear(6, 4)
    data = torch.randn(6, 4).t() if layout == "transposed" else torch.randn(4, 12)[:, ::2]
    layer.weight = nn.Parameter(data)
    other = nn.Linear(6, 4)
    other.weight, other.bias = (
        nn.Parameter(data.as_strided(data.shape, data.stride())),
        nn.Parameter(layer.bias.clone()),
    )
    packed = pack_gradients(other)
    x = torch.randn(5, 6)
    assert_same(run(other, x), run(layer, x))
    torch.testing.assert_close(run(other, x, 2)[2], run(layer, x, 2)[2])
    assert packed.report()["weight"].how == "written"


def test_channels_last_convolution() -> None:
    plain, mine, packed = twins(nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last))
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)
    assert_same(run(mine, x), run(plain, x))
    assert packed.report()["weight"].how == "added"
    assert "Conv2d has no packed form" in packed.report()["weight"].why
    assert mine.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_in_place_activation_on_the_output() -> None:
    plain, mine, _ = twins(nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)))
    for shape in ((5, 6), (2, 5, 6), (2, 3, 2, 6)):
        for model in (plain, mine):
            model.zero_grad()
        x = torch.randn(shape)
        assert_same(run(mine, x), run(plain, x))


def test_vector_input_and_bad_input_are_plain() -> None:
    plain, mine, packed = twins(nn.Linear(6, 4))
    assert_same(run(mine, x := torch.randn(6)), run(plain, x))
    assert packed.report()["weight"].how == "added"
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        mine(torch.randn(3, 7))
    with pytest.raises(RuntimeError, match="dtype"):
        mine(torch.randn(3, 6).double())


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "swiglu"])
@pytest.mark.parametrize("autocast", [False, True])
def test_dense_writes_and_is_bitwise_plain(activation: str | None, autocast: bool) -> None:
    plain, mine, packed = twins(Dense(12, 9, activation=activation))
    x = torch.randn(3, 5, 12)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_same(run(mine, x), run(plain, x))
    assert {row.how for row in packed.report().rows} == {"written"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trains_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_mlp_writes_and_is_bitwise_plain(activation: str, trains_first: bool, bias: bool) -> None:
    mlp = MLP([12, 9, 7, 5], activation, bias=bias)
    mlp[0].requires_grad_(trains_first)
    plain, mine, packed = twins(mlp)
    x = torch.randn(3, 4, 12)
    assert_same(run(mine, x), run(plain, x))
    for a, b in zip(run(mine, x, 2), run(plain, x, 2), strict=True):
        torch.testing.assert_close(a, b)
    assert {row.how for row in packed.report().rows} == {"written"}
    assert all(row.counts == {"written": 3} for row in packed.report().rows)


def test_mlp_in_other_ways() -> None:
    plain, mine, packed = twins(MLP([12, 9, 5], "gelu"))
    x = torch.randn(7, 12)
    for model in (plain, mine):
        y = model(x)
        y.backward(torch.ones_like(y), retain_graph=True)
        y.backward(torch.ones_like(y))
        (first,) = torch.autograd.grad(model(x).square().sum(), [model[0].weight], create_graph=True)
        first.square().sum().backward()
        model(x).square().sum().backward(inputs=[model[2].bias])
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(run(mine, x)[:2], run(plain, x)[:2])
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert packed.report()["0.weight"].how == "added"  # autocast's cast stands between the weight and the node
