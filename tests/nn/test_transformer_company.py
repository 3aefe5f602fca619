"""TransformerBlock among others: hooks, compile, transforms, checkpointing, lean(), packed gradients, DDP."""

import copy
import io
import threading

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.measure import measure
from leangrad.nn import AttentionContext, TransformerBlock
from tests.support import same_bits
from tests.support.transformer import (
    KINDS,
    WIDTH,
    PlainForm,
    batch,
    close,
    is_node,
    make,
    results,
    same,
    small_blocks_are_nodes,
)

__all__ = ["small_blocks_are_nodes"]


def gradients(model):
    return [p.grad for p in model.parameters()]


# An ordinary module


def test_state_dict_copies_and_pickles():
    block = make("llama", dropout=0.1)
    names = ["norm1.weight", "attention.qkv.weight", "attention.out.weight"]
    names += ["norm2.weight", "ffn.up.weight", "ffn.down.weight"]
    assert list(block.state_dict()) == names
    x, g = batch()
    expected = results(block, block, x, g)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    for other in (copy.deepcopy(block), torch.load(file, weights_only=False)):
        same(results(other, other, x, g), expected)
        assert repr(other) == repr(block)
    assert "heads=4, kv_heads=2, causal=True, dropout=0.1, rotary=10000.0" in repr(block)
    other = make("llama")
    other.load_state_dict(block.state_dict())
    same(other.state_dict().values(), block.state_dict().values())


def test_default_hidden_widths():
    assert TransformerBlock(48, 4).ffn.down.in_features == 192
    assert TransformerBlock(48, 4, activation="swiglu").ffn.down.in_features == 128
    assert TransformerBlock(20, 4, activation="swiglu").ffn.up.out_features == 2 * 56
    assert TransformerBlock(48, 4, hidden=7, activation="geglu").ffn.up.out_features == 14


def test_inside_a_sequential_with_an_optimizer():
    lean = nn.Sequential(*(make("gpt", torch.float32) for _ in range(2)), nn.Linear(WIDTH, 1))
    models = lean, copy.deepcopy(lean)
    x, target = torch.randn(4, 6, WIDTH), torch.randn(4, 6, 1)
    losses = []
    for model, run in zip(models, (lambda m, x: m(x), plain_sequential), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            loss = (run(model, x) - target).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss)
    same(*[list(m.parameters()) for m in models])
    same([losses[0]], [losses[1]])


def plain_sequential(model, x):
    for child in model:
        x = child.plain(x) if isinstance(child, TransformerBlock) else child(x)
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_without_grad(kind):
    block, (x, _) = make(kind), batch()
    block.eval()  # or a context would be updated
    before = x.detach().clone()
    with torch.no_grad():
        assert same_bits(block(x), block.plain(x))
    with torch.inference_mode():
        assert same_bits(block(x), block.plain(x))
    assert same_bits(x, before)
    assert block(x).requires_grad


def test_a_context_is_updated_in_training_and_begins_as_nothing():
    context = AttentionContext(WIDTH, dtype=torch.float64)
    block, (x, g) = make(context=context), batch()
    y = block(x)
    assert context.context is not None
    same([y], [make_alike(block)(x)])  # the strength is 0
    same(results(block, block, x, g), results(block.plain, block, x, g))
    seen = context.context.clone()
    block.eval()(x)
    same([context.context], [seen])


def make_alike(block):
    other = make()
    other.load_state_dict({k: v for k, v in block.state_dict().items() if not k.startswith("context")})
    return other


# Who must see torch's own ops


@pytest.mark.parametrize("child", ["norm1", "attention", "attention.qkv", "ffn", "ffn.down"])
def test_hooks_on_a_child_run_plain(child):
    block, (x, _) = make(), batch()
    seen = []
    handle = block.get_submodule(child).register_forward_hook(lambda module, args, out: seen.append(out.shape))
    y = block(x)
    assert not is_node(y)
    assert len(seen) == 1
    handle.remove()
    same([y], [block(x)])
    assert is_node(block(x))


def test_hooks_on_the_block_see_a_node():
    block, (x, g) = make(), batch()
    seen = []
    block.register_full_backward_hook(lambda module, before, after: seen.append(before[0].shape))
    block(x).backward(g)
    assert seen == [x.shape]


def test_replaced_children_run_plain():
    block, (x, g) = make(), batch()
    same(results(block, block, x, g), results(block.plain, block, x, g))
    block.norm1 = nn.Identity()
    assert not is_node(block(x))
    same(results(block, block, x, g), results(block.plain, block, x, g))
    for norm in (nn.RMSNorm(WIDTH), nn.LayerNorm((7, WIDTH))):  # with an eps that depends on the dtype; over more
        block.norm1 = norm.double()
        assert not is_node(block(x))
        same(results(block, block, x, g), results(block.plain, block, x, g))
    block.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
    assert is_node(block(x))
    same(results(block, block, x, g), results(block.plain, block, x, g))
    block = make()
    original = block.ffn.up.forward
    block.ffn.up.forward = lambda x: 2 * original(x)
    assert not is_node(block(x))
    same(results(block, block, x, g), results(block.plain, block, x, g))
    block = make()
    torch.nn.utils.parametrizations.weight_norm(block.ffn.up)
    assert not is_node(block(x))


