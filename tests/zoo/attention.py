"""Transformers: GPT, BERT, T5, Llama, ViT, DiT, each as its own papers and repositories write it."""

# A module's call returns Any.
# mypy: disable-error-code="no-any-return"

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, cross_entropy, images, masked_cross_entropy, mean_square, tokens

VOCABULARY = 512


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))

    def feed(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        return self.drop(self.c_out(x))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.feed(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(128, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([GPTBlock(width, heads, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.size(1), device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class BERTLayer(nn.Module):
    """Post-norm, with `nn.MultiheadAttention` and a padding mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        h, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.norm1(x + self.dropout(h))
        return self.norm2(x + self.dropout(self.feed(x)))


class BERT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width, padding_idx=0), nn.Embedding(128, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([BERTLayer(width, 4) for _ in range(layers)])
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        x = F.dropout(x, 0.1, self.training)
        for layer in self.layers:
            x = layer(x, ~mask)
        return self.head(x)


def padded_tokens() -> tuple[Tensor, Tensor]:
    """Rows of different lengths and the mask of what is not padding."""
    lengths = torch.randint(64, 129, (4, 1))
    mask = torch.arange(128) < lengths
    return torch.randint(1, VOCABULARY, (4, 128)) * mask, mask


class ScaleNorm(nn.Module):
    """T5's norm: a scale, no mean, no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class T5Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = ScaleNorm(width), ScaleNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.wi, self.wo = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def shape(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = self.shape(self.q(h)), self.shape(self.k(h)), self.shape(self.v(h))
        scores = torch.matmul(q, k.transpose(3, 2)) / math.sqrt(q.shape[-1]) + bias
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
        weights = weights / weights.sum(-1, keepdim=True)
        weights = F.dropout(weights, p=0.1, training=self.training)
        h = torch.matmul(weights.to(v.dtype), v).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.o(h), p=0.1, training=self.training)
        h = self.wo(F.dropout(F.relu(self.wi(self.norm2(x))), p=0.1, training=self.training))
        return x + F.dropout(h, p=0.1, training=self.training)


class T5(nn.Module):
    """One relative bias, shared by all layers; each position sees those before it."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3, buckets: int = 32) -> None:
        super().__init__()
        self.buckets = buckets
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.relative = nn.Embedding(buckets, heads)
        self.layers = nn.ModuleList([T5Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = ScaleNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def bucket(self, distance: Tensor) -> Tensor:
        """Near distances have a bucket each, far ones share theirs by the logarithm."""
        exact = self.buckets // 2
        far = torch.log(distance.clamp(min=1) / exact) / math.log(128 / exact) * (self.buckets - exact)
        return torch.where(distance < exact, distance, (exact + far.long()).clamp(max=self.buckets - 1))

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        behind = place[:, None] - place[None, :]
        bias = self.relative(self.bucket(behind.clamp(min=0))).permute(2, 0, 1).unsqueeze(0)
        x = F.dropout(self.embedding(ids), 0.1, self.training)
        for layer in self.layers:
            x = layer(x, bias, behind < 0)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.input_norm, self.post_norm = RMSNorm(width), RMSNorm(width)
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.size, bias=False)
        self.wv = nn.Linear(width, groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def repeat(self, x: Tensor) -> Tensor:
        B, G, T, D = x.shape
        n = self.heads // self.groups
        return x[:, :, None, :, :].expand(B, G, n, T, D).reshape(B, G * n, T, D)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        h = self.input_norm(x)
        q = self.wq(h).view(B, T, self.heads, self.size).transpose(1, 2)
        k = self.wk(h).view(B, T, self.groups, self.size).transpose(1, 2)
        v = self.wv(h).view(B, T, self.groups, self.size).transpose(1, 2)
        q = (q * cos + rotate_half(q) * sin).to(v.dtype)
        k = (k * cos + rotate_half(k) * sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, C))
        h = self.post_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 128, heads: int = 8, groups: int = 2, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([LlamaBlock(width, heads, groups) for _ in range(layers)])
        self.norm, self.output = RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        size = width // heads
        speed = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angle = torch.outer(torch.arange(128), speed).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.cos[: ids.shape[1]].to(x.dtype), self.sin[: ids.shape[1]].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x)).float()


class ViTBlock(nn.Module):
    """Attention by einsum, a gated MLP, and stochastic depth."""

    def __init__(self, width: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.heads, self.drop_path = heads, drop_path
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 6 * width), nn.Linear(3 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * (C // self.heads) ** -0.5
        h = torch.einsum("bhij,bhjd->bhid", F.dropout(scores.softmax(dim=-1), 0.1, self.training), v)
        return self.proj(h.transpose(1, 2).reshape(B, N, C))

    def feed(self, x: Tensor) -> Tensor:
        value, gate = self.fc1(x).chunk(2, -1)
        return self.fc2(value * F.gelu(gate))

    def drop(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_path == 0:
            return x
        keep = 1 - self.drop_path
        mask = torch.floor(keep + torch.rand((len(x), 1, 1), dtype=x.dtype, device=x.device))
        return x.div(keep) * mask

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.feed(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.blocks = nn.Sequential(*(ViTBlock(width, heads, 0.1 * i) for i in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class DiTBlock(nn.Module):
    """Timestep and class steer shift, scale and gate of both halves (FiLM)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(approximate="tanh"), nn.Linear(3 * width, width))
        self.film = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        B, N, C = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.film(c).chunk(6, dim=1)
        h = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        q, k, v = (t.view(B, N, self.heads, -1).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        x = x + gate1[:, None] * self.proj(h)
        h = torch.addcmul(shift2[:, None], self.norm2(x), 1 + scale2[:, None])
        return x + gate2[:, None] * self.mlp(h)


class DiT(nn.Module):
    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, 2, 2)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(10, width)
        self.blocks = nn.ModuleList([DiTBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.film, self.out = nn.Linear(width, 2 * width), nn.Linear(width, 16)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        speed = torch.exp(torch.arange(32, device=x.device) * (-math.log(10000.0) / 32))
        angle = t[:, None] * speed
        c = self.time(torch.cat([angle.cos(), angle.sin()], dim=-1).to(x.dtype)) + self.label(y)
        h = self.patch(x)
        B, _, H, W = h.shape
        h = h.flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.film(F.silu(c)).unsqueeze(1).chunk(2, dim=-1)
        h = self.out(self.norm(h) * (1 + scale) + shift)
        return h.view(B, H, W, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(B, 4, 2 * H, 2 * W)


def noisy_latents() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 4, 32, 32), torch.randint(1000, (4,)), torch.randint(10, (4,))


CASES = (
    Case("gpt", GPT, tokens(4, 128, VOCABULARY), cross_entropy, frozenset({"attention", "dropout"})),
    Case("bert", BERT, padded_tokens, masked_cross_entropy, frozenset({"attention", "dropout"})),
    Case("t5", T5, tokens(4, 128, VOCABULARY), cross_entropy, frozenset({"attention", "dropout"})),
    Case("llama", Llama, tokens(4, 128, VOCABULARY), cross_entropy, frozenset({"attention"})),
    Case("vit", ViT, images(8, 3, 64, 64), cross_entropy, frozenset({"conv", "attention", "dropout"})),
    Case("dit", DiT, noisy_latents, mean_square, frozenset({"conv", "attention"})),
)
