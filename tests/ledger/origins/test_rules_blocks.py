"""Rules together: blocks as users write them, functions that draw inside, second outputs, and what must be kept."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad.ledger.origins import rule_builder
from leangrad.ledger.origins.rules import RULES
from leangrad.ledger.values.pending_save import packed_in
from leangrad.ledger.values.value import Value
from tests.support import same_bits
from tests.support.rule_cases import Case, check
from tests.support.rule_cases.case import step, table
from tests.support.rule_cases.shapes import repeat_kv, rotary
from tests.zoo.bfloat16 import FastBFloat16

Function = Callable[..., Any]


def run(
    make: Callable[[], nn.Module], shape: tuple[int, ...], *, lean: bool, autocast: bool
) -> tuple[list[Any], Tensor]:
    """Outputs, gradients and the random state of one step."""
    torch.manual_seed(3)
    model, x = make(), torch.randn(shape, requires_grad=True)
    with ExitStack() as stack:
        stack.enter_context(FastBFloat16() if autocast else nullcontext())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), region(lean):
            y = model(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())], torch.get_rng_state()


def region(lean: bool) -> AbstractContextManager[Any]:
    return leangrad.saving(min_bytes=0) if lean else nullcontext()


class Block(nn.Module):
    """Parameters by name, and a function of them and of the input."""

    def __init__(self, function: Function, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_parameters()))  # type: ignore[no-any-return]


def llama_attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    angle = torch.arange(x.shape[1])[:, None] * 0.5 ** torch.arange(4).repeat(2)
    split = lambda y: y.unflatten(-1, (-1, 8)).transpose(1, 2)  # noqa: E731
    query, key = (rotary(split(x @ w), angle.cos(), angle.sin()) for w in (q, k))
    key, value = repeat_kv(key, 2), repeat_kv(split(x @ v), 2)
    mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)
    weights = F.softmax(query @ key.transpose(2, 3) / 8**0.5 + mask, dim=-1, dtype=torch.float32).to(query.dtype)
    return (F.dropout(weights, 0.1) @ value).transpose(1, 2).contiguous().flatten(2)


def complex_rotary(x: Tensor, w: Tensor) -> Tensor:
    turn = torch.polar(torch.ones(5, 4), torch.arange(20.0).view(5, 4))
    y = torch.view_as_complex((x @ w).float().reshape(2, 5, 4, 2)) * turn
    return F.gelu(torch.view_as_real(y).flatten(2).type_as(x)) * 2


def gated(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    a, b = (x @ up).chunk(2, dim=-1)
    h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.dropout((F.silu(a) * b) @ down, 0.2) + h.to(x.dtype)


def einsum_gate(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = torch.einsum("btd,de->bte", x, a)
    return torch.einsum("bte,ef->btf", h.tanh() * h.sigmoid(), b).cumsum(1).cos()


def fused(p: float, **settings: Any) -> Function:
    def attend(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **settings).transpose(1, 2).flatten(2).tanh()

    return attend


class SelfAttention(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True, **settings)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + F.gelu(self.attention(h, h, h, need_weights=False)[0])


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "llama attention": (lambda: Block(llama_attention, q=(16, 32), k=(16, 16), v=(16, 16)), (2, 5, 16)),
    "complex rotary": (lambda: Block(complex_rotary, w=(8, 8)), (2, 5, 8)),
    "gated mlp": (lambda: Block(gated, up=(8, 32), down=(16, 8)), (2, 5, 8)),
    "einsum": (lambda: Block(einsum_gate, a=(8, 12), b=(12, 4)), (2, 5, 8)),
    "fused attention": (lambda: Block(fused(0.0, is_causal=True), w=(8, 48)), (2, 5, 8)),
    "fused attention dropout": (lambda: Block(fused(0.3), w=(8, 48)), (2, 5, 8)),
    "fused attention dropout causal": (lambda: Block(fused(0.3, is_causal=True), w=(8, 48)), (2, 5, 8)),
    "multihead attention": (lambda: SelfAttention(), (2, 5, 8)),
    "multihead attention biased": (lambda: SelfAttention(add_bias_kv=True, add_zero_attn=True), (2, 5, 8)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), (2, 5, 8)),
    "encoder layer first": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.2, F.gelu, norm_first=True), (2, 5, 8)),
    "selu": (lambda: nn.Sequential(nn.Linear(8, 8), nn.SELU(True), nn.AlphaDropout(0.3), nn.Tanh()), (5, 8)),
    "mobile": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(True), nn.Conv2d(4, 4, 3), nn.Hardswish(True)
        ),
        (2, 3, 6, 6),
    ),
    "pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2), nn.Dropout2d(0.5, True)
        ),
        (2, 3, 6, 6),
    ),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, autocast: bool) -> None:
    make, shape = BLOCKS[name]
    plain, plain_state = run(make, shape, lean=False, autocast=autocast)
    lean, lean_state = run(make, shape, lean=True, autocast=autocast)
    assert same_bits(plain_state, lean_state)
    for a, b in zip(plain, lean, strict=True):
        assert same_bits(a, b)


# What no rule can serve is kept, and the gradients are plain's all the same.
KEPT = table(
    {
        "Hypot0 const": lambda h, t: torch.hypot(h, t.const(8)),  # the result is saved before the operand can be noted
        "Copysign0 const": lambda h, t: h.copysign(t.const(8)),
        "Add0 const dead": lambda h, t: h + t.random(8),
        "Addcmul0 const dead": lambda h, t: h.addcmul(t.random(8), t.random(8)),
        "Lerp1 const dead": lambda h, t: h.lerp(t.random(8), t.random(8)),
        "Complex0 const dead": lambda h, t: torch.complex(h.float(), t.random(8).float()).abs(),
        "Add0 its own memory": lambda h, t: (lambda y: y.add_(y.detach()))(h.cos()),
        "Add0 its own data": lambda h, t: (lambda y: y.add_(y.data))(h.cos()),
        "Embedding0 max norm": lambda h, t: F.embedding(t.index(9, 2, 4, 6), t.leaf(9, 8), max_norm=1.0) + h,
        "Round1 decimals": lambda h, t: torch.round(h, decimals=2) + h,
        "CopySlices0": lambda h, t: set_rows(h.cos(), t.random(8)),
        "IndexPut0": lambda h, t: set_mask(h.cos(), t.mask(2, 4, 6, 8)),
        "RreluWithNoise0": lambda h, t: F.rrelu(h, training=True),
        "ToCopy0 memory format": lambda h, t: h.to(memory_format=torch.channels_last).mean(1),
        "ToCopy0 float memory format": lambda h, t: h.double(memory_format=torch.channels_last).mean(1),
    }
)


def set_rows(y: Tensor, rows: Tensor) -> Tensor:
    y[:, 0] = 0.5
    y[:, :, 1] = rows
    return y


def set_mask(y: Tensor, mask: Tensor) -> Tensor:
    y[mask] = -1.0
    return y


@pytest.mark.parametrize(("case", "dtype"), [p for case in KEPT for p in case.parameters()])
def test_kept_or_not_the_gradients_are_plain(case: Case, dtype: torch.dtype) -> None:
    plain, lean = step(case, dtype, lean=False), step(case, dtype, lean=True)
    assert same_bits(plain.random_state, lean.random_state)
    for a, b in zip(plain.outputs + plain.gradients, lean.outputs + lean.gradients, strict=True):
        assert same_bits(a, b)


def test_one_weight_looked_up_twice_with_max_norm() -> None:
    """The second look-up changes the weight, as plain PyTorch allows."""

    def gradient(lean: bool) -> Tensor:
        weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        scale = torch.linspace(1, 2, 8).requires_grad_()
        with region(lean):
            first = F.embedding(torch.tensor([0, 1]), weight, max_norm=2.0) * scale
            second = F.embedding(torch.tensor([1, 2]), weight, max_norm=0.5) * scale
        torch.autograd.backward([first, second], [torch.ones(2, 8), torch.ones(2, 8)])
        assert scale.grad is not None
        return scale.grad

    assert same_bits(gradient(True), gradient(False))


SECOND_OUTPUTS: dict[str, tuple[Function, str]] = {
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), "result1"),
    "max_pool2d indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], "result1"),
    "max_pool3d": (lambda x: F.max_pool3d(x[None], 2), "result1"),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), "result1"),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x[None], 2), "result1"),
    "logsigmoid": (lambda x: F.logsigmoid(x), "buffer"),
}


@pytest.mark.parametrize("name", SECOND_OUTPUTS)
def test_second_outputs_are_rebuilt(name: str) -> None:
    """Index maps take 8 bytes an element: they are stored as recipes."""
    function, field = SECOND_OUTPUTS[name]
    w = torch.randn(3, 4, 8, 8, requires_grad=True)
    with leangrad.saving(min_bytes=0):
        h = w.sin()
        y = function(h * w)
        value = packed_in(getattr(y.grad_fn, f"_raw_saved_{field}"))
    assert type(value) is Value
    assert value.tensor is None
    expected = torch.autograd.grad(function(w.sin() * w), w, torch.ones_like(y))[0]
    assert same_bits(torch.autograd.grad(y, w, torch.ones_like(y))[0], expected)


NOISE: dict[str, Function] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout inplace": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "fused attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "fused attention causal": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.3, True),
}


@pytest.mark.parametrize("name", NOISE)
def test_random_numbers_are_drawn_again(name: str) -> None:
    """No mask and no factor is kept: somewhere in the graph stands a product with numbers that have a recipe."""
    w = torch.randn(2, 4, 6, 8, requires_grad=True)
    with leangrad.saving(min_bytes=0):
        nodes = [NOISE[name](w.sin() * w).grad_fn]
        found = []
        for node in nodes:
            if type(node).__name__ == "MulBackward0":
                other = node._raw_saved_other.data  # type: ignore[union-attr]
                found += [other] if type(other) is Value and other.op == "dropout" else []
            nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]  # type: ignore[union-attr]
    assert [value.tensor for value in found] == [None]


def test_replaying_a_copy_does_not_touch_the_parameter() -> None:
    """`to(copy=True)` replays as a copy: were the parameter itself handed on, the next op might write over it."""
    w = torch.randn(8, 8, requires_grad=True)
    before = w.detach().clone()
    with leangrad.saving(min_bytes=0):
        y = w.to(torch.float32, copy=True).mul(2).cos().add(1).sin()
    y.backward(torch.ones_like(y))
    assert same_bits(w.detach(), before)


def test_no_rule_for_what_must_not_be_computed_twice() -> None:
    never = ("Mm", "Bmm", "Addmm", "Baddbmm", "Convolution", "ScaledDotProduct", "Bernoulli", "Rnn", "Lstm", "Normal0")
    assert not [node for node in RULES if node.startswith(never)]


def test_check_fails_where_a_rule_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: a rule that is wrong, and a rule that is gone."""
    case = Case("CosBackward0", "", lambda h, t: h.cos())
    (rule,) = RULES["CosBackward0"]
    check(case, torch.float32)
    function = rule.function
    object.__setattr__(rule, "function", torch.sin)
    rule_builder.forget()
    try:
        with pytest.raises(AssertionError):
            check(case, torch.float32)
    finally:
        object.__setattr__(rule, "function", function)
        rule_builder.forget()
    other = Case("SinBackward0", "", lambda h, t: h.cos())
    with pytest.raises(AssertionError, match="is rebuilt by"):
        check(other, torch.float32)
