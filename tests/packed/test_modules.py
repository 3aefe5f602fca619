"""Modules whose products write packed gradients: what asking torch how its own product adds must not leave behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import leangrad
from leangrad.packed.modules import linear_adds_inside


@pytest.fixture
def never_asked() -> None:
    linear_adds_inside.cache_clear()


@pytest.mark.usefixtures("never_asked")
def test_the_question_saves_no_tensor() -> None:
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        assert linear_adds_inside(2, True, torch.device("cpu"))
    assert not saved


@pytest.mark.usefixtures("never_asked")
def test_a_checkpoint_around_the_first_packed_product_of_a_process() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    leangrad.pack_gradients(model)
    checkpoint(model, torch.ones(4, 8), use_reentrant=False).sum().backward()
    assert model[0].weight.grad is not None
