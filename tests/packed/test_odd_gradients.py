"""Gradients that a training loop moves about by hand, and parameters that change their part between the passes."""

from __future__ import annotations

import copy

import torch
from torch import nn

from leangrad import pack_gradients
from tests.support import same_bits


def nets() -> tuple[nn.Module, nn.Module]:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return plain, copy.deepcopy(plain)


def test_the_gradient_of_another_parameter_is_copied_once() -> None:
    plain, model = nets()
    packed = pack_gradients(model)
    x = torch.randn(2, 3)
    for one in (plain, model):
        one(x).sum().backward()
        one[0].weight.grad = one[1].weight.grad  # type: ignore[index]
    norms = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9), packed.clip_norm_(1e9)
    torch.testing.assert_close(*norms)
    assert same_bits(model[0].weight.grad, plain[1].weight.grad)  # type: ignore[index]


def test_a_parameter_that_is_frozen_before_backward_gets_no_gradient() -> None:
    plain, model = nets()
    pack_gradients(model)
    for one in (plain, model):
        loss = one(torch.ones(2, 3)).sum()
        one[0].requires_grad_(False)  # type: ignore[index]
        loss.backward()
        assert one[0].weight.grad is None  # type: ignore[index]
        assert one[1].weight.grad is not None  # type: ignore[index]


def test_an_empty_parameter_whose_gradient_lies_elsewhere() -> None:
    _, model = nets()
    model.marker = nn.Parameter(torch.empty(0))
    packed = pack_gradients(model)
    model(torch.ones(2, 3)).sum().backward()
    model.marker.grad = torch.zeros(0)
    held = model[0].weight.grad  # type: ignore[index]
    before = held.clone()
    model[0].weight.grad = None  # type: ignore[index]
    model(torch.full((2, 3), 5.0)).sum().backward()
    assert same_bits(held, before), "a held gradient was overwritten"
    del held
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    model.marker.grad = torch.zeros(0)
    packed.clip_norm_(1.0)


def test_sparse_inputs_run_plain() -> None:
    plain, model = nets()
    pack_gradients(model)
    x = torch.eye(3).to_sparse()
    for one in (plain, model):
        one[0](x).sum().backward()  # type: ignore[index]
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)  # type: ignore[index]
