"""Who else sees the buffers: shared gradients, held outputs, second backwards, kept bytes, allocations in backward."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad.errors import LeangradError
from leangrad.measure import measure
from leangrad.nn.abn import ABN, InPlaceABN
from leangrad.nn.abn.recipe import rebuilding
from tests.support import same_bits

ACT = {"leaky_relu": lambda y: F.leaky_relu(y, 0.2), "relu": F.relu}
Layer = Callable[[Tensor], Tensor]
# Each builds an output from a layer and its input; all are right in plain PyTorch.
GRAPHS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "abn": lambda abn, x: abn(x * 2),
    "skip + abn": lambda abn, x: x + abn(x * 1),
    "abn + skip": lambda abn, x: abn(x * 1) + x,
    "abn + abn": lambda abn, x: abn(x * 1) + abn(x * 2),
    "same twice": lambda abn, x: (lambda z: z + z)(abn(x * 1)),
    "sum": lambda abn, x: abn(x * 1).sum(),
    "expanded": lambda abn, x: abn(x * 1).mean((2, 3)),
    "cat": lambda abn, x: torch.cat((abn(x * 1), x, abn(x * 3)), 1),
    "strided": lambda abn, x: abn(x * 1).transpose(2, 3) * 2,
    "sliced": lambda abn, x: abn(x * 1)[:, 1:, ::2],
    "two consumers": lambda abn, x: (lambda z: z.exp() + z.sin() * z)(abn(x * 1)),
    "chain": lambda abn, x: abn(abn(abn(x * 1)) + x),
    "view of the input": lambda abn, x: abn((x * 1).transpose(2, 3)) * 2,
    "used before and after": lambda abn, x: (lambda h: h.sum() * 3 + abn(h + 0) + h)(x * 1),
    "two maps": lambda abn, x: (lambda z: F.conv2d(z, z[:1, :, :2, :2]))(abn(x * 1)),
}


def layers(name: str) -> tuple[InPlaceABN, Layer]:
    abn = InPlaceABN(3, activation=name, activation_param=0.2, track_running_stats=False).double()
    with torch.no_grad():
        abn.weight.copy_(torch.tensor([0.8, -1.3, 0.6]))
        abn.bias.copy_(torch.tensor([0.1, -0.2, 0.0]))
    plain = lambda x: ACT[name](F.batch_norm(x, None, None, abn.weight, abn.bias, True, 0.0, abn.eps))  # noqa: E731
    return abn, plain


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ACT)
def test_shared_gradients_are_right(name: str, graph: str, rebuilt: bool) -> None:
    abn, plain = layers(name)
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    expected = GRAPHS[graph](plain, x)
    dz = torch.randn_like(expected)
    before = dz.clone()
    inputs = (x, abn.weight, abn.bias)
    truth = torch.autograd.grad(expected, inputs, dz)
    if rebuilt:
        with rebuilding():
            out = GRAPHS[graph](abn, x)
    else:
        out = GRAPHS[graph](abn, x)
    torch.testing.assert_close(out, expected)
    for a, b in zip(torch.autograd.grad(out, inputs, dz), truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert same_bits(dz, before), "the caller's gradient was overwritten"


@pytest.mark.parametrize("name", ACT)
def test_second_backward_held_output_and_partial_graphs(name: str) -> None:
    abn, plain = layers(name)
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    with rebuilding():
        z = abn(x * 1)
        held = z.detach().clone()
        first, second = F.conv2d(z, w), z.square()
    dz = torch.randn_like(first)
    want = torch.autograd.grad(F.conv2d(plain(x), w), (x, w), dz)
    for _ in range(2):
        for a, b in zip(torch.autograd.grad(first, (x, w), dz, retain_graph=True), want, strict=True):
            torch.testing.assert_close(a, b)
    assert same_bits(z, held), "backward changed the output that the caller holds"
    torch.autograd.grad(first, (x, w), dz)
    torch.testing.assert_close(torch.autograd.grad(second.sum(), z)[0], 2 * held)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(first, x, dz)


def test_changing_the_output_raises() -> None:
    for name in ACT:
        abn, _ = layers(name)
        x = torch.randn(4, 3, 4, 4, dtype=torch.float64, requires_grad=True)
        z = abn(x * 1)
        y = z * z if name == "relu" else z * 1
        with torch.no_grad():
            z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("producer", [torch.sigmoid, torch.relu, torch.exp, lambda x: x.softmax(1)])
def test_the_output_of_a_producer_that_keeps_it_is_not_overwritten(producer: Layer) -> None:
    abn, plain = layers("leaky_relu")
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    dz = torch.randn_like(x)
    (a,), (b,) = (torch.autograd.grad(layer(producer(x)), x, dz) for layer in (abn, plain))
    torch.testing.assert_close(a, b)


def test_another_op_that_kept_the_input_raises() -> None:
    abn, _ = layers("leaky_relu")
    h = torch.randn(4, 3, 4, 4, dtype=torch.float64, requires_grad=True) * 1
    out = h.square().sum() + abn(h).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_only_what_autograd_made_is_overwritten() -> None:
    abn, plain = layers("leaky_relu")
    data = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    leaf, base = data.clone().requires_grad_(), data.repeat(2, 1, 1, 1).requires_grad_() * 1
    before, whole = data.clone(), base.detach().clone()
    abn(data), abn(leaf), abn(base[:4])
    with torch.no_grad():
        abn(leaf)
    for now, then in ((data, before), (leaf, before), (base, whole)):
        assert same_bits(now, then)
    made = leaf * 1
    z = abn(made)
    assert z.data_ptr() == made.data_ptr()
    torch.testing.assert_close(z, plain(leaf))


def test_double_backward_raises_and_first_is_right() -> None:
    for name in ACT:
        abn, plain = layers(name)
        x = torch.randn(4, 3, 4, 4, dtype=torch.float64, requires_grad=True)
        (dx,) = torch.autograd.grad(abn(x * 1).square().sum(), x, create_graph=True)
        (want,) = torch.autograd.grad(plain(x).square().sum(), x)
        torch.testing.assert_close(dx, want)
        with pytest.raises(LeangradError, match="differentiated twice"):
            dx.square().sum().backward()


# ---- bytes ----------------------------------------------------------------------------------------------------------

N, C, H = 4, 32, 32
MAP = 4 * N * C * H * H
VECTORS = 4 * 4 * C


class Chain(nn.Module):
    """conv + norm + activation, as often as asked."""

    def __init__(self, kind: type[ABN], name: str, depth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(C, C, 1, bias=False) for _ in range(depth + 1))
        named = {"activation": name, "track_running_stats": False}
        self.norms = nn.ModuleList(kind(C, **named) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        with rebuilding():
            for conv, norm in zip(self.convs, self.norms, strict=False):
                x = norm(conv(x))
            return self.convs[-1](x)


@pytest.mark.parametrize(
    ("kind", "name"), [(InPlaceABN, "leaky_relu"), (InPlaceABN, "relu"), (ABN, "silu"), (ABN, "leaky_relu")]
)
@pytest.mark.sampled(2)
def test_kept_bytes_are_one_map_per_layer(kind: type[ABN], name: str) -> None:
    x, dy = torch.randn(N, C, H, H), torch.randn(N, C, H, H)
    kept = {}
    for depth in (2, 5):
        model = Chain(kind, name, depth)
        # `dy` stands before the step; the last convolution's output and the input do not count as kept by a layer.
        kept[depth] = measure(lambda model=model: model(x).backward(dy), timed_runs=1).kept_bytes
    assert kept[5] - kept[2] == 3 * (MAP + VECTORS)


@pytest.mark.parametrize("shape", [(8, 16, 64, 64), (1, 16, 256, 128)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["leaky_relu", "relu"])
@pytest.mark.sampled(3)
def test_backward_with_owned_buffers_allocates_no_map(
    name: str, memory_format: torch.memory_format, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leangrad.ops.abn.CHUNK", 1 << 14)
    x = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
    dz = torch.randn(shape).to(memory_format=memory_format)
    abn = InPlaceABN(shape[1], activation=name)

    def step() -> None:
        (abn(x * 1) * 2).backward(dz)
        x.grad = None

    m = measure(step, timed_runs=1)
    large = [e for e in m.timeline if "ABNFunctionBackward" in e.op and e.bytes >= dz.nbytes // 4]
    assert m.peak_bytes >= dz.nbytes, "nothing was measured"
    assert not large, large


def test_backward_with_a_shared_gradient_allocates_one_map() -> None:
    x, dz = torch.randn(8, 16, 64, 64, requires_grad=True), torch.randn(8, 16, 64, 64)
    abn = InPlaceABN(16)
    m = measure(lambda: (x + abn(x * 1)).backward(dz), timed_runs=1)
    maps = [e for e in m.timeline if "ABNFunctionBackward" in e.op and e.bytes >= dz.nbytes]
    assert len(maps) == 1


@pytest.mark.parametrize("invert", [None, True])
def test_a_leaf_that_autograd_holds_is_all_that_is_kept(invert: bool | None) -> None:
    """Unless inversion is demanded: then that is the output."""
    x, w = torch.randn(N, C, H, H, requires_grad=True), torch.randn(C, 1, 1)
    abn = InPlaceABN(C, track_running_stats=False, invert=invert)
    dz = torch.randn_like(x)
    # One map is the product itself, where backward starts; it keeps only `w`, so any other is kept by the layer.
    m = measure(lambda: torch.autograd.grad(abn(x) * w, x, dz), timed_runs=1)
    assert m.kept_bytes == MAP + VECTORS + (MAP if invert else 0)
    (ours,) = torch.autograd.grad(abn(x), x, dz)
    (truth,) = torch.autograd.grad(F.leaky_relu(F.batch_norm(x.double(), None, None, training=True)), x, dz)
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


def test_a_rebuilt_residual_is_let_go_before_dx_takes_memory() -> None:
    """At most three maps: the gradient, which becomes that of the residual, the residual, then dx in its stead."""
    first, last = ABN(16, activation="identity"), ABN(16, activation="relu")
    x, shortcut = (torch.randn(4, 16, 32, 32, requires_grad=True) for _ in range(2))
    ledger = leangrad.saving(min_bytes=0)

    def step() -> None:
        with ledger:
            y = (last(x, first(shortcut)) * 2.0).sum()
        torch.autograd.grad(y, (x, shortcut))

    step()
    step()
    peak = measure(step, timed_runs=0).peak_bytes
    assert 3 <= peak / x.nbytes < 3.5
