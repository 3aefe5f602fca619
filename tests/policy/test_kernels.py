"""Which values get a buffer, and when those are made that backward makes again."""

from __future__ import annotations

from collections import Counter

from leangrad.policy.choice import NEAR, choose
from leangrad.policy.cut import cheapest_cut
from leangrad.policy.graph import Graph, Value
from leangrad.policy.kernels import ACROSS, WINDOWS, Fusion, Kernels
from leangrad.policy.peak import _backward_order, play

POINTWISE = {"is_inlined": True, "can_inline": True}


def sums(count: int, *, is_reused: bool = False) -> Kernels:
    """A sum of so many products, two at a time; then a product of it, or two."""
    values = [Value(8, is_fixed=True, work=1) for _ in range(count)]
    last = 0
    for n in range(1, count):
        values.append(Value(8, (last, n), **POINTWISE))
        last = len(values) - 1
    values += [Value(8, (last,), **POINTWISE, is_output=True) for _ in range(2 if is_reused else 1)]
    values.append(Value(8, (len(values) - 1,), is_fixed=True))
    order = list(range(len(values)))
    return Kernels(Graph(values), order, {n for n in order if values[n].is_output}, Fusion(), is_backward=False)


def test_a_value_of_many_memories_gets_a_buffer() -> None:
    for count, buffers in ((8, 0), (9, 1), (16, 1), (17, 2)):
        kernels = sums(count)
        assert sum(kernels.has_buffer[n] for n in range(count, 2 * count - 1)) == buffers


def test_a_value_with_several_readers_sooner() -> None:
    for count, has_buffer in ((4, False), (5, True)):
        kernels = sums(count, is_reused=True)
        assert kernels.has_buffer[2 * count - 2] is has_buffer
        assert kernels.written[2 * count - 2] is False  # its readers are in the same kernel


def residual(layers: int) -> Graph:
    """A stream of links, each the one before plus a product of it; backward reads each link, the last one first."""
    values = [Value(64, is_fixed=True, is_standing=True)]
    links, link = [], 0
    for _ in range(layers):
        values.append(Value(32, (link,), is_fixed=True, work=100))
        values.append(Value(64, (link, len(values) - 1), **POINTWISE))
        link = len(values) - 1
        links.append(link)
    values.append(Value(64, is_backward=True))
    for link in reversed(links):
        values.append(Value(64, (link,), **POINTWISE))  # of forward, read by backward only: a norm's output
        values.append(Value(64, (len(values) - 1, len(values) - 2), is_backward=True, work=100))
    return Graph(values)


def test_what_is_made_again_from_a_chain_is_there_with_it() -> None:
    graph = residual(12)
    kept = cheapest_cut(graph)
    assert all(graph.values[n].nbytes == 32 for n in kept if not graph.values[n].is_standing)  # products, no link
    peak = play(graph, kept).peak_bytes
    assert peak > 12 * 32 + 8 * 64  # and norms that are needed much later
    choice = choose(graph, slowdown=2.0)
    assert choice.outcome.peak_bytes < 0.8 * peak
    assert any(graph.values[n].nbytes == 64 and not graph.values[n].is_standing for n in choice.kept)


def test_reading_across_rows_takes_longer() -> None:
    """A copy into another memory format, inside the kernel that reads it or not; a second one leads back."""
    product, copy = Value(1000, is_fixed=True, work=1), Value(1000, (0,), **POINTWISE, across=(0,))
    works = []
    for values in (
        [product, Value(1000, (0,), **POINTWISE), Value(1000, (1,), **POINTWISE, is_output=True)],
        [product, copy, Value(1000, (1,), **POINTWISE, is_output=True)],
        [product, copy, Value(1000, (1,), **POINTWISE, across=(1,), is_output=True)],
    ):
        kernels = Kernels(Graph(values), [0, 1, 2], {2}, Fusion(), is_backward=False)
        works.append(kernels.work())
    along, across, back = works
    assert along == back == 1 + 1000 + 1000
    assert across == 1 + ACROSS * 1000 + 1000


