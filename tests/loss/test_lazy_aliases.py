"""Lazy logits whose input or values are reached by other names: the values are right, or reading them raises."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrad import lean
from leangrad.errors import LeangradError

V = 320


def pair() -> tuple[nn.Module, nn.Module]:
    plain = nn.Sequential(nn.Linear(16, V))
    return plain, lean(copy.deepcopy(plain), exact=False)


def test_an_input_in_inference_mode_that_changes() -> None:
    """It has no version counter: nothing would tell of the change."""
    for_both = torch.randn(4, 8, 16)
    found = []
    for model in pair():
        with torch.inference_mode():
            x = for_both.clone()
            z = model(x)
            x.zero_()
            found.append(z.clone())
    torch.testing.assert_close(*found)


def test_a_transposed_copy_is_contiguous() -> None:
    x = torch.randn(4, 8, 16)
    plain, lazy = (model(x).detach().transpose(1, 2).contiguous() for model in pair())
    assert lazy.is_contiguous()
    torch.testing.assert_close(lazy.view(4, -1), plain.view(4, -1))
    assert lazy.numpy().strides == plain.numpy().strides


def test_tensors_in_an_index_that_change_afterwards() -> None:
    x, target = torch.randn(4, 8, 16), torch.randint(V, (4, 3))
    found = []
    for model in pair():
        start, end = torch.tensor(1), torch.tensor(4)
        part = model(x)[:, start:end]
        start += 1
        end += 1
        found.append(F.cross_entropy(part.reshape(-1, V), target.flatten()))
    torch.testing.assert_close(*found)


def test_a_write_to_data_after_a_view_was_taken() -> None:
    _, lazy = pair()
    z = lazy(torch.randn(4, 8, 16))
    rows = z.view(-1, V)
    z.data[..., 300:] = -1e9
    with pytest.raises(LeangradError, match="written to"):
        F.cross_entropy(rows, torch.randint(300, (32,)))


def test_a_checkpointed_loss_that_reads_the_values_too() -> None:
    x, target = torch.randn(32, 16), torch.randint(V, (32,))

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z, target) + 1e-4 * z.logsumexp(-1).square().mean() + 1e-3 * z.square().mean()

    gradients = []
    for model in pair():
        checkpoint(loss, model(x), use_reentrant=False).backward()
        gradients.append(model[0].weight.grad)  # type: ignore[index]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["sparse", "csr", "nested"])
def test_inputs_that_are_not_dense(form: str) -> None:
    plain, lazy = (model.double() for model in pair())
    rows = torch.eye(20, 16, dtype=torch.float64)
    x = {
        "sparse": rows.to_sparse,
        "csr": rows.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([rows, rows[:9]]),
    }[form]()
    for one, other in zip(plain(x).unbind(), lazy(x).unbind(), strict=True):
        torch.testing.assert_close(one, other)
