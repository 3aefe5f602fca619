"""Bad input to a TransformerBlock: an error that names the argument; and masks in all their forms."""

import pytest
import torch

from leangrad.nn import AttentionContext, TransformerBlock
from leangrad.nn.blocks.masks import fit_mask
from tests.support import same_bits
from tests.support.transformer import BATCH, HEADS, LENGTH, WIDTH


def test_errors_name_the_argument():
    for message, options in {
        "heads: expected a divisor of width, 32; got 5": {"heads": 5},
        "heads: expected a positive int, got 0": {"heads": 0},
        "width: expected a positive int, got 0": {"width": 0},
        "kv_heads: expected a divisor of heads, 4; got 3": {"kv_heads": 3},
        "hidden: expected a positive int, got -1": {"hidden": -1},
        "norm: expected 'layer' or 'rms', got 'batch'": {"norm": "batch"},
        "activation: expected one of relu, elu, gelu, .*; got 'tanh'": {"activation": "tanh"},
        "activation: expected one of relu, leaky_relu": {"activation": "swish"},
        "dropout: expected a probability from 0 to 1, got 1.5": {"dropout": 1.5},
        "rotary: needs heads of an even width, got 12 / 4 = 3": {"width": 12, "rotary": True},
        "context: expected one of width 32, got one of 16": {"context": AttentionContext(16)},
    }.items():
        with pytest.raises(ValueError, match=message):
            TransformerBlock(**{"width": WIDTH, "heads": HEADS, **options})
    block = TransformerBlock(WIDTH, HEADS)
    with pytest.raises(ValueError, match=r"x: expected \(batch, length, 32\), got \(3, 32\)"):
        block(torch.randn(3, 32))
    with pytest.raises(ValueError, match=r"x: expected \(batch, length, 32\), got \(3, 7, 31\)"):
        block(torch.randn(3, 7, 31))
    with pytest.raises(TypeError, match=r"x: expected the dtype of the weights, torch\.float32, got torch\.float64"):
        block(torch.randn(3, 7, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="x: expected the device of the weights, cpu, got meta"):
        block(torch.randn(3, 7, 32, device="meta"))
    with pytest.raises(TypeError, match="x: expected a tensor, got list"):
        block([1.0])
    x = torch.randn(BATCH, LENGTH, WIDTH)
    for shape in [(2, 7), (3, 8), (7,), (3, 7, 6), (2, 4, 7, 7), (3, 2, 7, 7), (3, 4, 6, 7)]:
        with pytest.raises(ValueError, match=r"mask: expected \(3, 7\), \(3, 7, 7\) or \(3 or 1, 4 or 1, 7 or 1, 7\)"):
            block(x, torch.ones(shape, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask: expected a boolean tensor .* got torch.int64"):
        block(x, torch.ones(3, 7, dtype=torch.int64))


def test_a_mask_and_causal_become_one():
    mask, causal = fit_mask(torch.zeros(1, 1, 1, 3), (2, 3), 4, True, torch.float64)
    assert not causal
    assert mask.dtype == torch.float64
    assert same_bits(mask[0, 0].isinf(), torch.ones(3, 3).triu(1).bool())