def test_what_is_read_by_windows_is_written_and_read_several_times() -> None:
    """A product and its statistic, a norm of both, and a pool."""
    product, statistic = Value(1000, is_fixed=True, work=1), Value(1, (0,), is_fixed=True, work=1)
    works = []
    for norm, windows in (((0, 1), ()), ((0, 1), (2,)), ((0,), (2,))):
        pool = Value(1000, (2,), can_inline=True, windows=windows, is_output=True)
        graph = Graph([product, statistic, Value(1000, norm, **POINTWISE), pool])
        kernels = Kernels(graph, range(4), {3}, Fusion(), is_backward=False)
        assert kernels.written[2] is (norm == (0, 1) and bool(windows))
        works.append(kernels.work())
    once, by_windows, of_one_memory = works
    assert once == 2 + 1001 + 1000
    assert by_windows == 2 + 1001 + 1000 + WINDOWS * 1000 + 1000
    assert of_one_memory == 2 + WINDOWS * 1000 + 1000  # computed anew in each window, from what is there


def test_what_spares_the_most_work_for_its_bytes_is_kept_first() -> None:
    """Blocks with a pool and an activation of a product each: backward reads both from memory."""
    values = [Value(1, is_fixed=True, is_standing=True)]
    last: tuple[int, ...] = (0,)
    pools, activations = [], []
    for _ in range(6):
        product = len(values)
        values.append(Value(1000, last, is_fixed=True, work=20_000))
        values.append(Value(8, (product,), is_fixed=True, work=8))
        values.append(Value(1000, (product, product + 1), **POINTWISE, price=5500))
        values.append(Value(1000, (product, product + 1), **POINTWISE, price=100))
        values.append(Value(1000, (product + 3,), can_inline=True, windows=(product + 3,), price=6000))
        activations.append(product + 2)
        pools.append(product + 4)
        last = activations[-1], pools[-1]
    values.append(Value(8, last, is_fixed=True, is_output=True, work=8))
    values.append(Value(1000, is_backward=True))
    for activation, pool in zip(reversed(activations), reversed(pools), strict=True):
        product = activation - 2  # which the backward of its norm reads too
        values.append(Value(1000, (len(values) - 1, product, activation, pool), is_backward=True, work=40_000))
    graph = Graph(values)
    choice = choose(graph, slowdown=1.04)
    assert choice.is_held_back
    assert choice.kept.issuperset(pools)
    assert not choice.kept.intersection(activations)


def test_no_kernel_writes_more_than_it_has_registers_for() -> None:
    graph = residual(40)
    values = graph.values
    order = _backward_order(graph, cheapest_cut(graph))
    kernels = Kernels(graph, order, frozenset(), Fusion(), is_backward=True)
    made = [n for n in order if not values[n].is_backward and kernels.written[n]]
    places = Counter(kernels.place[n] for n in made)
    assert len(made) > Fusion().size == max(places.values())


def test_the_usual_cut_is_what_work_is_measured_by_and_no_peak_is_above_its() -> None:
    graph = residual(12)
    every_link = frozenset(
        n for n, v in enumerate(graph.values) if v.nbytes == 64 and v.is_inlined and len(v.inputs) == 2
    )
    usual = play(graph, cheapest_cut(graph, pinned=every_link))
    choice = choose(graph, slowdown=1.0, usual=every_link)
    assert choice.step_work == usual.work
    assert choice.outcome.work <= usual.work
    assert choice.outcome.peak_bytes <= usual.peak_bytes


def test_no_peak_is_above_the_usual_ones_whatever_the_work() -> None:
    """A decision that the usual cut makes again and the policy has to keep, beside a link that both could keep."""
    product = Value(100, is_fixed=True, work=1000)
    decision = Value(40, (0,), is_fixed=True, can_inline=True)
    dear = Value(100, (0, 1), can_inline=True, price=1000)
    gradient = Value(100, is_backward=True)
    graph = Graph([product, decision, dear, gradient, Value(100, (2, 3), is_backward=True, work=10)])
    choice = choose(graph, slowdown=1.0, usual={0})
    assert choice.usual is not None
    assert choice.outcome.peak_bytes <= NEAR * choice.usual.peak_bytes
