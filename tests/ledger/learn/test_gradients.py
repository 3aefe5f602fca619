"""Which gradients are alive while backward runs a node: beside what backward takes on this machine.

The programs save nothing, so all that backward holds are gradients, and the peak is theirs to the byte, but for a few
scalars.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import leangrad
from leangrad import _torch
from leangrad.ledger.learn.gradients import Graph
from tests.support.fuzz import fuzz_settings

SHAPE = (4, 16, 64)
MAP = 4 * 16 * 64 * 4  # bytes
SCALARS = 1024  # the gradients of losses, and constants that ops wrap


def f(x: Tensor) -> Tensor:
    """A branch."""
    return (x * 3.0) * 4.0


def joined(x: Tensor, *others: Tensor) -> Tensor:
    return torch.cat([x, *others], 1)


def shared_first(x: Tensor) -> Tensor:
    a, b = f(x).chunk(2, 1)
    return f(a) + b


def skip(x: Tensor) -> Tensor:
    """A U-Net's: the gradient of the input waits, in the memory of that of both, for all of the branch."""
    return f(joined(f(f(x)), x))


def residual_in_a_skip(x: Tensor) -> Tensor:
    return f(joined(f(f(x) + x), x))


PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and the maps at the peak
    "chain": (f, 2),
    "x + f(x)": (lambda x: f(x + f(x)), 3),
    "f(x) + x": (lambda x: f(f(x) + x), 3),
    "two branches": (lambda x: f(f(x) + f(x) + x), 3),
    "x + x": (lambda x: f(x + x), 2),
    "x - f(x)": (lambda x: f(x - f(x)), 3),
    "f(x) - x": (lambda x: f(f(x) - x), 3),
    "alpha": (lambda x: f(torch.add(f(x), x, alpha=2)), 3),
    "in place": (lambda x: f(f(x).add_(x)), 3),
    "cat": (lambda x: f(joined(f(x), x)), 4),
    "stack": (lambda x: f(torch.stack([f(x), x])), 4),
    "skip": (skip, 4),
    "residual in a skip": (residual_in_a_skip, 4),
    "views": (lambda x: f(f(x).view(-1) + x.transpose(1, 2).transpose(1, 2).reshape(-1)), 3),
    "clone": (lambda x: f(x.clone() + f(x)), 3),
    "sum of views": (lambda x: f((x - f(x)).transpose(1, 2).contiguous()), 3),
    "chunks": (shared_first, 2),
    "broadcast": (lambda x: f(x + x.sum(1, keepdim=True)), 2),
}


def alive(program: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, dict[int, int]]:
    graph = Graph(_torch.next_sequence_nr())
    loss = program(x * 2.0).sum()
    graph.add(loss)
    return loss, graph.alive()


def peak_of_backward(loss: Tensor, x: Tensor) -> int:
    return leangrad.measure(lambda: torch.autograd.grad(loss, x, retain_graph=True), timed_runs=0).peak_bytes


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sampled(3)
def test_the_peak_is_that_of_backward(name: str) -> None:
    program, maps = PROGRAMS[name]
    x = torch.randn(SHAPE, requires_grad=True)
    loss, found = alive(program, x)
    assert abs(peak_of_backward(loss, x) - max(found.values())) <= SCALARS
    assert max(found.values()) // MAP == maps


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_have_no_size_that_is_known(layout: torch.layout) -> None:
    """They are counted for nothing, and run as ever."""
    graph = Graph(_torch.next_sequence_nr())
    parts = [torch.randn(n, 8, requires_grad=True) for n in (2, 5)]
    nested = torch.nested.as_nested_tensor(parts, layout=layout) * 2.0
    graph.add(nested)
    assert 0 in graph.alive().values()
    model = leangrad.lean(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)), min_bytes=0
    )
    for _ in range(3):
        model.zero_grad()
        out = model(torch.nested.as_nested_tensor([p.detach() for p in parts], layout=layout))
        torch.nested.to_padded_tensor(out, 0.0).sum().backward()
        found = model[0].weight.grad.clone()
        model.zero_grad()
        sum(leangrad.plain(model)(p.detach()).sum() for p in parts).backward()
        torch.testing.assert_close(found, model[0].weight.grad)
        leangrad.lean(model, min_bytes=0)


UNARY: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 3.0,
    lambda x: x.transpose(1, 2).reshape(SHAPE),
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: (x * 3.0).neg_(),
    lambda x: x.clone(),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: torch.add(x, y, alpha=3),
    lambda x, y: joined(x, y)[:, 8:24],
    lambda x, y: torch.stack([x, y]).sum(0),
    lambda x, y: x + y.sum(1, keepdim=True),
]
Step = tuple[int, int, int]  # which op, and which two tensors


@fuzz_settings(15, 1000)
@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12))
def test_the_peak_of_random_programs(steps: list[Step]) -> None:
    def program(x: Tensor) -> Tensor:
        made = [x]
        for op, a, b in steps:
            one, other = made[a % len(made)], made[b % len(made)]
            made.append(UNARY[op](one) if op < len(UNARY) else BINARY[op - len(UNARY)](one, other))
        return f(made[-1])

    x = torch.randn(SHAPE, requires_grad=True)
    loss, found = alive(program, x)
    assert abs(peak_of_backward(loss, x) - max(found.values())) <= SCALARS
