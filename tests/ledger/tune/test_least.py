"""The first step with a budget, and the least that an error names, over the zoo."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad.errors import BudgetError
from tests.zoo import SMALL, Case

RECURRENT = "mamba"  # its states, position by position, are sums: the recorded step keeps them all


def peaks(case: Case, steps: int, budget: int | None = None) -> list[int]:
    torch.manual_seed(0)
    model, batch = leangrad.lean(case.make(), budget=budget), case.batch()

    def step() -> None:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        case.step(model, batch).backward()

    return [leangrad.measure(step, timed_runs=0).peak_bytes for _ in range(steps)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [one for one in SMALL if one.name != RECURRENT], ids=lambda one: one.name)
def test_the_least_that_an_error_names_is_met_from_the_third_step_on(case: Case) -> None:
    """The first step is recorded, and a plan that is made from it may turn out to take no less than it did."""
    with pytest.raises(BudgetError) as caught:
        peaks(case, 6, budget=1)
    least = caught.value.smallest
    first, second, *later = peaks(case, 6, budget=least)
    assert first <= 1.12 * peaks(case, 1)[0]  # what a lean model takes while it is recorded
    assert first <= 1.15 * least
    assert second <= max(first, least)
    assert max(later) <= least


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(self.linear(self.norm(x))), 0.3).sin()


@pytest.mark.parametrize("layers", [10, 30])
def test_the_first_step_of_a_chain_without_sums(layers: int) -> None:
    """Nothing says where a recipe should end, and a long one holds all that it makes on the way."""

    def peak(budget: int | None) -> int:
        torch.manual_seed(0)
        model = leangrad.lean(nn.Sequential(*(Layer(128) for _ in range(layers))), budget=budget)
        x = torch.randn(1024, 128)
        return leangrad.measure(lambda: model(x).square().mean().backward(), timed_runs=0).peak_bytes

    assert peak(10**9) < 1.5 * peak(None)
