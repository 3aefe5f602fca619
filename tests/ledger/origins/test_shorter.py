"""Replays by a shorter way have the bits of the op itself, and give way to it where they would not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import leangrad
from leangrad.ledger.origins.rules import reductions, shorter
from tests.support import same_bits

FLOATS = (torch.float32, torch.float64)
LAST = torch.channels_last


def maps(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1).to(dtype)


# ----------------------------------------------------------------------------------------------------------- batch norm


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "rows", "sequence", "volume", "strided"])
@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_batch_norm_from_its_statistics(dtype: torch.dtype, parameters: torch.dtype, layout: str, affine: str) -> None:
    x = {
        "contiguous": maps(3, 19, 5, 7, dtype=dtype),
        "channels last": maps(3, 19, 5, 7, dtype=dtype).to(memory_format=LAST),
        "rows": maps(64, 19, dtype=dtype),
        "sequence": maps(3, 19, 33, dtype=dtype),
        "volume": maps(3, 19, 4, 3, 5, dtype=dtype).to(memory_format=torch.channels_last_3d),
        "strided": maps(3, 33, 19, dtype=dtype).transpose(1, 2),
    }[layout]
    weight = maps(19, dtype=parameters, seed=1) if affine in ("both", "weight") else None
    bias = maps(19, dtype=parameters, seed=2) if affine in ("both", "bias") else None
    y, mean, inverse = reductions.whole_batch_norm(x, weight, bias, 1e-5)
    found = shorter.batch_norm(x, weight, bias, mean, inverse)
    if inverse.dtype == torch.bfloat16 or layout == "strided":
        assert found is None  # with no parameters the statistics have the dtype of the map
    else:
        assert found is not None
        assert found.stride() == y.stride()
        assert same_bits(found, y)


def test_batch_norm_with_bfloat16_parameters_goes_the_long_way() -> None:
    x, w = maps(3, 19, 5, 7, dtype=torch.bfloat16), maps(19, dtype=torch.bfloat16)
    _, mean, inverse = reductions.whole_batch_norm(x, w, w, 1e-5)
    assert shorter.batch_norm(x, w, w, mean, inverse) is None
    assert shorter.batch_norm(x, w, w, mean.float(), inverse.float()) is None


def test_batch_norm_with_strided_parameters_goes_the_long_way() -> None:
    """ATen computes it by another formula, with other bits."""
    x, strided = maps(3, 19, 5, 7), maps(19, 2)[:, 0]
    for w, b in ((strided, None), (None, strided)):
        _, mean, inverse = reductions.whole_batch_norm(x, w, b, 1e-5)
        assert shorter.batch_norm(x, w, b, mean, inverse) is None


def test_batch_norm_of_what_is_not_finite() -> None:
    x = maps(3, 4, 5, 7)
    x[0, 0, 0, 0], x[0, 1, 0, 0], x[:, 2] = float("inf"), float("nan"), 3.0
    w = torch.tensor([1.0, 2.0, 0.0, -1e38])
    y, mean, inverse = reductions.whole_batch_norm(x, w, w, 0.0)
    found = shorter.batch_norm(x, w, w, mean, inverse)
    assert found is not None
    assert same_bits(found.isnan(), y.isnan())
    assert same_bits(found.nan_to_num(7.0), y.nan_to_num(7.0))


def test_batch_norm_reads_no_statistics_of_the_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[Tensor, ...]:
        raise AssertionError("the long way")

    assert shorter._batch_norm_is_exact(torch.float32, torch.float32)
    monkeypatch.setattr(reductions, "whole_batch_norm", refuse)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = maps(4, 3, 32, 32)
    ledger = leangrad.saving(min_bytes=0)
    for _ in range(3):
        with ledger:
            y = model(x)
        y.backward(maps(*y.shape))


def test_a_release_in_which_batch_norm_differs_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = maps(3, 19, 5, 7), maps(19)
    y, mean, inverse = reductions.whole_batch_norm(x, w, w, 1e-5)
    apply = shorter._apply_batch_norm
    monkeypatch.setattr(shorter, "_apply_batch_norm", lambda *args: apply(*args) * (1 + 2**-23))
    shorter._batch_norm_is_exact.cache_clear()
    try:
        assert shorter.batch_norm(x, w, w, mean, inverse) is None
        assert same_bits(reductions._batch_norm(x, w, w, 1e-5, mean, inverse), y)
    finally:
        shorter._batch_norm_is_exact.cache_clear()


# ---------------------------------------------------------------------------------------------------------- max pooling

SETTINGS = {
    "halved": ((2, 2), (2, 2), (0, 0), (1, 1), False),
    "stem": ((3, 3), (2, 2), (1, 1), (1, 1), False),
    "dilated": ((3, 2), (1, 2), (1, 1), (1, 2), False),
    "ceil": ((3, 3), (2, 2), (0, 0), (1, 1), True),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("shape", [(5, 24, 27, 32), (1, 9, 64, 64), (300, 8, 7, 9)])
def test_max_pooling_turned(
    shape: tuple[int, ...], settings: tuple[object, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves are rounded, so that windows have ties; some are not numbers. The last piece is shorter than the rest."""
    monkeypatch.setattr(shorter, "PIECE", 1 << 15)
    x = (maps(*shape, dtype=dtype) * 2).round()
    x.view(-1)[::41] = float("nan")
    x.view(-1)[::3] = -0.0
    assert shorter._gains(x)
    expected = torch.ops.aten.max_pool2d_with_indices.default(x, *settings)
    for which in (0, 1):
        found = shorter.max_pool2d(which)(x, *settings)
        assert found.dtype == expected[which].dtype
        assert found.stride() == expected[which].stride()
        assert same_bits(found, expected[which], nans="bits")


