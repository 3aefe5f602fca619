"""How near to eager PyTorch a model is that Inductor compiles with our cut: beside the same with torch's own cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.compiled.error import CASES, GPT, TIMES, TIMES_OF_ONE, ConvNet, Errors, errors_of
from leangrad.compiled import compile_lean
from leangrad.compiled.partitioner import chosen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
TEXT = Path(__file__).parent.parent.parent / "docs" / "how_it_works.md"
LENGTH = 16


@contextmanager
def chosen_anew() -> Iterator[None]:
    """Nothing comes out of torch's caches, so that what our cut has chosen is known."""
    chosen.clear()
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        yield
    assert chosen


def assert_as_right_as_stock(errors: Errors) -> None:
    assert errors.times <= TIMES
    name, times = errors.worst()
    assert times <= TIMES_OF_ONE, name


@pytest.mark.parametrize("name", ["gpt", "convnet"])
@pytest.mark.sampled(2)
def test_gradients_are_as_near_to_float64_as_stocks(name: str) -> None:
    """On a CPU in float32, small; a run costs nothing beside the compile, so seeds are many and luck is little."""
    make = {"gpt": partial(GPT, width=32, depth=1), "convnet": partial(ConvNet, width=8)}[name]
    with chosen_anew():
        errors = errors_of(make, CASES[name][1], seeds=32)
    assert_as_right_as_stock(errors)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_near_to_float64_as_stocks_under_autocast_on_a_gpu(name: str) -> None:
    with chosen_anew():
        errors = errors_of(*CASES[name], device="cuda", autocast=torch.bfloat16)
    assert_as_right_as_stock(errors)


def test_errors_are_told() -> None:
    """The rule fails for one tensor that is off, and for all of them."""
    right = Errors({"a": [1e-6] * 8, "b": [1e-6] * 8}, {"a": [1e-6] * 8, "b": [1e-6] * 8}, {"a": 99, "b": 99})
    assert_as_right_as_stock(right)
    for ours in ({"a": [1.1e-6] * 8, "b": [1.1e-6] * 8}, {"a": [1e-6] * 8, "b": [2.1e-6] * 8}):
        with pytest.raises(AssertionError):
            assert_as_right_as_stock(Errors(ours, right.stock, right.sizes))


def curve(backend: str | None, characters: Tensor, vocabulary: int) -> Tensor:
    """The losses of 1,000 steps of a model that learns the next character."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(vocabulary, LENGTH, width=32, depth=1)
    run = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(1000):
        starts = torch.randint(len(characters) - LENGTH, (8, 1))
        loss = run(characters[starts + torch.arange(LENGTH + 1)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).double()


@pytest.mark.extended
def test_a_thousand_steps_lose_what_eager_loses() -> None:
    """On the text of a page of the docs. The curve is as near to eager's as the one of stock compile is."""
    text = TEXT.read_text()
    letters = sorted(set(text))
    characters = torch.tensor([letters.index(letter) for letter in text])
    plain = curve(None, characters, len(letters))
    stock = curve("inductor", characters, len(letters))
    with chosen_anew():
        ours = curve(compile_lean, characters, len(letters))
    assert plain[-50:].mean() < plain[:50].mean() - 0.5  # it learns
    rounding = torch.finfo(torch.float32).eps * float(plain.max()) / math.sqrt(12)
    distance, allowed = ((one - plain).square().mean().sqrt() for one in (ours, stock))
    assert distance <= 2 * max(float(allowed), rounding)
