"""Random programs, plain and through a ledger: the same gradients, bit for bit, or both raise.

A program is a list of steps over a pool of small tensors. Each step makes a tensor from one or two earlier ones or
changes one in place: pointwise ops with scalars, norms, softmax, views, in-place ops on tensors and on views, dropout,
joins and splits, products with parameters, casts and mixed dtypes, masks, detached branches, and edits that autograd
does not record. Part of the program may run before the region and part of it after. It runs three times through one
ledger, with other scalars and sometimes without one of its steps: what the first run taught is used, and misleads.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leangrad.errors import ChangedError
from leangrad.lean import saving
from leangrad.ledger import Ledger
from tests.fuzz import fuzz_settings

pytestmark = pytest.mark.fuzz

Make = Callable[["Run", Tensor, Tensor, float], "Tensor | tuple[Tensor, ...] | None"]
RECORDED: dict[str, Make] = {}  # steps that autograd records
UNRECORDED: dict[str, Make] = {}  # edits that it does not


def step(make: Make) -> Make:
    RECORDED[make.__name__] = make
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


@step
def scale(run, a, b, c):
    return a * c


@step
def shift(run, a, b, c):
    return a + c


@step
def from_scalar(run, a, b, c):
    return c - a


@step
def over_scalar(run, a, b, c):
    return c / (a.abs() + 1)


@step
def power(run, a, b, c):
    return (a.abs() + 0.5) ** c


@step
def leaky(run, a, b, c):
    return F.leaky_relu(a, abs(c) / 10)


@step
def clamp(run, a, b, c):
    return a.clamp(-abs(c), abs(c))


@step
def add(run, a, b, c):
    return torch.add(a, fit(b, a), alpha=c)


@step
def sub(run, a, b, c):
    return a - fit(b, a)


@step
def mul(run, a, b, c):
    return a * fit(b, a)


@step
def div(run, a, b, c):
    return a / (fit(b, a).abs() + 1)


@step
def maximum(run, a, b, c):
    return torch.maximum(a, fit(b, a).to(a.dtype))


@step
def lerp(run, a, b, c):
    return torch.lerp(a, fit(b, a).to(a.dtype).expand(a.shape), c)


@step
def where(run, a, b, c):
    return torch.where(run.mask, table(a), table(b).to(a.dtype))


@step
def where_scalar(run, a, b, c):
    return torch.where(run.mask, c, table(a))


@step
def masked(run, a, b, c):
    return table(a).masked_fill(run.mask, c)


@step
def cat(run, a, b, c):
    return torch.cat([table(a)[:2], table(b)[2:]], 0)


@step
def cat_frozen(run, a, b, c):
    return torch.cat([table(a)[:, :3], run.frozen[:, 3:]], 1)


@step
def stack(run, a, b, c):
    return torch.stack([table(a)[0], table(b)[1].to(a.dtype)] * 2)


@step
def buffer_add(run, a, b, c):
    return table(a) + run.frozen


@step
def buffer_mul(run, a, b, c):
    return table(a) * run.frozen


@step
def gathered(run, a, b, c):
    return table(a)[run.index]


@step
def matmul(run, a, b, c):
    return table(a) @ run.w.to(a.dtype)


@step
def linear(run, a, b, c):
    return F.linear(table(a), run.w.to(a.dtype), run.b.to(a.dtype))


@step
def bias(run, a, b, c):
    return table(a) + run.b


@step
def layer_norm(run, a, b, c):
    return F.layer_norm(table(a), (6,), run.b.to(a.dtype), None, eps=abs(c))


@step
def rms_norm(run, a, b, c):
    return F.rms_norm(table(a), (6,), run.b.to(a.dtype), eps=abs(c))


@step
def batch_norm(run, a, b, c):
    return F.batch_norm(table(a).float(), None, None, run.b, run.b, True, 0.1, abs(c))


@step
def running_norm(run, a, b, c):
    return F.batch_norm(table(a).float(), run.mean, run.var, run.b, None, True, 0.3, abs(c))


@step
def fixed_norm(run, a, b, c):
    return F.batch_norm(table(a).float(), run.mean.clone(), run.var.clone(), run.b, None, False, 0.3, abs(c))


@step
def centred_by_buffer(run, a, b, c):
    return table(a) - run.mean


@step
def group_norm(run, a, b, c):
    return F.group_norm(table(a).float(), 2, run.b, None, abs(c))


@step
def dropout(run, a, b, c):
    return F.dropout(a, min(abs(c) / 4, 0.9))


@step
def dropout_in_place(run, a, b, c):
    return F.dropout(a * 1.1, 0.3, inplace=True)


@step
def alpha_dropout(run, a, b, c):
    return F.alpha_dropout(a, 0.3, training=True)


@step
def attention(run, a, b, c):
    q = table(a).float().reshape(1, 4, 6)
    return F.scaled_dot_product_attention(q, q * c, q + 1, dropout_p=0.2).reshape(4, 6)


@step
def pool(run, a, b, c):
    return F.max_pool2d(table(a).float().reshape(1, 1, 4, 6), 2)


@step
def convolved(run, a, b, c):
    return F.conv1d(table(a).unsqueeze(0), run.w[:4, :4].to(a.dtype).unsqueeze(-1)).tanh()


@step
def checkpointed(run, a, b, c):
    return checkpoint(lambda t: (t * c).sin() * t, a, use_reentrant=False)


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
def doubled(run, a, b, c):
    return a + a.roll(1, -1)


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


Step = tuple[str, int, int, float]


@dataclass(frozen=True)
class Program:
    """What to run, where the region lies in it, which step the third run leaves out, and how backward runs."""

    steps: tuple[Step, ...]
    seed: int
    enter: int
    leave: int
    skip: int
    backward: str
    autocast: bool = False

    @property
    def edits(self) -> bool:
        return any(name in UNRECORDED for name, *_ in self.steps)


def forward(program: Program, run: Run, region: Any, turn: int, outputs: int = 4) -> list[Tensor]:
    def play(steps: tuple[tuple[int, Step], ...]) -> None:
        if steps and not run.pool:
            run.pool += [run.p * 1.0, run.p + run.b]
        for n, (name, i, j, c) in steps:
            if turn == 2 and n == program.skip:
                continue
            make = RECORDED.get(name) or UNRECORDED[name]
            made = make(run, run.pick(i), run.pick(j), c * (1 + turn / 8))
            if made is not None:
                run.pool.append(made)

    numbered = tuple(enumerate(program.steps))
    play(numbered[: program.enter])
    with region:
        play(numbered[program.enter : program.leave])
    play(numbered[program.leave :])
    return [t for t in run.pool[-outputs:] if t.requires_grad]


def gradients(program: Program, run: Run, outputs: list[Tensor]) -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(program.seed)
    seeds = [torch.randn(t.shape, generator=draw).to(t.dtype) for t in outputs]
    if program.backward == "create_graph":
        first = torch.autograd.grad(outputs, run.leaves, seeds, create_graph=True, allow_unused=True)
        graded = [g for g in first if g is not None and g.requires_grad]
        if graded:
            torch.autograd.backward([g.float().square().sum() for g in graded])
        return [*(g.detach() if g is not None else None for g in first), *(t.grad for t in run.leaves)]
    if program.backward == "partial":
        torch.autograd.backward(outputs[:1], seeds[:1], inputs=[run.w, run.p], retain_graph=True)
    torch.autograd.backward(outputs, seeds, retain_graph=program.backward == "twice")
    if program.backward == "twice":
        torch.autograd.backward(outputs, seeds)
    return [t.grad for t in run.leaves]


Result = list[Tensor | None] | Exception


def result(program: Program, ledger: Ledger | None, turn: int, outputs: int = 4) -> Result:
    """The outputs and gradients of one run, or its error."""
    torch.manual_seed(program.seed + turn)
    run = Run(program.seed + turn)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
            made = forward(program, run, ledger if ledger is not None else nullcontext(), turn, outputs)
        return [t.detach().clone() for t in made] + gradients(program, run, made)
    except (RuntimeError, IndexError) as error:
        return error


def may_refuse(program: Program, error: Exception, turn: int) -> bool:
    """Whether a ChangedError is fair where plain gives gradients.

    After an edit that nobody records it is (the second law). After recorded ones it is if plain refuses too as soon as
    everything that was computed takes part in backward: then a tensor that some backward needs was changed.
    """
    if not isinstance(error, ChangedError):
        return False
    return program.edits or isinstance(result(program, None, turn, outputs=99), Exception)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    nan = a.isnan()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(nan, b.isnan())
        and torch.equal(a[~nan], b[~nan])
        and torch.equal(a[~nan].signbit(), b[~nan].signbit())
    )


def check(program: Program, depth: Any) -> Counter[str]:
    """Compare plain with lean; count what happened."""
    seen: Counter[str] = Counter()
    ledger = saving(residual_depth=depth, min_bytes=0)
    for turn in range(3):
        plain, lean = result(program, None, turn), result(program, ledger, turn)
        if isinstance(plain, Exception):
            # Where plain refuses, lean may refuse too, or rebuild what was changed and be right.
            seen["refused"] += 1
        elif isinstance(lean, Exception):
            if not may_refuse(program, lean, turn):
                raise AssertionError(f"turn {turn}: plain gives gradients, lean raises") from lean
            seen["changed"] += 1
        else:
            seen["same"] += 1
            for n, (a, b) in enumerate(zip(plain, lean, strict=True)):
                assert same_bits(a, b), f"turn {turn}: tensor {n} differs"
    seen["rebuilt"] += "rebuilt" in ledger.summary().split("\n\n")[0]
    return seen


SCALARS = (0.5, 1.5, -0.7, 2.0, 1.0)
BACKWARDS = ("once", "once", "twice", "create_graph", "partial")
DEPTHS = (0, 1, 2, "auto")


@st.composite
def programs(draw: st.DrawFn, *, edits: bool) -> Program:
    names = st.sampled_from(sorted(RECORDED))
    if edits:
        names = st.one_of(names, names, names, names, st.sampled_from(sorted(UNRECORDED)))
    number = st.integers(0, 15)
    steps = draw(st.lists(st.tuples(names, number, number, st.sampled_from(SCALARS)), min_size=2, max_size=14))
    n = len(steps)
    enter = draw(st.sampled_from([0, 0, 0, 1, 2]))
    leave = draw(st.sampled_from([n, n, n, max(enter, n - 2)]))
    skip = draw(st.integers(0, 2 * n))
    backward, autocast = draw(st.sampled_from(BACKWARDS)), draw(st.sampled_from([False, False, False, True]))
    return Program(tuple(steps), draw(st.integers(0, 99)), enter, leave, skip, backward, autocast)


def random_program(seed: int) -> Program:
    """The same kind of program from a plain seed, where nothing needs to shrink."""
    choose = random.Random(seed)
    names = sorted(RECORDED)
    steps = tuple(
        (choose.choice(names), choose.randrange(16), choose.randrange(16), choose.choice(SCALARS))
        for _ in range(choose.randint(4, 16))
    )
    return Program(steps, seed, choose.choice([0, 0, 2]), len(steps), choose.randrange(30), choose.choice(BACKWARDS))


@given(program=programs(edits=False), depth=st.sampled_from(DEPTHS))
@fuzz_settings(200, 6_000)
def test_recorded_programs_give_the_same_bits(program: Program, depth: Any) -> None:
    check(program, depth)


@given(program=programs(edits=True), depth=st.sampled_from(DEPTHS))
@fuzz_settings(120, 4_000)
def test_unrecorded_edits_are_never_silently_wrong(program: Program, depth: Any) -> None:
    check(program, depth)


def test_the_fuzz_is_not_vacuous() -> None:
    """Most random programs train, and the ledger rebuilds something in most of them."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += check(random_program(seed), DEPTHS[seed % 4])
    assert seen["same"] > 60, seen
    assert seen["rebuilt"] > 25, seen
