"""Activated batch norm against BatchNorm + activation: values, gradients, statistics, errors."""

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.errors import LeangradError
from leangrad.nn.abn import ABN, InPlaceABN, InPlaceABNSync
from tests.support import same_bits
from tests.support.error_rule import Triple, assert_error_rule

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda y: F.leaky_relu(y, 0.2),
    "elu": lambda y: F.elu(y, 0.2),
    "identity": lambda y: y,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
}
LAYOUTS = {
    "2d": ((6, 5), torch.contiguous_format),
    "1d": ((4, 5, 7), torch.contiguous_format),
    "planes": ((4, 5, 3, 6), torch.contiguous_format),
    "channels_last": ((4, 5, 3, 6), torch.channels_last),
    "3d": ((2, 5, 2, 3, 4), torch.contiguous_format),
    "channels_last_3d": ((2, 5, 2, 3, 4), torch.channels_last_3d),
    "one position": ((7, 5, 1, 1), torch.contiguous_format),
    "one channel": ((4, 1, 3, 6), torch.contiguous_format),
}


def make(kind: type[ABN], channels: int, dtype: torch.dtype = torch.float64, **named: object) -> ABN:
    """A layer with weights of both signs and statistics that are not those of a new one."""
    layer = kind(channels, **named).to(dtype)
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_(torch.linspace(-1.5, 1.5, channels) + 0.1)
            layer.bias.copy_(torch.linspace(-0.5, 0.5, channels))
        if layer.running_mean is not None:
            layer.running_mean.copy_(torch.randn(channels))
            layer.running_var.copy_(torch.rand(channels) + 0.5)
    return layer


def plain(layer: ABN, x: Tensor, act: Callable[[Tensor], Tensor], residual: Tensor | None = None) -> Tensor:
    """The code that the layer stands for."""
    weight = layer.weight.abs() + layer.eps if layer.absolute else layer.weight
    training = layer.training or layer.running_mean is None
    mean, var = (layer.running_mean, layer.running_var) if layer.running_mean is not None else (None, None)
    y = F.batch_norm(x, mean, var, weight, layer.bias, training, layer.momentum, layer.eps)
    return act(y if residual is None else y + residual)


def gradients(z: Tensor, x: Tensor, layer: ABN, dz: Tensor) -> list[Tensor]:
    return [z.detach(), *torch.autograd.grad(z, [x, *layer.parameters()], dz)]


@pytest.mark.parametrize("kind", [ABN, InPlaceABN])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("training", [True, False])
def test_equals_batch_norm_and_activation(kind: type[ABN], layout: str, name: str, training: bool) -> None:
    shape, memory_format = LAYOUTS[layout]
    x = torch.randn(shape, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
    dz = torch.randn_like(x)
    layer = make(kind, shape[1], activation=name, activation_param=0.2).train(training)
    other = copy.deepcopy(layer)
    ours = gradients(layer(x * 1), x, layer, dz)
    theirs = gradients(plain(other, x * 1, ACTIVATIONS[name]), x, other, dz)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    for a, b in zip(layer.buffers(), other.buffers(), strict=True):
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [ABN, InPlaceABN])
@pytest.mark.parametrize("name", ["leaky_relu", "elu", "identity", "relu"])
@pytest.mark.parametrize("weight", [0.7, -0.7, 0.0, None])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.sampled(4)
def test_gradcheck(kind: type[ABN], name: str, weight: float | None, training: bool) -> None:
    layer = make(kind, 2, activation=name, activation_param=0.3, affine=weight is not None).train(training)
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    if weight is None:
        assert torch.autograd.gradcheck(lambda x: layer(x * 1), (x,))
        return
    w = torch.tensor([weight, 1.2], dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": w, "bias": b}, (x * 1,))

    assert torch.autograd.gradcheck(run, (x, w, b))


RESULTS = ("z", "dx", "dγ", "dβ")


def three_ways(layer: ABN, x: Tensor, dz: Tensor, act: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Triple]]:
    """Each result by the layer, by plain PyTorch, and in float64 from the very same numbers."""
    exact = copy.deepcopy(layer).double()
    xs = [x.clone().requires_grad_(), x.clone().requires_grad_(), x.double().requires_grad_()]
    ours = gradients(layer(xs[0] * 1), xs[0], layer, dz)
    theirs = gradients(plain(layer, xs[1] * 1, act), xs[1], layer, dz)
    truth = gradients(plain(exact, xs[2] * 1, act), xs[2], exact, dz.double())
    return zip(RESULTS, zip(ours, theirs, truth, strict=True), strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["leaky_relu", "elu", "identity", "relu", "silu"])
