"""Convolutions: what backward makes again for them has their format; their two gradients are two ops."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from leangrad._torch import compiler
from leangrad.compiled import compile_lean
from leangrad.compiled.convolutions import lay_out_convolutions, split_convolutions
from leangrad.compiled.partitioner import Settings
from tests.support.compiling import is_near, no_caches
from tests.support.partitions import Partitions, moved_by_backward

BACKWARD = torch.ops.aten.convolution_backward.default


class Block(nn.Module):
    """A norm of which a contiguous copy is taken, as group norm does on a GPU, then a convolution and another."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(1, 8), nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.second = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.norm(x).contiguous().sin()).relu())


class ChannelAttention(nn.Module):
    """Attention between the channels of a map, which products read through views of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.qkv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.conv(x).flatten(2).transpose(1, 2))
        rows, length, width = tokens.shape
        q, k, v = self.qkv(tokens).reshape(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((k * 0.5).transpose(-2, -1) @ v).softmax(dim=-1)
        return (weights @ q.transpose(-2, -1)).transpose(-2, -1).transpose(1, 2).reshape(rows, length, width)


def cut(model: nn.Module, x: Tensor, *, is_same: bool = False, **autocast: bool) -> fx.Graph:
    """The backward graph of a step; with `is_same`, its gradients are those of torch's own cut to the bit."""
    found = Partitions(Settings(slowdown=10.0))
    torch._dynamo.reset()
    step = torch.compile(model, backend=found.backend)
    with torch.autocast("cpu", torch.bfloat16, **autocast):
        out = step(x)
    out.float().square().sum().backward()
    (part,) = found.found
    assert part.compared > 0
    assert not (is_same and part.differences)  # a product in another memory format may add in another order
    return part.backward.graph


def of_weights(graph: fx.Graph) -> list[fx.Node]:
    """The ops that compute the gradient of a convolution's weight: one for each convolution."""
    return [node for node in graph.find_nodes(op="call_function", target=BACKWARD) if node.args[-1][1]]


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_what_is_made_again_has_the_format_of_the_weight(memory_format: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(), Block()).to(memory_format=memory_format)
    x = torch.randn(2, 3, 16, 16).to(memory_format=memory_format)
    graph = cut(model, x, enabled=False)
    made = [node.args[1] for node in of_weights(graph) if node.args[1].op != "placeholder"]
    assert len(of_weights(graph)) == 5
    assert len(made) >= 2
    for given in made:
        assert compiler.is_channels_last(given) == (memory_format is torch.channels_last)
    copies = [node for node in made if node.target is torch.ops.aten.clone.default]
    assert bool(copies) == (memory_format is torch.channels_last)


