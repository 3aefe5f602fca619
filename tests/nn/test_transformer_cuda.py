"""TransformerBlock and DiffusionBlock on CUDA: every attention kernel that torch chooses, autocast, dropout, bytes."""

import pytest
import torch
from torch import nn

from leangrad.nn import DiffusionBlock, TransformerBlock
from tests.support import same_bits
from tests.support.error_rule import assert_error_rule, named
from tests.support.transformer import small_blocks_are_nodes

__all__ = ["small_blocks_are_nodes"]

pytestmark = pytest.mark.gpu

LLAMA = {"norm": "rms", "activation": "swiglu", "kv_heads": 2, "rotary": True, "bias": False}
KINDS = {
    "gpt": {"causal": True},
    "encoder": {},
    "llama": {**LLAMA, "causal": True},
    "gpt dropout": {"causal": True, "dropout": 0.2},
    "llama encoder": LLAMA,
}
WIDTH, HEADS, BATCH, LENGTH = 128, 4, 3, 96


def results(forward, block, x, g, *args, autocast=False):
    torch.manual_seed(1)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = forward(x, *args)
    return [y, *torch.autograd.grad(y, [x, *block.parameters()], g.to(y.dtype))]


@pytest.mark.parametrize("mask", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_plain_form(kind, dtype, mask):
    """The output bit for bit, gradients by the error rule: some kernels have atomic sums."""
    autocast = dtype == "autocast"
    dtype = torch.float32 if autocast else dtype

    def draw():
        with torch.device("cuda"):
            block = TransformerBlock(WIDTH, HEADS, dtype=dtype, **KINDS[kind])
            x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
            g = torch.randn_like(x)
            args = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [50], [1]]),) if mask else ()
        found = results(block, block, x, g, *args, autocast=autocast)
        eager = results(block.plain, block, x, g, *args, autocast=autocast)
        assert found[0].grad_fn.name() == "_NodeBackward"
        assert same_bits(found[0], eager[0])
        if block.dropout:  # float64 runs another kernel, which draws other numbers: against plain itself
            for ours, theirs in zip(found, eager, strict=True):
                assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()
            return []
        wide = TransformerBlock(WIDTH, HEADS, dtype=torch.float64, device="cuda", **KINDS[kind])
        wide.load_state_dict(block.state_dict())
        truth = results(wide.plain, wide, x.detach().double().requires_grad_(), g.double(), *args)
        return named(found, eager, truth)

    if "dropout" in KINDS[kind]:
        draw()
    else:
        assert_error_rule(draw)


def test_a_diffusion_block():
    with torch.device("cuda"):
        block = DiffusionBlock(WIDTH, HEADS, condition_width=16)
        nn.init.normal_(block.film.weight, std=0.2)
        x, c = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True), torch.randn(BATCH, 16)
        g = torch.randn_like(x)
    found, eager = (results(f, block, x, g, c) for f in (block, block.plain))
    for ours, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


def test_retained_graphs_and_side_streams():
    with torch.device("cuda"):
        block = TransformerBlock(WIDTH, HEADS, causal=True, dropout=0.1, dtype=torch.bfloat16)
        x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn_like(x)
    # Detached: a graph that is alive would tie the gradients of the parameters to the stream that it ran on.
    expected = [t.detach() for t in results(block, block, x, g)]
    torch.manual_seed(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = block(x)
        for keep in (True, False):
            found = torch.autograd.grad(y, [x, *block.parameters()], g, retain_graph=keep)
            for one, other in zip(found, expected[1:], strict=True):
                assert (one - other).abs().max() <= 0.02 * other.abs().max()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kept_bytes_are_the_floor(dtype):
    """Nine maps and the logsumexp, which some kernels pad."""
    block = TransformerBlock(256, 4, causal=True, dtype=dtype, device="cuda")
    x = torch.randn(8, 256, 256, dtype=dtype, device="cuda")
    block(x).sum().backward()
    block.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = block(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    floor = 9 * x.nbytes + 8 * 4 * 256 * 4
    assert floor <= kept <= 1.02 * floor
