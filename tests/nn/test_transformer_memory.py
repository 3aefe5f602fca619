"""What a TransformerBlock keeps and allocates: the floor, to the byte, and nothing beside it after warm-up."""

import pytest
import torch

from leangrad import floor
from leangrad.engine.grad_buffer import release_scratch
from leangrad.measure import measure
from leangrad.nn import TransformerBlock
from leangrad.ops import norm
from tests.support.transformer import PlainForm, is_node, small_blocks_are_nodes

__all__ = ["small_blocks_are_nodes"]


@pytest.mark.parametrize(
    ("options", "widths"),
    [
        ({}, 3 + 1 + 1 + 4),
        ({"kv_heads": 1, "causal": True}, 1.5 + 1 + 1 + 4),
        ({"norm": "rms", "activation": "swiglu", "hidden": 128}, 3 + 1 + 1 + 4),
        ({"dropout": 0.25}, None),
    ],
    ids=["mha", "one key head", "swiglu", "dropout"],
)
@pytest.mark.sampled(2)
def test_kept_bytes_are_the_floor(options, widths):
    """Queries, keys, values; the attention's output; the sum after it; the hidden layer; and the logsumexp."""
    rows, width, heads = 8 * 64, 64, 4
    block = TransformerBlock(width, heads, **options)
    x, g = torch.randn(8, 64, width), torch.randn(8, 64, width)
    release_scratch()

    def step():
        for p in block.parameters():
            p.grad = None
        block(x).backward(g)

    step()  # the scratch stands before the step that is measured
    kept = measure(step, timed_runs=0).kept_bytes - x.numel() * 4  # the output, which the engine holds
    if widths is None:  # attention with dropout keeps its weights; the two others a byte for each element
        block.attention.dropout = 0.0
        without = 9 * rows * width * 4 + rows * heads * 4
        masked = measure(step, timed_runs=0).kept_bytes - x.numel() * 4
        assert without + 2 * rows * width <= masked <= without + 2 * rows * width + 16_384
        return
    assert kept == widths * rows * width * 4 + rows * heads * 4
    plain = PlainForm(block)
    assert kept == floor(plain, x, lambda y: (y * g).sum()).bytes


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")  # the scratch of the attention's kernel grows with them
def test_nothing_as_large_as_a_map_is_allocated_but_what_is_kept_or_leaves(monkeypatch):
    """After warm-up: five maps in forward, and in backward only the three of the attention's own kernel."""
    monkeypatch.setattr(norm, "_CHUNK", 1024)
    block = TransformerBlock(64, 4, causal=True)
    x, g = torch.randn(8, 64, 64, requires_grad=True), torch.randn(8, 64, 64)

    def step():
        x.grad = None
        for p in block.parameters():
            p.grad = None
        (block(x) * g).sum().backward()

    release_scratch()
    timeline = measure(step, timed_runs=2).timeline
    large = [e for e in timeline if e.bytes >= x.numel() * 4 and "aten::mul" not in e.op]  # those of the loss
    assert [e.bytes // x.numel() // 4 for e in large if e.phase == "forward"] == [3, 1, 1, 4, 1]
    backward = [e for e in large if e.phase == "backward"]
    assert all("attention" in e.op for e in backward)
    assert len(backward) == 3


def test_the_cache_is_empty_after_backward():
    block = TransformerBlock(64, 4)
    x = torch.randn(8, 64, 64)
    held = []

    def step():
        y = block(x)
        y.backward(torch.ones_like(y))
        held.append(y)
        for p in block.parameters():
            p.grad = None

    release_scratch()
    step()
    found = measure(step, timed_runs=0)
    assert len([e for e in found.alive_at(-1) if e.bytes >= x.numel() * 4]) == 1  # y itself


def test_a_small_block_runs_plain(monkeypatch):
    """Below a megabyte of hidden layer, where the host's time is worth more than the bytes."""
    monkeypatch.undo()
    block = TransformerBlock(64, 4)
    small, large = torch.randn(4, 255, 64), torch.randn(4, 256, 64)
    assert not is_node(block(small))
    assert is_node(block(large))
