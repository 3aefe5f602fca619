"""Habits of real training code: shared, frozen, random, counted, in place on views, a Function of one's own."""

# A module's call returns Any.
# mypy: disable-error-code="no-any-return"

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, cross_entropy, images, mean_square, tokens

VOCABULARY = 512


class Siamese(nn.Module):
    """One encoder for both pictures, one block for every depth, InstanceNorm throughout."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, 2, 2)
        self.norm = nn.InstanceNorm2d(width, affine=True)
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.InstanceNorm2d(width),
            nn.ELU(),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.head = nn.Linear(width, 32)

    def encode(self, x: Tensor) -> Tensor:
        x = F.elu(self.norm(self.stem(x)))
        for _ in range(3):
            x = x + self.block(x)
        return F.normalize(self.head(x.flatten(2).mean(-1)), dim=-1)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.encode(one) @ self.encode(other).t() / 0.1


class Adapted(nn.Module):
    """Fine-tuning: the stem and a block in the middle are frozen, one block trains only its biases."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.first, self.middle, self.biased, self.last = (self.block(width) for _ in range(4))
        self.head = nn.Linear(width, 10)
        self.stem.requires_grad_(False)
        self.middle.requires_grad_(False)
        for name, parameter in self.biased.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        self.train()

    @staticmethod
    def block(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.SiLU(),
            nn.Conv2d(width, width, 1),
            nn.Softplus(),
        )

    def train(self, mode: bool = True) -> "Adapted":
        super().train(mode)
        self.stem.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (self.first, self.middle, self.biased, self.last):
            x = x + block(x)
        return self.head(x.amax((2, 3)))


class Noisy(nn.Module):
    """Every kind of dropout, and noise drawn by hand."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2, 1)
        self.conv = nn.Conv2d(32, 32, 3, padding=1)
        self.channels = nn.Dropout2d(0.2)
        self.patch = nn.Conv2d(32, width, 4, 4)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.drop_inplace = nn.Dropout(0.1), nn.Dropout(0.1, inplace=True)
        self.head = nn.Linear(width, 10)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.drop(self.proj(h.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        x = self.channels(F.relu(self.stem(F.dropout(x, 0.05, self.training))))
        x = F.alpha_dropout(F.selu(self.conv(x)), 0.1, self.training)
        x = F.dropout1d(self.patch(x).flatten(2), 0.1, self.training).transpose(1, 2)
        x = x + self.attend(x)
        h = self.drop_inplace(F.gelu(self.expand(x)))
        h = self.contract(h)
        mask = torch.rand(h.shape[:-1], device=h.device).lt(0.9).unsqueeze(-1)
        x = x + h * mask / 0.9
        return self.head(self.drop(x.mean(1)))


class Warming(nn.Module):
    """Scale and shift follow the number of forward calls, as in schedules that live in the model."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.calls = 0
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.up = nn.ModuleList([nn.Linear(width, 4 * width) for _ in range(layers)])
        self.down = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        scale, shift = 1.0 - 0.5**self.calls, 0.01 * self.calls
        x = self.embedding(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            value, gate = up(norm(x) * scale + shift).chunk(2, dim=-1)
            x = x + down(value * torch.sigmoid(gate * (1 + shift)) - shift) / (1 + scale)
        return self.head(x.clamp(-8 - shift, 8 + shift))


class Shifting(nn.Module):
    """In-place ops on views: slices that are added to, scaled, copied into and masked."""

    def __init__(self, width: int = 128, prompts: int = 8) -> None:
        super().__init__()
        self.prompts, self.fold = prompts, width // 4
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.prompt = nn.Parameter(torch.randn(prompts, width) * 0.1)
        self.level = nn.Parameter(torch.ones(()))
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.qk, self.v = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def shift(self, x: Tensor) -> Tensor:
        """A quarter of the channels comes from the next token, a quarter from the one before."""
        out = torch.zeros_like(x)
        out[:, :-1, : self.fold] = x[:, 1:, : self.fold]
        out[:, 1:, self.fold : 2 * self.fold].copy_(x[:, :-1, self.fold : 2 * self.fold])
        out[:, :, 2 * self.fold :] = x[:, :, 2 * self.fold :]
        return out

    def attend(self, x: Tensor, future: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, dim=-1)
        scores = (q @ k.transpose(-2, -1)).mul_(x.shape[-1] ** -0.5)
        scores.masked_fill_(future, float("-inf"))
        return F.softmax(scores, dim=-1) @ self.v(x)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.embedding(ids)
        y[:, : self.prompts] += self.prompt
        y[..., 0].mul_(self.level)
        h = self.inner(self.shift(y))
        h[..., ::2].mul_(0.5)
        h.view(*h.shape[:-1], 2, -1)[..., 1, :].tanh_()
        y = self.norm(y + self.outer(h))
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu_(1)
        y = y + self.attend(y, future)
        y[:, -1].zero_()
        return self.head(y)


class Swish(torch.autograd.Function):
    """x * sigmoid(x) that keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class Quantize(torch.autograd.Function):
    """Round to steps of a learned size; the gradient passes straight through where nothing was clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Tensor) -> Tensor:
        level = x / size
        kept = level.abs() < 127
        rounded = level.round().clamp(-127, 127)
        ctx.save_for_backward(rounded - level * kept, kept)
        return (rounded * size).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        slope, kept = ctx.saved_tensors
        return grad * kept, (grad * slope).sum()


class SuperResolution(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3)
        self.body = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks)])
        self.size = nn.Parameter(torch.tensor(0.05))
        self.tail = nn.Conv2d(width, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(F.pad(x, (1, 1, 1, 1)))
        for conv in self.body:
            h = h + conv(Quantize.apply(Swish.apply(h), self.size))
        return F.pixel_shuffle(self.tail(h), 2)


def picture_pairs() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64)


CASES = (
    Case("shared", Siamese, picture_pairs, cross_entropy, frozenset({"conv", "shared"})),
    Case("frozen", Adapted, images(4, 3, 64, 64), cross_entropy, frozenset({"conv", "batchnorm", "frozen"})),
    Case(
        "dropout",
        Noisy,
        images(4, 3, 64, 64),
        cross_entropy,
        frozenset({"conv", "attention", "dropout", "inplace"}),
    ),
    Case("scalar", Warming, tokens(4, 128, VOCABULARY), cross_entropy, frozenset({"scalar"})),
    Case("views", Shifting, tokens(8, 128, VOCABULARY), cross_entropy, frozenset({"attention", "inplace", "views"})),
    Case("custom", SuperResolution, images(4, 3, 48, 48), mean_square, frozenset({"conv", "custom"})),
)
