"""Lazy logits where plain PyTorch's semantics are easily lost: each case gives plain's gradients, or a clear error."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from leangrad.errors import ChangedError, LeangradError
from leangrad.loss.lazy.logits import LazyLogits
from tests.support import same_bits

V, D, B, T = 320, 16, 4, 8
STEPS: dict[str, Callable[[nn.Module, Tensor], Any]] = {}
LOUD: dict[str, Callable[[nn.Module, Tensor], Any]] = {}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.body(self.embedding(tokens)).tanh()
        logits: Tensor = self.head(hidden)
        return logits


def _tokens(seed: int) -> Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


TOKENS, TARGETS = _tokens(0), _tokens(1).view(-1)


def _models() -> tuple[Model, Model]:
    torch.manual_seed(0)
    plain = Model().double()
    lazy = leangrad.lean(copy.deepcopy(plain), exact=False)
    assert type(lazy(TOKENS)) is LazyLogits
    return plain, lazy


def _loss(logits: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, V), TARGETS, **options)


def _compare(step: Callable[[nn.Module, Tensor], Any]) -> None:
    """What ``step`` returns, and the gradients that it leaves, are those of a plain model."""
    plain, lazy = _models()
    expected, got = step(plain, plain(TOKENS)), step(lazy, lazy(TOKENS))
    torch.testing.assert_close(got, expected)
    for (name, a), b in zip(plain.named_parameters(), lazy.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, msg=lambda text, name=name: f"{name}: {text}")


def step(function: Callable[[nn.Module, Tensor], Any]) -> Callable[[nn.Module, Tensor], Any]:
    """A step that a lazy model takes as a plain one does."""
    STEPS[function.__name__] = function
    return function


def loud(function: Callable[[nn.Module, Tensor], Any]) -> Callable[[nn.Module, Tensor], Any]:
    """A step that would be silently wrong, and is an error."""
    LOUD[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------------------------- in place


@step
def written_without_grad(model: nn.Module, logits: Tensor) -> None:
    with torch.no_grad():
        logits[..., 5] = -3.0
        logits.mul_(2)
    _loss(logits).backward()


@step
def a_part_is_written_without_grad(model: nn.Module, logits: Tensor) -> None:
    with torch.no_grad():
        logits[..., :5].zero_()
    _loss(logits).backward()


@step
def data_is_replaced_without_grad(model: nn.Module, logits: Tensor) -> None:
    with torch.no_grad():
        logits.data = logits.data * 3
    _loss(logits).backward()


@step
def a_multiple_is_written(model: nn.Module, logits: Tensor) -> None:
    cooled = logits / 2
    cooled.masked_fill_(torch.arange(V) % 7 == 0, -1.0)
    (_loss(cooled) + _loss(logits)).backward()


@step
def a_row_is_written(model: nn.Module, logits: Tensor) -> None:
    last = logits[:, -1, :]
    last[:, 3] = -1.0
    F.cross_entropy(last, TARGETS[:B]).backward()


@step
def written_after_a_loss_and_a_multiple(model: nn.Module, logits: Tensor) -> None:
    view, thrice = logits.view(-1, V), logits * 3
    loss = F.cross_entropy(view, TARGETS)
    logits.mul_(2)
    (loss + _loss(logits) + _loss(thrice)).backward()


@step
def detached_and_graded_anew(model: nn.Module, logits: Tensor) -> Tensor | None:
    leaf = logits.detach().requires_grad_()
    _loss(leaf).backward()
    logits.backward(leaf.grad)
    return leaf.grad


@loud
def detached_is_written(model: nn.Module, logits: Tensor) -> None:
    logits.detach().mul_(3)
    _loss(logits)


@loud
def a_part_of_a_view_is_written(model: nn.Module, logits: Tensor) -> None:
    logits.view(-1, V)[:, :5].zero_()
    _loss(logits)


@loud
def a_view_is_written_and_a_multiple_taken(model: nn.Module, logits: Tensor) -> None:
    logits[:, 0].zero_()
    _loss(logits * 2)


@loud
def written_after_a_view_was_read(model: nn.Module, logits: Tensor) -> None:
    view = logits.view(-1, V)
    view.sum()
    logits.mul_(2)


@loud
def a_contiguous_copy_is_written(model: nn.Module, logits: Tensor) -> None:
    rows = logits[:, :-1]
    rows.contiguous().mul_(2)
    rows.sum()


# ---------------------------------------------------------------------------------------------------------------- hooks


@step
def a_hook_after_values_were_read(model: nn.Module, logits: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    logits.sum()
    logits.register_hook(lambda g: seen.append(g.clone()))
    _loss(logits).backward()
    return seen


@step
def a_hook_after_a_loss_of_values(model: nn.Module, logits: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    view = logits.view(-1, V)
    loss = view.log_softmax(-1).square().mean()
    logits.register_hook(lambda g: seen.append(g.clone()))
    view.register_hook(lambda g: seen.append(g.clone()))
    loss.backward()
    return seen


@step
def the_gradient_of_logits_of_a_loss_of_values(model: nn.Module, logits: Tensor) -> Tensor:
    return torch.autograd.grad(logits.log_softmax(-1).square().mean(), logits)[0]


@step
def a_second_derivative_through_hooks_and_a_softcap(model: nn.Module, logits: Tensor) -> None:
    logits.register_hook(lambda g: None)
    loss = _loss((logits * 2).tanh() * 3)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(g.square().sum() for g in gradients).backward()  # type: ignore[union-attr]


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3  # not what forward says: it has to be asked


@step
def functions_of_others(model: nn.Module, logits: Tensor) -> None:
    (_loss(_Double.apply(logits)) + _Double.apply(logits / 2).tanh().square().mean() + _loss(logits)).backward()


@step
def anomaly_detection(model: nn.Module, logits: Tensor) -> None:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        _loss(model(TOKENS)).backward()


@loud
def a_softcap_is_differentiated_twice_after_a_write(model: nn.Module, logits: Tensor) -> None:
    logits.register_hook(lambda g: None)
    loss = logits.tanh().log_softmax(-1).square().mean()
    logits.mul_(2)
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@loud
def a_hook_on_a_view_after_the_loss(model: nn.Module, logits: Tensor) -> None:
    view = logits.view(-1, V)
    loss = F.cross_entropy(view, TARGETS)
    view.register_hook(lambda g: g * 2)
    loss.backward()


@loud
def a_hook_after_the_loss_and_a_reading(model: nn.Module, logits: Tensor) -> None:
    loss = _loss(logits)
    logits.sum()
    logits.register_hook(lambda g: g * 2)
    loss.backward()


@loud
def a_hook_on_the_same_logits_by_another_name(model: nn.Module, logits: Tensor) -> None:
    loss = _loss(logits)
    same = logits.double()
    same.register_hook(lambda g: g * 2)
    loss.backward()


@loud
def the_gradient_of_logits_of_a_fused_loss(model: nn.Module, logits: Tensor) -> None:
    (gradient,) = torch.autograd.grad(_loss(logits), logits)
    gradient.sum()


# --------------------------------------------------------------------------------------------------- modes and keywords


@step
def read_without_grad_first(model: nn.Module, logits: Tensor) -> bool:
    with torch.no_grad():
        logits.sum()
        assert logits.requires_grad
    _loss(logits).backward()
    return logits.requires_grad


@step
def in_inference_mode(model: nn.Module, logits: Tensor) -> Tensor:
    with torch.inference_mode():
        loss = _loss(model(TOKENS)) + model(TOKENS)[:, -1].max() + logits.max()
    _loss(logits).backward()
    return loss.clone()


@step
def keywords(model: nn.Module, logits: Tensor) -> Tensor:
    made = torch.tanh(input=torch.mul(input=torch.flatten(input=logits, start_dim=0, end_dim=1), other=2))
    F.cross_entropy(input=made.float(memory_format=torch.preserve_format), target=TARGETS).backward()
    return torch.mul(logits.detach(), 2, out=torch.empty(B, T, V, dtype=torch.float64))


@step
def float64_in_autocast(model: nn.Module, logits: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(TOKENS)
    loss = _loss(logits)
    loss.backward()
    return loss.detach()


@step
def a_compiled_loss(model: nn.Module, logits: Tensor) -> None:
    compiled = torch.compile(lambda z: F.cross_entropy(z.view(-1, V) * 2, TARGETS), backend="eager")
    compiled(logits).backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it
@pytest.mark.parametrize("name", sorted(STEPS))
def test_as_plain(name: str) -> None:
    _compare(STEPS[name])


@pytest.mark.parametrize("name", sorted(LOUD))
def test_never_silent(name: str) -> None:
    plain, lazy = _models()
    LOUD[name](plain, plain(TOKENS))
    with pytest.raises(LeangradError, match="exact=True"):
        LOUD[name](lazy, lazy(TOKENS))


class _ByData(torch.optim.Optimizer):
    """As optimizers were written once, and as extensions write still."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad)