class Normed(nn.Module):
    """A convolution, then norms and activations, each with another convolution after it."""

    def __init__(self, dimensions: int, bias: bool, **options: Any) -> None:
        super().__init__()
        convolution, norm = getattr(nn, f"Conv{dimensions}d"), getattr(nn, f"BatchNorm{dimensions}d")
        if options.pop("transposed", False):
            convolution = getattr(nn, f"ConvTranspose{dimensions}d")
        layers = [(norm(8), nn.ReLU(), convolution(8, 8, 3, padding=1, bias=bias, **options)) for _ in range(3)]
        self.layers = nn.Sequential(convolution(8, 8, 1), *(module for layer in layers for module in layer))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def halves(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The ops that compute only the gradient of the input, and only those of the weight and the bias."""
    nodes = graph.find_nodes(op="call_function", target=BACKWARD)
    masks = [(node, node.args[-1]) for node in nodes]
    return [n for n, mask in masks if not any(mask[1:])], [n for n, mask in masks if not mask[0]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"groups": 8}, {"dilation": 2}, {"stride": 2}, {"transposed": True}])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_the_two_gradients_are_two_ops(dimensions: int, options: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, *[9] * dimensions, requires_grad=True)
    graph = cut(Normed(dimensions, bias, **options), x, enabled=False, is_same=True)
    firsts, seconds = halves(graph)
    assert (len(firsts), len(seconds)) == (3, 3)  # the first convolution reads what stands anyway
    for one, other in zip(firsts, seconds, strict=True):
        stand_in, given = one.args[1], other.args[1]
        assert (stand_in.op, given.op) == ("placeholder", "call_function")
        assert compiler.is_laid_out_like(stand_in, given)
        assert [one.args[0], *one.args[2:-1]] == [other.args[0], *other.args[2:-1]]
        assert [value is not None for value in other.meta["val"]] == [False, True, bias]
        assert len(stand_in.users) > 1  # the derivative of the norm reads it too


@pytest.mark.parametrize("between", [nn.AvgPool2d(2), nn.Upsample(scale_factor=2), nn.ZeroPad2d(1), nn.Flatten(0, 1)])
def test_without_a_kept_value_of_that_layout_they_stay_one_op(between: nn.Module) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            read = between(self.norm(self.first(x)).relu())
            return self.second(read.view(-1, 8, *read.shape[-2:]))

    graph = cut(Net(), torch.randn(2, 3, 12, 12), enabled=False, is_same=True)
    of_inputs, _ = halves(graph)
    assert bool(of_inputs) == isinstance(between, nn.Flatten)  # which changes nothing for the convolution


@pytest.mark.parametrize("symbols", ["rows", "sides"])
def test_sizes_that_are_symbols_get_no_guard(symbols: str) -> None:
    """Rows make no stride a symbol; sides do, and then the two stay one op: see [Note: two gradients]."""
    found, guards = Partitions(Settings(slowdown=10.0)), []
    for split in (lambda graph: None, split_convolutions):
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch, no_caches():
            patch.setattr("leangrad.compiled.partitioner.split_convolutions", split)
            step = torch.compile(Normed(2, bias=False), backend=found.backend)
            for rows, side in ((2, 9), (3, 9), (2, 11), (5, 12)):
                x = torch.randn(rows, 8, side, side) if symbols == "sides" else torch.randn(rows, 8, 9, 9)
                for dimension in (0,) if symbols == "rows" else (0, 2, 3):
                    torch._dynamo.maybe_mark_dynamic(x, dimension)
                step(x.requires_grad_()).sum().backward()
        (node, *_) = found.found[-1].backward.graph.find_nodes(op="call_function", target=BACKWARD)
        guards.append([str(guard.expr) for guard in node.args[0].meta["val"].fake_mode.shape_env.guards])
    without, ours = found.found
    assert not ours.differences
    expected = [3, 3] if symbols == "rows" else [0, 0]
    assert [[len(half) for half in halves(part.backward.graph)] for part in (without, ours)] == [[0, 0], expected]
    assert guards[0] == guards[1]


def test_in_a_checkpoint_the_gradients_are_torchs() -> None:
    """What the user's checkpoint makes again, convolutions too, is computed in backward, with the same bits."""
    inner = Normed(2, bias=True)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Conv2d(8, 8, 1), inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=False)

    cut(Checkpointed(), torch.randn(2, 8, 9, 9), enabled=False, is_same=True)


def test_the_input_of_a_frozen_convolution_is_not_recomputed() -> None:
    """Its gradient is all there is to compute, and that reads only the input's shape and strides."""
    model = Normed(2, bias=False)
    for convolution in model.modules():
        if isinstance(convolution, nn.Conv2d):
            convolution.weight.requires_grad_(False)
    graph = cut(model, torch.randn(2, 8, 9, 9), enabled=False, is_same=True)
    nodes = [node for node in graph.find_nodes(op="call_function", target=BACKWARD) if node.args[-1][0]]
    assert [list(node.args[-1]) for node in nodes] == [[True, False, False]] * 3
    assert [node.args[1].op for node in nodes] == ["placeholder"] * 3


