"""Random Transformer and diffusion blocks, with random parts frozen, against their plain forms in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leangrad.nn import AttentionContext, DiffusionBlock, TransformerBlock
from tests.support.fuzz import fuzz_settings
from tests.support.transformer import close, is_node, small_blocks_are_nodes

__all__ = ["small_blocks_are_nodes"]


@st.composite
def cases(draw):
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    width = heads * draw(st.sampled_from([2, 4, 6]))
    options = {
        "kv_heads": draw(st.sampled_from([k for k in (1, 2, 3, 6) if heads % k == 0])),
        "hidden": draw(st.integers(1, 20)),
        "activation": draw(st.sampled_from(["gelu", "swiglu", "relu", "geglu", "silu"])),
        "norm": draw(st.sampled_from(["layer", "rms"])),
        "causal": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "rotary": draw(st.booleans()),
        "bias": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["plain", "context", "diffusion"]))
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 9)))
    mask = draw(st.sampled_from([None, "keys", "added"]))
    return kind, width, heads, options, shape, mask, draw(st.booleans()), draw(st.integers(0, 2**20))


def build(kind, width, heads, options):
    if kind == "diffusion":
        block = DiffusionBlock(width, heads, condition_width=4, dtype=torch.float64, **options)
    else:
        context = AttentionContext(width, rate=0.3, dtype=torch.float64) if kind == "context" else None
        block = TransformerBlock(width, heads, context=context, dtype=torch.float64, **options)
    for p in block.parameters():
        nn.init.normal_(p, 0.1, 0.5)
        p.requires_grad_(bool(torch.rand(()) > 0.3))
    return block


@pytest.mark.fuzz
@fuzz_settings(60, 2000)
@given(cases())
def test_a_random_block_is_its_plain_form(case):
    kind, width, heads, options, (batch, length), mask, needs_dx, seed = case
    torch.manual_seed(seed)
    block = build(kind, width, heads, options)
    x = torch.randn(batch, length, width, dtype=torch.float64, requires_grad=needs_dx)
    args = [torch.randn(batch, 4, dtype=torch.float64)] if kind == "diffusion" else []
    if mask == "keys":
        keys = torch.rand(batch, length) > 0.3
        keys[:, 0] = True
        args.append(keys)
    elif mask == "added":
        args.append(torch.randn(batch, 1, length, length, dtype=torch.float64))
    g = torch.randn(batch, length, width, dtype=torch.float64)
    wanted = [t for t in (x, *block.parameters()) if t.requires_grad]
    found = []
    for forward in (block, block.plain):
        if block.context is not None:
            block.context.reset()
            block.context.update(torch.ones(3, width).double().cumsum(0), torch.eye(3, width).double())
        torch.manual_seed(seed)
        y = forward(x, *args)
        if not wanted:
            assert not y.requires_grad
            return
        gradients = torch.autograd.grad(y, wanted, g, allow_unused=True)
        found.append([y, *gradients])
    assert is_node(found[0][0])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
    close([t for t in found[0] if t is not None], [t for t in found[1] if t is not None])
