"""Ledgers that run products again: whole models over several steps, what they keep, and how often a product runs."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad import _torch
from leangrad.errors import ChangedError
from leangrad.ledger import Ledger
from leangrad.ledger.origins import rule_builder
from leangrad.ledger.origins.rules import PRODUCTS
from leangrad.ledger.values.rebuild import rebuilt_cache
from leangrad.ledger.values.value import Value
from tests.support.ledger_programs import assert_same, backward, leaf, run

STEPS = 3
BLOCKS = 3
ROWS, LENGTH, WIDTH = 4, 16, 32
TOKENS_BYTES = ROWS * LENGTH * WIDTH * 4


def with_products(products: int = 8, depth: Any = 0) -> Ledger:
    return Ledger(residual_depth=depth, min_bytes=0, products=products)


# --------------------------------------------------------------------------------------------------------------- models


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return F.dropout(self.out(y.transpose(1, 2).flatten(-2)), self.dropout)


class WrittenAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / 3).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class GroupedQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * 8, bias=False) for n in (4, 2, 2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("cos", torch.randn(LENGTH, 8))
        self.register_buffer("sin", torch.randn(LENGTH, 8))

    def turned(self, x: Tensor) -> Tensor:
        return x * self.cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, 8)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in "gu")
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Of a transformer: norms before, or after."""

    def __init__(self, mixer: nn.Module, mlp: nn.Module | None = None, post: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixer, self.post = mixer, post
        self.mlp = mlp or nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, (self.mixer, self.mlp), strict=True):
            x = norm(x + part(x)) if self.post else x + part(norm(x))
        return x


class Residual(nn.Module):
    """Of a ResNet, with a ReLU in place."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convolutions[0](x)), inplace=True)
        return F.relu(x + self.norms[1](self.convolutions[1](y)), inplace=True)


class Excited(Residual):
    """With a gate of its own mean, and no ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.convolutions[1](F.silu(self.norms[0](self.convolutions[0](x)))))
        return x + y * self.gate(F.adaptive_avg_pool2d(y, 1)).sigmoid()


class Tied(nn.Module):
    """An embedding that is the head as well, and one block that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(50, WIDTH), Block(Attention())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.block(x)
        return F.linear(x, self.embedding.weight).log_softmax(-1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(Block(Attention()) for _ in range(3)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)
        return self.blocks[2](x)


class Views(nn.Module):
    """Products of views: slices, expanded rows, transposed sides, columns out of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH // 2, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = self.second(h[..., ::2]) + self.second(h[..., : WIDTH // 2].sin())
        b = h[:, :1].expand(-1, LENGTH, -1) @ self.frozen
        c = (h.transpose(1, 2).tanh() @ h) @ h.transpose(0, 1)[:1, :1].expand(ROWS, WIDTH, WIDTH).cos()
        return a * b + (a.transpose(1, 2) @ b @ c).mean(1, keepdim=True)


def stacked(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *[make() for _ in range(BLOCKS)])


def images(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *[make() for _ in range(BLOCKS)])


def chain() -> nn.Module:
    parts = [(nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True)) for i in range(7)]
    return nn.Sequential(*[part for layer in parts for part in layer])


