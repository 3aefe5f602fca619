"""The steps of random programs for the compiled engine: those of the ledger's fuzz, and what only a graph meets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.fuzz_steps import RECORDED, UNRECORDED, Make, Run, fit, table

LEDGERS_OWN = {"offloaded", "fresh_edit", "fresh_detach_edit"}  # hooks and edits that Dynamo does not trace
CHECKPOINTED = {"checkpointed", "region", "selective", "random_region"}  # here the user asks for ops to run twice
CHANGING = {
    "count",
    "moving_average",
    "buffer_view",
    "buffer_edit",
    "running",
    "running_norm",
    "leaf_edit",
}  # they write into buffers, or into a parameter
DRAWING = {
    "alpha_dropout",
    "attention",
    "bernoulli",
    "dropout",
    "dropout_in_place",
    "gumbel",
    "noise",
    "noisy_gate",
    "permuted",
    "random_region",
    "rrelu",
    "selective",
}  # they draw random numbers
# AOTAutograd gives other results than eager: other numbers, hidden edits of views that it loses, gradients of outputs
# whose elements share memory.
AOT_DIFFERS = {"rrelu", "no_grad_edit", "no_grad_view_edit", "overlapping"}
BUFFERS = ("frozen", "mean", "var", "counts")


class Modules(Run):
    """The leaves and buffers of a program, with modules that its steps share."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.table = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.table.weight
        torch.random.set_rng_state(state)
        self.counts = torch.zeros(6)
        self.modules = [self.up, self.down, self.conv, self.norm, self.table, self.head]
        self.leaves += list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    def buffers(self) -> list[Tensor]:
        return [*(getattr(self, name) for name in BUFFERS), *self.norm.buffers()]


STEPS: dict[str, Make] = {}


def graph_step(make: Make) -> Make:
    STEPS[make.__name__] = make
    return make


def integers(t: Tensor, n: int) -> Tensor:
    """Decisions: indices below ``n`` out of floats."""
    return (table(t).detach().float() * 3).round().nan_to_num(0.0, 0.0, 0.0).clamp(-99, 99).long() % n


