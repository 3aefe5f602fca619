"""TransformerBlock under autocast: plain's numbers and dtypes, and what is kept in the small dtype."""

import pytest
import torch

from leangrad.engine.grad_buffer import release_scratch
from leangrad.measure import measure
from leangrad.nn import TransformerBlock
from tests.support import same_bits
from tests.support.transformer import KINDS, WIDTH, batch, is_node, make, results, same, small_blocks_are_nodes

__all__ = ["small_blocks_are_nodes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_autocast(kind, dropout):
    """The residual stream stays in float32; products and attention are in bfloat16."""
    block = make(kind, torch.float32, dropout=dropout)
    x, g = batch(torch.float32)

    def cast(forward):
        def run(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return forward(x)

        return run

    found, expected = results(cast(block), block, x, g), results(cast(block.plain), block, x, g)
    assert is_node(found[0])
    assert found[0].dtype == torch.float32
    assert same_bits(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()
    if KINDS[kind].get("norm") != "rms":
        same(found, expected)


@pytest.mark.parametrize(
    "frozen", [("norm1", "attention"), ("norm2", "ffn"), ("norm1", "attention", "norm2", "ffn.up")]
)
@pytest.mark.parametrize("needs_dx", [True, False])
def test_autocast_of_frozen_parts(frozen, needs_dx):
    block = make("gpt", torch.float32)
    x, g = batch(torch.float32, requires_grad=needs_dx)
    for name in frozen:
        block.get_submodule(name).requires_grad_(False)
    found = []
    for forward in (block, block.plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = forward(x)
        wanted = [t for t in (x, *block.parameters()) if t.requires_grad]
        found.append([y, *torch.autograd.grad(y, wanted, g)])
    same(*found)


def test_kept_bytes_under_autocast():
    """All in bfloat16 but the logsumexp: what attention adds is kept in place of the float32 sum. And cast weights."""
    block, x, g = TransformerBlock(64, 4), torch.randn(8, 64, 64), torch.randn(8, 64, 64)

    def step():
        block.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x)
        y.backward(g)

    release_scratch()
    step()
    found = measure(step, timed_runs=0).kept_bytes - x.numel() * 4  # the output
    weights = sum(p.numel() for m in (block.attention, block.ffn) for p in m.parameters())
    assert found == 9 * x.numel() * 2 + 8 * 64 * 4 * 4 + 2 * weights


def test_autocast_of_a_low_precision_input_runs_plain():
    block = make("gpt", torch.float32)
    x = torch.randn(2, 3, WIDTH).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x)
        assert not is_node(y)
        same([y], [block.plain(x)])