def test_inductor_makes_no_pass_of_its_own_over_memory_for_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scheduler's own count: the input is written by a kernel that reads the gradient and the norm's input."""
    monkeypatch.setattr("torch._inductor.ir.is_cpu", lambda value: False)
    model, x = Normed(2, bias=False), torch.randn(2, 8, 16, 16)
    moved = []
    for split in (split_convolutions, lambda graph: None):
        monkeypatch.setattr("leangrad.compiled.partitioner.split_convolutions", split)
        moved.append(moved_by_backward(model, x))
    ours, before = moved
    assert ours.kernels == before.kernels - 3
    assert ours.pointwise_bytes <= before.pointwise_bytes - 3 * x.nbytes


def test_the_cast_of_a_weight_of_one_channel_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(groups=8), Block(groups=8)).to(memory_format=torch.channels_last)
    graph = cut(model, torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last), enabled=True)
    weights = [node.args[2] for node in of_weights(graph)]
    for weight in weights:
        is_one_channel = weight.meta["val"].shape[1] == 1
        assert (weight.op == "placeholder") == is_one_channel
    assert sum(weight.op == "placeholder" for weight in weights) == 2


def test_what_products_read_is_not_kept_in_four_dimensions() -> None:
    """Inductor would write it in channels_last: see [Note: kept in four dimensions]."""
    graph = cut(ChannelAttention(), torch.randn(2, 3, 8, 8), enabled=False)
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    read = [view.args[0] for product in products for view in product.args if view.op != "placeholder"]
    kept = [node for node in read if node.op == "placeholder"]
    assert sorted(tuple(node.meta["val"].shape) for node in kept) == [(4, 4, 64), (4, 4, 64), (4, 64, 4)]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_size_that_nobody_knows_is_not_asked_for() -> None:
    """Tensors of four dimensions that are no weights: as many rows as a mask has, heads and their width."""
    linear = nn.Linear(8, 8)

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = x[x[:, 0].gt(0).nonzero().squeeze(1)]
            heads = linear(rows).reshape(1, -1, 2, 4).sin()
            return heads * heads.cos()

    cut(Masked(), torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), enabled=False)


def test_a_copy_makes_no_size_known() -> None:
    """A slice that begins nobody knows where makes its size known. Inductor refuses a copy that does so once more."""
    graph = fx.Graph()
    values = {"gradient": torch.randn(2, 8, 4, 4), "x": torch.randn(2, 8, 9, 6), "weight": torch.randn(8, 8, 3, 3)}
    values["weight"] = values["weight"].to(memory_format=torch.channels_last)
    nodes = {name: graph.placeholder(name) for name in values}
    for name, node in nodes.items():
        node.meta["val"] = values[name]
    rows = graph.call_function(torch.ops.aten.slice.Tensor, (nodes["x"], 2, 3, 9))
    rows.meta = {"val": values["x"][:, :, 3:9], "unbacked_bindings": {"u0": ()}, "stack_trace": "here"}
    rest = [[8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]]
    node = graph.call_function(BACKWARD, (nodes["gradient"], rows, nodes["weight"], *rest))
    graph.output(node)
    lay_out_convolutions(graph)
    copy = node.args[1]
    assert copy.target is torch.ops.aten.clone.default
    assert compiler.is_channels_last(copy)
    assert (copy.meta["stack_trace"], "unbacked_bindings" in copy.meta) == ("here", False)
    run = fx.GraphModule({}, graph)
    expected = BACKWARD(values["gradient"], values["x"][:, :, 3:9], values["weight"], *rest)
    for ours, plain in zip(run(*values.values()), expected, strict=True):
        torch.testing.assert_close(ours, plain)


def test_convolutions_take_it_for_channels_last_as_torch_does() -> None:
    """Torch's own word: the format of a convolution's result, where the input alone could decide."""
    for shape in ((2, 3, 4, 5), (2, 3, 1, 1), (8, 1, 3, 3), (2, 3, 1, 5), (2, 3, 4, 5, 6), (8, 1, 3, 3, 3)):
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        plain, laid_out = torch.empty(shape), torch.empty(shape).to(memory_format=last)
        odd = torch.empty_strided(shape, [max(stride, 3) if stride != 1 else 1 for stride in plain.stride()])
        for value, expected in ((plain, False), (laid_out, True), (odd, False), (plain.transpose(-1, -2), False)):
            node = fx.Graph().placeholder("x")
            node.meta["val"] = value
            assert compiler.is_channels_last(node) is expected, (shape, value.stride())


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(100))
def test_the_gradient_of_an_input_does_not_read_its_values(seed: int, device: str) -> None:
    """See [Note: two gradients]: neither in value nor in layout does it depend on what the input holds."""
    choose = random.Random(seed)
    dims, transposed, groups = choose.choice((1, 2, 2, 3)), choose.random() < 0.3, choose.choice((1, 1, 2, 4))
    shape = (choose.choice((0, 1, 2, 2)), 4, *(choose.randint(5, 7) for _ in range(dims)))
    steps, edges, dilation = ([choose.choice(of) for _ in range(dims)] for of in ((1, 2), (0, 1), (1, 1, 2)))
    dtype = choose.choice((torch.float32, torch.float64, torch.bfloat16))
    x = torch.randn(shape).to(device, dtype)
    weight = torch.randn(4 if transposed else 8, (8 if transposed else 4) // groups, *[choose.randint(1, 3)] * dims)
    weight = weight.to(device, dtype)
    if dims > 1:
        formats = (torch.contiguous_format, torch.channels_last if dims == 2 else torch.channels_last_3d)
        x, weight = (one.contiguous(memory_format=choose.choice(formats)) for one in (x, weight))
    rest = (steps, edges, dilation, transposed, [0] * dims, groups)
    has_library = choose.random() < 0.5
    with torch.backends.mkldnn.flags(enabled=has_library), torch.backends.cudnn.flags(has_library, deterministic=True):
        gradient = torch.randn_like(torch.ops.aten.convolution.default(x, weight, None, *rest))
        both = BACKWARD(gradient, x, weight, [8], *rest, [True, True, True])
        first = BACKWARD(gradient, torch.full_like(x, torch.nan), weight, [8], *rest, [True, False, False])
        second = BACKWARD(gradient, x, weight, [8], *rest, [False, True, True])
    for ours, plain in zip((first[0], *second[1:]), both, strict=True):
        assert ours.stride() == plain.stride()
        torch.testing.assert_close(ours, plain)


class RandomNet(nn.Module):
    """Convolutions of any kind behind norms and activations, some read by several ops, some without a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        choose = random.Random(seed)
        self.dims = dims = choose.choice((1, 2, 2, 3))
        conv, transposed, norm = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "ConvTranspose", "BatchNorm"))
        norms = (norm, norm, lambda width: nn.GroupNorm(2, width), getattr(nn, f"InstanceNorm{dims}d"))
        activations = (nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, lambda: nn.ReLU(inplace=True), nn.Dropout)

        def product() -> nn.Module:
            groups, bias, dilation = choose.choice((1, 1, 2, 8)), choose.random() < 0.5, choose.choice((1, 2))
            if choose.random() < 0.2:
                return transposed(8, 8, 3, padding=1, groups=groups, bias=bias)  # type: ignore[no-any-return]
            return conv(8, 8, 3, padding=dilation, dilation=dilation, groups=groups, bias=bias)  # type: ignore[no-any-return]

        self.first = conv(3, 8, 1)
        self.layers = nn.ModuleList(
            nn.ModuleList([choose.choice(norms)(8), choose.choice(activations)(), product(), product()])
            for _ in range(4)
        )
        self.kinds = [choose.choice(("plain", "residual", "two", "again")) for _ in self.layers]
        for weight in self.layers.parameters():
            weight.requires_grad_(choose.random() > 0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            norm, activation, one, other = layer  # type: ignore[misc]
            y = activation(norm(x))
            y = one(y) + other(y) if kind == "two" else one(one(y).sin()) if kind == "again" else one(y)
            x = x + y if kind == "residual" else y
        return x


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 8))])
def test_two_ops_compute_what_one_does(seed: int) -> None:
    """In these nets at least one input is recomputed from a value of its layout; not so with seed 2."""
    model, found = RandomNet(seed), Partitions(Settings(slowdown=10.0))
    torch._dynamo.reset()
    step: Any = torch.compile(model, backend=found.backend)
    x = torch.randn(2, 3, *[7] * model.dims)
    if seed % 3 == 2:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=seed % 3 == 1):
        out = step(x)
    out.float().square().sum().backward()
    (part,) = found.found
    assert part.compared > 0
    assert not part.differences
    ops = part.backward.graph.find_nodes(op="call_function", target=BACKWARD)
    assert any(list(node.args[-1]) == [True, False, False] for node in ops)


@pytest.mark.slow
def test_gradients_are_eagers() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(), Block(groups=8)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    runs: list[list[Tensor | None]] = []
    for step in (model, torch.compile(model, backend=compile_lean)):
        model.zero_grad()
        step(x).square().sum().backward()
        runs.append([p.grad for p in model.parameters()])
    assert is_near(runs[1], runs[0])
