"""The simulated peak equals that of a second, slower simulation; the choice is the best of its candidates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leangrad.policy.choice import NEAR, choose
from leangrad.policy.cut import cheapest_cut
from leangrad.policy.graph import Graph, Value
from leangrad.policy.max_flow import Network
from leangrad.policy.peak import play
from tests.policy.graphs import random_graph, transformer
from tests.policy.oracle import peak


@given(st.integers(0, 1 << 32), st.integers(1, 14), st.integers(1, 8), st.sampled_from([0.0, 0.5]))
def test_the_peak_is_that_of_a_slow_simulation(seed: int, forward: int, backward: int, price: float) -> None:
    graph = random_graph(seed, forward=forward, backward=backward)
    try:
        kept = cheapest_cut(graph, price=price)
    except OverflowError:
        return
    assert play(graph, kept).peak_bytes == peak(graph, kept)


def test_a_step_by_hand() -> None:
    """Two products with an activation between them: w1 and w2 stand, h is kept, gelu is made again."""
    x, w1, w2 = (Value(size, is_fixed=True, is_standing=True) for size in (8, 16, 16))
    h = Value(100, (0, 1), is_fixed=True, work=7)
    gelu = Value(100, (3,), is_inlined=True, can_inline=True, price=5)
    y = Value(10, (4, 2), is_fixed=True, is_output=True, work=7)
    tangent = Value(10, is_backward=True)
    to_w2 = Value(16, (4, 6), is_backward=True, is_output=True, work=7)
    to_gelu = Value(100, (2, 6), is_backward=True, work=7)
    to_h = Value(100, (8, 3), is_backward=True, is_inlined=True, can_inline=True)
    to_w1 = Value(16, (9, 0), is_backward=True, is_output=True, work=7)
    graph = Graph([x, w1, w2, h, gelu, y, tangent, to_w2, to_gelu, to_h, to_w1])
    outcome = play(graph, frozenset({0, 2, 3}))
    # Backward: h 100, y 10, w2's gradient 16; then h, its gradient and that of gelu are there together, with h's 100.
    assert outcome.peak_bytes == 100 + 10 + 16 + 100 + 100
    assert outcome.peak_at == 9
    assert outcome.kept_bytes == 100
    gelu_twice, to_h_once = 2 * (100 + 100), 100 + 100 + 100  # read and written
    assert outcome.work == 5 * 7 + gelu_twice + to_h_once
    assert play(graph, frozenset({0, 2, 3, 4})).work == outcome.work - 200


def test_what_only_backward_makes_is_no_work_of_forward() -> None:
    values = [Value(8, is_fixed=True, work=5), Value(8, (0,), work=3), Value(8, (0,), is_output=True, work=2)]
    graph = Graph([*values, Value(8, (1,), is_backward=True, work=1)])
    assert play(graph, frozenset({0})).work == 5 + 3 + 2 + 1


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("slowdown", [1.0, 1.1, 2.0])
@pytest.mark.sampled(4)
def test_the_choice_is_no_worse_than_the_cheapest_cut(seed: int, slowdown: float) -> None:
    graph = random_graph(seed, forward=80, backward=60, can_be_cut=True)
    first = play(graph, cheapest_cut(graph))
    choice = choose(graph, slowdown=slowdown)
    assert choice.floor == first
    assert choice.outcome == play(graph, choice.kept, reused_reads=choice.reused_reads)
    assert choice.outcome.work <= slowdown * choice.step_work
    if choice.floor.work <= slowdown * choice.step_work:
        assert choice.outcome.peak_bytes <= NEAR * first.peak_bytes


def test_a_bound_on_work_holds_the_choice_back() -> None:
    values = [Value(64, is_fixed=True, is_standing=True)]
    activations = []
    for _ in range(8):  # a product, and an activation that both the next product and backward read
        values.append(Value(64, (len(values) - 1,), is_fixed=True, work=1000))
        values.append(Value(64, (len(values) - 1,), is_inlined=True, can_inline=True, price=128))
        activations.append(len(values) - 1)
    values.append(Value(64, (len(values) - 1,), is_fixed=True, is_output=True, work=1000))
    values.append(Value(64, is_backward=True))
    for n in reversed(activations):
        values.append(Value(64, (len(values) - 1, n), is_backward=True, work=1000))
        values.append(Value(64, (len(values) - 1, n - 1), is_backward=True, is_inlined=True, can_inline=True))
    graph = Graph(values)
    choices = [choose(graph, slowdown=slowdown) for slowdown in (2.0, 1.03, 1.0)]
    assert [choice.is_held_back for choice in choices] == [False, True, True]
    assert choices[0].slowdown > 1.03 >= choices[1].slowdown > choices[2].slowdown == 1.0
    peaks = [choice.outcome.peak_bytes for choice in choices]
    assert peaks[0] < peaks[1] < peaks[2]  # what blocks that are alike keep can be kept by some of them


def test_the_rounds_of_the_flow_do_not_grow_with_the_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes time in proportion to the size of the graph: so does the whole, if they are few."""
    rounds = []
    levels = Network._levels
    monkeypatch.setattr(Network, "_levels", lambda network: rounds.append(network) or levels(network))
    counts = []
    for blocks in (4, 16, 64):
        rounds.clear()
        choose(transformer(blocks), slowdown=1.1)
        counts.append(len(rounds) / len(set(rounds)))
    assert max(counts) < 12, counts
    assert counts[2] < 1.5 * counts[0], counts
