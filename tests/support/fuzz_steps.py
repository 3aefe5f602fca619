"""The steps of random programs for the ledger: each makes a tensor from earlier ones, or changes one in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Make = Callable[["Run", Tensor, Tensor, float], "Tensor | tuple[Tensor, ...] | None"]
RECORDED: dict[str, Make] = {}  # steps that autograd records
PRODUCTS: dict[str, Make] = {}  # steps with a product, for ledgers that run products again
UNRECORDED: dict[str, Make] = {}  # edits that it does not


def step(make: Make) -> Make:
    RECORDED[make.__name__] = make
    return make


def product(make: Make) -> Make:
    PRODUCTS[make.__name__] = make
    return make


def edit(make: Make) -> Make:
    UNRECORDED[make.__name__] = make
    return make


class Run:
    """The parameters, the buffers and the pool of one run."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.p = torch.randn(4, 6, generator=draw).requires_grad_()
        self.w = torch.randn(6, 6, generator=draw).mul_(0.4).requires_grad_()
        self.b = torch.randn(6, generator=draw).requires_grad_()
        self.frozen = torch.randn(4, 6, generator=draw)
        self.mean, self.var = torch.randn(6, generator=draw), torch.rand(6, generator=draw) + 0.5
        self.mask = torch.randn(4, 6, generator=draw) > 0
        self.index = torch.randint(4, (4,), generator=draw)
        self.leaves = [self.p, self.w, self.b]
        self.pool: list[Tensor] = []

    def pick(self, n: int) -> Tensor:
        """A tensor of the pool: for small ``n`` one of the last, so that most programs are deep."""
        return self.pool[-1 - n] if n < min(4, len(self.pool)) else self.pool[n % len(self.pool)]


def fit(t: Tensor, like: Tensor) -> Tensor:
    """``t`` in a shape that goes with ``like``."""
    return t.reshape(like.shape) if t.numel() == like.numel() else t.mean()


def table(t: Tensor) -> Tensor:
    return t.reshape(4, 6) if t.numel() == 24 else t.mean().expand(4, 6)


def one(function: Callable[[Tensor], Tensor]) -> Make:
    return lambda run, a, b, c: function(a)


for _name, _function in {
    "sin": torch.sin,
    "exp": lambda t: torch.exp(t.clamp(max=3)),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": lambda t: F.gelu(t, approximate="tanh"),
    "silu": F.silu,
    "square": lambda t: t**2,
    "rsqrt": lambda t: (t * t + 1).rsqrt(),
    "log": lambda t: t.abs().add(0.5).log(),
    "hardswish": F.hardswish,
    "neg": torch.neg,
    "double": Tensor.double,
    "float": Tensor.float,
    "bfloat16": Tensor.bfloat16,
    "copied": lambda t: t.to(t.dtype, copy=True),
    "clone": torch.clone,
    "contiguous": Tensor.contiguous,
    "transpose": lambda t: table(t).t(),
    "flat": lambda t: t.reshape(-1),
    "cube": lambda t: table(t).reshape(2, 3, 4).permute(2, 0, 1),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "expand": lambda t: table(t)[:1].expand(4, 6),
    "rows": lambda t: table(t)[1:3],
    "strided": lambda t: table(t)[:, ::2],
    "unbind": lambda t: table(t).unbind(0)[2],
    "split": lambda t: table(t).split(2, 0)[1],
    "roll": lambda t: t.roll(1, 0),
    "flip": lambda t: t.flip(0),
    "softmax": lambda t: F.softmax(t, -1),
    "log_softmax": lambda t: F.log_softmax(t, 0),
    "centre": lambda t: t - t.mean(-1, keepdim=True),
    "spread": lambda t: t / (t.float().std() + 1),
    "cumsum": lambda t: t.cumsum(0),
    "norm": lambda t: F.normalize(t, dim=-1),
    "detached": lambda t: t.detach() * 1.5 + t,
}.items():
    RECORDED[_name] = one(_function)


