"""Patterns of chains: what matches, what does not, and how the tensors of a chain's leaves are fetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leangrad.errors import ChangedError, LeangradError
from leangrad.ledger.fuse.chain import Chain
from leangrad.ledger.fuse.pattern import AGAIN, Pattern
from leangrad.ledger.origins.rules import RULES
from leangrad.ledger.values.value import MANY, Value, leaf_value

TASK = 7
PLAN = SimpleNamespace(device=torch.device("cpu"))
SHAPE = 4, 6


def kept(tensor: Tensor) -> Value:
    value = Value("kept")
    value.keep(tensor)
    return value


def op(node: str, *args: Any, **kwargs: Any) -> Value:
    value = Value(node)
    value.set_recipe(RULES[node][0].function, args, kwargs)
    return value


@dataclass
class Parts:
    """The chain cast((saved - y)² + soft · x / across · shared), and a name for the values that are changed below."""

    x: Value
    y: Value
    across: Value  # kept, and not contiguous
    even: Value  # kept, and perhaps a part of a complex tensor: its strides are even
    parameter: Value
    soft: Value  # a leaf that has to be rebuilt
    shared: Value  # read twice here, and elsewhere: held for recipes
    saved: Value  # autograd saved it
    minus: Value
    square: Value
    scaled: Value
    product: Value
    sum: Value
    root: Value
    made: dict[int, Tensor] = field(default_factory=dict)


def build() -> Parts:
    x, y, across = kept(torch.randn(SHAPE)), kept(torch.randn(SHAPE)), kept(torch.randn(6, 4).t())
    even, parameter = kept(torch.randn(4, 6, 2)[..., 0]), leaf_value(torch.randn(6), 0)
    soft = op("SoftmaxBackward0", kept(torch.randn(SHAPE)), -1, torch.float32)
    shared = op("MulBackward0", x, torch.tensor(0.5, dtype=torch.float64))
    shared.recipe_reads = MANY - 2
    saved = op("AddBackward0", op("MulBackward0", shared, even), parameter, alpha=1)
    saved.readers, saved.layout = 1, (torch.Size(SHAPE), (6, 1))
    minus = op("SubBackward0", saved, y, alpha=1)
    square = op("PowBackward0", minus, 2)
    scaled = op("MulBackward0", soft, x)
    product = op("MulBackward0", op("DivBackward0", scaled, across), shared)
    total = op("AddBackward0", square, product, alpha=1)
    total.dtype = torch.float32
    root = op("ToCopyBackward0", total, torch.bfloat16)
    root.dtype, root.readers = torch.bfloat16, 1
    return Parts(x, y, across, even, parameter, soft, shared, saved, minus, square, scaled, product, total, root)


def pattern_of(parts: Parts, plan: Any = PLAN) -> Pattern:
    chain = Chain(parts.root, parts.made, TASK)
    assert parts.shared in chain.values
    assert parts.soft in chain.leaves
    at_hand = [chain.is_made(v) for v in chain.leaves]
    tensors = [v.tensor if v.tensor is not None else torch.empty(SHAPE) for v in chain.leaves]
    return Pattern(chain, at_hand, tensors, plan)


Change = Callable[[Parts], None]


def setting(name: str, **attributes: Any) -> Change:
    def change(parts: Parts) -> None:
        for attribute, content in attributes.items():
            setattr(getattr(parts, name), attribute, content)

    return change


def arguing(name: str, place: int, argument: Callable[[Parts], Any]) -> Change:
    def change(parts: Parts) -> None:
        value = getattr(parts, name)
        value.args = (*value.args[:place], argument(parts), *value.args[place + 1 :])

    return change


def keeping(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda parts: getattr(parts, name).keep(make(getattr(parts, name).tensor))


def making(name: str) -> Change:
    return lambda parts: parts.made.update({id(getattr(parts, name)): torch.empty(0)})


def alike(value: Value) -> Value:
    """Another value that is made as this one is."""
    other = Value(value.op)
    for name in Value.__slots__:
        if name != "__weakref__":
            setattr(other, name, getattr(value, name))
    return other


def random(_: Any) -> Tensor:
    return torch.randn(SHAPE)


DIFFERENCES: dict[str, Change] = {
    "the root's dtype": setting("root", dtype=None),
    "the root's keywords": setting("root", kwargs={"copy": True}),
    "the root's constant": arguing("root", 1, lambda _: torch.float16),
    "an inner value that is a tensor": arguing("root", 0, random),
    "an inner value that is kept": setting("sum", tensor=torch.randn(SHAPE)),
    "an inner value that is held": setting("sum", memo=torch.randn(SHAPE)),
    "a function": setting("sum", function=RULES["SubBackward0"][0].function),
    "a dtype": setting("sum", dtype=None),
    "a layout": setting("saved", layout=(torch.Size(SHAPE), (1, 4))),
    "no layout": setting("saved", layout=None),
    "keywords": setting("sum", kwargs={"alpha": 2}),
    "no keywords": setting("sum", kwargs={}),
    "more arguments": lambda parts: setting("square", args=(*parts.square.args, None))(parts),
    "fewer arguments": lambda parts: setting("square", args=parts.square.args[:1])(parts),
    "more readers": setting("saved", readers=2),
    "no readers": setting("saved", readers=0),
    "readers where there were none": setting("sum", readers=1),
    "readers that have come": setting("saved", reads=1, task=TASK),
    "more recipes that read it": setting("shared", recipe_reads=MANY + 1),
    "fewer recipes that read it": setting("shared", recipe_reads=MANY - 1),
    "two recipes that read it where there was one": setting("sum", recipe_reads=2),
    "a shared value that was made": making("shared"),
    "two leaves in the place of one": arguing("scaled", 1, lambda parts: alike(parts.x)),
    "two inner values in the place of one": arguing("product", 1, lambda parts: alike(parts.shared)),
    "a number that is none": arguing("shared", 1, lambda _: None),
    "a number that is complex": arguing("shared", 1, lambda _: torch.tensor(1j)),
    "a number with dimensions": arguing("shared", 1, lambda _: torch.tensor([0.5])),
    "a constant": arguing("square", 1, lambda _: 3),
    "a constant of another type": arguing("square", 1, lambda _: 2.0),
    "a leaf that is no value": arguing("saved", 1, lambda _: torch.randn(6)),
    "a leaf that is not kept": setting("parameter", tensor=None),
    "a leaf's dtype": keeping("parameter", Tensor.double),
    "a leaf's shape": keeping("parameter", lambda t: t[None]),
    "a leaf's device": keeping("parameter", lambda t: t.to("meta")),
    "a leaf's strides": keeping("across", Tensor.contiguous),
    "a leaf that is no longer contiguous": keeping("x", lambda t: t.t().contiguous().t()),
    "a leaf that is negated": keeping("even", lambda t: torch.complex(t, -t).conj().imag),
    "one leaf in the place of two": arguing("minus", 1, lambda parts: parts.x),
    "a rebuilt leaf that is kept": setting("soft", tensor=torch.randn(SHAPE)),
    "a rebuilt leaf that is held": setting("soft", memo=torch.randn(SHAPE)),
    "a rebuilt leaf that was made": making("soft"),
    "a rebuilt leaf that could chain": setting("soft", function=RULES["ReluBackward0"][0].function),
}


def test_the_like_of_a_chain_is_known() -> None:
    match, parts = pattern_of(build()).match, build()
    found = match(parts.root, parts.made, TASK)
    assert found is not None
    values, leaves, scalars = found
    assert (values[0], values[1]) == (parts.root, parts.sum)
    assert {parts.shared, parts.saved, parts.square} < set(values)
    assert set(leaves) == {parts.x, parts.y, parts.across, parts.even, parts.parameter, parts.soft}
    assert scalars == [0.5]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_one_difference_is_enough(difference: str) -> None:
    match, parts = pattern_of(build()).match, build()
    DIFFERENCES[difference](parts)
    assert match(parts.root, parts.made, TASK) is None


ALIKE: dict[str, Change] = {
    "another number": arguing("shared", 1, lambda _: 3),
    "readers that came in another backward pass": setting("saved", reads=1, task=TASK - 1),
    "other tensors": keeping("x", torch.zeros_like),
    "a parameter that has changed": lambda parts: parts.parameter.tensor.mul_(2),  # which is said when it is read
}


@pytest.mark.parametrize("change", ALIKE)
def test_what_a_program_does_not_depend_on_may_differ(change: str) -> None:
    match, parts = pattern_of(build()).match, build()
    ALIKE[change](parts)
    assert match(parts.root, parts.made, TASK) is not None


def test_readers_that_are_not_to_come() -> None:
    """The pattern of a chain whose saved value was read before."""
    learned = build()
    learned.saved.reads, learned.saved.task = 1, TASK
    match, parts = pattern_of(learned).match, build()
    assert match(parts.root, {}, TASK) is None
    parts.saved.reads, parts.saved.task = 1, TASK
    assert match(parts.root, {}, TASK) is not None
    assert match(parts.root, {}, TASK + 1) is None


def test_whether_a_value_is_held_for_recipes() -> None:
    """Fewer than MANY recipes: it is held if it is a link of a stream."""
    learned, parts = build(), build()
    learned.shared.recipe_reads = parts.shared.recipe_reads = 2
    match = pattern_of(learned).match
    assert match(parts.root, {}, TASK) is not None
    parts.shared.depth = 1
    assert match(parts.root, {}, TASK) is None


# ---- fetching


def test_leaves_are_fetched_in_the_order_of_the_chain() -> None:
    pattern, parts = pattern_of(build()), build()
    found = pattern.match(parts.root, parts.made, TASK)
    assert found is not None
    taken: dict[Value, tuple[Tensor, bool]] = {}
    fetched = pattern.fetch(found, parts.made, TASK, taken)
    assert fetched is not None
    tensors, owned, scalars, held = fetched
    for leaf, tensor, free in zip(found[1], tensors, owned or (), strict=True):
        assert tensor is leaf.tensor or leaf is parts.soft
        assert free is (leaf is parts.soft)  # made just now, and nobody else has it
    assert scalars == [0.5]
    assert set(held) == {parts.saved, parts.shared}
    assert not taken


def test_a_leaf_that_was_taken_is_not_taken_again() -> None:
    pattern, parts = pattern_of(build()), build()
    found = pattern.match(parts.root, {}, TASK)
    assert found is not None
    mine, others = torch.randn(SHAPE), torch.randn(3)
    taken = {parts.soft: (mine, False), parts.saved: (others, True)}
    fetched = pattern.fetch(found, {}, TASK, taken)
    assert fetched is not None
    assert fetched[0][found[1].index(parts.soft)] is mine
    assert fetched[1] == [False] * len(found[1])
    assert list(taken) == [parts.saved]  # which is to be given back


@pytest.mark.parametrize("inner", ["saved", "shared"])
def test_a_chain_that_becomes_another_one_is_not_fetched(inner: str) -> None:
    """To rebuild the leaf a value of the chain was rebuilt, and is held."""
    pattern, parts = pattern_of(build()), build()
    found = pattern.match(parts.root, {}, TASK)
    assert found is not None
    getattr(parts, inner).memo = torch.randn(SHAPE)
    taken: dict[Value, tuple[Tensor, bool]] = {}
    assert pattern.fetch(found, {}, TASK, taken) is None
    assert list(taken) == [parts.soft]
    getattr(parts, inner).memo = None
    made = {id(getattr(parts, inner)): torch.randn(SHAPE)}
    assert pattern.fetch(found, made, TASK, {}) is None
    assert pattern.fetch(found, {}, TASK, taken) is not None


def test_a_rebuilt_leaf_of_another_kind_is_not_fetched() -> None:
    pattern, parts = pattern_of(build()), build()
    found = pattern.match(parts.root, {}, TASK)
    assert found is not None
    for tensor in (torch.randn(SHAPE).double(), torch.randn(6, 4), torch.randn(6, 4).t()):
        taken = {parts.soft: (tensor, True)}
        assert pattern.fetch(found, {}, TASK, taken) is None
        assert taken  # to be given back


def test_a_chain_that_is_another_one_each_time() -> None:
    pattern, parts = pattern_of(build(), AGAIN), build()
    found = pattern.match(parts.root, {}, TASK)
    assert found is not None
    taken: dict[Value, tuple[Tensor, bool]] = {}
    assert pattern.fetch(found, {}, TASK, taken) is None
    assert list(taken) == [parts.soft]


def change_kept(parts: Parts) -> None:
    assert parts.y.tensor is not None
    parts.y.tensor.mul_(2)


def change_parameter(parts: Parts) -> None:
    assert parts.parameter.tensor is not None
    parts.parameter.tensor.mul_(2)


def free_parameter(parts: Parts) -> None:
    assert parts.parameter.tensor is not None
    parts.parameter.tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("change", "error"),
    [(change_kept, ChangedError), (change_parameter, ChangedError), (free_parameter, LeangradError)],
)
def test_kept_leaves_are_checked_each_time(change: Change, error: type[Exception]) -> None:
    pattern, parts = pattern_of(build()), build()
    found = pattern.match(parts.root, {}, TASK)
    assert found is not None
    change(parts)
    with pytest.raises(error):
        pattern.fetch(found, {}, TASK, {})


def test_recipes_read_what_was_before_a_change() -> None:
    """Behind autograd's back: no version tells."""
    pattern, parts = pattern_of(build()), build()
    assert parts.y.tensor is not None
    before = parts.y.recipe_tensor = parts.y.tensor.clone()
    found = pattern.match(parts.root, {}, TASK)
    assert found is not None
    fetched = pattern.fetch(found, {}, TASK, {})
    assert fetched is not None
    assert fetched[0][found[1].index(parts.y)] is before


