"""Steps without arithmetic: what they allocate is what real ranks allocate, and nothing is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.measure import measure

pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks.distributed import simulated
from benchmarks.distributed.untouched import Untouched, one_of


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_a_simulated_rank_is_within_5_percent_of_a_real_one() -> None:
    rows = {row["way"]: row for row in simulated.checks()}
    assert tuple(rows) == simulated.WAYS
    for way, row in rows.items():
        assert row["peak_bytes"] == pytest.approx(row["real_peak_bytes"], rel=0.05), way
        assert row["kept_bytes"] == pytest.approx(row["real_kept_bytes"], rel=0.05), way
    assert rows["lean"]["real_kept_bytes"] < 0.7 * rows["plain"]["real_kept_bytes"]  # no way passes for another


def program(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Views, products, something in place, a norm, attention, a reduction."""
    h = F.silu(F.linear(x, weight))
    h = F.layer_norm(h.add_(1), h.shape[-1:]).unflatten(-1, (4, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(h, h, h, is_causal=True)
    return h, mixed, mixed.transpose(1, 2).flatten(2), mixed.float().mean((0, 1)), x.argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_look_like_those_of_kernels(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 64, 32, dtype=dtype), torch.randn(128, 32, dtype=dtype, requires_grad=True)
    expected = program(x, weight)
    with Untouched():
        found = program(x, weight)
    for a, b in zip(found, expected, strict=True):
        assert type(a) is Tensor
        assert (a.shape, a.stride(), a.dtype, a.storage_offset()) == (b.shape, b.stride(), b.dtype, b.storage_offset())
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        assert type(a.grad_fn) is type(b.grad_fn)


def test_nothing_is_written_to() -> None:
    x = torch.full((1000,), 3.0)
    with Untouched():
        y = x.mul_(2)
        torch.add(x, x, out=x)
    assert y is x
    assert x._version == 2
    assert x.eq(3).all()


def test_what_programs_branch_on_is_computed() -> None:
    with Untouched():
        tokens = torch.arange(10_000)
        assert (tokens.view(100, 100)[1:] > 99).all()
        assert tokens.max().item() == 9_999
        assert torch.full((4,), 2.0).mul(3).sum().item() == 24.0


def test_a_step_takes_the_bytes_that_it_takes() -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    x, optimizer = torch.randn(512, 64), torch.optim.AdamW(net.parameters(), fused=True)

    def step() -> None:
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    real = measure(step, timed_runs=0)
    with Untouched():
        found = measure(step, timed_runs=0)
    assert found.kept_bytes == real.kept_bytes
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


def test_collectives_of_ranks_that_do_not_exist_return_at_once() -> None:
    with one_of(64), Untouched():
        assert dist.get_world_size() == 64
        part = torch.full((1000,), 1.0)
        dist.all_reduce(part)
        assert part._version == 0
    assert not dist.is_initialized()


def test_the_table_of_the_docs_is_that_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads((simulated.RESULTS / "simulated.json").read_text())["rows"]
    text = simulated.DOCS.read_text()
    assert simulated.BEGIN + simulated.table(rows) + simulated.END in text
    copy = tmp_path / "distributed.md"
    copy.write_text(text.replace(simulated.table(rows), ""))
    monkeypatch.setattr(simulated, "DOCS", copy)
    simulated.write_table(rows)
    assert copy.read_text() == text
