"""What a block of memory is, told by when it is made and how long it lives."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import leangrad
from leangrad.timeline.categories import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    Curve,
)
from leangrad.timeline.event import Event, Phase


def events(*changes: tuple[int, int, Phase]) -> list[Event]:
    """From (block, bytes, phase)."""
    live, found = 0, []
    for n, (block, count, phase) in enumerate(changes):
        live += count
        found.append(Event(n / 1000, count, live, block, f"op{block}", "", phase))
    return found


def categories(*changes: tuple[int, int, Phase], standing: Mapping[str, int] | None = None) -> list[str]:
    return Curve(events(*changes), standing or {}).categories


def test_what_backward_finds_is_kept() -> None:
    assert categories((0, 8, "forward"), (1, 4, "backward"), (0, -8, "backward")) == [
        ACTIVATIONS,
        GRADIENTS,
        ACTIVATIONS,
    ]


def test_what_backward_releases_first_is_kept_too() -> None:
    assert categories((0, 8, "forward"), (0, -8, "backward")) == [ACTIVATIONS] * 2


def test_what_ends_in_its_phase_is_temporary() -> None:
    found = categories(
        (0, 8, "forward"),
        (0, -8, "forward"),
        (1, 8, "backward"),
        (1, -8, "backward"),
        (2, 8, "other"),
        (2, -8, "other"),
    )
    assert found == [TEMPORARIES] * 6


def test_a_gradient_lasts_until_the_optimizer_or_longer() -> None:
    assert categories((0, 8, "backward"), (0, -8, "other")) == [GRADIENTS] * 2
    assert categories((0, 8, "backward"), (1, 4, "other")) == [GRADIENTS, STATE]


def test_micro_batches() -> None:
    """The activations of the second batch are made when a backward has been."""
    found = categories(
        (0, 8, "forward"),
        (1, 4, "backward"),
        (0, -8, "backward"),
        (2, 8, "forward"),
        (3, 2, "backward"),
        (3, -2, "backward"),
        (2, -8, "backward"),
    )
    assert found == [ACTIVATIONS, GRADIENTS, ACTIVATIONS, ACTIVATIONS, TEMPORARIES, TEMPORARIES, ACTIVATIONS]


def test_without_a_backward_nothing_is_kept() -> None:
    assert categories((0, 8, "forward"), (1, 8, "forward")) == [TEMPORARIES] * 2


def test_what_stood_before_is_released() -> None:
    curve = Curve(events((-1, -8, "forward"), (-1, -4, "forward"), (0, 2, "forward")), {GRADIENTS: 8, OTHER: 4})
    assert curve.categories == [GRADIENTS, OTHER, TEMPORARIES]
    assert curve.at(2) == {**dict.fromkeys(CATEGORIES, 0), TEMPORARIES: 2}
    assert curve.peak_bytes == 12
    assert curve.peak_index == -1


def test_what_nobody_counted_is_not_released() -> None:
    curve = Curve(events((-1, -8, "forward"), (0, 2, "forward")), {PARAMETERS: 16, GRADIENTS: 4})
    assert curve.categories == [TEMPORARIES]
    assert curve.at(0)[GRADIENTS] == 4
    assert curve.peak_bytes == 22


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["forward", "backward", "other"])), max_size=40))
def test_categories_add_up_to_the_live_bytes(draws: list[tuple[int, Phase]]) -> None:
    alive: set[int] = set()
    number, changes = 100, []
    names: dict[int, int] = {}
    for block, phase in draws:
        if block in alive:
            alive.remove(block)
            changes.append((names[block], -(block + 1), phase))
        else:
            alive.add(block)
            number += 1
            names[block] = number
            changes.append((number, block + 1, phase))
    curve = Curve(events(*changes), {PARAMETERS: 5})
    for index, event in enumerate(curve.timeline):
        at = curve.at(index)
        assert sum(at.values()) == event.live_bytes + 5
        assert min(at.values()) >= 0
        assert sum(one.bytes for one, _ in curve.alive_at(index)) == event.live_bytes
    assert curve.peak_bytes == max([5, *(5 + event.live_bytes for event in curve.timeline)])


@pytest.mark.parametrize("batch", [32, 64])
def test_a_real_step(batch: int) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(batch, 16)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    timeline = leangrad.measure(step, timed_runs=0).timeline
    curve = Curve(timeline, {})
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    steps = sum(s["step"].nbytes for s in optimizer.state.values())
    end = curve.at(len(curve.timeline) - 1)
    assert end[GRADIENTS] == parameter_bytes
    assert end[STATE] == 2 * parameter_bytes + steps
    first = next(n for n, event in enumerate(curve.timeline) if event.phase == "backward")
    # Linear, GELU and square keep 64, 64 and 16 numbers of each row; the loss is one.
    assert curve.at(first - 1)[ACTIVATIONS] == 4 * (batch * (64 + 64 + 16) + 1)
