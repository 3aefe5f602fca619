"""The cut is the cheapest of all sets, is enough, and is the same wherever it is found."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leangrad.policy.cut import HANDED_OUT, SCALE, cheapest_cut, remade
from leangrad.policy.graph import Graph, Value
from tests.policy.graphs import random_graph, transformer
from tests.policy.oracle import cheapest_cost, cost, keepable

PRICES = (0.0, 0.25, 1.0)


@example(1084, 6, 1, 0.25, False)  # two sets of nearly equal cost, one with a value that forward returns
@given(st.integers(0, 1 << 32), st.integers(1, 9), st.integers(1, 4), st.sampled_from(PRICES), st.booleans())
def test_the_cut_is_the_cheapest_of_all_sets(seed: int, forward: int, backward: int, price: float, pins: bool) -> None:
    graph = random_graph(seed, forward=forward, backward=backward)
    choices = keepable(graph)
    pinned = frozenset(random.Random(seed).sample(choices, len(choices) // 3)) if pins else frozenset()
    least = cheapest_cost(graph, price, pinned)
    if least is None:
        with pytest.raises(OverflowError):
            cheapest_cut(graph, price=price, pinned=pinned)
        return
    kept = cheapest_cut(graph, price=price, pinned=pinned)
    assert cost(graph, kept, price, pinned) == least
    assert cost(graph, cheapest_cut(graph, price=price, pinned=pinned, early=True), price, pinned) == least
    assert kept <= {*keepable(graph), *(n for n, value in enumerate(graph.values) if value.is_standing)}


def test_the_random_graphs_show_every_kind() -> None:
    """Else the test above would prove less than it says."""
    graphs = [random_graph(seed, forward=9, backward=4) for seed in range(300)]
    values = [value for graph in graphs for value in graph.values]
    for kind in ("is_fixed", "is_forced", "is_standing", "is_output", "is_asked_for", "is_inlined", "can_inline"):
        assert sum(getattr(value, kind) for value in values) > 50, kind
    assert sum(not value.can_be_kept for value in values) > 50
    assert sum(value.view_of is not None for value in values) > 50
    assert sum(value.is_fixed and not value.can_be_kept for value in values) > 20
    costs = [cheapest_cost(graph, 0.25, frozenset()) for graph in graphs]
    assert sum(one is None for one in costs) < 0.5 * len(costs)  # most can be cut at all
    assert sum(bool(one) for one in costs) > 0.3 * len(costs)


@pytest.mark.parametrize("seed", range(6))
def test_the_cut_of_a_larger_graph_costs_what_networkx_says(seed: int) -> None:
    networkx = pytest.importorskip("networkx")
    graph = transformer(6) if seed == 0 else random_graph(seed, forward=1200, backward=900, can_be_cut=True)
    network = networkx.DiGraph()
    network.add_nodes_from(["source", "sink"])
    price = (0.0, 0.25)[seed % 2]
    for n, value in enumerate(graph.values):
        if value.is_backward:
            continue
        is_one = not value.can_be_kept or value.view_of is not None
        nbytes = value.nbytes * (HANDED_OUT / SCALE if n in graph.handed_out else 1)
        network.add_edge(f"in{n}", f"out{n}", capacity=float("inf") if is_one else 0 if value.is_standing else nbytes)
        if n in graph.needed:
            network.add_edge(f"out{n}", "sink")
        if value.is_forced:
            network.add_edge(f"in{n}", "sink")
        elif value.is_fixed or value.is_standing:
            network.add_edge("source", f"in{n}")
            continue
        elif price and value.price and value.inputs:
            network.add_edge("source", f"in{n}", capacity=price * value.price)
        for i in value.inputs:
            network.add_edge(f"out{i}", f"in{n}")
    for n in set(range(len(graph.values))) - reach(graph):  # a forced value that backward cannot come to has no say
        network.remove_nodes_from([f"in{n}", f"out{n}"])
    value, _ = networkx.minimum_cut(network, "source", "sink")
    kept = cheapest_cut(graph, price=price)
    assert value > 0
    assert cost(graph, kept, price, frozenset()) == pytest.approx(value, abs=1e-6)


def reach(graph: Graph) -> set[int]:
    """What backward may come to make again."""
    found: set[int] = set()
    frontier = list(graph.needed)
    while frontier:
        n = frontier.pop()
        value = graph.values[n]
        if n not in found:
            found.add(n)
            frontier += value.inputs if value.is_forced or not (value.is_fixed or value.is_standing) else ()
    return found


SCRIPT = """
from leangrad.policy.choice import choose
from tests.policy.graphs import random_graph, transformer
for graph in (transformer(3), *(random_graph(seed, forward=60, backward=40, can_be_cut=True) for seed in range(20))):
    choice = choose(graph, slowdown=1.2)
    print(sorted(choice.kept), choice.outcome)
"""


def test_the_choice_does_not_depend_on_the_process() -> None:
    """Ranks of one job must choose alike, whatever their hash seeds are."""
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True).stdout
        for env in ({**environment(), "PYTHONHASHSEED": seed} for seed in ("1", "2"))
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].splitlines()) == 21


def environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path or "." for path in sys.path)}


def test_of_equal_cuts_the_one_nearest_backward() -> None:
    chain = [Value(8, is_fixed=True), Value(8, (0,)), Value(8, (1,)), Value(8, (2,), is_backward=True)]
    assert cheapest_cut(Graph(chain)) == {2}
    assert cheapest_cut(Graph(chain), early=True) == {0}


def test_a_view_is_kept_by_its_base() -> None:
    base, part = Value(12, is_fixed=True), Value(4, (0,), view_of=0)
    assert cheapest_cut(Graph([base, part, Value(4, (1,), is_backward=True)])) == {0}


def test_a_forced_value_is_made_again_though_it_is_heavy() -> None:
    values = [Value(4, is_fixed=True), Value(2, (0,), is_fixed=True, is_forced=True), Value(2, (1,), is_backward=True)]
    graph = Graph(values)
    assert cheapest_cut(graph) == {0}
    assert remade(graph, frozenset({0})) == {1}


def test_what_can_neither_be_kept_nor_made_again_is_refused() -> None:
    values = [Value(4, is_fixed=True, can_be_kept=False), Value(4, (0,), is_backward=True)]
    with pytest.raises(OverflowError, match="endless path"):
        cheapest_cut(Graph(values))


def test_inputs_must_come_before_their_reader() -> None:
    with pytest.raises(ValueError, match="inputs of value 0 to come before it"):
        Graph([Value(1, (1,)), Value(1)])


def test_of_like_values_the_one_that_is_handed_out_is_kept() -> None:
    """Logits, of which the caller has a view, and a statistic; or the probabilities, which are a little smaller."""
    for is_output, kept in ((True, [0, 1]), (False, [2])):
        logits, statistic = Value(4000, is_fixed=True), Value(16, (0,), is_fixed=True)
        gradient, view = Value(4000, (2,), is_backward=True), Value(4000, (0,), view_of=0, is_output=is_output)
        assert sorted(cheapest_cut(Graph([logits, statistic, Value(4000, (0, 1)), gradient, view]))) == kept
