"""The state-space blocks: the numbers of the same blocks in plain PyTorch, step by step or all at once."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad.measure import measure
from leangrad.nn.causal_conv import CausalConv
from leangrad.nn.gate import HeadLinear, gated
from leangrad.nn.ssm import RGLRU, MambaBlock, RGLRUBlock
from leangrad.ops.scan import chunk_length
from tests.support import same_bits
from tests.support.error_rule import assert_error_rule

WIDTH = 6
BLOCKS = {
    "rg_lru": lambda **made: RGLRU(WIDTH, **made),
    "rg_lru, rms, heads": lambda **made: RGLRU(WIDTH, heads=3, rms=True, **made),
    "griffin": lambda **made: RGLRUBlock(WIDTH, 8, heads=2, **made),
    "mamba": lambda **made: MambaBlock(WIDTH, states=3, **made),
    "mamba, other sizes": lambda **made: MambaBlock(
        WIDTH, expand=3, states=1, kernel=1, rank=4, dt_max=0.5, bias=True, **made
    ),
}


# The blocks in plain PyTorch, from their parameters


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return {RGLRU: plain_rg_lru, RGLRUBlock: plain_griffin, MambaBlock: plain_mamba}[type(block)](block, x)


def plain_linear(layer: nn.Module, x: Tensor) -> Tensor:
    weight = torch.block_diag(*layer.weight) if isinstance(layer, HeadLinear) else layer.weight
    return F.linear(x, weight, layer.bias)


def plain_conv(conv: CausalConv, x: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, conv.kernel_size[0] - 1, 0))
    return F.conv1d(padded.mT, conv.weight, conv.bias, groups=x.shape[-1]).mT


def plain_rg_lru(unit: RGLRU, x: Tensor) -> Tensor:
    r, i = torch.sigmoid(plain_linear(unit.recurrence_gate, x)), torch.sigmoid(plain_linear(unit.input_gate, x))
    log = 8 * r * F.logsigmoid(unit.lam)
    weight = torch.sqrt(-torch.expm1(2 * log)) if unit.rms else -torch.expm1(log)
    h, outputs = x.new_zeros(x.shape[0], x.shape[2]), []
    for t in range(x.shape[1]):
        h = torch.exp(log[:, t]) * h + weight[:, t] * i[:, t] * x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1)


def plain_griffin(block: RGLRUBlock, x: Tensor) -> Tensor:
    gate, y = block.in_proj(x).chunk(2, -1)
    return block.out_proj(plain_rg_lru(block.unit, plain_conv(block.conv, y)) * F.gelu(gate))


def plain_mamba(block: MambaBlock, x: Tensor) -> Tensor:
    u, gate = block.in_proj(x).chunk(2, -1)
    u = F.silu(plain_conv(block.conv, u))
    dt, B, C = block.x_proj(u).split([block.rank, block.states, block.states], -1)
    dt, A = F.softplus(block.dt_proj(dt)), block.A_log.exp()
    s, outputs = u.new_zeros(u.shape[0], block.inner, block.states), []
    for t in range(x.shape[1]):
        decay = torch.exp(-dt[:, t, :, None] * A)
        s = decay * s + (1 - decay) / A * B[:, t, None, :] * u[:, t, :, None]
        outputs.append((C[:, t, None, :] * s).sum(-1) + block.D * u[:, t])
    return block.out_proj(torch.stack(outputs, 1) * F.silu(gate))


def outputs_and_grads(run, block: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    y = run(x)
    return [y, *torch.autograd.grad(y, [x, *block.parameters()], g.to(y.dtype))]


@pytest.fixture(params=BLOCKS)
def make(request):
    return BLOCKS[request.param]


# The same numbers


@pytest.mark.parametrize("T", [1, 2, 19])
def test_equals_the_plain_block(make, T):
    block = make(dtype=torch.float64)
    x = torch.randn(3, T, WIDTH, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)
    found = outputs_and_grads(block, block, x, g)
    expected = outputs_and_grads(lambda x: plain(block, x), block, x, g)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.sampled(3)
def test_gradcheck_and_second_derivatives(make):
    block = make(dtype=torch.float64)
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, x)
    assert torch.autograd.gradgradcheck(block, x)
    (dx,) = torch.autograd.grad(block(x), x, torch.randn_like(x), create_graph=True)
    found = torch.autograd.grad(dx, list(block.parameters()), torch.randn_like(dx), allow_unused=True)
    assert any(g is not None and g.any() for g in found)


@pytest.mark.parametrize("training", [True, False])
def test_one_step_at_a_time_is_all_at_once(make, training):
    block = make().requires_grad_(training)
    x = torch.randn(2, 9, WIDTH)
    whole = block(x)
    state, outputs = block.initial_state(2), []
    for t in range(9):
        y, state = block(x[:, t : t + 1], state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    state, outputs = block.initial_state(2), []
    for part in x.split([0, 1, 6, 2], 1):
        y, state = block(part, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)


def test_gradients_flow_through_states(make):
    """A sequence in two parts has the gradients of the whole one."""
    block = make(dtype=torch.float64)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)

    def in_parts(x):
        first, state = block(x[:, :4], block.initial_state(2))
        rest, _ = block(x[:, 4:], state)
        return torch.cat([first, rest], 1)

    found, expected = (outputs_and_grads(run, block, x, g) for run in (in_parts, block))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_no_steps(make):
    block = make()
    assert block(torch.randn(2, 0, WIDTH)).shape == (2, 0, WIDTH)
    state = block.initial_state(2)
    y, after = block(torch.randn(2, 0, WIDTH), state)
    assert y.shape == (2, 0, WIDTH)
    torch.testing.assert_close(after, state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(make, dtype):
    """The error rule, beside the plain block in the same dtype."""

    def draw():
        block = make(dtype=dtype)
        exact = copy.deepcopy(block).double()
        x = torch.randn(4, 40, WIDTH).to(dtype)
        with torch.no_grad():
            return [("y", (block(x), plain(block, x), plain(exact, x.double())))]

    assert_error_rule(draw)


# An ordinary module


def test_state_dict_has_readable_names():
    assert list(MambaBlock(WIDTH).state_dict()) == [
        "A_log", "D", "in_proj.weight", "conv.weight", "conv.bias", "x_proj.weight",
        "dt_proj.weight", "dt_proj.bias", "out_proj.weight",
    ]  # fmt: skip
    assert list(RGLRU(WIDTH).state_dict()) == [
        "lam", "recurrence_gate.weight", "recurrence_gate.bias", "input_gate.weight", "input_gate.bias",
    ]  # fmt: skip
    assert [name for name in RGLRUBlock(WIDTH).state_dict() if "unit" not in name] == [
        "in_proj.weight", "in_proj.bias", "conv.weight", "conv.bias", "out_proj.weight", "out_proj.bias",
    ]  # fmt: skip


def test_saving_and_loading(make):
    block, other = make(), make()
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 5, WIDTH)
    assert same_bits(block(x), other(x))
    assert same_bits(block(x), copy.deepcopy(block)(x))


def test_dtype_and_device(make):
    block = make(dtype=torch.bfloat16, device="meta")
    assert {(p.dtype, p.device.type) for p in block.parameters()} == {(torch.bfloat16, "meta")}
    block = block.to_empty(device="cpu")
    for module in block.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert block(torch.randn(1, 3, WIDTH).bfloat16()).isfinite().all()


def test_begins_as_published():
    unit, block = RGLRU(512), MambaBlock(64, states=4)
    decay = torch.sigmoid(unit.lam) ** 8
    assert decay.min() >= 0.9 - 1e-5
    assert decay.max() <= 0.999 + 1e-5
    assert decay.std() > 0.02
    dt = F.softplus(block.dt_proj.bias)
    assert dt.min() >= 1e-3 * (1 - 1e-4)
    assert dt.max() <= 0.1 * (1 + 1e-4)
    torch.testing.assert_close(block.A_log.exp(), torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(128, 4))
    block.reset_parameters()
    assert not same_bits(dt, F.softplus(block.dt_proj.bias))


@pytest.mark.sampled(3)
def test_in_sequential_with_lean_and_packed_gradients(make):
    """The same gradients, bit for bit, beside everything else in the house."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), make(), nn.Linear(WIDTH, WIDTH), nn.GELU(), make())
    x, y = torch.randn(3, 40, WIDTH), torch.randn(3, 40, WIDTH)
    assert leangrad.verify(model, x, loss=lambda out: F.mse_loss(out, y)).equal
    F.mse_loss(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    packed = leangrad.pack_gradients(leangrad.lean(model, min_bytes=0))
    F.mse_loss(model(x), y).backward()
    assert "copied" not in str(packed.report())
    for p, g in zip(model.parameters(), expected, strict=True):
        assert same_bits(p.grad, g)


def test_under_autocast(make):
    block = make()
    x = torch.randn(3, 20, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
        state_y, _ = block(x, block.initial_state(3))
    torch.testing.assert_close(y, state_y)
    found = torch.autograd.grad(y, [x, *block.parameters()], g := torch.randn(y.shape).to(y.dtype))
    expected = torch.autograd.grad(block(x), [x, *block.parameters()], g.float())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() <= 0.05 * other.norm()


def test_under_compile():
    model = nn.Sequential(BLOCKS["griffin"](), BLOCKS["mamba"]())
    x, g = torch.randn(2, 5, WIDTH, requires_grad=True), torch.randn(2, 5, WIDTH)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = (outputs_and_grads(run, model, x, g) for run in (compiled, model))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_under_func_transforms(make):
    """Gradients of each sample by itself."""
    block = make()
    parameters = {name: p.detach() for name, p in block.named_parameters()}
    x, g = torch.randn(4, 7, WIDTH), torch.randn(4, 7, WIDTH)

    def loss(parameters, x, g):
        return (torch.func.functional_call(block, parameters, (x[None],))[0] * g).sum()

    by_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, g)
    expected = torch.autograd.grad((block(x) * g).sum(), list(block.parameters()))
    for one, other in zip(by_sample.values(), expected, strict=True):
        torch.testing.assert_close(one.sum(0), other)


def test_checkpointed(make):
    block = make()
    x, g = torch.randn(2, 9, WIDTH, requires_grad=True), torch.randn(2, 9, WIDTH)
    again = lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # noqa: E731
    found, expected = (outputs_and_grads(run, block, x, g) for run in (again, block))
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.extended
def test_learns_to_remember():
    """The first token, told at the end: both kinds carry it over the steps between."""
    for block in (RGLRUBlock(16, rms=True), MambaBlock(16, states=4)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 16), block, nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(120):
            tokens = torch.cat([torch.randint(4, (32, 1)), torch.full((32, 11), 4)], 1)
            loss = F.cross_entropy(model(tokens)[:, -1], tokens[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss < 0.1, type(block).__name__


# Kept bytes


def test_kept_bytes_of_mamba():
    batch, T = 2, 300
    block = MambaBlock(32, states=8)
    x, g = torch.randn(batch, T, 32, requires_grad=True), torch.randn(batch, T, 32)
    found = measure(lambda: torch.autograd.grad(block(x), [x, *block.parameters()], g), timed_runs=0)
    inner, small = block.inner, block.rank + 2 * 8
    halves, conv, u, dt, z, gated_z, out = 2 * inner, inner, inner, inner, inner, inner, 32
    states = -(-T // chunk_length(T)) + 1
    kept = 4 * batch * (T * (halves + conv + u + dt + z + gated_z + small + out) + states * inner * 8)
    assert kept <= found.kept_bytes <= kept + 4 * 2 * block.A_log.numel()  # exp(A_log), and its transpose


def test_kept_bytes_of_rg_lru():
    batch, T, width = 2, 300, 32
    unit = RGLRU(width)
    x, g = torch.randn(batch, T, width, requires_grad=True), torch.randn(batch, T, width)
    found = measure(lambda: torch.autograd.grad(unit(x), [x, *unit.parameters()], g), timed_runs=0)
    r, i, h = width, width, width
    states = -(-T // chunk_length(T)) + 1
    kept = 4 * batch * (T * (r + i + h) + states * width)
    assert kept <= found.kept_bytes <= kept + 4 * 4 * width


# Gates


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gated(activation, needs):
    x, gate = (torch.randn(4, 3, dtype=torch.float64, requires_grad=need) for need in needs)
    wanted = [t for t in (x, gate) if t.requires_grad]
    y, expected = gated(x, gate, activation), x * getattr(F, activation)(gate)
    assert same_bits(y, expected)
    g = torch.randn_like(y)
    for one, other in zip(torch.autograd.grad(y, wanted, g), torch.autograd.grad(expected, wanted, g), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.autograd.gradgradcheck(lambda *xs: gated(x, gate, activation), wanted)


def test_gated_in_two_dtypes():
    x, gate = torch.randn(9, requires_grad=True), torch.randn(9, dtype=torch.bfloat16, requires_grad=True)
    y, expected = gated(x, gate, "silu"), x * F.silu(gate)
    g = torch.randn(9)
    for one, other in zip(
        (y, *torch.autograd.grad(y, (x, gate), g)),
        (expected, *torch.autograd.grad(expected, (x, gate), g)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


# Bad input


def test_wrong_arguments_are_named(make):
    block = make()
    for x in (torch.randn(2, 3, 7), torch.randn(3, WIDTH), None):
        with pytest.raises(ValueError, match=r"^x: expected \(batch, T, 6\)"):
            block(x)
    with pytest.raises(ValueError, match=r"^state: expected"):
        block(torch.randn(2, 3, WIDTH), block.initial_state(3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RGLRU(6, heads=4), r"^heads: expected a divisor of the width 6, got 4"),
        (lambda: RGLRU(0), r"^width: expected a positive int"),
        (lambda: RGLRU(6, heads=0), r"^heads: expected a positive int"),
        (lambda: RGLRUBlock(6, inner=-1), r"^inner: expected a positive int"),
        (lambda: RGLRUBlock(6, kernel=0), r"^kernel: expected a positive int"),
        (lambda: MambaBlock(6, states=0), r"^states: expected a positive int"),
        (lambda: MambaBlock(6, expand=1.5), r"^expand: expected a positive int"),
        (lambda: MambaBlock(6, rank=0), r"^rank: expected a positive int"),
        (lambda: MambaBlock(6, dt_min=0.2), r"^dt_min: expected 0 < dt_min <= dt_max"),
    ],
)
def test_sizes_that_cannot_be(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.gpu
def test_training_on_a_gpu_is_training_on_a_cpu():
    for name, build in BLOCKS.items():
        block = build()
        x, g = torch.randn(2, 100, WIDTH, requires_grad=True), torch.randn(2, 100, WIDTH)
        expected = outputs_and_grads(block, block, x, g)
        there = copy.deepcopy(block).cuda()
        found = outputs_and_grads(there, there, x.detach().cuda().requires_grad_(), g.cuda())
        for one, other in zip(found, expected, strict=True):
            error = (one.cpu() - other).norm() / other.norm()
            assert error < 1e-4, name
        with torch.autocast("cuda", torch.bfloat16):
            y = there(x.detach().cuda())
        assert (y.float().cpu() - expected[0]).norm() < 0.05 * expected[0].norm(), name