def test_max_pooling_that_would_gain_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("turned")

    monkeypatch.setattr(shorter, "_pool_turned", refuse)
    few, small, last = maps(2, 3, 96, 96), maps(2, 8, 16, 16), maps(4, 16, 32, 32).to(memory_format=LAST)
    for x in (few, small, last, maps(4, 16, 32, 32, dtype=torch.bfloat16), maps(16, 32, 32)):
        expected = torch.ops.aten.max_pool2d_with_indices.default(x, *SETTINGS["stem"])
        for which in (0, 1):
            assert same_bits(shorter.max_pool2d(which)(x, *SETTINGS["stem"]), expected[which])


def test_a_release_in_which_pooling_differs_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x = maps(4, 16, 32, 32)
    expected = torch.ops.aten.max_pool2d_with_indices.default(x, *SETTINGS["stem"])
    turned = shorter._pool_turned
    monkeypatch.setattr(shorter, "_pool_turned", lambda x, which, settings: turned(x, which, settings) + which)
    shorter._pool_is_exact.cache_clear()
    try:
        assert same_bits(shorter.max_pool2d(1)(x, *SETTINGS["stem"]), expected[1])
    finally:
        shorter._pool_is_exact.cache_clear()


def test_a_pooled_map_in_a_model() -> None:
    def gradients(*, lean: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        head = nn.Conv2d(16, 4, 3)
        x = maps(4, 3, 34, 34)
        ledger = leangrad.saving()
        for _ in range(3):
            if lean:
                with ledger:
                    y = head(model(x))
            else:
                y = head(model(x))
            y.backward(maps(*y.shape, seed=1))
        return [p.grad for p in (*model.parameters(), *head.parameters())]

    for a, b in zip(gradients(lean=False), gradients(lean=True), strict=True):
        assert same_bits(a, b)


# ----------------------------------------------------------------------------------------------------------- resampling


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 4, 7), (1, 3, 1, 2), (2, 3, 33, 2)])
@pytest.mark.parametrize("scales", [(2.0, 2.0), (None, None)])
def test_nearest_neighbours_of_a_doubled_map(
    scales: tuple[float | None, ...], shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = maps(*shape, dtype=dtype)
    size = [2 * n for n in shape[2:]]
    expected = torch.ops.aten.upsample_nearest2d.default(x, size, *scales)
    monkeypatch.setattr(shorter, "_upsample", None)
    found = shorter.upsample_nearest2d(x, size, *scales)
    assert found.is_contiguous()
    assert not found._is_view()  # so that the next op may write over it
    assert same_bits(found, expected)


@pytest.mark.parametrize(
    ("size", "scales"),
    [((8, 7), ()), ((9, 14), ()), ((8, 14), (2.1, 2.0)), ((12, 21), (3.0, 3.0)), ((8, 14), (None, 1.9))],
)
def test_other_nearest_neighbours_are_looked_up(size: tuple[int, int], scales: tuple[float | None, ...]) -> None:
    """A scale that is given decides, whatever the size: of 4 elements, 2.1 times, come 8."""
    x = maps(3, 5, 4, 7)
    expected = torch.ops.aten.upsample_nearest2d.default(x, size, *scales)
    assert same_bits(shorter.upsample_nearest2d(x, size, *scales), expected)
    last = x.to(memory_format=LAST)
    found = shorter.upsample_nearest2d(last, size, *scales)
    assert found.is_contiguous(memory_format=LAST)
    assert same_bits(found, expected)


def test_no_generator_is_drawn_from() -> None:
    """The comparisons run in the middle of somebody's backward."""
    shorter._batch_norm_is_exact.cache_clear()
    shorter._pool_is_exact.cache_clear()
    before = torch.get_rng_state()
    assert shorter._batch_norm_is_exact(torch.float32, torch.float32)
    assert shorter._pool_is_exact(torch.float32)
    assert same_bits(before, torch.get_rng_state())


def test_maps_of_one_position_that_lie_channels_last() -> None:
    """They are contiguous as well; what is made of them is not."""
    x = torch.as_strided(maps(512, 64, 1, 1), (512, 64, 1, 1), (64, 1, 64, 64))
    settings = ((2, 2), (1, 1), (1, 1), (1, 1), False)
    pooled = torch.ops.aten.max_pool2d_with_indices.default(x, *settings)
    doubled = torch.ops.aten.upsample_nearest2d.default(x, (2, 2), None, None)
    found = shorter.upsample_nearest2d(x, (2, 2), None, None)
    for mine, plain in (*((shorter.max_pool2d(n)(x, *settings), pooled[n]) for n in (0, 1)), (found, doubled)):
        assert mine.stride() == plain.stride()
        assert same_bits(mine, plain)
