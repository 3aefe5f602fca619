"""The zoo, cut for Inductor and run op by op: the same bits as torch's own cut, no heavy op twice, bytes at the floor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.floor import floor
from tests.support.partitions import Partitions
from tests.zoo import CASES, Case

ZOO = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def gradients(case: Case, backend: Partitions | None) -> list[Tensor | None]:
    torch.manual_seed(0)
    model, batch = case.make(), case.batch()

    def step(*batch: object) -> Tensor:
        return case.step(model, batch)

    torch.manual_seed(1)
    run = step if backend is None else torch.compile(step, backend=backend.backend)
    run(*batch).backward()
    return [p.grad for p in model.parameters()]


@ZOO
def test_zoo(case: Case) -> None:
    found = Partitions()
    ours = gradients(case, found)
    assert sum(p.compared for p in found.found) > 0
    assert [d for p in found.found for d in p.differences] == []
    assert [name for p in found.found for name in p.heavy_twice()] == []
    torch.manual_seed(0)
    model, batch = case.make(), case.batch()
    least = floor(model, batch, case.loss).bytes
    err = -1.
    if True:
        plain = gradients(case, None)
        num = sum((a - b).double().square().sum() for a, b in zip(ours, plain, strict=True) if b is not None)
        den = sum(b.double().square().sum() for b in plain if b is not None)
        err = float((num / den).sqrt())
    print(f"RATIO {case.name} graphs {len(found.found)} kept/floor {found.kept_bytes / least:.3f} stock/floor {found.stock_kept_bytes/least:.3f} err {err:.2e}")
