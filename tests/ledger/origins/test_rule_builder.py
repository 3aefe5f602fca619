"""Rules as functions of a node, and what a value is told of its inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from leangrad.ledger.origins import rule_builder as forms
from leangrad.ledger.values.value import Value


def test_a_rule_is_built_once_for_each_type() -> None:
    x = torch.randn(4, requires_grad=True)
    nodes: list[Any] = [F.leaky_relu(x, slope).grad_fn for slope in (0.1, 0.2)]
    first, second = (forms.origin_of(node, 0) for node in nodes)
    assert first is second is not None
    assert forms.origin_of((x @ x).grad_fn, 0) is None  # never computed twice
    assert forms.origin_of(nodes[0], 1) is None  # it has one output


def test_dimensions_that_count_from_the_end() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    node: Any = x.transpose(-1, 0).grad_fn
    assert node._saved_dim0 == (1 << 64) - 1
    assert forms.signed(node._saved_dim0) == -1
    assert forms.signed((0, (1 << 64) - 2, None)) == (0, -2, None)


@st.composite
def values(draw: st.DrawFn) -> Value:
    """A value as a walk may meet it: a parameter, kept, rebuilt at some depth, absent, or waiting for what is."""
    kind = draw(st.sampled_from(("leaf", "kept", "rebuilt", "absent", "waiting")))
    value = Value(kind)
    if kind in ("leaf", "kept"):
        value.tensor, value.free = torch.zeros(()), kind == "leaf"
    elif kind != "absent":
        value.function = torch.sin
        value.depth, value.root = draw(st.integers(0, 3)), draw(st.sampled_from((None, *ROOTS)))
        if kind == "waiting":
            value.blocked = (draw(st.sampled_from(ROOTS)),)
    return value


ROOTS = (Value("root"), Value("root"))


def lineage(value: Value) -> tuple[Any, ...]:
    return value.inputs, value.order, value.depth, value.root, value.blocked


@given(st.lists(values(), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_what_a_value_is_told_of_its_inputs(inputs: list[Value], twice: bool, listed: bool) -> None:
    if twice:
        inputs = [inputs[0], *inputs]
    before = [v.recipe_reads for v in inputs]
    value = Value("op")
    value.set_recipe(torch.sin, (2.0, tuple(inputs)) if listed else (*inputs, 2.0), {})
    deepest_first = sorted(range(len(inputs)), key=lambda i: -inputs[i].depth)
    counted = [v for v in inputs if not v.free]
    roots = list(dict.fromkeys(v.root or v for v in counted))
    depth = max((v.depth for v in counted), default=0) + (len(roots) > 1)
    absent = [b for v in inputs if v.tensor is None for b in (v.blocked if v.function else [v])]
    expected = (
        tuple(inputs),
        (1,) if listed else tuple(deepest_first),
        depth,
        roots[0] if len(roots) == 1 else None,
        tuple(dict.fromkeys(absent)),
    )
    assert lineage(value) == expected
    value.settle_lineage()  # which is asked again when what a recipe waited for is kept
    assert lineage(value) == expected
    for v, parents in zip(inputs, before, strict=True):
        assert v.recipe_reads == parents + sum(w is v for w in inputs)


@pytest.mark.parametrize(
    ("anchor", "of_node", "expected"),
    [
        pytest.param(torch.empty(2), None, False, id="an_anchor_on_the_same_device"),
        pytest.param(torch.empty(2, device="meta"), "meta", True, id="an_anchor_on_another"),
        pytest.param(torch.empty(2, device="meta"), "cpu", False, id="a_recipe_that_only_reads_something_there"),
        pytest.param(torch.empty(()), "meta", True, id="a_number_tells_nothing"),
    ],
)
def test_a_copy_from_another_device_is_told_by_an_anchor(anchor: Tensor, of_node: str | None, expected: bool) -> None:
    """Torch itself is asked only where the anchor does not settle it: asking takes its time."""
    kept, made = Value("kept"), Value("made")
    kept.keep(anchor)
    made.set_recipe(torch.exp, (kept,), {})
    asked = [] if of_node is None else [SimpleNamespace(device=torch.device(of_node))]
    node = SimpleNamespace(_input_metadata=asked)
    assert forms.is_from_elsewhere(made, node, 0, torch.empty(3)) is expected
