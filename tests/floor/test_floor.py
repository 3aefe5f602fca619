"""The floor, equal to the byte to counts made by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrad import floor

FLOAT = 4  # bytes


class Apply(nn.Module):
    """A model written as a function of its parts."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def classes(logits: Tensor) -> Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, torch.arange(len(rows)) % rows.shape[-1])


# The three hand counts


def test_mlp_keeps_one_map_per_hidden_layer() -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 10))
    result = floor(net, torch.randn(8, 16), classes)
    # Each hidden layer: the pre-activation h. GELU's backward reads h, and the next layer's weight gradient reads
    # GELU(h), which is rebuilt from it. The first layer reads the batch, which is the caller's.
    # The loss: log_softmax's backward reads the log-probabilities. They are rebuilt from the logits, a product; to keep
    # the one or the other costs the same. The targets and the total weight of the loss are rebuilt, too.
    assert [kept.bytes for kept in result.tensors] == [8 * 64 * FLOAT, 8 * 48 * FLOAT, 8 * 10 * FLOAT]
    assert [kept.module for kept in result.tensors] == ["0", "2", "4"]
    assert [kept.op for kept in result.tensors] == ["addmm"] * 3
    assert result.tensors[0].shape == (8, 64)
    assert result.tensors[0].dtype == torch.float32
    assert result.bytes == FLOAT * 8 * (64 + 48 + 10)


class Residual(nn.Module):
    def __init__(self, width: int, inplace: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=self.inplace)))
        if self.inplace:
            h += x
            return F.relu(h, inplace=True)
        return F.relu(h + x)


