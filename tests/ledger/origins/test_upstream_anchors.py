"""What a norm reads in float32 is kept in the dtype that it was cast from: see [Note: kept in fewer bits]."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad import _torch
from leangrad.errors import BudgetError
from leangrad.ledger import Ledger
from tests.support import assert_same_bits

ROWS, WIDTH = 64, 32


class Block(nn.Module):
    """A residual block in half precision, whose norm runs in float32, as under autocast on a GPU.

    is_seen: through a view, as windows of an image are.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, is_seen: bool = False) -> None:
        super().__init__()
        self.norm, self.is_seen = nn.LayerNorm(WIDTH), is_seen
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype), nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.unflatten(0, (-1, 4)) if self.is_seen else x
        return x + self.down(F.gelu(self.up(self.norm(seen.float()).to(x.dtype)))).view_as(x)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, blocks: int = 8, is_seen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.blocks = nn.Sequential(*(Block(dtype, is_seen) for _ in range(blocks)))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)).float())


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same_gradients(plain: nn.Module, lean: nn.Module, x: Tensor, steps: int = 4) -> None:
    for _ in range(steps):
        for a, b in zip(gradients(plain, x), gradients(lean, x), strict=True):
            assert_same_bits(a, b)


def batch(dtype: torch.dtype, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


class Sums(nn.Module):
    """Each the sum of two products, of which autograd keeps none: they take as much as their sum in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        pairs = list(self.pairs)
        for left, right in zip(pairs[::2], pairs[1::2], strict=True):
            x = F.layer_norm((left(x) + right(x)).float(), (WIDTH,)).to(x.dtype)
        return x.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_in_half_precision_is_kept_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain, x = Sums(dtype), batch(dtype, 512)
    lean = leangrad.lean(copy.deepcopy(plain), min_bytes=0)
    assert_same_gradients(plain, lean, x)
    kept = leangrad.measure(lambda: gradients(lean, x)).kept_bytes
    assert 6 < kept / x.nbytes < 6 + 4  # one for each layer; the statistics, the last output, and what its loss takes


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_stream_in_half_precision(is_seen: bool) -> None:
    torch.manual_seed(0)
    plain, x = Net(is_seen=is_seen), batch(torch.bfloat16)
    assert_same_gradients(plain, leangrad.lean(copy.deepcopy(plain), min_bytes=0), x)


@pytest.mark.parametrize("is_seen", [False, True])
def test_the_least_of_a_budget_is_below_a_checkpoint_for_each_block(is_seen: bool) -> None:
    """Which keeps the stream in half precision; with the casts to float32 for anchors we kept twice that.

    Of a view of the stream the plan counted on a copy in half precision that later steps did not keep.
    """
    torch.manual_seed(0)
    plain, x = Net(blocks=8, is_seen=is_seen), batch(torch.bfloat16, 192)
    checkpointed = copy.deepcopy(plain)
    for block in checkpointed.blocks:
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]

    def peak(model: nn.Module) -> int:
        return leangrad.measure(lambda: gradients(model, x), timed_runs=0).peak_bytes

    budget = peak(checkpointed)
    lean = leangrad.lean(copy.deepcopy(plain), budget=budget, min_bytes=0)
    peaks = [peak(lean) for _ in range(36)]
    assert max(peaks[-4:]) <= budget
    assert_same_gradients(plain, lean, x, 2)
    lean = leangrad.lean(copy.deepcopy(plain), budget=1, min_bytes=0)
    with pytest.raises(BudgetError) as caught:
        [peak(lean) for _ in range(12)]
    assert caught.value.smallest < budget


def _checkpointed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------------- what was cast


def halves() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(8, 8, generator=draw).bfloat16().requires_grad_() for _ in range(3)]


def two_products(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A sum of which autograd keeps neither the terms nor itself."""
    return a @ b + b @ c


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:])


