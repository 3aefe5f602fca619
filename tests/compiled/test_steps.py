"""Steps that are not one forward and one backward: backward twice, several losses, errors, threads, leaks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from leangrad.compiled import compile_lean, joint_graph
from tests.support import assert_same_bits

Run = Callable[[Tensor], Tensor]
EXACT = {"leangrad.exact": True}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def mlp(p: float = 0.3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(p), nn.Linear(32, 8), nn.Tanh())


def compiled(model: nn.Module) -> Run:
    return torch.compile(model, backend=compile_lean, options=EXACT)


def twice(run: Run, x: Tensor, model: nn.Sequential) -> None:
    loss = run(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(run: Run, x: Tensor, model: nn.Sequential) -> None:
    y = run(x)
    y[:, :4].sum().backward(retain_graph=True)
    y.square().sum().backward()


def interleaved(run: Run, x: Tensor, model: nn.Sequential) -> None:
    made = [run(x * k) for k in range(3)]
    for k in (1, 0, 2):
        made[k].square().sum().backward()


def after_an_error_in_backward(run: Run, x: Tensor, model: nn.Sequential) -> None:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    handle = model[3].bias.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run(x).sum().backward()
    handle.remove()
    model.zero_grad()  # eager has some of them by then
    run(x).square().sum().backward()


def after_a_forward_without_backward(run: Run, x: Tensor, model: nn.Sequential) -> None:
    run(x)
    run(x).square().sum().backward()


@pytest.mark.parametrize(
    "step", [twice, two_losses, interleaved, after_an_error_in_backward, after_a_forward_without_backward]
)
def test_gradients_are_eagers(step: Callable[[Run, Tensor, nn.Sequential], None]) -> None:
    models, x = (mlp(), mlp()), torch.randn(5, 8)
    for model, run in zip(models, (compiled(models[0]), models[1]), strict=True):
        torch.manual_seed(1)
        step(run, x, model)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert_same_bits(p.grad, q.grad)


def test_backward_through_backward_is_refused_as_by_torch() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(mlp())(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.square().sum().backward()


def test_what_is_changed_between_forward_and_backward_is_refused() -> None:
    model, x = mlp(), torch.randn(5, 8)
    loss = compiled(model)(x).square().sum()
    with torch.no_grad():
        model[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_threads_share_a_compiled_model() -> None:
    """Compiled before: torch's own tracing does not run in two threads at once."""
    model, x = mlp(0.0), torch.randn(5, 8)
    run = compiled(model)
    inputs = [[(x * (n + k)).requires_grad_() for n in range(20)] for k in range(2)]
    run(inputs[0][0].clone().detach().requires_grad_()).square().sum().backward()
    found: list[list[Tensor]] = [[], []]

    def work(k: int) -> None:
        for one in inputs[k]:
            found[k] += torch.autograd.grad(run(one).square().sum(), one)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(2):
        for mine, one in zip(found[k], inputs[k], strict=True):
            assert_same_bits(mine, *torch.autograd.grad(model(one).square().sum(), one))


def test_nothing_is_left_without_the_garbage_collector() -> None:
    """After backward, after a forward that is dropped, and after a backward that raised."""
    model, x = mlp(), torch.randn(61, 8)
    run = compiled(model)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def left() -> int:
        return sum(type(one) is Tensor and one.shape[:1] == (61,) for one in gc.get_objects())

    run(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        before = left()
        for _ in range(3):
            run(x).sum().backward()
        run(x)
        handle = model[3].bias.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            run(x).sum().backward()
        handle.remove()
        assert left() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("op", "arguments", "expected"),
    [
        ("avg_pool2d", ([3, 3], [1, 1], [1, 1]), True),  # each element is in nine windows
        ("avg_pool2d", ([3, 3], [2, 2], [1, 1]), False),  # in two or three
        ("avg_pool2d", ([2, 2],), False),
        ("avg_pool2d", ([2, 2], []), False),
        ("avg_pool2d_backward", (None, [3, 3], [1, 1]), True),
        ("avg_pool3d", ([3, 3, 3], [2, 2, 2]), False),
        ("relu", (), False),
    ],
)
def test_pools_that_read_an_element_in_several_windows(op: str, arguments: tuple[Any, ...], expected: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = tuple(x if one is None else one for one in arguments)
    node = graph.call_function(getattr(torch.ops.aten, op).default, (x, *given))
    assert joint_graph._has_windows(node) is expected