def test_a_mask_that_wants_a_gradient_runs_plain():
    block, (x, g) = make("encoder"), batch()
    mask = torch.randn(1, 1, 7, 7, dtype=torch.float64, requires_grad=True)
    y = block(x, mask)
    assert not is_node(y)
    same(torch.autograd.grad(y, mask, g), torch.autograd.grad(block.plain(x, mask), mask, g))


def test_transforms_compile_and_forward_mode():
    block, (x, g) = make("llama", torch.float32), batch(torch.float32)
    parameters = dict(block.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(block, p, (x,)).square().sum())(parameters)
    y = block.plain(x)
    close(found.values(), torch.autograd.grad(y, list(block.parameters()), 2 * y.detach()), torch.float32)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    wanted = [x, *block.parameters()]
    close(
        torch.autograd.grad(compiled(x), wanted, g),
        torch.autograd.grad(block.plain(x), wanted, g),
        torch.float32,
    )


# Who watches what is kept


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_saved_tensor_hooks_see_all_that_is_kept(kind, dropout):
    """Each hook gets its own copy back, as offloading gives it, and nothing is kept beside."""
    block, (x, g) = make(kind, dropout=dropout), batch()
    expected = results(block.plain, block, x, g)
    packed = []

    def pack(t):
        packed.append(t.numel())
        return t.detach().clone(memory_format=torch.contiguous_format)

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.clone()):
        y = block(x)
    hidden = block.ffn.up.out_features
    kv = block.attention.qkv.out_features
    for wanted in (x.numel(), x.numel() // WIDTH * hidden, x.numel() // WIDTH * kv):
        assert wanted in packed
    for keep in (True, False):
        close([y, *torch.autograd.grad(y, [x, *block.parameters()], g, retain_graph=keep)], expected)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(kind, dropout, reentrant):
    block, (x, g) = make(kind, dropout=dropout), batch()
    expected = results(block.plain, block, x, g)
    torch.manual_seed(1)
    y = checkpoint(block, x, use_reentrant=reentrant)
    y.backward(g)
    close([y, x.grad, *gradients(block)], expected)


def test_checkpointing_drops_the_maps():
    block, x, g = TransformerBlock(64, 4), torch.randn(8, 32, 64), torch.randn(8, 32, 64)

    def step():
        block.zero_grad()
        checkpoint(block, x, use_reentrant=False).backward(g)

    assert measure(step, timed_runs=1).kept_bytes < 2 * x.numel() * 4  # the output, and no map


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_beside_lean(kind, dropout):
    """Not bit for bit: where hooks hold what is kept, swiglu may not write over its input, and reads it strided."""
    blocks = make(kind, dropout=dropout), nn.GELU(), make(kind)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), *blocks)
    other = copy.deepcopy(model)
    lean = leangrad.lean(model, min_bytes=0)
    x, g = torch.randn(3, 7, WIDTH, dtype=torch.float64), torch.randn(3, 7, WIDTH, dtype=torch.float64)
    for step in range(3):  # recorded, planned, planned
        for one in (lean, other):
            torch.manual_seed(step)
            one.zero_grad()
            one(x).backward(g)
        close(gradients(lean), gradients(other))


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_beside_packed_gradients(kind):
    block, other = make(kind), make(kind)
    other.load_state_dict(block.state_dict())
    packed = leangrad.pack_gradients(block)
    for _ in range(2):  # the second is added to the first
        x, g = batch(requires_grad=False)
        y = block(x)
        assert is_node(y)
        y.backward(g)
        other(x).backward(g)
    close(gradients(block), gradients(other))
    assert packed.norm() > 0


def test_distributed_data_parallel(tmp_path):
    block, other = make("llama"), make("llama")
    other.load_state_dict(block.state_dict())
    x, g = batch(requires_grad=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(block)
        for _ in range(2):
            model(x).backward(g)
    finally:
        torch.distributed.destroy_process_group()
    for _ in range(2):
        other(x).backward(g)
    same(gradients(block), gradients(other))


def test_sharded_parameters(tmp_path):
    """FSDP gathers them for forward and for backward; the node reads them in both, as autograd's own ops do."""
    block, other = make("llama"), make("llama")
    other.load_state_dict(block.state_dict())
    x, g = batch(requires_grad=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        torch.distributed.fsdp.fully_shard(block, mesh=mesh, reshard_after_forward=True)
        for _ in range(2):
            y = block(x)
            assert is_node(y)
            y.backward(g)
            other(x).backward(g)
        same([p.grad.full_tensor() for p in block.parameters()], gradients(other))
    finally:
        torch.distributed.destroy_process_group()


def test_threads():
    """Each has its own tapes; scratch is never in two hands."""
    block = make("llama").requires_grad_(False)
    batches = [batch() for _ in range(4)]
    expected = [torch.autograd.grad(block(x), x, g)[0] for x, g in batches]
    wrong = []

    def train(x, g, true):
        for _ in range(20):
            if not same_bits(torch.autograd.grad(block(x), x, g)[0], true):
                wrong.append(x)

    threads = [threading.Thread(target=train, args=(x, g, e)) for (x, g), e in zip(batches, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_micro_batches_and_several_losses():
    block = make("llama")
    other = make("llama")
    other.load_state_dict(block.state_dict())
    batches = [batch() for _ in range(3)]
    for model in (block, PlainForm(other)):
        outputs = [model(x) for x, _ in batches]  # three live tapes
        outputs[2].backward(batches[2][1])
        torch.autograd.backward(outputs[:2], [g for _, g in batches[:2]])
    close(gradients(block), gradients(other))