@pytest.mark.parametrize("kind", [ABN, InPlaceABN])
@pytest.mark.sampled(4)
def test_error_rule(kind: type[ABN], name: str, dtype: torch.dtype) -> None:
    """Weights stay float32 for the 16-bit maps, as under autocast; the mean is ten deviations from zero.

    Not dγ of 16-bit maps that are inverted: see the next test.
    """
    inverts = kind is InPlaceABN and name in ("leaky_relu", "identity")

    def draw() -> Iterator[tuple[str, Triple]]:
        layer = make(kind, 32, torch.float32, activation=name, activation_param=0.2)
        x, dz = torch.randn(16, 32, 5, 5).add(10).to(dtype), torch.randn(16, 32, 5, 5).to(dtype)
        for what, triple in three_ways(layer, x, dz, ACTIVATIONS[name]):
            if what != "dγ" or dtype == torch.float32 or not inverts:
                yield what, triple

    assert_error_rule(draw)


@pytest.mark.parametrize("beta_over_gamma", [0.0, 1.0, 1.414])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_inverted_is_within_twice_plain_of_a_network_that_never_rounds(
    beta_over_gamma: float, dtype: torch.dtype
) -> None:
    """[Note: which channels invert]: the input and dz were rounded to the dtype, for plain as for ours."""

    def draw() -> Iterator[tuple[str, Triple]]:
        layer = InPlaceABN(32, activation_param=0.2)
        with torch.no_grad():
            layer.weight.uniform_(0.5, 2.0)
            layer.bias.copy_(layer.weight * beta_over_gamma)
        exact = copy.deepcopy(layer).double()
        x, dz = torch.randn(64, 32, 4, 4, dtype=torch.float64), torch.randn(64, 32, 4, 4, dtype=torch.float64)
        xs = [x.to(dtype).requires_grad_(), x.to(dtype).requires_grad_(), x.requires_grad_()]
        act = ACTIVATIONS["leaky_relu"]
        ours = gradients(layer(xs[0] * 1), xs[0], layer, dz.to(dtype))[2]
        theirs = gradients(plain(layer, xs[1] * 1, act), xs[1], layer, dz.to(dtype))[2]
        truth = gradients(plain(exact, xs[2] * 1, act), xs[2], exact, dz)[2]
        yield "dγ", (ours, theirs, truth)

    assert_error_rule(draw, times=2.0)


@pytest.mark.parametrize("name", ["leaky_relu", "identity", "elu"])
@pytest.mark.parametrize("beta_over_gamma", [0.0, 1.0, 1.4, 1.5, 3.0, 4.0])
def test_error_rule_on_both_sides_of_what_inverts(name: str, beta_over_gamma: float) -> None:
    """In float32, for either sign of β."""

    def draw() -> Iterator[tuple[str, Triple]]:
        layer = InPlaceABN(32, activation=name, activation_param=0.2)
        with torch.no_grad():
            layer.weight.uniform_(0.3, 0.9)
            layer.bias.copy_(layer.weight * beta_over_gamma)
            layer.bias[::2].neg_()
        x, dz = torch.randn(64, 32, 4, 4), torch.randn(64, 32, 4, 4)
        return three_ways(layer, x, dz, ACTIVATIONS[name])

    assert_error_rule(draw)


