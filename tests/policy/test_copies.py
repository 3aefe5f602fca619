"""Which readers in backward compute a recomputed value once more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leangrad.policy.copies import find_copies
from leangrad.policy.cut import cheapest_cut, remade
from leangrad.policy.graph import Graph, Value
from leangrad.policy.peak import _backward, copies_of, play
from tests.policy.graphs import POINTWISE, random_graph

MAP, STATISTIC = 1000, 10
PRODUCT, MEAN, RELU, GRADIENT, OTHER, MASKED, RESULT = range(7)


def block(**change: object) -> Graph:
    """A product, its norm and activation, which a product of backward reads, and then the norm's derivative.

    change: what is different in the value that the derivative begins with.
    """
    values = [
        Value(MAP, is_fixed=True, work=5000),  # PRODUCT
        Value(STATISTIC, (PRODUCT,), is_fixed=True, can_inline=True),  # MEAN
        Value(MAP, (PRODUCT, MEAN), **POINTWISE),  # RELU
        Value(MAP, (), is_backward=True),  # GRADIENT
        Value(MAP, (RELU, GRADIENT), is_backward=True, work=5000),  # OTHER: of a convolution, for instance
        replace(Value(MAP, (RELU, OTHER), is_backward=True, **POINTWISE), **change),  # type: ignore[arg-type]  # MASKED
        Value(MAP, (MASKED, PRODUCT), is_backward=True, is_output=True, **POINTWISE),  # RESULT
    ]
    return Graph(values)


def test_a_kernel_that_reads_the_same_memory_computes_the_value_again() -> None:
    graph = block()
    kept = cheapest_cut(graph)
    assert kept == {PRODUCT, MEAN}
    (copy,) = copies_of(graph, kept)
    assert (copy.value, copy.ops, copy.readers) == (RELU, {RELU}, {MASKED})
    assert (copy.inlined, copy.kernels) == ({MASKED}, {RESULT})
    assert [nbytes for _, _, nbytes, _ in copy.spared] == [RELU]


def test_the_value_is_freed_when_the_product_has_run_and_one_pass_less_is_counted() -> None:
    graph = block()
    kept = cheapest_cut(graph)
    kernels = _backward(graph, kept, None)
    (copy,) = find_copies(kernels)
    assert kernels.work() - kernels.work(copy.spared) == MAP
    large = [*graph.values[:RESULT], replace(graph.values[RESULT], nbytes=4 * MAP)]
    without = [*large[:MASKED], replace(large[MASKED], windows=(RELU,)), large[RESULT]]  # never of a copy
    peaks = [play(Graph(values), kept).peak_bytes for values in (large, without)]
    assert peaks[1] - peaks[0] == MAP - STATISTIC  # which the copy reads


def test_no_copy_where_the_kernel_would_read_another_memory_for_it() -> None:
    values = list(block().values)
    values[RESULT] = replace(values[RESULT], inputs=(MASKED,))  # does not read the product
    graph = Graph(values)
    assert copies_of(graph, cheapest_cut(graph)) == []


@pytest.mark.parametrize("results", [1, 2])
def test_no_copy_that_gives_a_buffer_to_another_value_than_the_one_that_is_read(results: int) -> None:
    """With the copy the sum is made from nine memories and gets a buffer: its cast does so then only if it must."""
    product, mean, deviation, relu, gradient, other, statistics = 0, 1, 2, 3, 4, 5, (6, 7, 8, 9, 10)
    values = [
        Value(MAP, is_fixed=True, work=5000),
        *(Value(STATISTIC, (product,), is_fixed=True, can_inline=True) for _ in (mean, deviation)),
        Value(MAP, (product, mean, deviation), **POINTWISE),
        Value(MAP, (), is_backward=True),
        Value(MAP, (relu, gradient), is_backward=True, work=5000),
        *(Value(STATISTIC, (other,), is_backward=True, can_inline=True) for _ in statistics),
        Value(2 * MAP, (relu, other, product, *statistics), is_backward=True, **POINTWISE),
        Value(MAP, (11,), is_backward=True, **POINTWISE),
        *(Value(MAP, (12,), is_backward=True, is_output=True, **POINTWISE) for _ in range(results)),
    ]
    graph = Graph(values)
    found = copies_of(graph, cheapest_cut(graph))
    assert [copy.value for copy in found] == ([relu] if results == 1 else [])


def test_no_copy_where_another_kernel_needs_the_value_after_all() -> None:
    """The second one reads no product's output, in the same stage: the pass is made anyway."""
    values = [*block().values, Value(MAP, (RELU, OTHER), is_backward=True, is_output=True, **POINTWISE)]
    graph = Graph(values)
    found = copies_of(graph, cheapest_cut(graph))
    assert found == [] or all(copy.spared for copy in found)
    kernels = _backward(graph, cheapest_cut(graph), None)
    assert kernels.work(frozenset().union(*(copy.spared for copy in found))) <= kernels.work()


@pytest.mark.parametrize("seed", range(300))
def test_copies_of_random_graphs_can_be_computed(seed: int) -> None:
    """What a copy is computed from is in memory, nothing of it is random or a product, and work never grows."""
    graph = random_graph(seed, forward=30, backward=30, can_be_cut=True)
    try:
        kept = cheapest_cut(graph)
    except OverflowError:
        return
    kernels = _backward(graph, kept, None)
    again = remade(graph, kept)
    spared = set()
    for copy in find_copies(kernels):
        assert copy.value in again
        assert copy.value in copy.ops
        for n in copy.ops:
            value = graph.values[n]
            assert not value.is_backward
            assert not value.is_fixed
            for i in value.inputs:
                is_read = kernels.written.get(graph.base(i), True)
                assert i in copy.ops or is_read
        assert all(not kernels.has_buffer[n] for n in copy.inlined if graph.values[n].view_of is None)
        assert not copy.readers - copy.inlined - copy.kernels
        assert copy.spared <= {one for n in kernels.order for one in kernels.passes(n)}
        spared |= copy.spared
    assert kernels.work(frozenset(spared)) <= kernels.work()
