"""The short way for the cast of a parameter: its bits, its layout, and memory of its own."""

import pytest
import torch
from torch import Tensor, nn

from leangrad.errors import ChangedError, LeangradError
from leangrad.ledger.values.cast import Cast
from tests.support import same_bits


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))


def read(cast: Cast) -> Tensor:
    with torch.no_grad():
        return cast.read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("view", ["itself", "t", "slice", "flat"])
def test_is_read_as_it_was(dtype: torch.dtype, view: str) -> None:
    w = parameter()
    owner = w.to(dtype, copy=True)
    seen = {"itself": owner, "t": owner.t(), "slice": owner[2:, 1:3], "flat": owner.view(-1)}[view]
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