@pytest.mark.parametrize("name", ["leaky_relu", "relu"])
def test_absolute_weight(name: str) -> None:
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    layer = make(InPlaceABN, 5, activation=name, activation_param=0.2, absolute=True)
    dz = torch.randn_like(x)
    ours = gradients(layer(x * 1), x, layer, dz)
    for a, b in zip(ours, gradients(plain(layer, x, ACTIVATIONS[name]), x, layer, dz), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["identity", "relu", "leaky_relu", "gelu"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_residual(name: str, needs: tuple[bool, bool]) -> None:
    x, r = (torch.randn(4, 5, 3, 3, dtype=torch.float64, requires_grad=n) for n in needs)
    layer = make(InPlaceABN, 5, activation=name, activation_param=0.2)
    dz = torch.randn_like(x)
    inputs = [t for t in (x, r) if t.requires_grad] + list(layer.parameters())
    ours = torch.autograd.grad(layer(x * 1, r * 1) * 1, inputs, dz)
    theirs = torch.autograd.grad(plain(layer, x, ACTIVATIONS[name], r), inputs, dz)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_residual_of_another_shape_or_dtype() -> None:
    layer = make(ABN, 5, torch.float32, activation="relu")
    x = torch.randn(4, 5, 3, 3, requires_grad=True)
    # The second has the strides of x, and fewer elements.
    for r in (torch.randn(5, 1, 1), torch.randn(1, 5, 3, 3), torch.randn(4, 5, 3, 3, dtype=torch.float64)):
        r.requires_grad_()
        z = layer(x, r)
        expected = plain(layer, x, F.relu, r)
        assert z.dtype == expected.dtype
        dz = torch.randn_like(z)
        for a, b in zip(torch.autograd.grad(z, (x, r), dz), torch.autograd.grad(expected, (x, r), dz), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="residual of the input's shape"):
        layer(x, torch.randn(2, 4, 5, 3, 3))


@pytest.mark.parametrize("function", [torch.tanh, nn.Mish(), nn.ReLU6(inplace=True), lambda y: y.softmax(1)])
def test_any_other_activation(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    layer = make(InPlaceABN, 5, activation=function)
    dz = torch.randn_like(x)
    ours = gradients(layer(x * 1), x, layer, dz)
    for a, b in zip(ours, gradients(plain(layer, x, function), x, layer, dz), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_inference_is_plain(name: str) -> None:
    """Bit for bit, with and without a residual, and nobody's tensor is overwritten."""
    x, r = torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5)
    layer = make(InPlaceABN, 4, torch.float32, activation=name, activation_param=0.2).eval()
    before = x.clone(), r.clone()
    with torch.no_grad():
        for residual in (None, r, r.double(), r[:, :, :1]):
            assert same_bits(layer(x, residual), plain(layer, x, ACTIVATIONS[name], residual))
        wide = ABN(4, activation=torch.tanh).eval()
        assert same_bits(wide(x, r), torch.tanh(F.batch_norm(x, torch.zeros(4), torch.ones(4)) + r))
    assert same_bits(x, before[0])
    assert same_bits(r, before[1])


def test_cumulative_average() -> None:
    ours, theirs = ABN(3, momentum=None), nn.BatchNorm2d(3, momentum=None)
    for _ in range(4):
        x = torch.randn(5, 3, 4, 4) * 3 + 1
        ours(x), theirs(x)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_without_running_statistics_eval_uses_the_batch() -> None:
    x = torch.randn(5, 3, 4, 4)
    ours, theirs = (m(3, track_running_stats=False).eval() for m in (ABN, nn.BatchNorm2d))
    torch.testing.assert_close(ours(x), F.leaky_relu(theirs(x)))


def test_plain_checkpoint_loads_and_gives_the_same_output() -> None:
    norm = make(ABN, 4, torch.float32).state_dict()
    theirs = nn.BatchNorm2d(4)
    theirs.load_state_dict(norm)
    ours = InPlaceABN(4, activation="relu")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(ours.eval()(x), F.relu(theirs.eval()(x)))
    del norm["num_batches_tracked"]  # as older in-place batch norms write it
    ours.load_state_dict(norm)


def test_large_mean_does_not_cancel() -> None:
    def draw() -> Iterator[tuple[str, Triple]]:
        x = (torch.randn(64, 3, 8, 8) + 3e3).requires_grad_()
        layer = ABN(3, activation="identity")
        ways = (F.batch_norm(t, None, None, training=True) for t in (x, x.double()))
        yield "z", (layer(x), *ways)

    assert_error_rule(draw)


def test_elu_far_below_stays_finite() -> None:
    layer = make(InPlaceABN, 2, torch.float32, activation="elu", activation_param=1.0, invert=True)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 60.0]))
    x = (torch.randn(64, 2, 4) * torch.tensor([1.0, 1.0])[:, None]).requires_grad_()
    dz = torch.randn(64, 2, 4)
    ours = gradients(layer(x * 1), x, layer, dz)
    exact = copy.deepcopy(layer).double()
    xd = x.detach().double().requires_grad_()
    truth = gradients(plain(exact, xd, F.elu), xd, exact, dz.double())
    for a, b in zip(ours, truth, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize("beta_over_gamma", [3.0, 100.0, 1e6, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_weights_keep_their_input(beta_over_gamma: float, dtype: torch.dtype) -> None:
    """Among channels that invert, those whose γ is small beside β have plain's error, in dγ of 16-bit maps too."""

    def draw() -> Iterator[tuple[str, Triple]]:
        layer = InPlaceABN(32, activation_param=0.2)
        with torch.no_grad():
            layer.bias.fill_(0.5)
            layer.weight[1::2] = 0.5 / beta_over_gamma
        x, dz = torch.randn(64, 32, 4, 4).to(dtype), torch.randn(64, 32, 4, 4).to(dtype)
        for what, (ours, theirs, truth) in three_ways(layer, x, dz, ACTIVATIONS["leaky_relu"]):
            small = (slice(None), slice(1, None, 2)) if what in ("z", "dx") else (slice(1, None, 2),)
            yield what, (ours[small], theirs[small], truth[small])

    assert_error_rule(draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_without_a_weight(dtype: torch.dtype) -> None:
    """Somebody set the weight to None: next to a large β nothing of x̂ is left in the output."""
    layer = InPlaceABN(4, activation="identity")
    layer.weight = None
    assert layer.bias is not None
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([0.1, 1e5, -1e3, 5.0]))
    x, dz = torch.randn(8, 4, 5, 5).to(dtype), torch.randn(8, 4, 5, 5).to(dtype)
    mine, plain = x.clone().requires_grad_(), x.double().requires_grad_()
    (dx,) = torch.autograd.grad(layer(mine * 1), mine, dz)
    expected = F.batch_norm(plain, None, None, None, layer.bias.double(), training=True)
    (want,) = torch.autograd.grad(expected, plain, dz.double())
    error = (dx - want).abs().max()
    assert error < 8 * torch.finfo(dtype).eps * want.abs().max()


def test_bad_input() -> None:
    layer = InPlaceABN(3)
    with pytest.raises(ValueError, match=r"shape \(N, 3, ...\).*got \(2, 4, 5, 5\)"):
        layer(torch.randn(2, 4, 5, 5))
    with pytest.raises(ValueError, match="more than one value per channel"):
        layer(torch.randn(1, 3, 1, 1))
    assert layer.eval()(torch.randn(1, 3, 1, 1)).shape == (1, 3, 1, 1)
    with pytest.raises(ValueError, match=r"can be inverted.*'relu'"):
        InPlaceABN(3, activation="relu", invert=True)
    with pytest.raises(ValueError, match="can be inverted"):
        InPlaceABN(3, activation_param=-0.1, invert=True)
    with pytest.raises(ValueError, match="expected an activation of"):
        ABN(3, activation="rely")
    with pytest.raises(ValueError, match="without parameters, got PReLU"):
        ABN(3, activation=nn.PReLU())
    with pytest.raises(ValueError, match="keeps the shape"):
        ABN(3, activation=lambda y: y[:1])(torch.randn(2, 3, 4))


def test_activation_with_a_hidden_parameter_raises() -> None:
    slope = nn.Parameter(torch.tensor(0.2))
    layer = ABN(3, activation=lambda y: torch.where(y > 0, y, y * slope))
    z = layer(torch.randn(4, 3, 5, requires_grad=True))
    with pytest.raises(RuntimeError, match="would be left without a gradient"):
        z.square().sum().backward()


def test_activation_that_draws_random_numbers_raises_where_backward_would_draw_others() -> None:
    layer = ABN(3, activation=lambda y: F.dropout(y, 0.5))
    x = torch.randn(4, 3, 5)
    z = layer(x)
    with pytest.raises(LeangradError, match="draws random numbers"):
        z.sum().backward()


def test_activation_whose_mode_changes_between_forward_and_backward_raises() -> None:
    layer = ABN(3, activation=nn.Sequential(nn.Tanh()))
    z = layer(torch.randn(4, 3, 5))
    layer.activation.eval()
    with pytest.raises(LeangradError, match=r"train\(\) or eval\(\) was called"):
        z.sum().backward()


def test_activation_can_be_set_later() -> None:
    x = torch.randn(4, 3, 5)
    layer = ABN(3, activation="relu")
    layer.activation = "gelu"
    assert same_bits(layer(x), ABN(3, activation="gelu")(x))
    layer.activation, layer.activation_param = "leaky_relu", 0.3
    assert same_bits(layer(x), ABN(3, activation="leaky_relu", activation_param=0.3)(x))
    with pytest.raises(ValueError, match="expected an activation of"):
        layer.activation = "rely"
    assert layer.activation == "leaky_relu"


def test_empty_batch() -> None:
    for layer in (ABN(3).eval(), InPlaceABN(3, activation="relu").eval()):
        x = torch.randn(0, 3, 4, 4, requires_grad=True)
        z = layer(x)
        z.sum().backward()
        assert z.shape == x.grad.shape == (0, 3, 4, 4)


def test_compile_and_functional_transforms_run_plain() -> None:
    layer = make(InPlaceABN, 3, torch.float64, activation="leaky_relu", activation_param=0.2)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    expected = plain(layer, x, ACTIVATIONS["leaky_relu"])
    layer.eval()
    grad = torch.func.grad(lambda x: layer(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    layer(leaf).square().sum().backward()
    torch.testing.assert_close(grad, leaf.grad)
    layer.train()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_sync_without_processes_is_in_place() -> None:
    x = torch.randn(4, 3, 5, requires_grad=True)
    a, b = InPlaceABNSync(3), InPlaceABN(3)
    torch.testing.assert_close(a(x * 1), b(x * 1), rtol=0, atol=0)
    assert copy.deepcopy(a).group is None


@pytest.mark.parametrize("kind", [ABN, InPlaceABN])
def test_a_batch_of_gradients_is_refused(kind: type[ABN]) -> None:
    x = torch.randn(4, 5, 3, 3, requires_grad=True)
    z = make(kind, 5, torch.float32)(x * 1)
    with pytest.raises(LeangradError, match="one by one"):
        torch.autograd.grad(z, x, torch.randn(2, *z.shape), is_grads_batched=True)
