"""leangrad.budget: the least work whose foreseen peak fits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leangrad
from leangrad.compiled import compile_lean
from leangrad.compiled.backend import read_options
from leangrad.compiled.partitioner import chosen
from tests.support import assert_same_bits

pytestmark = pytest.mark.usefixtures("fresh_choice")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))).sin())


def run(model: nn.Module, x: Tensor, **options: Any) -> tuple[int, float]:
    """One step, exact; the foreseen peak and the work beside that of the step itself."""
    torch._dynamo.reset()
    step = torch.compile(model, backend=compile_lean, options={"leangrad.exact": True, **options})
    step(x).square().mean().backward()
    choice = chosen[-1].choice
    return choice.outcome.peak_bytes, choice.outcome.work


def test_more_room_is_less_work_and_every_step_has_eagers_bits() -> None:
    torch.manual_seed(0)
    eager, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(256, 64)
    eager(x).square().mean().backward()
    least, _ = run(copy.deepcopy(eager), x, **{"leangrad.slowdown": 100.0})
    most, _ = run(copy.deepcopy(eager), x, **{"leangrad.slowdown": 1.0})
    assert least < most
    before = float("inf")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0, 2.0):
        budget = int(least + share * (most - least))
        model = copy.deepcopy(eager)
        model.zero_grad()
        peak, work = run(model, x, **{"leangrad.budget": budget})
        assert peak <= budget
        assert work <= before
        before = work
        for a, b in zip(eager.parameters(), model.parameters(), strict=True):
            assert_same_bits(a.grad, b.grad)


def test_a_budget_that_cannot_be_met_names_the_least() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(256, 64)
    least, _ = run(copy.deepcopy(model), x, **{"leangrad.slowdown": 100.0})
    torch._dynamo.reset()
    step = torch.compile(model, backend=compile_lean, options={"leangrad.exact": True, "leangrad.budget": least // 2})
    with pytest.raises(Exception, match=r"leangrad.budget: .* cannot be met; .* takes at least") as caught:
        step(x)
    assert leangrad.sizes.size_text(least) in str(caught.value)


@pytest.mark.parametrize("budget", ["20 gigs", 0, -1, float("nan"), "90%"])
def test_no_budget(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"^leangrad.budget must be"):
        read_options({"leangrad.budget": budget})


def test_one_of_the_two() -> None:
    with pytest.raises(ValueError, match="not both"):
        read_options({"leangrad.budget": "8GB", "leangrad.slowdown": 1.1})
    assert read_options({"leangrad.budget": "8GB"})[0].budget == 8 * 10**9