def test_each_kept_leaf_is_told_the_stream_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """``anchor`` tells the allocator where that is not the stream on which it was kept."""
    asked: list[tuple[Value, int]] = []

    def anchor(self: Value, stream: int) -> Tensor:
        asked.append((self, stream))
        assert self.tensor is not None
        return self.tensor

    pattern, parts = pattern_of(build(), SimpleNamespace(device=torch.device("cuda", 0))), build()
    monkeypatch.setattr("leangrad.ledger.fuse.pattern.raw_stream", lambda device: 5 + device.index)
    monkeypatch.setattr(Value, "anchor", anchor)
    found = pattern.match(parts.root, {}, TASK)
    assert found is not None
    assert pattern.fetch(found, {}, TASK, {parts.soft: (torch.randn(SHAPE), True)}) is not None
    assert asked == [(leaf, 5) for leaf in found[1] if leaf is not parts.soft]
    assert len(asked) == 5


def test_an_empty_parameter_is_there() -> None:
    """It has no memory, and needs none."""
    root = op("MulBackward0", op("MulBackward0", leaf_value(torch.empty(0), 0), 2.0), kept(torch.empty(0)))
    chain = Chain(root, {}, TASK)
    pattern = Pattern(chain, [True, True], [v.tensor for v in chain.leaves], PLAN)
    found = pattern.match(root, {}, TASK)
    assert found is not None
    fetched = pattern.fetch(found, {}, TASK, {})
    assert fetched is not None
    assert [t.numel() for t in fetched[0]] == [0, 0]
    assert fetched[1] is None  # none is owned, and nobody needs to ask
