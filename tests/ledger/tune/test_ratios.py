"""The time of a plan relative to plain PyTorch's, from single steps on a host that changes its speed."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from leangrad.ledger.tune.ratios import PRECISE, Ratios


def measured(true: float, noise: float, pairs: int, seed: int, *, outliers: int = 0) -> Ratios:
    draw, ratios = random.Random(seed), Ratios()
    for n in range(pairs):
        speed = 3.0 if n < outliers else 1.0
        ratios.add([math.exp(draw.gauss(0, noise))], [speed * true * math.exp(draw.gauss(0, noise))])
    return ratios


def test_without_noise_it_is_certain() -> None:
    ratios = measured(1.25, 0.0, 4, 0)
    assert ratios.ratio == pytest.approx(1.25)
    assert ratios.doubt == pytest.approx(0.0)
    assert ratios.is_clear(1.25)


@pytest.mark.parametrize("pairs", [8, 24])
@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_the_ratio_and_its_doubt(noise: float, pairs: int) -> None:
    found = [measured(1.1, noise, pairs, seed) for seed in range(300)]
    errors = [one.ratio / 1.1 - 1 for one in found]
    off = math.sqrt(statistics.fmean(error**2 for error in errors))
    assert off < 1.15 * noise * math.sqrt(2 / pairs)  # of the best estimate: 1.0
    assert abs(statistics.median(errors)) < 0.2 * off + 1e-4
    doubt = statistics.median(one.doubt for one in found) / 1.1
    assert 0.7 < doubt / off < 1.3


def test_a_step_in_eight_may_take_three_times_as_long() -> None:
    found = [measured(1.1, 0.02, 16, seed, outliers=2).ratio for seed in range(100)]
    assert statistics.median(found) < 1.13


def test_a_clock_that_stands_still_is_no_error() -> None:
    ratios = Ratios()
    ratios.add([0.0, 0.0, -1.0], [0.0, 0.0, 0.0])
    assert ratios.ratio == pytest.approx(1.0)


def test_it_is_clear_far_from_the_bound_or_when_it_is_precise() -> None:
    noisy, quiet = measured(1.5, 0.1, 8, 0), measured(1.1, 0.002, 8, 0)
    assert noisy.is_clear(1.1)
    assert not noisy.is_clear(1.5)
    assert quiet.doubt < PRECISE
    assert quiet.is_clear(1.1)
