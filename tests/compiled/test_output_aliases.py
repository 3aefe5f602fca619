"""A compiled model returns its logits and a view of the hidden states, and the caller writes to that view."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D = 320, 16
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "the last token": lambda h: h.detach()[:, -1],
    "the same memory": lambda h: h.detach().view(-1),
    "transposed": lambda h: h.transpose(1, 2).detach(),
}


class Words(nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.view = view

    def forward(self, words: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(self.embed(words)).tanh()
        z = self.head(h)
        return F.cross_entropy(z.view(-1, V), target), z, self.view(h)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_returned_view_of_the_hidden_states_is_written_to(name: str, graded: bool) -> None:
    torch._dynamo.reset()
    plain = Words(VIEWS[name])
    compiled = torch.compile(copy.deepcopy(plain), backend="leangrad")
    words, target = torch.randint(V, (4, 8)), torch.randint(V, (32,))
    found = []
    for model in (plain, compiled):
        with contextlib.nullcontext() if graded else torch.no_grad():
            _, z, view = model(words, target)
            if model is plain:
                z = z.clone()  # it was computed before the write; eager would refuse its gradient
            view.mul_(-3)
            found.append((z.detach().clone(), z))
    torch.testing.assert_close(found[1][0], found[0][0])
    if graded:  # of the hidden states as they were
        weights = torch.randn(4, 8, V)
        (gradient,) = torch.autograd.grad((found[1][1] * weights).sum(), compiled.head.weight)
        with torch.no_grad():
            h = plain.body(plain.embed(words)).tanh()
        torch.testing.assert_close(gradient, weights.flatten(0, 1).t() @ h.flatten(0, 1), rtol=1e-4, atol=1e-4)