@pytest.mark.parametrize("inplace", [False, True])
def test_residual_net_keeps_each_convolution_once(inplace: bool) -> None:
    width = 8
    stem = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace), nn.MaxPool2d(2)]
    blocks = [Residual(width, inplace) for _ in range(3)]
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))
    result = floor(net, torch.randn(4, 3, 16, 16), classes)
    # Batch norm's backward reads the convolution's output c_k, so every c_k is kept. They are enough: with the batch's
    # statistics rebuilt from c_k, x_k = relu(bn(c_2k) + x_{k-1}) unrolls to the stem, and so do ReLU's outputs, the
    # maximum's indices and the input of every convolution. The head reads the pooled x_3, rebuilt as well.
    stem_map, block_map = 4 * width * 16 * 16 * FLOAT, 4 * width * 8 * 8 * FLOAT
    assert [kept.op for kept in result.tensors] == ["convolution"] * 7 + ["addmm"]
    assert result.bytes == stem_map + 6 * block_map + 4 * 5 * FLOAT


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        h = self.fc(self.ln_2(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return x + self.drop(self.out(h))


def gpt(layers: int) -> nn.Module:
    """Tokens of 50 kinds, width 32, 4 heads."""
    blocks = [GPTBlock(32, 4) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(50, 32), nn.Dropout(0.1), *blocks, nn.LayerNorm(32), nn.Linear(32, 50))


#: For batch B, length T, width D, H heads, each block keeps
#:   qkv     3D  attention's backward reads q, k and v: parts of one product
#:   mixed    D  attention's backward reads its own output, also the input of `proj`
#:   lse      H  and the log of its softmax's denominators, one for each head and token
#:   proj     D  `mixed` does not give it without a second product. It is needed: ln_2 and fc's weight gradient read
#:               x + drop(proj). To keep that sum instead costs the same.
#:   fc      4D  from it all five steps of the written-out GELU are rebuilt, and the input of `out`
#:   out      D  for the next norm, as with `proj`
#: numbers for each token. Dropout's masks are rebuilt from the random state; the embedding from its table and the ids.
def gpt_bytes(layers: int, B: int, T: int, D: int = 32, H: int = 4, vocabulary: int = 50) -> int:
    return FLOAT * B * T * (layers * (3 * D + D + H + D + 4 * D + D) + vocabulary)


@pytest.mark.parametrize("layers", [1, 3])
def test_gpt_with_dropout_and_written_out_gelu(layers: int) -> None:
    result = floor(gpt(layers), torch.randint(50, (2, 16)), classes)
    assert result.bytes == gpt_bytes(layers, B=2, T=16)
    assert [kept.shape for kept in result.tensors[:3]] == [(32, 96), (2, 4, 16, 8), (2, 4, 16)]
    assert result.tensors[0].module == "2.qkv"


# Where the floor lies


def test_upstream_of_a_cast() -> None:
    net = nn.Linear(16, 100, dtype=torch.bfloat16)
    # Eager keeps float32 log-probabilities; they are rebuilt from bfloat16 logits.
    assert floor(net, torch.randn(8, 16, dtype=torch.bfloat16), lambda y: classes(y.float())).bytes == 8 * 100 * 2


def test_upstream_of_repeated_keys() -> None:
    def attend(self: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        return F.scaled_dot_product_attention(q, k, v)

    net = Apply(attend, q=nn.Linear(16, 64), k=nn.Linear(16, 16), v=nn.Linear(16, 16))
    # For each of 2 x 10 tokens: q and the output of 8 heads, k and v of 2, and 8 logs of denominators.
    assert floor(net, torch.randn(2, 10, 16), torch.mean).bytes == FLOAT * 2 * 10 * (64 + 64 + 16 + 16 + 8)


def test_only_the_slice_that_is_used() -> None:
    net = Apply(lambda self, x: self.last(self.first(x)[:, 0]), first=nn.Linear(16, 32), last=nn.Linear(32, 4))
    result = floor(net, torch.randn(8, 10, 16), lambda y: y.square().mean())
    # `last` reads one of ten tokens; the square reads its output.
    assert result.bytes == FLOAT * 8 * (32 + 4)
    assert result.tensors[0].op == "addmm (part)"


def test_slice_of_a_slice_and_its_base() -> None:
    def nested(self: Any, x: Tensor) -> Tensor:
        half = self.first(x)[:, :16]
        return half.sin().sum() + half[:, :4].exp().sum()

    # sin reads half the columns; exp's result is rebuilt from a part of them.
    assert floor(Apply(nested, first=nn.Linear(8, 32)), torch.randn(4, 8)).bytes == FLOAT * 4 * 16


def test_mask_that_backward_makes_may_be_kept() -> None:
    # amax's backward compares its input with the maximum: no gradient is in that, so a byte per element is enough.
    assert floor(nn.Linear(8, 32), torch.randn(4, 8), lambda y: y.amax(1).mean()).bytes == 4 * 32


def test_autocast() -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10))
    result = floor(net, torch.randn(8, 16), classes, autocast=torch.bfloat16)
    # The products are in bfloat16; casts of weights and of the batch are rebuilt from what the caller has.
    assert result.bytes == 2 * 8 * (64 + 10)
    assert {kept.dtype for kept in result.tensors} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("layer", "shape"), [(lambda: nn.Linear(8, 8), (4, 8)), (lambda: nn.Conv1d(8, 8, 1), (4, 8, 1))]
)
def test_frozen_layer_needs_no_input(layer: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    net = nn.Sequential(layer(), layer(), layer())
    net[1].requires_grad_(False)
    # The second layer has no weight gradient, so the first one's output is not needed; eager's convolution keeps it.
    # The square reads the last output.
    result = floor(net, torch.randn(shape), lambda y: y.square().mean())
    assert [(kept.module, kept.bytes) for kept in result.tensors] == [("1", FLOAT * 32), ("2", FLOAT * 32)]


def test_frozen_first_layer_in_eval_mode() -> None:
    stem = nn.Sequential(nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8)).requires_grad_(False).eval()
    net = nn.Sequential(nn.Conv1d(2, 4, 1), stem, nn.Conv1d(8, 3, 1))
    # With fixed statistics and a frozen weight, batch norm's backward only scales; its output is the last input.
    result = floor(net, torch.randn(5, 2, 6), torch.mean)
    assert [(kept.module, kept.bytes) for kept in result.tensors] == [("1.0", FLOAT * 5 * 8 * 6)]


def test_in_place_ops() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        h.mul_(2.0)
        h[:, :8].add_(self.few(x))
        h[:, 8:].tanh_()
        return self.last(h)

    # tanh's backward reads its result, the last layer reads all of h: the state of h before tanh gives both, so neither
    # the two products nor a second copy of h are kept.
    net = Apply(forward, first=nn.Linear(16, 32), few=nn.Linear(16, 8), last=nn.Linear(32, 1))
    result = floor(net, torch.randn(4, 16), torch.mean)
    assert result.bytes == FLOAT * 4 * 32


def test_in_place_ops_on_a_part() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        before = h.exp()
        h[:, :8].mul_(self.few(x))
        return (before * h).mean()

    # exp's backward reads exp(h) of the first state, the product with h reads the second; the in-place product reads 8
    # columns of the first and all of few(x). The first state and few(x) give everything.
    net = Apply(forward, first=nn.Linear(16, 32), few=nn.Linear(16, 8))
    result = floor(net, torch.randn(4, 16))
    assert [kept.bytes for kept in result.tensors] == [FLOAT * 4 * 32, FLOAT * 4 * 8]