def mixed() -> nn.Module:
    """Layers of every dimension, grouped, dilated and transposed; pictures come in channels_last."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=2, dilation=2),
        nn.GELU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.SiLU(),
        nn.Conv2d(6, 8, 2, stride=2, groups=2),
        nn.MaxPool2d(2),
        nn.Flatten(2),
        nn.Conv1d(8, 4, 3, padding=1),
        nn.Tanh(),
        nn.Unflatten(1, (2, 2)),
        nn.Conv2d(2, 2, 1),
        nn.Unflatten(3, (5, 5)),
        nn.Conv3d(2, 3, (1, 3, 3)),
    )


def pooled() -> nn.Module:
    """Poolings, the indices of which are rebuilt too."""
    layers = [(nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.LogSigmoid()) for i in range(3)]
    return nn.Sequential(*[part for layer in layers for part in layer])


def tokens() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH)


def pictures() -> Tensor:
    return torch.randn(4, 3, 10, 10)


def words() -> Tensor:
    return torch.randint(50, (ROWS, LENGTH))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (stacked(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())), tokens),
    "gpt": (stacked(lambda: Block(Attention())), tokens),
    "dropout": (stacked(lambda: Block(Attention(0.1))), tokens),
    "written attention, norms after": (stacked(lambda: Block(WrittenAttention(), post=True)), tokens),
    "grouped queries, gated": (stacked(lambda: Block(GroupedQueries(), Gated())), tokens),
    "resnet": (images(Residual), pictures),
    "squeeze and excite": (images(Excited), pictures),
    "no joins": (chain, pictures),
    "mixed layers": (mixed, lambda: pictures().to(memory_format=torch.channels_last)),
    "pooled": (pooled, pictures),
    "tied": (Tied, words),
    "views": (Views, tokens),
    "checkpoint": (lambda: Checkpointed(False), tokens),
    "reentrant checkpoint": (lambda: Checkpointed(True), lambda: tokens().requires_grad_()),
}


def train(
    make: Callable[[], nn.Module],
    batch: Callable[[], Tensor],
    region: Any,
    *,
    autocast: bool = False,
    device: str = "cpu",
) -> list[list[Tensor | None]]:
    """Several steps: of each, the gradients."""
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = batch().to(device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast), region:
            y = model(x)
        backward(y.cpu())
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_models_train_as_plain_ones(name: str, autocast: bool) -> None:
    """A recorded step, then steps along its trace; and fewer bytes are kept than without products."""
    plain = train(*MODELS[name], nullcontext(), autocast=autocast)
    without = Ledger(residual_depth=0, min_bytes=0)
    train(*MODELS[name], without, autocast=autocast)
    for products, depth in ((8, 0),) if autocast else ((8, 0), (1, 0), (3, "auto")):
        ledger = with_products(products, depth)
        for step, (a, b) in enumerate(zip(train(*MODELS[name], ledger, autocast=autocast), plain, strict=True)):
            assert_same(a, b, (products, depth, step))
        assert ledger.differences == 0
        assert ledger.totals().kept_bytes < without.totals().kept_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "name", ["mlp", "written attention, norms after", "grouped queries, gated", "resnet", "no joins"]
)
def test_models_train_as_plain_ones_on_cuda(name: str, autocast: bool) -> None:
    with torch.backends.cudnn.flags(deterministic=True), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        plain = train(*MODELS[name], nullcontext(), autocast=autocast, device="cuda")
        for products in (1, 8):
            ledger = with_products(products)
            lean = train(*MODELS[name], ledger, autocast=autocast, device="cuda")
            for step, (a, b) in enumerate(zip(lean, plain, strict=True)):
                assert_same(a, b, (products, step))
            assert ledger.totals().rebuilt_bytes > 0


# ------------------------------------------------------------------------------------------------------- what they keep


def kept_bytes(name: str, ledger: Ledger) -> int:
    train(*MODELS[name], ledger)
    return ledger.totals().kept_bytes


def test_a_transformer_keeps_its_residual_sums_alone() -> None:
    """Two of each block, but for the last: nothing saves that."""
    for name in ("gpt", "grouped queries, gated"):
        norms = 0  # the statistics of layer norms are no part of it
        assert kept_bytes(name, with_products()) == (2 * BLOCKS - 1) * TOKENS_BYTES + norms, name
    # Without products: of each block the queries, keys and values, the attention and the wide product.
    block = (3 + 1 + 4) * TOKENS_BYTES
    assert kept_bytes("gpt", with_products(0)) >= BLOCKS * block


def test_a_resnet_keeps_the_output_of_each_block() -> None:
    map_bytes = 4 * 8 * 10 * 10 * 4
    assert kept_bytes("resnet", with_products()) == BLOCKS * map_bytes
    assert kept_bytes("resnet", with_products(0)) >= 2 * BLOCKS * map_bytes


@pytest.mark.parametrize("products", [1, 2, 3, 6, 7])
def test_a_chain_ends_where_its_recipe_ran_through_too_many_products(products: int) -> None:
    layers, map_bytes = 7, 4 * 8 * 10 * 10 * 4
    ledger = with_products(products)
    assert kept_bytes("no joins", ledger) == layers // (products + 1) * map_bytes
    if products < layers:
        assert f"it lies more than {products} products after the last kept tensor" in ledger.summary()


# ----------------------------------------------------------------------------------------------- how often products run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The nodes of the products that recipes run again, in order."""
    found: list[str] = []

    def counting(node: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found.append(node)
            return function(*args, **kwargs)

        return run

    functions = {rule: rule.function for rules in PRODUCTS.values() for rule in rules}
    for rule, function in functions.items():
        object.__setattr__(rule, "function", counting(rule.node, function))
    rule_builder.forget()
    yield found
    for rule, function in functions.items():
        object.__setattr__(rule, "function", function)
    rule_builder.forget()


def test_each_product_of_a_block_runs_once(runs: list[str]) -> None:
    """Those that a residual sum is made of do not run at all: the sum is kept. The first layer is one more."""
    ledger = with_products()
    train(*MODELS["gpt"], ledger)
    attention = "ScaledDotProductFlashAttentionForCpuBackward0"
    # Backward comes to the last block first: its wide product, then the attention, for which queries, keys and values
    # are made in one product.
    expected = ["AddmmBackward0", "AddmmBackward0", attention] * BLOCKS + ["AddmmBackward0"]
    assert sorted(runs) == sorted(expected * STEPS)


PARALLEL: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "recipes of one product": lambda x, w: (lambda h: [(h + 1).sin(), (h * 2).cos(), (h - 3).exp()])(x @ w),
    "a reader after a recipe": lambda x, w: (lambda h: [(h + 1).exp(), h.sin()])(x @ w),
    "a reader before a recipe": lambda x, w: (lambda h: [h.sin(), (h + 1).exp()])(x @ w),
    "views of one product": lambda x, w: (lambda h: [p.sin() for p in h.split(2, 1)] + [h.t().cos()])(x @ w),
    "a sum of one product": lambda x, w: (lambda h: [(h + 1).sin(), (h + 1).cos(), (h.relu() * h).tanh()])(x @ w),
}


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("twice", [False, True])
def test_a_product_with_several_readers_runs_once_in_a_backward(name: str, twice: bool, runs: list[str]) -> None:
    def program(region: Any) -> list[Tensor | None]:
        x, w = leaf(6, 8), leaf(8, 8, seed=1)
        with region:
            outputs = PARALLEL[name](x, w)
        if twice:
            backward(*outputs, retain_graph=True)
        backward(*outputs)
        return [x.grad, w.grad]

    plain = run(program, nullcontext())
    ledger = with_products()
    for step, (a, b) in enumerate(zip(run(program, ledger), plain, strict=True)):
        assert_same(a, b, step)
    assert runs == ["MmBackward0"] * len(plain) * (1 + twice)
    assert ledger.totals().kept_bytes == 0