@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.AdamW, fused=True), partial(torch.optim.SGD, fused=True), torch.optim.SGD, _ByData],
    ids=["fused AdamW", "fused SGD", "SGD", "data"],
)
def test_values_after_a_step(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Fused optimizers do not change the version of a parameter."""
    _, lazy = _models()
    _, other = _models()
    logits, others = lazy(TOKENS), other(TOKENS)
    _loss(logits).backward()
    make(lazy.parameters()).step()
    for read in (Tensor.argmax, Tensor.sum, _loss):
        with pytest.raises(ChangedError, match="optimizer's step"):
            read(logits)
    _loss(others)  # another model's are as they were


def test_dimensions_that_are_none() -> None:
    _, lazy = _models()
    with pytest.raises(IndexError, match="Dimension out of range"):
        lazy(TOKENS).flatten(-9, 1)


def test_another_subclass_sees_the_call() -> None:
    seen = []

    class Watching(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    _, lazy = _models()
    assert type(lazy(TOKENS) + torch.ones(V).as_subclass(Watching)) is Watching
    assert seen == ["add"]


def test_a_forward_that_somebody_replaced() -> None:
    """Before `lean`: it is no projection. After it: it calls ours, and `plain` leaves it there."""
    model, _ = _models()
    expected = model(TOKENS) / 2
    own = model.head.forward
    model.head.forward = lambda x: own(x) / 2  # type: ignore[method-assign]
    torch.testing.assert_close(leangrad.lean(model, exact=False)(TOKENS), expected)

    model, lazy = _models()
    ours = lazy.head.forward
    lazy.head.forward = lambda x: ours(x) / 2  # type: ignore[method-assign]
    torch.testing.assert_close(lazy(TOKENS).clone(), expected)
    torch.testing.assert_close(leangrad.plain(lazy)(TOKENS), expected)


def test_a_metric_beside_the_loss() -> None:
    """`argmax` before the loss, in each step, neither keeps values nor makes the head give up."""
    plain, lazy = _models()
    for _ in range(3):
        logits = lazy(TOKENS)
        assert type(logits) is LazyLogits
        assert same_bits(logits.argmax(-1), plain(TOKENS).argmax(-1))
        assert same_bits(
            torch.argmax(logits.view(-1, V), dim=1, keepdim=True), plain(TOKENS).view(-1, V).argmax(1, True)
        )
        assert logits._rows.values is None
        _loss(logits).backward()


def test_a_loss_that_is_kept_keeps_nothing() -> None:
    """After backward; and what it let go is not asked for again."""
    _, lazy = _models()
    logits = lazy(TOKENS)
    capped = (logits * 2).tanh()
    rest, source = capped.sum(), weakref.ref(logits._rows.source)
    loss = _loss(capped)
    loss.backward()
    with pytest.raises(LeangradError, match="retain_graph"):
        rest.backward()
    del logits, capped
    assert source() is None


def test_nothing_stays_alive() -> None:
    _, lazy = _models()
    alive: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        for kind in range(8):
            logits = lazy(TOKENS)
            capped = (logits.view(-1, V) * 2).tanh()
            loss = F.cross_entropy(capped, TARGETS)
            if kind % 4 == 1:
                loss = loss + logits.square().mean() + capped.square().mean()
            if kind % 4 == 2:
                logits.register_hook(lambda g: None)
                loss = loss + _loss(logits * 3)
            if kind % 4 == 3:
                written = lazy(TOKENS)
                written.mul_(2)
                loss = loss + _loss(written)
                alive.append(weakref.ref(written._rows))
                del written
            loss.backward()
            alive += [weakref.ref(one) for one in (logits, logits._rows, logits._rows.source, capped, capped._rows)]
            del logits, capped, loss
        assert [one() for one in alive if one() is not None] == []
    finally:
        gc.enable()
