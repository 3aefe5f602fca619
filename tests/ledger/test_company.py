"""In company: checkpoints, foreign hooks, custom functions, subclasses, transforms, modules with a state.

Each program runs plain and through a ledger, three steps in a row, and must give the same bits.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad import saving
from leangrad.ledger.learn.entries import Totals
from leangrad.ledger.ledger import _warn_of_other_hooks
from tests.support.ledger_programs import (
    WITNESS_BYTES,
    assert_same,
    assert_same_as_plain,
    backward,
    grads,
    leaf,
    model,
    rebuilds,
    witness,
)

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


class Product(torch.autograd.Function):
    """``x * y`` and its sign; keeps its inputs and its outputs."""

    @staticmethod
    def forward(ctx, x, y):
        out = x * y
        sign = out > 0
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(x, y, out, sign)
        return out, sign

    @staticmethod
    def backward(ctx, grad, _):
        x, y, out, sign = ctx.saved_tensors
        return grad * y * sign + out, grad * x - out


class Same(torch.autograd.Function):
    """Returns its very input, or a view of it, and keeps a tensor on ``ctx``."""

    @staticmethod
    def forward(ctx, x, view):
        ctx.x = x.detach().clone()
        return x.view_as(x) if view else x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.x, None


@program
def custom_functions(region):
    w = leaf(8, 8)
    with region:
        out, sign = Product.apply(w * 2, (w + 1).exp())
        a = (out * 1.5).sin().masked_fill(sign, 0.5).cos()
        b = (Same.apply(w * 2, True) + 1).sin()
        c = (Same.apply(w * 2, False) + 1).sin()
    backward(a, b, c)
    return [w.grad]


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


@program
def subclass_as_activation(region):
    w = leaf(8, 8)
    with region:
        z = (((w * 2).as_subclass(Tagged) + 1).sin().exp() * w).tanh()
    backward(z.as_subclass(torch.Tensor))
    return [w.grad]


@program
@rebuilds(WITNESS_BYTES)
def subclass_of_two_outputs(region):
    w = leaf(8, 8)
    with region:
        own, seen = witness()
        z = nn.functional.logsigmoid((w * 2).as_subclass(Tagged)) * w
    backward(z.as_subclass(torch.Tensor), seen)
    return [w.grad, own.grad]


@program
@rebuilds(WITNESS_BYTES)
def subclass_as_parameter(region):
    w = nn.Parameter(leaf(8, 8).detach().as_subclass(Tagged))
    with region:
        own, seen = witness()
        z = ((w * 2) + 1).sin().exp()
    backward(z.as_subclass(torch.Tensor), seen)
    return [w.grad.as_subclass(torch.Tensor), own.grad]


def checkpoint_programs(reentrant):
    def inside(region):
        net, x = model(), leaf(4, 8)
        with region:
            h = (x * 2).exp()
            h = checkpoint(lambda t: net((t + 1).sin()) * t, h, use_reentrant=reentrant)
            h = checkpoint(net, (h + 1).cos(), use_reentrant=reentrant)
            y = (h * 2).sin()
        backward(y)
        return [x.grad, *grads(net)]

    def around(region):
        net, x = model(), leaf(4, 8)

        def part(t):
            t = t.tanh()
            with region:
                t = net((t + 1).sin()) * t
            return t.cos() * t

        y = checkpoint(part, checkpoint(part, x * 2, use_reentrant=reentrant), use_reentrant=reentrant)
        backward(y)
        return [x.grad, *grads(net)]

    def nested(region):
        net, x = model(), leaf(4, 8)

        def inner(t):
            return (net(t) + 1).sin()

        def outer(t):
            return checkpoint(inner, t * 2, use_reentrant=reentrant) * t

        with region:
            y = checkpoint(outer, x.exp(), use_reentrant=reentrant).cos()
        backward(y)
        return [x.grad, *grads(net)]

    for function in (inside, around, nested):
        function.__name__ = f"checkpoint_{function.__name__}_{'reentrant' if reentrant else 'by_hooks'}"
        program(function)


checkpoint_programs(True)
checkpoint_programs(False)


@program
def foreign_hooks_inside(region):
    w = leaf(8, 8)
    with region:
        y = w.exp()
        with torch.autograd.graph.save_on_cpu():
            z = (y + 1).sin() * y
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t * 1):
            u = ((z + 1).sigmoid() * w).tanh()
        v = (u * 2).cos()
    backward(v)
    return [w.grad]


def foreign_hooks_outside(region):
    w = leaf(8, 8)
    with torch.autograd.graph.save_on_cpu():
        y = w.exp().tanh()
        with region:
            z = (y + 1).sin() * y
        u = (z * 2).cos()
    backward(u)
    return [w.grad]


def test_under_hooks_of_others_a_region_is_plain():
    ledger = saving(min_bytes=0)
    _warn_of_other_hooks.cache_clear()
    with pytest.warns(UserWarning, match="runs plain inside saved-tensor hooks"):
        mine = foreign_hooks_outside(ledger)
    assert_same(mine, foreign_hooks_outside(nullcontext()), "under other hooks")
    assert ledger.totals() == Totals()


class Through(TorchFunctionMode):
    """Lets every call through."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def left_after_the_region(guest):
    """What was set inside a region and is left after it, as a generator may do: ours stands until then."""

    def program(region):
        w, mine = leaf(8, 8), guest()
        with region:
            own, seen = witness()
            mine.__enter__()
            y = (w.exp() + 1).sin()
        z = (y * 2).cos() * y
        mine.__exit__(None, None, None)
        backward((z + 1).tanh(), seen)
        return [w.grad, own.grad]

    PROGRAMS.append(program)
    program.__name__ = f"left_after_the_region_{guest.__name__}"