def sliced(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = two_products(a, b, c)[:, 2:6]
    return norm(x).sum(0) * (x * x).float().sum(0)


def transposed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = two_products(a, b, c).t()
    return norm(x).sum(0) * x.cumsum(0).float().sum(0) * (x @ x).float().sum(0)


def saved_too(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = two_products(a, b, c)
    return norm(x).cos() + (x * x).float() + (x @ c).float()


def saved_before(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = two_products(a, b, c)
    y = (x * x).float()
    return norm(x).cos() + y


def twice(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = two_products(a, b, c)
    return norm(x).cos() * norm(x + 1).sin() + F.layer_norm(x.double(), (8,)).float().exp()


def changed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = two_products(a, b, c)
    y = norm(x)
    x += 1
    return y.cos() + (x * x).float() + norm(x).sin()


def changed_in_data(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = two_products(a, b, c)
    y = norm(x)
    x.data.mul_(2)
    return y.cos() + (x * x).float() + norm(x).sin()


def changed_under_no_grad(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = two_products(a, b, c)
    y = norm(x)
    with torch.no_grad():
        x.mul_(2)
    return y.cos() + (x * x).float() + norm(x).sin()


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 0.5)[::2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.repeat_interleave(2, 0) * 0.5


def of_a_function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = Halved.apply(two_products(a, b, c))
    return norm(x).cos() + (x * x).float() + (x @ c).float()  # type: ignore[no-any-return]


def joined(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A skip connection: what was kept in fewer bits is an anchor of others."""
    x, y = two_products(a, b, c), two_products(c, a, b)
    z = norm(x).cos() + norm(y).sin()
    return z + norm(torch.cat([x, y], 1))[:, :8] + norm(x + y).exp()


def extremes(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Infinities and denormals come back as they were."""
    x = two_products(a, b, c) * torch.tensor([1, -1e-39, 3e38, 1e-30, 1e30, 1, 1, 1]).bfloat16()
    return x.float().atan() + x.float().clamp(-1, 1).cos()


def of_eight_bits(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Which torch promotes to nothing."""
    return two_products(a, b, c).to(torch.float8_e4m3fn).float().sin()


def changed_before(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A sum that has a version already, and is saved after its cast."""
    x = a @ b
    x += b @ c
    x += c @ a
    return norm(x).cos() + (x * x).float()


def of_a_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Which is alive when it is cast, so it is kept itself."""
    x = a @ b
    return norm(x).cos() + norm(x @ c).sin()


def of_a_product_that_changes(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = a @ b
    y = norm(x).cos()
    x += c
    return y + norm(x).sin()


def of_a_product_that_changes_unseen(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x, z = a @ b, b @ c
    y = norm(x).cos() + norm(z).cos()
    x.data.mul_(2)
    z.detach()[1:5].mul_(3)
    return y + (x * z).float()


def of_a_product_that_changed_before(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x, z = a @ b, b @ c
    x.data.mul_(2)
    with torch.no_grad():
        z.mul_(3)
    return norm(x).cos() + norm(z).cos()


def of_a_product_that_changes_by_an_alias(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Autograd records the change of the alias, and knows nothing of one of the product."""
    x, z = a @ b, b @ c
    d, e = x.data, z.detach()
    d.addcmul_(c, b)
    e.mul_(a)
    return norm(x * c).cos() + norm(z * a).sin() + d.float() + e.float()


def of_a_part_of_a_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = (a @ b)[:4]
    return norm(x).cos().sum(0) + norm((b @ c).t()).sin()


PROGRAMS = (
    of_a_product, of_a_product_that_changes, of_a_product_that_changes_unseen, of_a_product_that_changed_before,
    of_a_part_of_a_product, of_a_product_that_changes_by_an_alias,
    sliced, transposed, saved_too, saved_before, twice, changed, changed_in_data, changed_under_no_grad, of_a_function,
    joined, extremes, of_eight_bits, changed_before,
)  # fmt: skip


def run(program: Callable[..., Tensor], region: Any, *, twice: bool = False) -> list[Tensor | None] | str:
    leaves = halves()
    try:
        with region:
            out = program(*leaves)
        weight = torch.linspace(0, 1, out.numel()).view_as(out)
        loss = (out * weight).sum()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "changed"
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("products", [0, 8])
@pytest.mark.parametrize("depth", [0, 2, "auto"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_the_same_bits_whatever_was_cast(
    program: Callable[..., Tensor], again: bool, depth: Any, products: int
) -> None:
    ledger = Ledger(residual_depth=depth, min_bytes=0, products=products)
    for _ in range(4):
        plain, mine = run(program, nullcontext(), twice=again), run(program, ledger, twice=again)
        if isinstance(plain, str) or isinstance(mine, str):
            assert plain == mine
            continue
        for a, b in zip(mine, plain, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_product_that_the_model_holds_is_not_copied(is_held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that a model returns: a copy beside them would raise the peak of forward by as much."""
    copies, copy_unseen = [], _torch.copy_unseen

    def counted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        copies.append(tensor.shape)
        return copy_unseen(tensor, dtype)

    monkeypatch.setattr(_torch, "copy_unseen", counted)
    ledger, held = Ledger(residual_depth=0, min_bytes=0, products=1), list[Tensor]()

    def program(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        held.append((a @ b) @ c)  # two products in a row: one of them is kept
        return (held[-1] if is_held else held.pop()).float().sin()

    for _ in range(4):
        held.clear()
        copies.clear()
        plain, mine = run(program, nullcontext()), run(program, ledger)
        for a, b in zip(mine, plain, strict=True):
            assert_same_bits(a, b)  # type: ignore[arg-type]
        assert copies == ([] if is_held else [(8, 8)])


IN_FLIGHT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "itself": lambda x, t, z: x.addcmul_(t, z),
    "a view": lambda x, t, z: x[:4].addcmul_(t[:4], z[:4]),
    "detached": lambda x, t, z: x.detach().addcmul_(t, z),
    "data": lambda x, t, z: x.data.addcmul_(t, z),
    "an op of ATen": lambda x, t, z: torch.ops.aten.addcmul_(x.data, t, z),
    "a list": lambda x, t, z: _in_a_list(x.data, t, z),
}


def _in_a_list(x: Tensor, t: Tensor, z: Tensor) -> Tensor:
    torch._foreach_addcmul_([x], [t], [z])
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", IN_FLIGHT)
def test_a_product_is_copied_while_an_op_changes_it(name: str, dtype: torch.dtype) -> None:
    """The op saves the product's cast, and then writes into the product: a copy made before has the right numbers."""
    held = list[Tensor]()

    def program(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x = (a @ b) @ c
        held.append(x)
        return IN_FLIGHT[name](x, a.to(dtype), x.float()).float().sin()

    ledger = Ledger(residual_depth=0, min_bytes=0, products=1)
    for _ in range(4):
        held.clear()
        plain, mine = run(program, nullcontext()), run(program, ledger)
        assert not isinstance(plain, str)
        for a, b in zip(mine, plain, strict=True):
            assert_same_bits(a, b)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_a_cast_to_complex_numbers_warns_of_nothing() -> None:
    ledger = Ledger(residual_depth=0, min_bytes=0)
    for _ in range(3):
        a, b, c = halves()
        with ledger:
            out = (two_products(a, b, c).float() + 1).to(torch.complex64).sin().real
        out.sum().backward()


def changed_in_some_steps(change: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    """What is made of a sum before it changes is rebuilt from what it was; what is cast afterwards is not that."""

    def program(a: Tensor, b: Tensor, c: Tensor, changes: bool) -> Tensor:
        x = a @ b + b @ c + c @ a
        y = (x * 2).sin()
        if changes:
            change(x)
        return y.float() + norm(x).cos()

    return program


@torch.no_grad()
def double(x: Tensor) -> None:
    x.mul_(2)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda x: x.data.mul_(2),
    "no_grad": double,
    "view": lambda x: x.detach()[1:5].mul_(2),
}


@pytest.mark.parametrize("products", [0, 8])
@pytest.mark.parametrize("depth", [0, 2, "auto"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_sum_that_changes_unseen_in_some_steps(change: str, depth: Any, products: int) -> None:
    """The plan was made in a step in which it did not."""
    program, ledger = (
        changed_in_some_steps(CHANGES[change]),
        Ledger(residual_depth=depth, min_bytes=0, products=products),
    )
    for changes in (False, False, False, True, True, False, True):
        plain, mine = (run(partial(program, changes=changes), region) for region in (nullcontext(), ledger))
        for a, b in zip(mine, plain, strict=True):
            assert_same_bits(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_sum_that_is_saved_after_its_cast_is_kept_once(is_changed: bool) -> None:
    """Autograd keeps the sum itself then, also along a trace, and the copy is let go."""
    torch.manual_seed(0)
    x = batch(torch.bfloat16, 512)
    weights = [torch.randn(WIDTH, WIDTH).bfloat16().requires_grad_() for _ in range(3)]
    ledger = Ledger(residual_depth=2, min_bytes=0)

    def step() -> None:
        with ledger:
            y = x @ weights[0]
            for weight in weights[1:]:
                y = y.add_(x @ weight) if is_changed else y + x @ weight
            z = F.layer_norm(y.float(), (WIDTH,)).sum() + (y * y).sum()
        z.backward()

    for _ in range(4):
        kept = leangrad.measure(step, timed_runs=0).kept_bytes
        assert kept < 1.5 * x.nbytes


def test_nothing_stays_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        ledger, kept = Ledger(residual_depth="auto", min_bytes=0), []
        for _ in range(3):
            leaves = halves()
            with ledger:
                out = joined(*leaves)
            kept += [weakref.ref(one) for one in leaves]
            out.sum().backward()
            del out, leaves
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()
