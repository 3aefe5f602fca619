"""DiffusionBlock: FiLM after both norms, its plain form's numbers; EDM preconditioning; embeddings of time."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leangrad
from leangrad import floor
from leangrad.engine.grad_buffer import release_scratch
from leangrad.measure import measure
from leangrad.nn import DiffusionBlock, TransformerBlock
from leangrad.nn.diffusion import embed_time, precondition
from tests.support import same_bits
from tests.support.transformer import close, is_node, same, small_blocks_are_nodes

__all__ = ["small_blocks_are_nodes"]

KINDS = {
    "dit": {},
    "rms": {"norm": "rms", "activation": "swiglu", "kv_heads": 2, "rotary": True, "bias": False},
    "dropout": {"dropout": 0.3},
    "causal": {"causal": True, "activation": "gelu_tanh"},
}
WIDTH, HEADS, CONDITION, BATCH, LENGTH = 32, 4, 6, 3, 7


def make(kind="dit", dtype=torch.float64, **options):
    block = DiffusionBlock(WIDTH, HEADS, condition_width=CONDITION, dtype=dtype, **{**KINDS[kind], **options})
    for p in block.parameters():  # zeros and ones would hide a forgotten weight
        if p.dim() == 1:
            nn.init.normal_(p, 0.5, 0.3)
    nn.init.normal_(block.film.weight, std=0.3)
    return block


def batch(dtype=torch.float64, shape=(BATCH, LENGTH), requires_grad=True):
    x = torch.randn(*shape, WIDTH, dtype=dtype, requires_grad=requires_grad)
    condition = torch.randn(shape[0], CONDITION, dtype=dtype, requires_grad=requires_grad)
    return x, condition, torch.randn(*shape, WIDTH, dtype=dtype)


def results(forward, block, x, condition, g, *args):
    torch.manual_seed(1)
    y = forward(x, condition, *args)
    wanted = [t for t in (x, condition, *block.parameters()) if t.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, g)]


@pytest.mark.parametrize("needs_inputs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_plain_form(kind, dtype, needs_inputs):
    block, inputs = make(kind, dtype), batch(dtype, requires_grad=needs_inputs)
    found, expected = results(block, block, *inputs), results(block.plain, block, *inputs)
    assert is_node(found[0])
    if kind == "rms":
        close(found, expected, dtype)
    else:
        same(found, expected)


def test_the_formula():
    """Written out once more, with torch's own modules."""
    block, (x, condition, _) = make(), batch()
    s1, b1, s2, b2 = (t.unsqueeze(1) for t in block.film(F.silu(condition)).chunk(4, -1))
    q, k, v = block.attention.qkv(block.norm1(x) * (1 + s1) + b1).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    mixed = torch.softmax(q @ k.mT / math.sqrt(WIDTH // HEADS), -1) @ v
    r = x + block.attention.out(mixed.transpose(1, 2).flatten(2))
    y = r + block.ffn.down(F.gelu(block.ffn.up(block.norm2(r) * (1 + s2) + b2)))
    close([block(x, condition)], [y])


def test_at_first_the_condition_changes_nothing():
    block, (x, condition, g) = DiffusionBlock(WIDTH, HEADS, condition_width=CONDITION, dtype=torch.float64), batch()
    plain = TransformerBlock(WIDTH, HEADS, dtype=torch.float64)
    plain.load_state_dict({k: v for k, v in block.state_dict().items() if not k.startswith("film")})
    y = block(x, condition)
    same([y], [plain(x)])
    (dw,) = torch.autograd.grad(y, block.film.weight, g)
    assert dw.abs().min() > 0  # and yet it is learned


def test_each_sequence_has_its_own_condition():
    block, (x, condition, _) = make(), batch()
    for i in range(BATCH):
        close([block(x[i : i + 1], condition[i : i + 1])], [block(x, condition)[i : i + 1]])


def test_gradcheck():
    block = DiffusionBlock(4, 2, condition_width=2, hidden=5, norm="rms", activation="swiglu", dtype=torch.float64)
    nn.init.normal_(block.film.weight, std=0.5)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    condition = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, c, *_: block(x, c), (x, condition, *block.parameters()))
    assert torch.autograd.gradgradcheck(block, (x, condition))


@pytest.mark.parametrize("trained", ["film", "norm1", "norm2", "attention", "ffn"])
@pytest.mark.parametrize("needs_inputs", [True, False])
def test_frozen_parts(trained, needs_inputs):
    block, inputs = make(), batch(requires_grad=needs_inputs)
    block.requires_grad_(False).get_submodule(trained).requires_grad_(True)
    same(results(block, block, *inputs), results(block.plain, block, *inputs))


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (0, 3), (2, 0)], ids=str)
def test_shapes(shape):
    block, inputs = make(), batch(shape=shape)
    found, expected = results(block, block, *inputs), results(block.plain, block, *inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    block, (x, condition, g) = make(kind, torch.float32), batch(torch.float32)
    found, expected = [], []
    for forward, into in ((block, found), (block.plain, expected)):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = forward(x, condition)
        into += [y, *torch.autograd.grad(y, [x, condition, *block.parameters()], g)]
    assert is_node(found[0])
    assert same_bits(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()


def test_retained_graphs_copies_and_lean():
    block, (x, condition, g) = make(), batch()
    wanted = [x, condition, *block.parameters()]
    expected = results(block.plain, block, x, condition, g)[1:]
    y = block(x, condition)
    for keep in (True, False):
        same(torch.autograd.grad(y, wanted, g, retain_graph=keep), expected)
    other = copy.deepcopy(block)
    same(other.state_dict().values(), block.state_dict().values())
    assert list(block.state_dict())[-2:] == ["film.weight", "film.bias"]
    leangrad.lean(block, min_bytes=0)
    for _ in range(3):
        close(results(block, block, x, condition, g)[1:], expected)


def test_kept_bytes_are_the_floor():
    """Those of a Transformer block, and the condition, its activation and the scales and shifts."""
    rows, width, heads = 8 * 64, 64, 4
    block = DiffusionBlock(width, heads, condition_width=16)
    x, condition, g = torch.randn(8, 64, width), torch.randn(8, 16), torch.randn(8, 64, width)

    def step():
        for p in block.parameters():
            p.grad = None
        block(x, condition).backward(g)

    release_scratch()
    step()
    kept = measure(step, timed_runs=0).kept_bytes - x.numel() * 4  # the output, which the engine holds
    assert kept == 9 * rows * width * 4 + rows * heads * 4 + 8 * 16 * 4 + 8 * 4 * width * 4

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x, condition):
            return self.block.plain(x, condition)

    lowest = floor(Plain(), (x, condition), lambda y: (y * g).sum()).bytes
    assert kept <= lowest + 8 * 16 * 4 + 8 * 4 * width * 4


# Preconditioning


@pytest.mark.parametrize("data_std", [0.5, 1.0, 3.0])
def test_preconditioning_is_edms(data_std):
    alpha_bar = torch.tensor([0.999, 0.5, 0.01], dtype=torch.float64)
    c = precondition(alpha_bar=alpha_bar, data_std=data_std)
    sigma2 = (1 - alpha_bar) / alpha_bar
    torch.testing.assert_close(c.sigma**2, sigma2)
    torch.testing.assert_close(c.input, 1 / (sigma2 + data_std**2).sqrt())
    torch.testing.assert_close(c.skip, data_std**2 / (sigma2 + data_std**2))
    torch.testing.assert_close(c.output, sigma2.sqrt() * data_std / (sigma2 + data_std**2).sqrt())
    torch.testing.assert_close(c.loss_weight, (sigma2 + data_std**2) / (sigma2.sqrt() * data_std) ** 2)
    same([precondition(c.sigma, data_std=data_std).skip], [c.skip])


def test_input_and_target_have_variance_one_at_every_noise_level():
    sigma, data_std = torch.tensor([0.01, 0.5, 20.0]), 2.0
    c = precondition(sigma, data_std=data_std)
    data = data_std * torch.randn(3, 200_000)
    noisy = data + sigma.unsqueeze(1) * torch.randn_like(data)
    assert torch.allclose((c.input.unsqueeze(1) * noisy).std(1), torch.ones(3), atol=0.02)
    target = (data - c.skip.unsqueeze(1) * noisy) / c.output.unsqueeze(1)
    assert torch.allclose(target.std(1), torch.ones(3), atol=0.02)
    close([c.denoise(lambda x: target, noisy)], [data], torch.float32)


def test_embeddings_of_time():
    found = embed_time(torch.tensor([0, 3]), 6)
    angles = torch.tensor([3.0, 3.0 * 10_000 ** (-1 / 3), 3.0 * 10_000 ** (-2 / 3)])
    torch.testing.assert_close(found[1], torch.cat([angles.cos(), angles.sin()]))
    assert found.dtype == torch.float32


# Bad input


def test_errors_name_the_argument():
    block, (x, condition, _) = make(), batch()
    for bad in (condition[:2], condition[:, :3], condition.unsqueeze(1), 1.0):
        with pytest.raises(ValueError, match=r"condition: expected \(3, 6\), got"):
            block(x, bad)
    with pytest.raises(ValueError, match=r"x: expected \(batch, length, 32\)"):
        block(x[..., :5], condition)
    with pytest.raises(ValueError, match="condition_width: expected a positive int, got 0"):
        DiffusionBlock(8, 2, condition_width=0)
    with pytest.raises(ValueError, match="heads: expected a divisor of width"):
        DiffusionBlock(8, 3, condition_width=4)
    with pytest.raises(ValueError, match="sigma and alpha_bar: expected one of the two, got none"):
        precondition()
    with pytest.raises(ValueError, match="sigma and alpha_bar: expected one of the two, got both"):
        precondition(torch.ones(1), alpha_bar=torch.ones(1))
    with pytest.raises(ValueError, match="data_std: expected a positive number, got 0"):
        precondition(torch.ones(1), data_std=0)
    with pytest.raises(ValueError, match="width: expected an even number, got 5"):
        embed_time(torch.ones(1), 5)
    with pytest.raises(ValueError, match=r"time: expected one dimension, got \(1, 1\)"):
        embed_time(torch.ones(1, 1), 4)