STEPS |= {
    "mlp": lambda run, a, b, c: run.down(F.gelu(run.up(table(a).float()))),
    "residual": lambda run, a, b, c: table(a) + run.down(run.up(table(a).float()).relu()) * c,
    "conv": lambda run, a, b, c: run.conv(table(a).float().unsqueeze(0)).squeeze(0),
    "running": lambda run, a, b, c: run.norm(table(a).float().unsqueeze(0).repeat(2, 1, 1))[1],
    "embed": lambda run, a, b, c: run.table(integers(a, 8)[:, 0]),
    "tied": lambda run, a, b, c: run.head(table(a).float())[:, :6],
    "topk": lambda run, a, b, c: table(a).topk(3, -1)[0].repeat(1, 2),
    "routed": lambda run, a, b, c: table(a).gather(1, F.gelu(table(b).float()).topk(6, -1)[1]),
    "argmax": lambda run, a, b, c: table(a).gather(1, (table(b).sin() * c).argmax(-1, keepdim=True)).expand(4, 6),
    "compared": lambda run, a, b, c: torch.where(F.silu(table(b)) > c / 4, table(a), table(b).to(a.dtype)),
    "rounded": lambda run, a, b, c: (table(b).sin() * 5).round() * table(a),
    "straight": lambda run, a, b, c: a + ((a * 4).round() / 4 - a).detach(),
    "floored": lambda run, a, b, c: (a * c) - (a * c).floor(),
    "remainder": lambda run, a, b, c: torch.remainder(a.tanh() * 5, 1.5),
    "signed": lambda run, a, b, c: (a * c).sin().sign() * a.abs(),
    "truncated": lambda run, a, b, c: table(b).sin().mul(5).int() * table(a),
    "scattered": lambda run, a, b, c: torch.zeros_like(table(a)).scatter(1, integers(b, 6), table(a)),
    "scatter_add": lambda run, a, b, c: table(b).scatter_add(1, integers(b, 6), table(a).to(b.dtype)),
    "scatter_amax": lambda run, a, b, c: (
        table(b).float().scatter_reduce(1, integers(b, 6), table(a).float().sin(), "amax")
    ),
    "index_put": lambda run, a, b, c: table(b).index_put((run.index,), table(a).to(b.dtype), accumulate=True),
    "index_add": lambda run, a, b, c: table(b).index_add(0, run.index, table(a).to(b.dtype)),
    "amax": lambda run, a, b, c: (a * c).sin().amax(-1, keepdim=True) + a,
    "amin_all": lambda run, a, b, c: a - F.silu(a).min(),
    "infinite_norm": lambda run, a, b, c: a / (1 + a.float().sin().norm(float("inf"))),
    "cummax": lambda run, a, b, c: table(a).cummax(0)[0],
    "sorted": lambda run, a, b, c: table(a).sort(-1)[0],
    "logsumexp": lambda run, a, b, c: a - a.float().logsumexp(-1, keepdim=True),
    "prod": lambda run, a, b, c: table(a)[:, :2].tanh().prod(-1, keepdim=True) + table(a),
    "var": lambda run, a, b, c: a / (a.float().var(-1, keepdim=True) + 1).sqrt(),
    "max_pool": lambda run, a, b, c: F.max_pool1d(table(a).sin().float(), 3, 1, 1),
    "adaptive_pool": lambda run, a, b, c: F.adaptive_max_pool1d(table(a).sin().float(), 3).repeat(1, 2),
    "average_pool": lambda run, a, b, c: F.avg_pool1d(table(a).float(), 3, 1, 1),
    "attention2": lambda run, a, b, c: F.scaled_dot_product_attention(
        *(run.up(table(t).float()).view(4, 2, 6).transpose(0, 1) for t in (a, b, a)), is_causal=c > 0
    ).sum(0),
    "as_strided": lambda run, a, b, c: table(a).clone().as_strided((4, 6), (1, 4), 0),
    "overlapping": lambda run, a, b, c: table(a).contiguous().as_strided((4, 6), (2, 1), 1),
    "unfolded": lambda run, a, b, c: table(a).unfold(1, 3, 1).sum(-1).repeat(1, 2)[:, :6],
    "chunk": lambda run, a, b, c: torch.cat(table(a).sin().chunk(3, 1)[::-1], 1),
    "diagonal": lambda run, a, b, c: table(a) * table(b).diagonal().unsqueeze(-1),
    "expanded": lambda run, a, b, c: table(a).mean(0).expand(4, 6),
    "pad": lambda run, a, b, c: F.pad(table(a), (1, 2))[:, :6],
    "triangle": lambda run, a, b, c: table(a).exp().tril() if c > 1 else table(a).triu(),
    "complex": lambda run, a, b, c: torch.view_as_real(
        torch.view_as_complex(table(a).float().reshape(4, 3, 2)) * torch.polar(torch.ones(3), run.mean[:3])
    ).reshape(4, 6),
    "conj": lambda run, a, b, c: (torch.complex(table(a).float(), table(b).float()).conj() * (1 + 2j)).real,
    "fft": lambda run, a, b, c: torch.fft.rfft(table(a).float()).abs().repeat(1, 2)[:, :6],
    "imaginary": lambda run, a, b, c: torch.complex(table(a).float(), table(b).float()).tanh().imag * c,
    "no_grad": lambda run, a, b, c: a * no_grad(lambda: (fit(b, a) * c).sin()),
    "noise": lambda run, a, b, c: a + torch.randn_like(a) * a,
    "noisy_gate": lambda run, a, b, c: torch.where(torch.rand_like(a.float()) > 0.4, a, a.sin()),
    "bernoulli": lambda run, a, b, c: a.sin() * torch.bernoulli(a.detach().float().sigmoid().nan_to_num(0.5)),
    "rrelu": lambda run, a, b, c: F.rrelu(a.float(), training=True),
    "gumbel": lambda run, a, b, c: F.gumbel_softmax(table(a).float(), hard=True),
    "permuted": lambda run, a, b, c: table(a)[torch.randperm(4)],
    "region": lambda run, a, b, c: checkpoint(run.up, table(a).float(), use_reentrant=False).sin()[:, :6],
    "random_region": lambda run, a, b, c: checkpoint(lambda t: F.dropout(t.sin(), 0.4) * t, a, use_reentrant=False),
    "linspace": lambda run, a, b, c: table(a) * torch.linspace(0, c, 6),
    "bool_mask": lambda run, a, b, c: table(a).masked_fill(table(b).cos() > 0.2, 0.0),
    "softplus": lambda run, a, b, c: F.softplus(a, beta=abs(c)),
    "elu": lambda run, a, b, c: F.elu(a),
    "hardtanh": lambda run, a, b, c: F.hardtanh(a),
    "huber": lambda run, a, b, c: F.smooth_l1_loss(table(a).float(), table(b).float(), reduction="none"),
    "loss": lambda run, a, b, c: a * F.cross_entropy(table(a).float(), integers(b, 6)[:, 0]),
    "cdist": lambda run, a, b, c: torch.cdist(table(a).float(), table(b).float() + 1).repeat(1, 2)[:, :6],
    "einsum": lambda run, a, b, c: torch.einsum("ij,kj,kl->il", table(a).float(), table(b).float(), run.p),
    "nan": lambda run, a, b, c: torch.where(a > 50, float("nan"), a).nan_to_num(0.0),
    "counted": lambda run, a, b, c: table(a) * run.counts.exp(),
    "halves": lambda run, a, b, c: (a.bfloat16() * c).float() * a,
}


