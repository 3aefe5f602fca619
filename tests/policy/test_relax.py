"""What is kept beside the cut with the least memory: against every subset, on graphs that are small enough."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from leangrad.policy.choice import lowest_peak
from leangrad.policy.graph import Graph, Value
from leangrad.policy.relax import TRIES, Relaxation
from leangrad.policy.replay import Replay


def random_step(seed: int) -> tuple[Graph, list[float]]:
    """A chain of products and cheap ops over them, as a lean model has it, and what each is worth."""
    draw = random.Random(seed)
    values: list[Value] = []
    for _ in range(draw.randint(3, 9)):
        nbytes = draw.choice([100, 200, 400])
        if not values or draw.random() < 0.4:
            values.append(Value(nbytes, is_fixed=True))
        else:
            inputs = draw.sample(range(len(values)), min(len(values), draw.randint(1, 2)))
            values.append(Value(nbytes, tuple(sorted(inputs))))
    reads = [n for n in range(len(values)) for _ in range(draw.randint(1, 2))]
    ops = [Value(0, (n,), is_backward=True, scratch=draw.choice([0, 100, 500])) for n in sorted(reads, reverse=True)]
    costs = [0.0 if value.is_fixed else draw.choice([1.0, 2.0, 5.0]) for value in values] + [0.0] * len(ops)
    return Graph((*values, *ops)), costs


def every_set(relaxation: Relaxation) -> list[frozenset[int]]:
    order = relaxation.order
    return [relaxation.kept.union(some) for size in range(len(order) + 1) for some in combinations(order, size)]


@pytest.mark.parametrize("seed", range(60))
def test_near_the_best_of_all_sets(seed: int) -> None:
    graph, costs = random_step(seed)
    replay = Replay(graph, costs)
    relaxation = Relaxation(replay, lowest_peak(graph, replay.play))
    least, most = (
        replay.play(relaxation.kept).peak_bytes,
        replay.play(relaxation.kept.union(relaxation.order)).peak_bytes,
    )
    all_sets = every_set(relaxation)
    before = None
    for limit in sorted({least, (least + most) // 2, most}):
        found = relaxation.within(lambda outcome, limit=limit: outcome.peak_bytes <= limit)
        assert replay.play(found).peak_bytes <= limit
        assert relaxation.kept <= found
        best = min(replay.play(some).work for some in all_sets if replay.play(some).peak_bytes <= limit)
        work = replay.play(found).work
        assert work <= best + max(costs, default=0.0)  # greedy: at most one value more than the best is made again
        assert before is None or work <= before  # more room is never more work
        before = work


@pytest.mark.parametrize("seed", range(60))
def test_the_lowest_peak_for_a_bound_on_work(seed: int) -> None:
    graph, costs = random_step(seed)
    replay = Replay(graph, costs)
    relaxation = Relaxation(replay, lowest_peak(graph, replay.play))
    most = replay.play(relaxation.kept).work
    before = None
    for share in (1.0, 0.5, 0.0):
        found = relaxation.at_most(share * most)
        assert replay.play(found).work <= share * most
        peak = replay.play(found).peak_bytes
        assert peak <= replay.play(relaxation._fewest_bytes(share * most)).peak_bytes
        assert before is None or peak >= before  # less work is never less memory
        before = peak
    assert relaxation.at_most(most) == relaxation.kept


def test_what_is_gone_before_the_peak_is_kept_first_where_time_is_short() -> None:
    """The value of the last layer costs a little less to make; but to keep it does not raise the peak."""
    values = (Value(100, is_fixed=True), Value(400, (0,)), Value(100, (1,), is_fixed=True), Value(400, (2,)))
    ops = [Value(0, (n,), is_backward=True, scratch=1000 * (n == 2)) for n in (3, 2, 1, 0)]
    replay = Replay(Graph((*values, *ops)), [0, 2.0, 0, 1.9, 0, 0, 0, 0])
    relaxation = Relaxation(replay, frozenset({0, 2}))
    assert relaxation.order == [1, 3]
    assert relaxation._fewest_bytes(2.0) == {0, 1, 2}
    found = relaxation.at_most(2.0)
    assert found == {0, 2, 3}
    assert replay.play(found).peak_bytes == replay.play(relaxation.kept).peak_bytes


def test_the_dearest_for_each_byte_is_kept_first() -> None:
    product = Value(100, is_fixed=True)
    cheap, dear = Value(100, (0,)), Value(100, (0,))
    ops = [Value(0, (n,), is_backward=True) for n in (2, 1, 0)]
    graph = Graph((product, cheap, dear, *ops))
    replay = Replay(graph, [0, 1, 9, 0, 0, 0])
    relaxation = Relaxation(replay, frozenset({0}))
    assert relaxation.order == [2, 1]
    assert relaxation.within(lambda outcome: outcome.kept_bytes <= 200) == {0, 2}


def test_what_is_made_for_one_value_alone_is_part_of_its_gain() -> None:
    product = Value(100, is_fixed=True)
    between, last, other = Value(100, (0,)), Value(100, (1,)), Value(100, (0,))
    ops = [Value(0, (n,), is_backward=True) for n in (3, 2, 0)]
    replay = Replay(Graph((product, between, last, other, *ops)), [0, 5, 1, 4, 0, 0, 0])
    assert Relaxation(replay, frozenset({0})).order[0] == 2  # 1 for itself and 5 for what nothing else needs


def test_what_is_dear_and_large_and_read_at_the_peak_is_kept() -> None:
    """Logits: backward reads them first, where they are there in any case. Everything else would raise the peak."""
    small = [Value(10, (0,)) for _ in range(TRIES + 20)]
    logits = Value(1000, (0,))
    values = (Value(0, is_fixed=True), *small, logits)
    last = len(values) - 1
    ops = [Value(0, (n,), is_backward=True, scratch=2000 * (n == last)) for n in range(last, 0, -1)]
    replay = Replay(Graph((*values, *ops)), [0.0] + [1.0] * len(small) + [50.0] + [0.0] * len(ops))
    relaxation = Relaxation(replay, frozenset({0}))
    least = relaxation.play(relaxation.kept)
    assert relaxation.order[-1] == last  # it is the cheapest for each of its bytes
    assert relaxation.within(lambda outcome: outcome.peak_bytes <= least.peak_bytes) == {0, last}


@pytest.mark.parametrize("seed", range(40))
def test_as_many_of_the_last_as_fit(seed: int) -> None:
    graph, costs = random_step(seed)
    replay = Replay(graph, costs)
    relaxation = Relaxation(replay, lowest_peak(graph, replay.play), lambda kept: 50 * (-1 in kept))
    last = sorted(relaxation.order)
    least, most = (relaxation.play(relaxation.kept.union(some)).peak_bytes for some in ((), last))
    for limit in {least, (least + most) // 2, most}:
        found = relaxation.with_last(lambda outcome, limit=limit: outcome.peak_bytes <= limit)
        first = len(last) - len(found.kept - relaxation.kept)
        assert found.kept == relaxation.kept.union(last[first:])
        assert found.play(found.kept).peak_bytes <= limit
        within = found.within(lambda outcome, limit=limit: outcome.peak_bytes <= limit)
        assert found.kept <= within
    marked = frozenset({-1, *relaxation.kept})  # no value of the graph
    assert relaxation.play(marked).peak_bytes == least + 50
