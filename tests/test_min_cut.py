"""The cut is the cheapest of all sets, by brute force on small graphs."""

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.min_cut import min_cut


def brute_force(costs: list[int], inputs: list[list[int]], fixed: set[int], needed: set[int]) -> int:
    """The cost of the cheapest set that is enough, of all sets."""

    def suffices(kept: set[int]) -> bool:
        at_hand = set()
        for value, sources in enumerate(inputs):  # inputs come before what is made of them
            if value in kept or (value not in fixed and at_hand.issuperset(sources)):
                at_hand.add(value)
        return needed <= at_hand

    everything = range(len(costs))
    sets = chain.from_iterable(combinations(everything, size) for size in range(len(costs) + 1))
    return min(sum(costs[value] for value in kept) for kept in map(set, sets) if suffices(kept))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], list[list[int]], set[int], set[int]]:
    size = draw(st.integers(1, 9))
    costs = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))
    inputs = [draw(st.lists(st.integers(0, value - 1), max_size=3)) if value else [] for value in range(size)]
    some = st.sets(st.integers(0, size - 1))
    return costs, inputs, draw(some), draw(some)


@given(graphs())
def test_min_cut_is_the_cheapest_of_all_sets(graph: tuple[list[int], list[list[int]], set[int], set[int]]) -> None:
    costs, inputs, fixed, needed = graph
    kept = min_cut(costs, inputs, fixed, needed)
    assert sum(costs[value] for value in kept) == brute_force(costs, inputs, fixed, needed)
    # It is itself enough: with what is kept at no cost, nothing more is needed.
    assert brute_force([0 if value in kept else 1 for value in range(len(costs))], inputs, fixed, needed) == 0


def test_min_cut_of_a_deep_graph() -> None:
    # A residual chain: value 2k + 1 is fixed, value 2k + 2 the sum so far. All are needed: keep every fixed value.
    depth = 3000
    inputs: list[list[int]] = [[]]
    for step in range(depth):
        inputs += [[2 * step], [2 * step, 2 * step + 1]]
    fixed = set(range(1, 2 * depth, 2))
    assert min_cut([1] * len(inputs), inputs, fixed, set(range(len(inputs)))) == fixed
