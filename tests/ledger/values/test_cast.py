"""The short way for the cast of a parameter: its bits, its layout, and memory of its own."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leangrad
from leangrad.errors import ChangedError, LeangradError
from leangrad.ledger import Ledger
from leangrad.ledger.values.cast import Cast
from tests.support import same_bits

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda w: w,
    "t": Tensor.t,
    "slice": lambda w: w[2:, 1:3],
    "flat": lambda w: w.view(-1),
}


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))


def read(cast: Cast) -> Tensor:
    with torch.no_grad():
        return cast.read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("view", VIEWS)
def test_is_read_as_it_was(dtype: torch.dtype, view: str) -> None:
    w = parameter()
    owner = w.to(dtype, copy=True)
    seen = VIEWS[view](owner)
    tensor = read(Cast(w, seen, owner))
    assert same_bits(tensor, seen)
    assert tensor.dtype is dtype
    for fact in (Tensor.size, Tensor.stride, Tensor.storage_offset):
        assert fact(tensor) == fact(seen)
    tensor.zero_()  # a recipe that owns it may write over it
    assert w.count_nonzero() == w.numel()


def test_a_parameter_that_was_changed_or_freed_is_told() -> None:
    w = parameter()
    owner = w.to(torch.bfloat16)
    changed = Cast(w, owner, owner)
    with torch.no_grad():
        w += 1
    with pytest.raises(ChangedError, match="a parameter or input"):
        read(changed)
    freed = Cast(w, owner, owner)
    w.untyped_storage().resize_(0)
    with pytest.raises(LeangradError, match="memory was freed"):
        read(freed)


def test_an_empty_parameter_is_not_taken_for_a_freed_one() -> None:
    w = nn.Parameter(torch.empty(0, 4))
    owner = w.to(torch.bfloat16)
    assert read(Cast(w, owner.t(), owner)).shape == (4, 0)


# ---- through a ledger


def save(
    ledger: Ledger, w: nn.Parameter, view: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, list[Tensor]]:
    """A cast of ``w``, or a view of that, and two products that save it."""
    with ledger:
        seen = VIEWS[view](w.to(dtype, copy=True))
        products = [seen * torch.full_like(seen, 3).requires_grad_() for _ in range(2)]
    return seen.detach(), products


def saved_in(product: Tensor) -> Tensor:
    node: Any = product.grad_fn
    return node._saved_self.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_saved_of_a_cast_is_rebuilt_as_it_was(dtype: torch.dtype, view: str) -> None:
    w, ledger = parameter(), leangrad.saving(min_bytes=0)
    for _ in range(3):  # recorded, and along what was learned
        seen, products = save(ledger, w, view, dtype)
        tensor = saved_in(products[0])
        assert same_bits(tensor, seen)
        assert tensor.untyped_storage().data_ptr() not in (w.data_ptr(), seen.untyped_storage().data_ptr())
        for fact in (Tensor.size, Tensor.stride, Tensor.storage_offset):
            assert fact(tensor) == fact(seen)
        torch.autograd.grad([p.sum() for p in products], w)
    assert ledger.totals().rebuilt_bytes == w.numel() * dtype.itemsize


@pytest.mark.parametrize("view", VIEWS)
def test_a_cast_is_not_held_between_its_readers(view: str) -> None:
    """A weight that is called often would be held through most of backward."""
    w, ledger = parameter(), leangrad.saving(min_bytes=0)
    for _ in range(2):
        _, products = save(ledger, w, view)
        torch.autograd.grad([p.sum() for p in products], w)
    _, products = save(ledger, w, view)
    memory = weakref.ref(saved_in(products[1]).untyped_storage())
    assert memory() is None
    assert torch.autograd.grad([p.sum() for p in products], w)[0].eq(6).sum() == VIEWS[view](w).numel()


def test_a_sparse_parameter_is_kept() -> None:
    """Also in a step of which nothing was learned."""
    w, x, ledger = nn.Parameter(torch.eye(4).to_sparse()), torch.randn(4, 4).double(), leangrad.saving(min_bytes=0)
    for _ in range(2):
        ledger.note_difference("a test")
    with ledger:
        product = torch.sparse.mm(w.double(), x.requires_grad_())
    assert "recorded no step" in ledger.summary()
    (grad,) = torch.autograd.grad(product.sum(), x)
    assert same_bits(grad, torch.ones_like(x))


def test_a_parameter_that_is_a_number() -> None:
    """Numbers lie on the CPU wherever they are used, so the device of one is asked of torch."""
    w, ledger = nn.Parameter(torch.tensor(0.3)), leangrad.saving(min_bytes=0)
    for _ in range(3):
        seen, products = save(ledger, w, "itself")
        assert same_bits(saved_in(products[0]), seen)
        torch.autograd.grad([p.sum() for p in products], w)
    assert ledger.totals().rebuilt_bytes == 2
