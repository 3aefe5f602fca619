"""Dense and MLP: ordinary modules, `nn.Sequential`'s numbers and state_dict, one map a layer, consumed once."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leangrad.engine import chain
from leangrad.engine.grad_buffer import release_scratch
from leangrad.errors import ConsumedError
from leangrad.measure import measure
from leangrad.nn import MLP, Activate, Dense
from leangrad.ops.activation import ACTIVATIONS, resolve
from tests.support import same_bits
from tests.support.activation import PLAIN


class Swiglu(nn.Module):
    def forward(self, x):
        return PLAIN["swiglu"](x)


class Geglu(nn.Module):
    def forward(self, x):
        return PLAIN["geglu"](x)


MODULES = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
    "softmax": lambda: nn.Softmax(-1),
    "swiglu": Swiglu,
    "geglu": Geglu,
}
SIZES = [5, 16, 7, 3]


@pytest.fixture(autouse=True, params=[0, 1 << 20], ids=["rebuilt", "stored"])
def _rebuilding(request, monkeypatch):
    """Small maps are stored, not rebuilt: test both, whatever the size."""
    monkeypatch.setattr(chain, "REBUILD_MIN_BYTES", request.param)


def plain_of(mlp: MLP) -> nn.Sequential:
    """The same model out of torch's own modules, with its own copy of the parameters."""
    children = [
        nn.Linear(m.in_features, m.out_features, m.bias is not None, dtype=m.weight.dtype, device=m.weight.device)
        if isinstance(m, nn.Linear)
        else MODULES[m.record.name]()
        for m in mlp
    ]
    plain = nn.Sequential(*children)
    plain.load_state_dict(mlp.state_dict())
    return plain


def pair(activation="gelu", sizes=SIZES, dtype=torch.float32, **options) -> tuple[MLP, nn.Sequential]:
    mlp = MLP(sizes, activation, dtype=dtype, **options)
    return mlp, plain_of(mlp)


def grads_of(model, x, g):
    y = model(x)
    return y, *torch.autograd.grad(y, [t for t in (x, *model.parameters()) if t.requires_grad], g)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs_dx", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_is_sequential_bit_for_bit(activation, needs_dx, bias, dtype):
    mlp, plain = pair(activation, dtype=dtype, bias=bias, output_activation=activation)
    x = torch.randn(9, 5, dtype=dtype, requires_grad=needs_dx)
    g = torch.randn(9, 3, dtype=dtype)
    before = g.clone()
    same(grads_of(mlp, x, g), grads_of(plain, x, g))
    assert same_bits(g, before)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_dense_is_linear_and_activation(activation):
    layer = Dense(5, 4, activation=activation)
    plain = nn.Sequential(
        nn.Linear(5, layer.weight.shape[0]), nn.Identity() if activation is None else MODULES[activation]()
    )
    plain[0].load_state_dict(layer.state_dict())
    x, g = torch.randn(6, 5, requires_grad=True), torch.randn(6, 4)
    same(grads_of(layer, x, g), grads_of(plain, x, g))


