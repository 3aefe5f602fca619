"""What forward writes into: backward needs the old value, and torch's own cut hands it the new one, without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch.utils.checkpoint import checkpoint

from leangrad.compiled import compile_lean, partitioner
from leangrad.compiled.partitioner import Partitioner, Settings
from leangrad.errors import LeangradError
from tests.support import assert_same_bits
from tests.support.partitions import Partitions

EXACT = {"leangrad.exact": True}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def read(x: Tensor, b: Tensor) -> Tensor:
    y = x * (b * 2).sin()
    b.add_(1)
    return y.exp() + b.cos() * x


def read_by_a_view(x: Tensor, b: Tensor) -> Tensor:
    y = x * b.sin()
    b[:2].mul_(3)
    return y.exp()


def before_a_branch(x: Tensor, b: Tensor) -> Tensor:
    y = read(x, b)
    if not torch.compiler.is_compiling():  # eager's cond is compiled too
        return (y.sin() if y.sum() > 0 else y.cos()).exp()
    return torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,)).exp()


def hidden(x: Tensor, b: Tensor) -> Tensor:
    y = x * (b * 2).sin()
    with torch.no_grad():
        b.add_(1)
    return y.exp()


def gradient(function: Callable[..., Tensor], x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x, b = x.clone().requires_grad_(), b.clone()
    for _ in range(2):
        function(x, b).sum().backward()
    return x.grad, b


@pytest.mark.parametrize("function", [read, read_by_a_view, before_a_branch, hidden])
def test_backward_has_the_old_value(function: Callable[..., Tensor]) -> None:
    x, b = torch.randn(4, 4), torch.randn(4)
    expected = gradient(function, x, b)
    exact = gradient(torch.compile(function, backend=compile_lean, options=EXACT), x, b)
    torch._dynamo.reset()
    cut = gradient(torch.compile(function, backend=Partitions().backend), x, b)
    for mine, graphs, other in zip(exact, cut, expected, strict=True):
        assert_same_bits(mine, other)
        torch.testing.assert_close(graphs, other)


@pytest.mark.parametrize("exact", [False, True])
def test_a_region_that_is_made_again_reads_the_old_value(exact: bool) -> None:
    """The user asks for ops to be run again on what forward has changed: a copy of it is kept."""

    def step(x: Tensor, b: Tensor, again: bool = True) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return (x * b.sin()).sin()

        y = checkpoint(body, x, use_reentrant=False) if again else body(x)
        b.add_(1)
        return y.exp()

    x, b = torch.randn(4, 4), torch.randn(4)
    expected = gradient(lambda x, b: step(x, b, again=False), x, b)
    found = Partitions()
    run = torch.compile(step, **({"backend": compile_lean, "options": EXACT} if exact else {"backend": found.backend}))
    for mine, other in zip(gradient(run, x, b), expected, strict=True):
        torch.testing.assert_close(mine, other)
    if not exact:
        assert "sin" in found.found[0].run_twice()


class Lost(Partitioner):
    """Finds no cut."""

    def _keep(self, graph: fx.Graph, info: Any) -> list[fx.Node]:
        raise OverflowError


def test_torchs_own_choice_is_refused_where_it_would_keep_what_forward_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the policy finds no cut, not even with copies. With the copies torch's own choice is right."""

    def compiler(gm: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(gm.forward)

    def step(x: Tensor, b: Tensor) -> Tensor:
        run = aot_function(read, compiler, compiler, partition_fn=Lost(Settings()), keep_inference_input_mutations=True)
        return run(x, b)

    x, b = torch.randn(4, 4), torch.randn(4)
    for mine, other in zip(gradient(step, x, b), gradient(read, x, b), strict=True):
        torch.testing.assert_close(mine, other)
    monkeypatch.setattr(partitioner, "copy_changed_inputs", lambda graph: None)
    with pytest.raises(LeangradError, match="forward writes into inputs whose old value backward needs"):
        gradient(step, x, b)
