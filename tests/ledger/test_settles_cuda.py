"""On a GPU, every architecture whose step is the same each time follows its trace from the third step on."""

import pytest
import torch

import leangrad
from benchmarks.ledger.architectures import ARCHITECTURES, FORMATS, settles, setup
from tests.zoo import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_of_timm_settles(name: str, memory_format: str) -> None:
    pytest.importorskip("timm")
    model, forward = setup(name, FORMATS[memory_format], batch=32)
    leangrad.lean(model)
    assert settles(model, forward) == ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_model_of_the_zoo_settles(case) -> None:
    torch.manual_seed(0)
    model, batch = case.make().cuda(), [x.cuda() if isinstance(x, torch.Tensor) else x for x in case.batch()]
    ledger = leangrad.saving(min_bytes=1024)
    for n in range(5):
        with ledger:
            loss = case.step(model, batch)
        loss.backward()
        assert n < 2 or (ledger.trace is not None and not ledger.differences), ledger.trace_status