RECORDED |= {
    "scale": lambda run, a, b, c: a * c,
    "shift": lambda run, a, b, c: a + c,
    "from_scalar": lambda run, a, b, c: c - a,
    "over_scalar": lambda run, a, b, c: c / (a.abs() + 1),
    "power": lambda run, a, b, c: (a.abs() + 0.5) ** c,
    "leaky": lambda run, a, b, c: F.leaky_relu(a, abs(c) / 10),
    "clamp": lambda run, a, b, c: a.clamp(-abs(c), abs(c)),
    "add": lambda run, a, b, c: torch.add(a, fit(b, a), alpha=c),
    "sub": lambda run, a, b, c: a - fit(b, a),
    "mul": lambda run, a, b, c: a * fit(b, a),
    "div": lambda run, a, b, c: a / (fit(b, a).abs() + 1),
    "maximum": lambda run, a, b, c: torch.maximum(a, fit(b, a).to(a.dtype)),
    "lerp": lambda run, a, b, c: torch.lerp(a, fit(b, a).to(a.dtype).expand(a.shape), c),
    "where": lambda run, a, b, c: torch.where(run.mask, table(a), table(b).to(a.dtype)),
    "where_scalar": lambda run, a, b, c: torch.where(run.mask, c, table(a)),
    "masked": lambda run, a, b, c: table(a).masked_fill(run.mask, c),
    "cat": lambda run, a, b, c: torch.cat([table(a)[:2], table(b)[2:]], 0),
    "cat_frozen": lambda run, a, b, c: torch.cat([table(a)[:, :3], run.frozen[:, 3:]], 1),
    "stack": lambda run, a, b, c: torch.stack([table(a)[0], table(b)[1].to(a.dtype)] * 2),
    "buffer_add": lambda run, a, b, c: table(a) + run.frozen,
    "buffer_mul": lambda run, a, b, c: table(a) * run.frozen,
    "gathered": lambda run, a, b, c: table(a)[run.index],
    "matmul": lambda run, a, b, c: table(a) @ run.w.to(a.dtype),
    "linear": lambda run, a, b, c: F.linear(table(a), run.w.to(a.dtype), run.b.to(a.dtype)),
    "bias": lambda run, a, b, c: table(a) + run.b,
    "layer_norm": lambda run, a, b, c: F.layer_norm(table(a), (6,), run.b.to(a.dtype), None, eps=abs(c)),
    "rms_norm": lambda run, a, b, c: F.rms_norm(table(a), (6,), run.b.to(a.dtype), eps=abs(c)),
    "batch_norm": lambda run, a, b, c: F.batch_norm(table(a).float(), None, None, run.b, run.b, True, 0.1, abs(c)),
    "running_norm": lambda run, a, b, c: F.batch_norm(
        table(a).float(), run.mean, run.var, run.b, None, True, 0.3, abs(c)
    ),
    "fixed_norm": lambda run, a, b, c: F.batch_norm(
        table(a).float(), run.mean.clone(), run.var.clone(), run.b, None, False, 0.3, abs(c)
    ),
    "centred_by_buffer": lambda run, a, b, c: table(a) - run.mean,
    "group_norm": lambda run, a, b, c: F.group_norm(table(a).float(), 2, run.b, None, abs(c)),
    "dropout": lambda run, a, b, c: F.dropout(a, min(abs(c) / 4, 0.9)),
    "dropout_in_place": lambda run, a, b, c: F.dropout(a * 1.1, 0.3, inplace=True),
    "alpha_dropout": lambda run, a, b, c: F.alpha_dropout(a, 0.3, training=True),
    "pool": lambda run, a, b, c: F.max_pool2d(table(a).float().reshape(1, 1, 4, 6), 2),
    "convolved": lambda run, a, b, c: F.conv1d(table(a).unsqueeze(0), run.w[:4, :4].to(a.dtype).unsqueeze(-1)).tanh(),
    "checkpointed": lambda run, a, b, c: checkpoint(lambda t: (t * c).sin() * t, a, use_reentrant=False),
    "doubled": lambda run, a, b, c: a + a.roll(1, -1),
}


@step
def attention(run, a, b, c):
    q = table(a).float().reshape(1, 4, 6)
    return F.scaled_dot_product_attention(q, q * c, q + 1, dropout_p=0.2).reshape(4, 6)


@step
def autocast(run, a, b, c):
    with torch.autocast("cpu", torch.bfloat16):
        return F.gelu(F.linear(table(a).float(), run.w, run.b)) * c


@step
def offloaded(run, a, b, c):
    with torch.autograd.graph.save_on_cpu():
        return (a * c).tanh() * a


