"""Models that loop or route: a selective scan, recurrent nets, a mixture of experts."""

# A module's call returns Any.
# mypy: disable-error-code="no-any-return"

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, cross_entropy, tokens

VOCABULARY = 512


class ScanBlock(nn.Module):
    """A selective state space (Mamba), its scan a plain loop over time."""

    def __init__(self, width: int, state: int = 16, rank: int = 8) -> None:
        super().__init__()
        inner = 2 * width
        self.inner, self.state, self.rank = inner, state, rank
        self.norm = nn.LayerNorm(width)
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1, state + 1).float().log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def scan(self, u: Tensor) -> Tensor:
        dt, B, C = self.x_proj(u).split([self.rank, self.state, self.state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        A = -torch.exp(self.A_log.float())
        h = u.new_zeros(u.shape[0], self.inner, self.state)
        outputs = []
        for t in range(u.shape[1]):
            decay = torch.exp(dt[:, t, :, None] * A)
            h = decay * h + (dt[:, t] * u[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(1)
            outputs.append((h * C[:, t, None, :]).sum(-1))
        return torch.stack(outputs, dim=1) + u * self.D

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(self.norm(x)).chunk(2, -1)
        u = self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.out_proj(self.scan(F.silu(u)).to(z.dtype) * F.silu(z))


class Scan(nn.Module):
    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([ScanBlock(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """A word model: LSTM below, GRU above, and the embedding is the head as well."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.gru = nn.GRU(width, width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, VOCABULARY)
        self.head.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids))
        # oneDNN has no bfloat16 LSTM for many CPUs (torch 2.13 raises), so it runs in the parameters' dtype.
        with torch.autocast(x.device.type, enabled=False):
            x, _ = self.lstm(x)
        h, _ = self.gru(x.transpose(0, 1))
        return self.head(self.drop(x + h.transpose(0, 1)))


class Experts(nn.Module):
    """Each token goes to the two experts that it scores highest; how many an expert gets, the data says."""

    def __init__(self, width: int, experts: int = 4, choices: int = 2) -> None:
        super().__init__()
        self.choices = choices
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(experts)]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        scores = F.softmax(self.router(flat), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(scores, self.choices, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == i)
            mine = expert(flat.index_select(0, token)) * weights[token, rank, None]
            out.index_add_(0, token, mine.to(out.dtype))
        load = F.one_hot(chosen, scores.shape[-1]).sum(1).float().mean(0)
        return out.view_as(x), (load * scores.mean(0)).sum() * scores.shape[-1]


class MixtureBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.experts = nn.Conv1d(width, width, 5, groups=4), Experts(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        past = F.pad(self.norm1(x).transpose(1, 2), (4, 0))
        x = x + self.mix(past).transpose(1, 2)
        h, balance = self.experts(self.norm2(x))
        return x + h, balance


class Mixture(nn.Module):
    """Returns the logits and the routers' balance, which joins the loss."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([MixtureBlock(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        balance = x.new_zeros(())
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        return self.head(self.norm(x)), balance


def mixture_loss(output: tuple[Tensor, Tensor]) -> Tensor:
    logits, balance = output
    return cross_entropy(logits) + 0.01 * balance


CASES = (
    Case("mamba", Scan, tokens(8, 24, VOCABULARY), cross_entropy, frozenset({"recurrent", "conv"})),
    Case(
        "lstm_gru_tied",
        Recurrent,
        tokens(8, 64, VOCABULARY),
        cross_entropy,
        frozenset({"recurrent", "tied", "dropout"}),
    ),
    Case("moe", Mixture, tokens(4, 128, VOCABULARY), mixture_loss, frozenset({"routing", "conv", "inplace"})),
)