left_after_the_region(Through)
left_after_the_region(torch.autograd.graph.save_on_cpu)


def test_functional_gradients_inside_a_region_are_refused_by_torch():
    """torch.func.grad does not run where saved-tensor hooks are set, and says so; nothing of ours is left behind."""
    with pytest.raises(RuntimeError, match="saved tensor hooks"), saving(min_bytes=0):
        torch.func.grad(lambda t: (t**3).sum())(torch.ones(3))
    assert torch.func.grad(lambda t: (t**3).sum())(torch.ones(3)).tolist() == [3.0] * 3


@program
def vmap_inside(region):
    w = leaf(8, 8)
    with region:
        y = w * 3
        z = (torch.func.vmap(lambda t: (t**2).sin() + t.mean())(y) * 2).cos()
    backward(z)
    return [w.grad]


@program
def convolutions(region):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1),
        nn.GroupNorm(2, 4), nn.SiLU(inplace=True), nn.InstanceNorm2d(4), nn.Hardswish(inplace=True), nn.Dropout2d(0.3),
        nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(2),
    )  # fmt: skip
    x = leaf(2, 3, 8, 8)
    with region:
        y = net(x.to(memory_format=torch.channels_last)) + net(x)
    backward(y)
    return [x.grad, *grads(net), *(b.clone() for b in net.buffers())]


@program
def parametrized_weights(region):
    """Spectral norm updates its vectors in place, through ``out=``, in every forward."""
    torch.manual_seed(0)
    spectral, weight = nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm
    net = nn.Sequential(spectral(nn.Linear(8, 8)), nn.GELU(), weight(nn.Linear(8, 8)), nn.Sigmoid())
    x = leaf(4, 8)
    with region:
        y = net(net(x))
    backward(y)
    return [x.grad, *grads(net), *(b.clone() for b in net.buffers())]


@program
def recurrent(region):
    torch.manual_seed(0)
    lstm, gru, cell = nn.LSTM(8, 8, 2, dropout=0.2), nn.GRU(8, 8), nn.LSTMCell(8, 8)
    x = leaf(5, 2, 8)
    with region:
        z = gru(lstm(x * 2)[0].tanh())[0]
        state = (torch.zeros(2, 8), torch.zeros(2, 8))
        for t in z:
            state = cell(t, state)
    backward(*state)
    return [x.grad, *grads(lstm), *grads(gru), *grads(cell)]


@program
def caches(region):
    """Buffers that are filled slice by slice, with and without gradients."""
    x = leaf(8, 8)
    with region:
        fixed, live = torch.zeros(16, 8), torch.zeros(16, 8)
        fixed[:8] = x.detach()
        a = (x * 2 + fixed[:8]).sin()
        fixed[8:] = 3.0
        fixed[:8] = 7.0
        b = (x.exp() + fixed[8:]).cos()
        fixed.zero_()
        live[:8] = x * 2
        c = live.exp()
        live[8:] = x.sin()
        d = (live * 2 + 1).sin()
    backward(a, b, c, d)
    return [x.grad]


@program
def optimizer_step_inside_the_region(region):
    w, b = leaf(8, 8), leaf(8, seed=1)
    optimizer = torch.optim.AdamW([w, b], lr=0.1, foreach=True)
    with region:
        early = w * 2 + b
        backward((w * 2).exp())
        b.grad = torch.ones(8)
        optimizer.step()
        z = (early + 1).sin() + (w * 3 + b).cos()
    backward(z)
    return [w.grad, b.grad, w.detach().clone()]


@program
def attention(region):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True, activation="gelu")
    x = leaf(2, 5, 8)
    with region:
        y = layer(x, src_mask=torch.triu(torch.full((5, 5), float("-inf")), 1))
        z = nn.functional.scaled_dot_product_attention(y.view(2, 5, 2, 4), y.view(2, 5, 2, 4), y.view(2, 5, 2, 4))
        layer.self_attn.eval()
        u = layer.self_attn(x * 1, x * 1, x * 1, need_weights=False)[0]
    backward(y, z, u)
    return [x.grad, *grads(layer)]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a checkpoint inside a reentrant one
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda p: p.__name__)
def test_the_same_bits(case):
    assert_same_as_plain(case)


class CompiledPart(nn.Module):
    """A model that compiles a part of its forward, with modules in it, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linears, self.norm = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.LayerNorm(16)
        self.graphs: list[torch.fx.GraphModule] = []
        self.compiled = torch.compile(self.part, backend=self.compile_part)

    def compile_part(self, graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        self.graphs.append(graph)
        return graph

    def part(self, x: Tensor) -> Tensor:
        return F.gelu(self.linears[1](self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linears[2](self.compiled(F.gelu(self.linears[0](x))))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own look
def test_a_compiled_part_stays_in_one_piece_while_a_step_is_recorded() -> None:
    """The recorder's hooks on the modules inside are no graph breaks."""
    torch.manual_seed(0)
    plain = CompiledPart()
    lean = leangrad.lean(CompiledPart(), min_bytes=0)
    lean.load_state_dict(plain.state_dict())
    x = torch.randn(8, 16)
    for step in range(3):
        for one in (plain, lean):
            one.zero_grad()
            one(x).square().sum().backward()
        assert_same([p.grad for p in lean.parameters()], [p.grad for p in plain.parameters()], step)
        if step == 0:
            assert (len(lean.graphs), len(plain.graphs)) == (1, 1)
    assert leangrad.ledger_of(lean).totals().rebuilt_bytes > 0
