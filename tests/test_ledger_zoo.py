"""The ledger's promises over the zoo: the same bits, bytes near the floor, and a peak no higher than plain's."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import leangrad
from benchmarks.floor import floor
from leangrad.ledger import Ledger
from tests.zoo import CASES, Case, FastBFloat16

NEAR_FLOOR = 1.02

# Kept bytes over the floor in float32 where they are above NEAR_FLOOR, and why.
# Checked by what changes it: residual_depth=32 brings the first kind to the floor, min_bytes=0 mends the second.
PEAK = "links of a residual chain are kept, because rebuilding them would raise the peak"
SMALL = "many tensors below 16 KiB are kept unseen"
RANDOM = "each dropout on a CPU keeps the state of its generator, 5 KB"
EARLY = "decided as each tensor was saved, without sight of the whole graph; not traced further"
ABOVE_FLOOR = {
    "resnet_inplace": (1.12, PEAK),
    "resnet": (1.12, PEAK),
    "unet": (1.51, f"{PEAK}; the rest was {EARLY}"),
    "depthwise": (1.05, PEAK),
    "t5": (1.035, RANDOM),
    "dit": (1.09, f"{PEAK}; {SMALL}"),
    "mamba": (1.97, f"{PEAK}, for a third of it; {SMALL}; {EARLY}"),
    "lstm_gru_tied": (1.11, f"{SMALL}, for half of it; {EARLY}"),
    "moe": (1.10, "what index_add gives is kept"),
    "frozen": (1.23, f"{PEAK}; a sum over a map that needs no gradient is kept"),
    "dropout": (1.09, f"{RANDOM}; {EARLY}"),
    "views": (1.08, "a tensor that was written to slice by slice has no recipe"),
    "custom": (2.74, "an autograd Function of the user's is never run twice"),
    "hf_resnet": (1.19, PEAK),
    "hf_t5": (1.025, RANDOM),
    "hf_mamba": (1.33, f"{PEAK}, for a quarter of it; {EARLY}"),
    "hf_clip": (1.04, EARLY),
}

DTYPES = pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
ZOO = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _onednn() -> None:
    """Switch oneDNN on: a bfloat16 product that it cannot do switches it off, and other kernels save other tensors.

    The public `torch.backends.mkldnn.flags` warns of a setting that it reads and we do not touch.
    """
    torch._C._set_mkldnn_enabled(True)


@contextlib.contextmanager
def arithmetic(autocast: bool) -> Iterator[None]:
    with FastBFloat16() if autocast else contextlib.nullcontext():
        yield


def loss_of(case: Case, model: nn.Module, batch: tuple[object, ...], ledger: Ledger | None, autocast: bool) -> Tensor:
    with ledger or contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return case.step(model, batch)


def made(case: Case) -> tuple[nn.Module, tuple[object, ...]]:
    torch.manual_seed(0)
    return case.make(), case.batch()


@DTYPES
@ZOO
def test_gradients_and_buffers_are_the_same_bits(case: Case, autocast: bool) -> None:
    """Three steps with one ledger: the recorded one, and two that use what it learned."""
    (plain, batch), (lean, _) = made(case), made(case)
    ledger = leangrad.saving()
    with arithmetic(autocast):
        for seed in range(3):
            for model, region in ((plain, None), (lean, ledger)):
                model.zero_grad(set_to_none=True)
                torch.manual_seed(seed)
                loss_of(case, model, batch, region, autocast).backward()
            for (name, p), q in zip(plain.named_parameters(), lean.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                assert p.grad is None or torch.equal(p.grad, q.grad), (seed, name)
            for (name, p), q in zip(plain.named_buffers(), lean.buffers(), strict=True):
                assert torch.equal(p, q), (seed, name)


@DTYPES
@ZOO
def test_kept_bytes_and_peak(case: Case, autocast: bool) -> None:
    model, batch = made(case)
    ledger = leangrad.saving()
    with arithmetic(autocast):
        loss_of(case, model, batch, ledger, autocast).backward()
        lean = leangrad.measure(lambda: loss_of(case, model, batch, ledger, autocast).backward(), timed_runs=0)
        plain = leangrad.measure(lambda: loss_of(case, model, batch, None, autocast).backward(), timed_runs=0)
        assert lean.peak_bytes <= plain.peak_bytes
        if not autocast:
            least = floor(model, batch, case.loss).bytes
            limit, _ = ABOVE_FLOOR.get(case.name, (NEAR_FLOOR, ""))
            assert lean.kept_bytes <= limit * least


@pytest.mark.parametrize("name", ["resnet_inplace", "hf_resnet", "dit", "depthwise", "unet", "frozen"])
def test_the_cut_has_no_higher_peak_than_any_constant_depth(name: str) -> None:
    """Within 1%: of the scratch memory that ops take the plan knows only what convolutions take."""
    case = next(c for c in CASES if c.name == name)
    model, batch = made(case)
    peaks = {}
    for depth in ("auto", 0, 1, 2, 3, 4, 8):
        ledger = leangrad.saving(residual_depth=depth)
        loss_of(case, model, batch, ledger, False).backward()
        peaks[depth] = leangrad.measure(
            lambda ledger=ledger: loss_of(case, model, batch, ledger, False).backward(), timed_runs=0
        ).peak_bytes
    assert peaks["auto"] <= 1.01 * min(peaks.values())
