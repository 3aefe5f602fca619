"""The zoo with Inductor's own code generation: gradients, losses and buffers of the compiled step beside eager's."""

from __future__ import annotations

import pytest
import torch

from leangrad.compiled import compile_lean
from tests.support.compiling import DYNAMOS_OWN, assert_near, prepared, skip_where_dynamo_is_wrong
from tests.zoo import CASES, Case

pytestmark = [pytest.mark.slow, *DYNAMOS_OWN]
OPTIONS = {"fallback_random": True}  # draw as eager does: masks are then eager's


@pytest.mark.parametrize("case", [case for case in CASES if "hf" not in case.tags], ids=lambda case: case.name)
def test_two_steps_are_eagers(case: Case) -> None:
    """The second step reads what the first has left: running statistics, and gradients that are added to."""
    torch._dynamo.reset()
    skip_where_dynamo_is_wrong(case)
    runs = []
    for backend, options in ((None, {}), (compile_lean, {"options": OPTIONS})):
        model, step, batch = prepared(case, backend, **options)
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            loss = step(*batch)
            loss.backward()
            losses.append(loss.detach())
        buffers = [b.detach() for b in model.buffers() if b.is_floating_point()]
        runs.append(([p.grad for p in model.parameters()], [*losses, *buffers]))
    (plain, plain_rest), (ours, our_rest) = runs
    assert_near(ours, plain)
    assert_near(our_rest, plain_rest)