class Custom(torch.autograd.Function):
    """``x * tanh(x)``, keeping its input and its output; in place on demand."""

    @staticmethod
    def forward(ctx, x, in_place):
        ctx.save_for_backward(t := x.tanh())
        if in_place:
            ctx.mark_dirty(x)
            return x.mul_(t)
        return x * t

    @staticmethod
    def backward(ctx, grad):
        (t,) = ctx.saved_tensors
        return grad * t, None


@step
def custom(run, a, b, c):
    return Custom.apply(a, False)


@step
def custom_(run, a, b, c):
    return Custom.apply(a * c, True)


@step
def add_(run, a, b, c):
    a.add_(fit(b, a), alpha=c)


@step
def mul_(run, a, b, c):
    a.mul_(fit(b, a))


@step
def shift_(run, a, b, c):
    a += c


@step
def scale_(run, a, b, c):
    a *= c


@step
def sigmoid_(run, a, b, c):
    a.sigmoid_()


@step
def relu_(run, a, b, c):
    F.relu(a, inplace=True)


@step
def clamp_(run, a, b, c):
    a.clamp_(-abs(c), abs(c))


@step
def masked_fill_(run, a, b, c):
    if 0 not in a.stride():  # torch warns of an expanded target
        a.masked_fill_(a.detach() > c, c)


@step
def div_(run, a, b, c):
    a.div_(fit(b, a).abs() + 1)


@step
def into_row(run, a, b, c):
    a[..., 0] = c


@step
def into_slice(run, a, b, c):
    a[:1] = fit(b, a)[:1] if b.numel() == a.numel() else c


@step
def view_scale_(run, a, b, c):
    v = a.view(-1) if a.is_contiguous() else a
    v[1:].mul_(c)
    return v


@step
def view_of_view_add_(run, a, b, c):
    v = a.transpose(0, -1)
    v[:1].add_(c)
    return v


@step
def fresh_edit(run, a, b, c):
    """A new tensor that nobody has saved is changed behind autograd's back."""
    t = a * c
    t.data.mul_(0.5)
    return t


@step
def fresh_detach_edit(run, a, b, c):
    t = a + fit(b, a)
    t.detach().view(-1).mul_(0.5) if t.is_contiguous() else t.detach().mul_(0.5)
    return t


@step
def fresh_out(run, a, b, c):
    t = a * c
    with torch.no_grad():
        torch.add(t, 1, out=t)
    return t


@edit
def no_grad_edit(run, a, b, c):
    with torch.no_grad():
        a.mul_(c)


@edit
def no_grad_view_edit(run, a, b, c):
    with torch.no_grad():
        a[:1].add_(c)


@edit
def detach_edit(run, a, b, c):
    a.detach().add_(c)


@edit
def leaf_edit(run, a, b, c):
    with torch.no_grad():
        run.b.add_(c)


@edit
def buffer_edit(run, a, b, c):
    run.frozen.mul_(c)


@edit
def aten_edit(run, a, b, c):
    with torch.no_grad():
        torch.ops.aten.mul_.Scalar(a, c)


