"""Small transformer blocks of every kind, and their results beside those of their plain form."""

import pytest
import torch
from torch import nn

from leangrad.nn import AttentionContext, TransformerBlock, transformer
from tests.support.bits import same_bits

LLAMA = {"norm": "rms", "activation": "swiglu", "kv_heads": 2, "causal": True, "rotary": True, "bias": False}
KINDS = {
    "gpt": {"causal": True},
    "encoder": {},
    "llama": LLAMA,
    "no bias": {"bias": False, "activation": "gelu_tanh"},
    "one key head": {"kv_heads": 1, "rotary": 500.0, "activation": "geglu", "hidden": 24},
    "rms": {"norm": "rms", "activation": "relu"},
    "context": {"context": True},
}
WIDTH, HEADS, BATCH, LENGTH = 32, 4, 3, 7


@pytest.fixture(autouse=True)
def small_blocks_are_nodes(monkeypatch):
    monkeypatch.setattr(transformer, "_NODE_MIN_BYTES", 0)


def make(kind="gpt", dtype=torch.float64, **options):
    options = {**KINDS[kind], **options}
    if options.get("context") is True:
        context = AttentionContext(WIDTH, rate=0.5, dtype=dtype)
        context.update(torch.randn(40, WIDTH, dtype=dtype), torch.randn(40, WIDTH, dtype=dtype))
        nn.init.constant_(context.strength, 3.0)
        options["context"] = context
    block = TransformerBlock(WIDTH, HEADS, dtype=dtype, **options)
    for p in block.parameters():  # ones and zeros would hide a forgotten weight
        if p.dim() == 1 and p.numel() > 1:
            nn.init.normal_(p, 1.0, 0.3)
    return block


def batch(dtype=torch.float64, shape=(BATCH, LENGTH, WIDTH), requires_grad=True):
    return torch.randn(shape, dtype=dtype, requires_grad=requires_grad), torch.randn(shape, dtype=dtype)


def results(forward, block, x, g, *args, seed=1):
    """Output, gradients of x and of the parameters, and the context after it; the context is put back."""
    before = None if block.context is None else block.context.context.clone()
    torch.manual_seed(seed)
    y = forward(x, *args)
    wanted = [t for t in (x, *block.parameters()) if t.requires_grad]
    found = [y, *torch.autograd.grad(y, wanted, g)]
    if before is not None:
        found.append(block.context.context.clone())
        block.context.context.copy_(before)
    return found


def is_node(y):
    """Whether the block ran as one node, and its output is no view: whoever has it may change it in place."""
    return y.grad_fn.name() == "_NodeBackward" and not y._is_view()


def close(found, expected, dtype=torch.float64):
    """Within 1e-12 or 1e-5 of the largest entry: what spec and docstring promise."""
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= bound * max(1e-3, other.abs().max())


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)


class PlainForm(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block.plain(x)