def test_a_part_that_an_in_place_op_did_not_touch() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        before, top = h.exp(), h[:2]
        h[2:].add_(self.other(x)[2:])
        return before.mean() + top.sin().mean()

    # The upper rows are still those of the first state, which exp needs anyway; the other product is not needed.
    net = Apply(forward, first=nn.Linear(16, 32), other=nn.Linear(16, 32))
    assert floor(net, torch.randn(4, 16)).bytes == FLOAT * 4 * 32


def test_a_buffer_filled_in_slices() -> None:
    def scan(self: Any, x: Tensor) -> Tensor:
        states = torch.empty(5, 3, 16)
        state = torch.zeros(3, 16)
        for step in range(5):
            state = torch.tanh(self.inner(state) + x[step])
            states[step] = state
        return self.last(states)

    # tanh's backward reads its result, which is also what the buffer and the next step are made of: 5 products.
    # Of the last layer nothing is needed.
    net = Apply(scan, inner=nn.Linear(16, 16), last=nn.Linear(16, 2))
    result = floor(net, torch.randn(5, 3, 16), torch.mean)
    assert result.bytes == FLOAT * 5 * 3 * 16


def test_routing_that_depends_on_the_data() -> None:
    def route(self: Any, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            if rows.numel() > 0:
                out[rows] += weight[rows, None] * expert(x[rows])
        return out

    experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)])
    net = Apply(route, router=nn.Linear(16, 4), experts=experts)
    # Every token goes to one expert: 4 router logits give its weight and its rows, 64 pre-activations, and 16 outputs
    # that the weight's gradient reads.
    assert floor(net, torch.randn(40, 16), torch.mean).bytes == FLOAT * 40 * (4 + 64 + 16)


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_keeps_no_mask(inplace: bool) -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3, inplace), nn.Linear(64, 1))
    assert floor(net, torch.randn(8, 16), torch.mean).bytes == FLOAT * 8 * 64
    # With nothing but dropout after the product, not even its input is needed.
    assert floor(net[:2], torch.randn(8, 16), torch.mean).bytes == 0


def test_checkpoint_has_the_floor_of_the_plain_model() -> None:
    net, ids = gpt(2), torch.randint(50, (2, 16))

    def recomputed(self: Any, ids: Tensor) -> Tensor:
        x = net[1](net[0](ids))
        for block in (net[2], net[3]):
            x = checkpoint(block, x, use_reentrant=False)
        return net[5](net[4](x))

    assert floor(Apply(recomputed, net=net), ids, classes).bytes == gpt_bytes(2, B=2, T=16)


def test_a_buffer_that_the_forward_changes() -> None:
    def scaled(self: Any, x: Tensor) -> Tensor:
        y = self.first(x) * self.scale.exp()
        if self.changes:
            self.scale.mul_(0.9).add_(0.1)
        return y

    net = Apply(scaled, first=nn.Linear(16, 32), scale=torch.rand(32), changes=False)
    assert floor(net, torch.randn(4, 16), torch.mean).bytes == 0
    net.changes = True
    assert floor(net, torch.randn(4, 16), torch.mean).bytes == FLOAT * 32  # the scale as it was, or its exp


def test_statistics_that_batch_norm_changes_unsaid() -> None:
    def normed(self: Any, x: Tensor) -> Tensor:
        return self.norm(self.first(x) * self.norm.running_var.exp())

    # Batch norm's backward reads its input, rebuilt from the product and the variance as it was, or kept as it is.
    # The gradient of the product also reads exp(variance). The op's schema does not say that it changes the variance.
    net = Apply(normed, first=nn.Linear(16, 32), norm=nn.BatchNorm1d(32))
    assert floor(net, torch.randn(4, 16), lambda y: y.square().mean()).bytes == FLOAT * (4 * 32 + 32)
    net.norm.eval()
    assert floor(net, torch.randn(4, 16), lambda y: y.square().mean()).bytes == FLOAT * 4 * 32


def test_a_constant_of_the_forward_is_free() -> None:
    net = Apply(lambda self, x: self.first(x) * torch.tensor([1.0, 2.0]).exp(), first=nn.Linear(4, 2))
    assert floor(net, torch.randn(3, 4), torch.mean).bytes == 0


def test_a_kernel_past_the_dispatcher_is_an_error() -> None:
    def unseen(self: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.numpy()[:] = 1.0
        return self.first(x) * out

    with pytest.raises(RuntimeError, match="no op has written"):
        floor(Apply(unseen, first=nn.Linear(4, 4)), torch.randn(4, 4), torch.mean)