@pytest.mark.parametrize("name", [name for name in MODELS if "checkpoint" not in name])
@pytest.mark.sampled(4)
def test_recipes_that_were_given_up_count_no_more(name: str) -> None:
    """Or what they read would be held for them: see [Note: a product runs once]."""
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model, ledger = make(), with_products(2)
    for step in range(STEPS):
        with ledger:
            y = model(batch())
        gc.collect()
        values = [v for v in gc.get_objects() if type(v) is Value]
        readers = Counter(id(v) for value in values for v in value.inputs)
        found = [(v.op, v.recipe_reads, readers[id(v)]) for v in values if v.products and v.tensor is None]
        assert [f for f in found if f[1] != f[2]] == [], step
        assert found
        backward(y)
        del y, values


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_held_longer_than_its_readers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still held for recipes when backward ends was held in vain."""
    left: list[str] = []
    forget = rebuilt_cache._forget

    def look(task: int) -> None:
        held = [ref() for ref in rebuilt_cache.memos.get(task, ())]
        left.extend(value.op for value in held if value is not None and value.memo is not None)  # type: ignore[attr-defined]
        forget(task)

    monkeypatch.setattr(rebuilt_cache, "_forget", look)
    train(*MODELS[name], with_products())
    assert left == []


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_held_for_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever backward has read a tensor: what is held waits for a recipe or for backward itself."""
    read, held = Value.read, list[tuple[str, int, int]]()

    def look(self: Value) -> Tensor:
        tensor = read(self)
        for refs in rebuilt_cache.memos.values():
            for ref in refs:
                v: Any = ref()
                if v is not None and v.memo is not None and v.memo_reads >= v.recipe_reads + v.readers:
                    held.append((v.op, v.memo_reads, v.memo.nbytes))
        return tensor

    monkeypatch.setattr(Value, "read", look)
    train(*MODELS[name], with_products())
    assert held == []


# ----------------------------------------------------------------------------------------------------------- in company