PRODUCTS |= {name: RECORDED[name] for name in ("matmul", "linear", "convolved", "attention", "autocast")}
PRODUCTS |= {
    "turned": lambda run, a, b, c: (table(a).t() @ table(b).to(a.dtype))[:4],
    "rows_by_rows": lambda run, a, b, c: (table(a) @ table(b).t().to(a.dtype)) @ run.frozen.to(a.dtype),
    "by_frozen": lambda run, a, b, c: table(a) @ (run.frozen.t() @ run.frozen).to(a.dtype),
    "frozen_turned": lambda run, a, b, c: ((table(a) * c).t() @ run.frozen.to(a.dtype)).t(),
    "frozen_linear": lambda run, a, b, c: F.linear(table(a), run.frozen.to(a.dtype), run.b[:4].to(a.dtype)),
    "scaled_addmm": lambda run, a, b, c: torch.addmm(
        table(b).to(a.dtype), table(a), run.w.to(a.dtype), alpha=c, beta=0.5
    ),
    "addmm_of_sum": lambda run, a, b, c: torch.addmm(
        table(b).to(a.dtype) + 1, table(a) * c, run.w.t().to(a.dtype), alpha=c
    ),
    "batched": lambda run, a, b, c: torch.bmm(
        table(a).reshape(2, 2, 6), table(b).to(a.dtype).reshape(2, 2, 6).transpose(1, 2)
    ),
    "batched_frozen": lambda run, a, b, c: torch.bmm(
        (table(a) * c).t().reshape(2, 3, 4), run.frozen.to(a.dtype).reshape(2, 4, 3)
    ),
    "batched_sum": lambda run, a, b, c: torch.baddbmm(
        run.b.to(a.dtype)[:2], table(a).reshape(2, 2, 6), run.w.to(a.dtype)[:, :2].expand(2, 6, 2), alpha=c, beta=0.3
    ),
    "summed_batches": lambda run, a, b, c: torch.addbmm(
        run.w.to(a.dtype)[:2, :2], table(a).reshape(2, 2, 6), run.w.to(a.dtype)[:, :2].expand(2, 6, 2), alpha=c
    ),
    "vector": lambda run, a, b, c: (table(a) @ run.b.to(a.dtype)).unsqueeze(1) * table(a),
    "column": lambda run, a, b, c: torch.mv(table(a).t(), table(b).to(a.dtype)[:, 1]),
    "vector_sum": lambda run, a, b, c: torch.addmv(run.b.to(a.dtype)[:4], table(a), table(b).to(a.dtype)[0], alpha=c),
    "einsum": lambda run, a, b, c: torch.einsum("ij,kj,kl->il", table(a), table(b).to(a.dtype), run.w.to(a.dtype)[:4]),
    "expanded": lambda run, a, b, c: table(a)[:1].expand(4, 6) @ run.w.to(a.dtype),
    "broadcast": lambda run, a, b, c: torch.matmul(table(a).reshape(2, 2, 6), run.w.to(a.dtype).expand(2, 6, 6)),
    "convolved_2d": lambda run, a, b, c: F.conv2d(
        table(a).reshape(1, 2, 3, 4),
        run.w.to(a.dtype)[:4].reshape(4, 1, 3, 2),
        run.b.to(a.dtype)[:4],
        padding=1,
        groups=2,
    ),
    "channels_last": lambda run, a, b, c: F.conv2d(
        (table(a).reshape(2, 3, 2, 2) * c).contiguous(memory_format=torch.channels_last),
        run.w.to(a.dtype)[:, :3].reshape(6, 3, 1, 1),
    ),
    "frozen_convolution": lambda run, a, b, c: F.conv2d(
        (table(a).reshape(2, 3, 2, 2) * c).relu(), run.frozen.to(a.dtype).reshape(4, 3, 2, 1)
    ),
    "transposed_convolution": lambda run, a, b, c: F.conv_transpose1d(
        table(a).unsqueeze(0), run.w.to(a.dtype)[:4, :4].unsqueeze(-1).expand(4, 4, 3), None, 2, 1, 1
    ),
    "causal": lambda run, a, b, c: F.scaled_dot_product_attention(
        *(t.float().reshape(1, 2, 2, 6) for t in (table(a), table(b) * c, table(a) + 1)), is_causal=True
    ),
    "biased_attention": lambda run, a, b, c: F.scaled_dot_product_attention(
        *(t.float().reshape(1, 2, 2, 6) for t in (table(a), table(b), table(a))),
        attn_mask=run.b[:4].reshape(2, 2),
        scale=c,
    ),
    "masked_attention": lambda run, a, b, c: F.scaled_dot_product_attention(
        *(t.float().reshape(1, 6, 2, 2).transpose(1, 2) for t in (table(a), table(b), table(a))),
        attn_mask=run.frozen[:1, :4].reshape(2, 2) * c,
    ),
    "grouped_queries": lambda run, a, b, c: F.scaled_dot_product_attention(
        table(a).float().reshape(1, 4, 2, 3), *(table(b).float()[:2].reshape(1, 2, 2, 3) for _ in "kv"), enable_gqa=True
    ),
}


@product
def addmm_(run, a, b, c):
    t = (table(a) * c).t().contiguous().t()
    return t.addmm_(table(b).to(t.dtype), run.w.to(t.dtype), alpha=0.5)


@product
def written_over(run, a, b, c):
    """The output of a product is changed in place, and the next product reads it."""
    t = table(a) @ run.w.to(a.dtype)
    t.relu_()
    return t @ run.w.to(a.dtype)
