"""Amounts of memory as people write them."""

from __future__ import annotations

import math

import pytest

from leangrad.sizes import parse_budget, parse_size, size_text


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("20GB", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        ("20 gb", 20 * 10**9),
        ("1.5MiB", 3 * 2**19),
        (".5kB", 500),
        ("4096", 4096),
        (4096, 4096),
        (4096.0, 4096),
        ("2TB", 2 * 10**12),
        ("7b", 7),
        (2**63, 2**63),
    ],
)
def test_sizes(size: object, nbytes: int) -> None:
    assert parse_size(size) == nbytes
    assert parse_budget(size) == nbytes


@pytest.mark.parametrize("size", ["20 gigs", "GB", "", "-1", "-1GB", "1e9", "20G", 0, -1, 0.5, math.nan, math.inf, "0"])
def test_what_is_no_size_is_said_in_one_sentence(size: object) -> None:
    with pytest.raises(ValueError, match=r"budget must be a number of bytes above 0.*20GB.*got"):
        parse_budget(size)


@pytest.mark.parametrize("size", [None, True, [1], b"20GB"])
def test_other_types(size: object) -> None:
    with pytest.raises(TypeError, match="budget must be"):
        parse_budget(size)


def test_a_share_of_the_device() -> None:
    assert parse_budget("90%") == 0.9
    assert parse_budget("100 %") == 1.0
    for wrong in ("0%", "101%"):
        with pytest.raises(ValueError, match="above 0% and at most 100%"):
            parse_budget(wrong)


def test_sizes_as_people_read_them() -> None:
    assert size_text(1500) == "1.50 kB"
    assert size_text(0) == "0 bytes"