@pytest.mark.parametrize("shape", [(5,), (1, 5), (0, 5), (2, 3, 5), (2, 1, 3, 5)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_shapes(activation, shape):
    mlp, plain = pair(activation, dtype=torch.float64)
    x, g = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(*shape[:-1], 3, dtype=torch.float64)
    for one, other in zip(grads_of(mlp, x, g), grads_of(plain, x, g), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_strided_input_and_gradient(activation):
    mlp, plain = pair(activation, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64).t().requires_grad_()
    y, z = mlp(x), plain(x)
    for g in (torch.randn(3, 8, dtype=torch.float64).t(), torch.randn(3, dtype=torch.float64).expand(8, 3)):
        found = torch.autograd.grad(y, [x, *mlp.parameters()], g, retain_graph=True)
        expected = torch.autograd.grad(z, [x, *plain.parameters()], g, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("activation", ["gelu", "tanh", "swiglu"])
def test_gradcheck_and_double_backward(activation):
    mlp = MLP([3, 4, 2], activation, dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    parameters = tuple(mlp.parameters())
    assert torch.autograd.gradcheck(lambda x, *p: mlp(x), (x, *parameters))
    assert torch.autograd.gradgradcheck(lambda x, *p: mlp(x), (x, *parameters))


# Graphs around it


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(
    "graph",
    [
        lambda f, x: f(x) + x,
        lambda f, x: x + f(x),
        lambda f, x: f(f(x)) * 2,
        lambda f, x: torch.cat([f(x), x]),
        lambda f, x: (lambda y: y * y + y)(f(x)),
        lambda f, x: f(x).sum(),
        lambda f, x: f(x * 2).view(-1) * 2,
    ],
    ids=["mlp+skip", "skip+mlp", "shared twice", "cat", "two consumers", "sum", "viewed"],
)
def test_inside_other_graphs(graph, activation):
    mlp, plain = pair(activation, sizes=[6, 8, 8, 6], dtype=torch.float64, output_activation=activation)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    y, z = graph(mlp, x), graph(plain, x)
    g = torch.randn_like(y)
    same(torch.autograd.grad(y, [x, *mlp.parameters()], g), torch.autograd.grad(z, [x, *plain.parameters()], g))


def test_tied_layers():
    mlp, plain = pair(sizes=[6, 6, 6, 6], dtype=torch.float64)
    mlp[2].weight = mlp[0].weight
    plain[2].weight = plain[0].weight
    x, g = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(4, 6, dtype=torch.float64)
    for one, other in zip(grads_of(mlp, x, g), grads_of(plain, x, g), strict=True):
        torch.testing.assert_close(one, other)
    (first,) = torch.autograd.grad(mlp(x), mlp[0].weight, g, create_graph=True)
    (second,) = torch.autograd.grad(plain(x), plain[0].weight, g, create_graph=True)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("frozen", [(0,), (2,), (4,), (0, 2), (2, 4), (0, 2, 4)], ids=str)
@pytest.mark.parametrize("needs_dx", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", "softmax"])
def test_frozen_layers(activation, needs_dx, frozen):
    mlp, plain = pair(activation, dtype=torch.float64)
    for model in (mlp, plain):
        for i in frozen:
            model[i].requires_grad_(False)
    x, g = torch.randn(4, 5, dtype=torch.float64, requires_grad=needs_dx), torch.randn(4, 3, dtype=torch.float64)
    if not mlp(x).requires_grad:
        assert not plain(x).requires_grad
        return
    same(grads_of(mlp, x, g), grads_of(plain, x, g))


def test_micro_batches_and_several_losses():
    mlp, plain = pair(dtype=torch.float64)
    batches = [torch.randn(4, 5, dtype=torch.float64) for _ in range(3)]
    weight = torch.randn(3, dtype=torch.float64)
    for model in (mlp, plain):
        outputs = [model(x) for x in batches]  # three live tapes
        (outputs[2] * weight).sum().backward()
        ((outputs[0] * weight).sum() + (outputs[1] ** 2).sum()).backward()
    for p, q in zip(mlp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# Consumed once


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_second_backward_says_what_to_do(activation):
    y = MLP(SIZES, activation)(torch.randn(4, 5))
    g = torch.randn_like(y)
    y.backward(g)
    with pytest.raises(ConsumedError, match="pass retain_graph=True"):
        y.backward(g)


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "swiglu", "softmax"])
def test_retained_graphs_give_the_same_again(activation):
    mlp, plain = pair(activation, output_activation="tanh")
    x, g = torch.randn(4, 5, requires_grad=True), torch.randn(4, 3)
    expected = torch.autograd.grad(plain(x), [x, *plain.parameters()], g)
    y = mlp(x)
    for keep in (True, True, False):
        same(torch.autograd.grad(y, [x, *mlp.parameters()], g, retain_graph=keep), expected)
        same(grads_of(mlp, x, g)[1:], expected)  # another tape in between


def test_where_torch_does_not_tell_the_graph_is_kept(monkeypatch):
    from leangrad.engine import single_node

    monkeypatch.setattr(single_node, "graph_is_kept", lambda: True)
    mlp, plain = pair("relu")
    x, g = torch.randn(4, 5, requires_grad=True), torch.randn(4, 3)
    same(grads_of(mlp, x, g), grads_of(plain, x, g))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_cache_is_empty_after_backward(activation):
    """What the chain kept is gone after backward although the output, and with it the node, is still held."""
    mlp = MLP([64, 64, 64, 64], activation)
    x = torch.randn(128, 64)

    def step():
        y = mlp(x)
        y.backward(torch.ones_like(y))
        kept.append(y)
        mlp.zero_grad()

    kept = []
    release_scratch()
    step()
    found = measure(step, timed_runs=0)
    held = [e for e in found.alive_at(-1) if e.bytes >= 128 * 64 * 4]
    assert len(held) == 1  # y itself


@pytest.mark.parametrize("runs_backward", [True, False])
@pytest.mark.sampled(2)
def test_no_leak_with_the_collector_off(runs_backward):
    """Nothing of a step is part of a cycle, whether or not its backward ran."""
    mlp = MLP(SIZES, "relu", output_activation="relu")
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, 5)
        y = mlp(x)
        node = weakref.ref(y)
        if runs_backward:
            y.sum().backward()
        del y
        assert node() is None
        alive = weakref.ref(x)
        del x
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("target", ["weight", "input", "output"])
def test_a_change_in_place_before_backward_is_an_error(target):
    mlp = MLP(SIZES, "relu", output_activation="relu")
    x = torch.randn(4, 5)
    y = mlp(x)
    loss = y.square().sum() if target != "output" else (y * torch.ones(3)).sum()
    with torch.no_grad():
        {"weight": mlp[2].weight, "input": x, "output": y}[target].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_inside_backward_never_changes_dx():
    """dx uses the weights of the forward, though each weight is stepped as soon as its gradient is there."""
    mlp, plain = pair(dtype=torch.float64)
    stepped = []

    def step(p):
        p.data.sub_(p.grad)
        stepped.append(p)

    x, g = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad(plain(x), x, g)
    for p in mlp.parameters():
        p.register_post_accumulate_grad_hook(step)
    mlp(x).backward(g)
    assert len(stepped) == 6
    assert same_bits(x.grad, expected)


# What it keeps


@pytest.mark.parametrize(("activation", "maps"), [("relu", 1), ("gelu", 1), ("swiglu", 2), ("tanh", 1)])
@pytest.mark.sampled(3)
def test_kept_bytes(activation, maps, monkeypatch):
    """One map for each hidden layer, and the caller's own output and input."""
    monkeypatch.setattr(chain, "REBUILD_MIN_BYTES", 0)
    mlp, x, g = MLP([32, 32, 32, 32, 32], activation), torch.randn(2048, 32), torch.randn(2048, 32)
    release_scratch()
    mlp(x).backward(g)  # warm-up: the scratch stands before the step

    def step():
        mlp.zero_grad()
        mlp(x).backward(g)

    assert measure(step, timed_runs=1).kept_bytes == (3 * maps + 1) * x.numel() * 4


def test_the_first_layer_sees_the_callers_own_storage():
    x = torch.randn(4, 5)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.data_ptr()), t)[1], lambda t: t):
        MLP(SIZES)(x)
        MLP(SIZES)(x.view(2, 2, 5))
    assert seen.count(x.data_ptr()) == 2


def test_zero_layers_return_the_input_itself():
    x = torch.randn(4, 5)
    assert MLP([5])(x) is x
    assert list(MLP([5]).parameters()) == []


# Ordinary modules


def test_state_dict_copies_and_pickles():
    mlp, plain = pair("leaky_relu", output_activation="tanh")
    assert list(mlp.state_dict()) == list(plain.state_dict())
    x = torch.randn(4, 5)
    mlp(x).sum().backward()
    file = io.BytesIO()
    torch.save(mlp, file)
    file.seek(0)
    for other in (copy.deepcopy(mlp), torch.load(file, weights_only=False)):
        assert same_bits(other(x), mlp(x))
        assert repr(other) == repr(mlp)
    assert "activation=gelu" in repr(Dense(2, 2, activation="gelu"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_grad(activation):
    mlp, plain = pair(activation, output_activation=activation)
    x = torch.randn(4, 5)
    before = x.clone()
    with torch.no_grad():
        assert same_bits(mlp(x), plain(x))
    with torch.inference_mode():
        assert same_bits(mlp.eval()(x), plain(x))
    assert same_bits(x, before)
    mlp.requires_grad_(False)
    assert not mlp(x).requires_grad
    mlp.requires_grad_(True)
    y = mlp(x)  # scratch made under inference_mode must not come back here
    y.backward(torch.ones_like(y))


@pytest.mark.parametrize("activation", ["relu", "gelu", "softplus", "softmax"])
def test_autocast(activation):
    mlp, plain = pair(activation)
    x, g = torch.randn(4, 5, requires_grad=True), torch.randn(4, 3).bfloat16()
    results = []
    for model in (mlp, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        results.append((y, *torch.autograd.grad(y, [x, *model.parameters()], g)))
    same(*results)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # backward inside autocast, too
        found = torch.autograd.grad(mlp(x), [x, *mlp.parameters()], g)
    same(found, results[1][1:])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_autocast_around_backward_alone_has_no_say(activation, device):
    mlp = MLP([8] * 5, activation, device=device)
    x, g = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(4, 8, device=device)
    expected = grads_of(mlp, x, g)
    y = mlp(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = torch.autograd.grad(y, [x, *mlp.parameters()], g)
    same(found, expected[1:])


def test_hooks_and_replaced_children_run_plain():
    mlp, plain = pair()
    x = torch.randn(4, 5)
    seen = []
    handle = mlp[2].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert same_bits(mlp(x), plain(x))
    assert seen == [(4, 7)]
    handle.remove()
    mlp[1] = nn.Tanh()
    plain[1] = nn.Tanh()
    assert same_bits(mlp(x), plain(x))
    torch.nn.utils.parametrizations.weight_norm(mlp[0])
    assert mlp(x).requires_grad


@pytest.mark.parametrize("place", [0, 1])
def test_a_child_with_a_forward_of_its_own_runs_it(place):
    mlp, plain = pair()
    x, g = torch.randn(4, 5), torch.randn(4, 3)
    for model in (mlp, plain):
        original = model[place].forward
        model[place].forward = lambda x, original=original: 2 * original(x)
    same(grads_of(mlp, x, g), grads_of(plain, x, g))
    assert same_bits(mlp(x), plain(x))


def test_a_weight_that_is_no_parameter_any_more_runs_plain():
    mlp, plain = pair()
    weight = mlp[2].weight.detach() * 2
    for model in (mlp, plain):
        del model[2].weight
        model[2].weight = weight
    x, g = torch.randn(4, 5), torch.randn(4, 3)
    same(grads_of(mlp, x, g), grads_of(plain, x, g))


def test_transforms_compile_and_trace():
    mlp, plain = pair()
    x = torch.randn(4, 5)
    assert torch.allclose(torch.func.vmap(mlp)(x), plain(x), atol=1e-6)
    parameters = dict(mlp.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(mlp, p, (x,)).sum())(parameters)
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    same(found.values(), expected)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    g = torch.randn(4, 3)
    y, z = compiled(x), plain(x)
    for one, other in zip(
        torch.autograd.grad(y, list(mlp.parameters()), g),
        torch.autograd.grad(z, list(plain.parameters()), g),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_threads():
    """Four threads over one module: each has its own tape, and no two get the same scratch."""
    mlp, plain = pair(sizes=[32, 64, 64, 32])
    inputs = [torch.randn(64, 32) for _ in range(4)]
    expected = [torch.autograd.grad(plain(x).square().sum(), list(plain.parameters())) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(10):
            found = torch.autograd.grad(mlp(inputs[i]).square().sum(), list(mlp.parameters()))
            wrong.extend(i for one, other in zip(found, expected[i], strict=True) if not torch.allclose(one, other))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_over_one_kept_graph():
    mlp, plain = pair(sizes=[32, 64, 64, 32])
    x, g = torch.randn(64, 32), torch.randn(64, 32)
    expected = torch.autograd.grad(plain(x), list(plain.parameters()), g)
    y, wrong = mlp(x), []

    def work():
        for _ in range(5):
            found = torch.autograd.grad(y, list(mlp.parameters()), g, retain_graph=True)
            wrong.extend(1 for one, other in zip(found, expected, strict=True) if not same_bits(one, other))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_reentrant_backward():
    mlp, plain = pair(sizes=[6, 8, 6], dtype=torch.float64)
    x, g = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(4, 6, dtype=torch.float64)

    def graph(model):
        checkpoint = torch.utils.checkpoint.checkpoint
        return checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True) * 2

    y, z = graph(mlp), graph(plain)
    y.backward(g)
    found, x.grad = x.grad, None
    z.backward(g)
    same([found, *(p.grad for p in mlp.parameters())], [x.grad, *(p.grad for p in plain.parameters())])


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_saved_tensor_hooks_see_all_that_is_kept(activation):
    """Checkpointing and offloading work by such hooks; what they hand back is never overwritten."""
    mlp, plain = pair(activation)
    x, g = torch.randn(4, 5, requires_grad=True), torch.randn(4, 3)
    expected = grads_of(plain, x, g)
    packed, unpacked = [], []

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    def unpack(t):
        unpacked.append((t, t.clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = mlp(x)
    for keep in (True, False):
        same(torch.autograd.grad(y, [x, *mlp.parameters()], g, retain_graph=keep), expected[1:])
    assert sum(shape[0] == 4 for shape in packed) >= 3  # x and one map for each hidden layer
    assert all(same_bits(now, then) for now, then in unpacked)
    same(grads_of(lambda_module(mlp), x, g), expected)


def lambda_module(mlp):
    """The same module under checkpointing."""
    module = copy.copy(mlp)
    module.forward = lambda x: torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False)
    return module


def test_checkpointing_drops_the_maps():
    mlp, x, g = MLP([64, 64, 64, 64], "gelu"), torch.randn(256, 64), torch.randn(256, 64)

    def step():
        mlp.zero_grad()
        torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False).backward(g)

    assert measure(step, timed_runs=1).kept_bytes < 2 * x.numel() * 4  # the output, and no map


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode uses it
def test_forward_mode_runs_plain():
    mlp, plain = pair(dtype=torch.float64)
    x, t = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    tangents = []
    for model in (mlp, plain):
        with torch.autograd.forward_ad.dual_level():
            y = model(torch.autograd.forward_ad.make_dual(x, t))
            tangents.append(torch.autograd.forward_ad.unpack_dual(y).tangent)
    same(*[[tangent] for tangent in tangents])


def test_distributed_data_parallel(tmp_path):
    mlp, plain = pair()
    x, g = torch.randn(4, 5), torch.randn(4, 3)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(mlp)
        for _ in range(2):
            model(x).backward(g)
    finally:
        torch.distributed.destroy_process_group()
    for _ in range(2):
        plain(x).backward(g)
    same([p.grad for p in mlp.parameters()], [p.grad for p in plain.parameters()])


def test_an_exception_in_backward_leaves_no_harm():
    mlp, plain = pair()
    x, g = torch.randn(4, 5, requires_grad=True), torch.randn(4, 3)

    def fail(grad):
        raise ZeroDivisionError

    h = x * 1
    h.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        mlp(h).backward(g)
    mlp.zero_grad()
    same(grads_of(mlp, x, g), grads_of(plain, x, g))


# It learns


def test_xor_is_learned():
    torch.manual_seed(0)
    x = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]])
    target = torch.tensor([[0.0], [1], [1], [0]])
    mlp = MLP([2, 8, 1], "tanh")
    optimizer = torch.optim.Adam(mlp.parameters(), lr=0.05)
    first = F.mse_loss(mlp(x), target).item()
    for _ in range(200):
        optimizer.zero_grad()
        loss = F.mse_loss(mlp(x), target)
        loss.backward()
        optimizer.step()
    assert first > 0.1
    assert F.mse_loss(mlp(x), target).item() < 0.01


def test_softmax_output_has_the_right_derivative():
    layer = Dense(3, 4, activation="softmax", dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    (dx,) = torch.autograd.grad(layer(x), x, torch.randn(2, 4, dtype=torch.float64))
    assert dx.abs().min() > 1e-6


# Bad input


def test_errors_name_the_argument_and_the_choice():
    mlp = MLP(SIZES)
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 5\), got \(4, 6\)"):
        mlp(torch.randn(4, 6))
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 5\), got \(\)"):
        mlp(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"x: expected the dtype of the weights, torch.float32, got torch.float64"):
        mlp(torch.randn(4, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x: expected the device of the weights, cpu, got meta"):
        mlp(torch.randn(4, 5, device="meta"))
    with pytest.raises(ValueError, match="activation: expected one of relu, "):
        MLP(SIZES, "swish")
    with pytest.raises(ValueError, match="activation: expected one of relu, "):
        Dense(2, 3, activation="softmaxx")
    for sizes in ([], [3, 0], [3, 2.5], [-1]):
        with pytest.raises(ValueError, match="sizes: expected at least one positive int"):
            MLP(sizes)
    assert isinstance(MLP([2, 3, 1], resolve("leaky_relu", 0.2))[1], Activate)


# Torch's own, at the first product in the thread that runs backward.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_on_a_gpu(activation, dtype):
    with torch.device("cuda"):
        mlp, plain = pair(activation, sizes=[64, 128, 128, 32], dtype=dtype)
        x, g = torch.randn(256, 64, dtype=dtype, requires_grad=True), torch.randn(256, 32, dtype=dtype)
        same(grads_of(mlp, x, g), grads_of(plain, x, g))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y, z = mlp(x.float()), plain(x.float())
        assert y.dtype == z.dtype
        assert same_bits(y, z)


def test_a_batch_of_gradients_at_once() -> None:
    """`is_grads_batched=True`: the gradients have no memory of their own, and torch's own ops compute them."""
    x = torch.randn(4, 8, requires_grad=True)
    lean = MLP([8, 16, 4], "gelu")
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    plain.load_state_dict(lean.state_dict())
    gradients = torch.randn(3, 4, 4)
    found, expected = (
        torch.autograd.grad(model(x), [x, *model.parameters()], gradients, is_grads_batched=True)
        for model in (lean, plain)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