def programs() -> dict[str, Callable[[Any], list[Tensor | None]]]:
    def fails_first(region: Any) -> list[Tensor | None]:
        x, w = leaf(6, 8), leaf(8, 8, seed=1)
        with pytest.raises(ZeroDivisionError), region:
            (x @ w).sin().mul(1 / 0)
        with region:
            y = (x @ w).relu() @ w
        backward(y)
        return [x.grad, w.grad]

    def second_derivative(region: Any) -> list[Tensor | None]:
        x, w = leaf(6, 8), leaf(8, 8, seed=1)
        with region:
            y = ((x @ w).tanh() @ w).sin()
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        backward(first)
        return [first.detach(), w.grad]

    def in_pieces(region: Any) -> list[Tensor | None]:
        x, w = leaf(6, 8), leaf(8, 8, seed=1)
        with region:
            h = (x @ w).tanh()
            y, z = (h @ w).sin(), (h.t() @ h).cos()
        backward(y, inputs=[x], retain_graph=True)
        backward(z)
        return [x.grad, w.grad]

    def own_layers(region: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(8, 16), leangrad.nn.MLP((16, 32, 16)), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8)
        )
        x = leaf(6, 8)
        with region:
            y = net(x)
        backward(y)
        return [x.grad, *(p.grad for p in net.parameters())]

    def packed(region: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
        leangrad.pack_gradients(net)
        x = leaf(6, 8)
        with region:
            y = net(x)
        backward(y)
        return [x.grad, *(p.grad for p in net.parameters())]

    def threads(region: Any) -> list[Tensor | None]:
        """Backward is called with autocast and gradients on."""
        x, w = leaf(6, 8), leaf(8, 8, seed=1)
        with region:
            y = (x @ w).relu() @ w
        with torch.autocast("cpu", torch.bfloat16):
            backward(y)
        return [x.grad, w.grad]

    return {f.__name__: f for f in (fails_first, second_derivative, in_pieces, own_layers, packed, threads)}


@pytest.mark.parametrize("name", programs())
def test_in_company(name: str) -> None:
    program = programs()[name]
    plain, ledger = run(program, nullcontext()), with_products()
    for step, (a, b) in enumerate(zip(run(program, ledger), plain, strict=True)):
        assert_same(a, b, step)
    assert ledger.totals().rebuilt_bytes > 0


# -------------------------------------------------------------------------------------------------------------- changes


def changing(region: Any, needs_gradient: bool) -> list[Tensor | None]:
    """A weight changes after forward; plain minds if the gradient of what it multiplies is asked for."""
    x, w = leaf(6, 8), leaf(8, 8, seed=1)
    x.requires_grad_(needs_gradient)
    with region:
        y = (x @ w).sin()
    with torch.no_grad():
        w.add_(1)
    backward(y)
    return [x.grad, w.grad]


def test_a_weight_that_changed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changing(nullcontext(), True)
    changing(nullcontext(), False)  # plain does not read the weight again; a recipe would
    for needs_gradient in (True, False):
        ledger = with_products()
        for _ in range(3):
            with pytest.raises(ChangedError, match="modified by an inplace operation"):
                changing(ledger, needs_gradient)


def test_a_weight_that_changes_inside_the_region() -> None:
    """The recipes read what it was."""

    def program(region: Any) -> list[Tensor | None]:
        x, w = leaf(6, 8).detach(), leaf(8, 8, seed=1)
        with region:
            y = (x @ w).sin()
            with torch.no_grad():
                w.mul_(2)
            z = (x @ w).cos()
        backward(y, z)
        return [w.grad]

    plain = run(program, nullcontext())
    for a, b in zip(run(program, with_products()), plain, strict=True):
        assert_same(a, b, "inside")


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "8", None])
def test_wrong_numbers_of_products_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="products must be an int >= 0"):
        with_products(wrong)


def test_a_copy_has_the_same_setting() -> None:
    assert copy.deepcopy(with_products(3)).products == 3
    assert with_products(3).segment(0).products == 3
    assert leangrad.saving().products == 0


SETTINGS = {  # each with values of which one is another than now
    "cuda.matmul.fp32_precision": ("ieee", "tf32"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (True, False),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (True, False),
    "cuda.matmul.allow_fp16_accumulation": (True, False),
    "cudnn.conv.fp32_precision": ("ieee", "tf32"),
    "cudnn.enabled": (True, False),
    "cudnn.benchmark": (True, False),
    "cudnn.deterministic": (True, False),
    "mkldnn.matmul.fp32_precision": ("ieee", "bf16"),
    "mkldnn.conv.fp32_precision": ("ieee", "bf16"),
    "mkldnn.deterministic": (True, False),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_that_changes_is_seen(name: str) -> None:
    """They are read by shorter ways than torch's attributes."""
    home: Any = torch.backends
    *path, last = name.split(".")
    for part in path:
        home = getattr(home, part)
    was, before = getattr(home, last), _torch.product_settings()
    try:
        setattr(home, last, next(value for value in SETTINGS[name] if value != was))
        assert f"torch.backends.{name} was" in _torch.changed_settings(before)
    finally:
        setattr(home, last, was)
    assert _torch.changed_settings(before) == ""