def no_grad(function: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return function()


@graph_step
def count(run, a, b, c):
    """A buffer is read, changed, and read again."""
    made = table(a) * (run.counts * c).cos()
    run.counts.add_(abs(c))
    return made + run.counts.sin() * table(a)


@graph_step
def moving_average(run, a, b, c):
    with torch.no_grad():
        run.counts.lerp_(table(a).float().mean(0), 0.3)
    return table(a) - run.counts


@graph_step
def buffer_view(run, a, b, c):
    """A view of a buffer is changed after something was made of its base."""
    made = table(a) * (run.frozen + c).tanh()
    run.frozen[1:].mul_(0.9)
    return made


@graph_step
def split_edit(run, a, b, c):
    t = table(a) * c
    first, _ = t.split(3, 1)
    first.sin_()
    return t


@graph_step
def index_edit(run, a, b, c):
    t = table(a).clone()
    t[run.index[:2]] = table(b)[:2].to(t.dtype).cos()
    return t * t


@graph_step
def mask_edit(run, a, b, c):
    t = table(a).sin()
    t[t > 0.3] = c
    return t


def policy(_: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@graph_step
def selective(run, a, b, c):
    context = partial(create_selective_checkpoint_contexts, policy)
    body = lambda t: run.down(F.dropout(F.gelu(run.up(t)), 0.3))  # noqa: E731
    return checkpoint(body, table(a).float(), use_reentrant=False, context_fn=context)


class Clipped(torch.autograd.Function):
    """Rounds forward, and lets a gradient through where its input was small: a decision that only backward asks."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 2)


@graph_step
def clipped(run, a, b, c):
    return Clipped.apply(a * c)


class Statistic(torch.autograd.Function):
    """Saves what forward does not need: a product and a mask that only backward reads."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x @ w, x.sin() > 0.5)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        product, mask = ctx.saved_tensors
        return grad * product.cos() * mask, None


@graph_step
def statistic(run, a, b, c):
    return Statistic.apply(table(a).float().sin(), run.w)


ALL: dict[str, Make] = {**{k: v for k, v in RECORDED.items() if k not in LEDGERS_OWN}, **STEPS}
EDITS: dict[str, Make] = {
    name: UNRECORDED[name] for name in ("no_grad_edit", "no_grad_view_edit", "buffer_edit", "leaf_edit")
}
