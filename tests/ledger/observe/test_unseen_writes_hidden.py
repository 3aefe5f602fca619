"""Code that writes into a tensor past its version, and hides how: by other names, in other objects, in containers."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leangrad.ledger.observe.unseen_writes import may_write_unseen


def writes(w: Tensor) -> None:
    w.data.add_(1)


def call(w: Tensor, function: Callable[[Tensor], None]) -> None:
    function(w)


class Registry(dict[str, Any]):
    """A dict with a class of its own."""


@functools.wraps(F.linear)
def says_it_is_torchs(w: Tensor) -> None:
    w.data.add_(1)


class Updating(nn.Module):
    def forward(self, w: Tensor) -> None:
        w.data.add_(1)

    def update(self, w: Tensor) -> None:
        w.data.add_(1)


class Object:
    def step(self, w: Tensor) -> None:
        self.update(w)

    def update(self, w: Tensor) -> None:
        w.data.add_(1)


REGISTRY, PROXY, MODULE = Registry(a=writes), types.MappingProxyType({"a": writes}), Updating()
to_array, as_array = Tensor.numpy, np.asarray
data_of, numpy_of = operator.attrgetter("data"), operator.methodcaller("numpy")

HIDDEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "a dict with a class of its own": lambda self, x: REGISTRY["a"](self.weight),
    "a read-only dict": lambda self, x: PROXY["a"](self.weight),
    "a NumPy function that shares memory": lambda self, x: np.ascontiguousarray(self.weight.detach()).fill(0),
    "NumPy's function by another name": lambda self, x: as_array(self.weight.detach()).fill(0),
    "torch's method by another name": lambda self, x: to_array(self.weight.detach()).fill(0),
    "a getter of an attribute": lambda self, x: data_of(self.weight).add_(1),
    "a caller of a method": lambda self, x: numpy_of(self.weight.detach()).fill(0),
    "a function with torch's name": lambda self, x: says_it_is_torchs(self.weight),
    "a module that is no part": lambda self, x: MODULE(self.weight),
    "a copy": lambda self, x: copy.copy(self.weight.detach()).add_(1),
    "names in a tuple": lambda self, x: [getattr(self.weight, name) for name in ("data", "grad")][0].add_(1),  # noqa: RUF015
    "a computed name": lambda self, x: getattr(self, f"update_{x}")(),
    "a name that is passed on": lambda self, x: getattr(self, self.name)(),
}


def made(forward: Callable[..., Any], **members: Any) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    Model.forward = forward
    for name, member in members.items():
        setattr(Model, name, member)
        if hasattr(member, "__set_name__"):
            member.__set_name__(Model, name)
    return Model()


@pytest.mark.parametrize("how", HIDDEN)
def test_hidden_in_code(how: str) -> None:
    assert may_write_unseen(made(HIDDEN[how]))


def update(self: Any, *args: Any) -> None:
    self.weight.data.add_(1)


@contextlib.contextmanager
def updating(self: Any) -> Iterator[None]:
    self.weight.data.add_(1)
    yield


@functools.singledispatch
def by_type(self: Any) -> None:
    raise NotImplementedError


@by_type.register
def _(self: nn.Module) -> None:
    self.weight.data.add_(1)


WRAPPED: dict[str, Callable[..., Any]] = {
    "no_grad": torch.no_grad()(update),
    "inference mode": torch.inference_mode()(update),
    "a context manager": updating,
    "by type": by_type,
    "a cache": functools.lru_cache(update),
    "torch.compiler": torch.compiler.disable(update),
    "autocast": torch.autocast("cpu")(update),
    "twice": torch.no_grad()(torch.enable_grad()(update)),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_wrapped_by_a_known_function(how: str) -> None:
    wrapped = WRAPPED[how]
    assert may_write_unseen(made(lambda self, x: wrapped(self)))
    assert may_write_unseen(made(wrapped))


def test_a_wrapped_function_that_writes_nothing() -> None:
    assert not may_write_unseen(made(torch.no_grad()(lambda self, x: x + 1)))


MEMBERS: dict[str, Any] = {
    "partial method": functools.partialmethod(update, True),
    "method by type": functools.singledispatchmethod(update),
    "cached property": functools.cached_property(update),
}


@pytest.mark.parametrize("how", MEMBERS)
def test_hidden_in_a_class(how: str) -> None:
    assert may_write_unseen(made(lambda self, x: self.member, member=MEMBERS[how]))


ATTRIBUTES: dict[str, Any] = {
    "a keyword of a partial": functools.partial(call, function=writes),
    "a method of an object": Object().step,
}


@pytest.mark.parametrize("how", ATTRIBUTES)
def test_hidden_in_an_attribute(how: str) -> None:
    model = made(lambda self, x: self.function(self.weight))
    model.function = ATTRIBUTES[how]  # type: ignore[assignment]
    assert may_write_unseen(model)


@pytest.mark.parametrize(
    "forward", [lambda self, x: self.teacher[0](self.weight), lambda self, x: self.teacher[0].update(self.weight)]
)
def test_a_module_in_a_list_is_no_part_of_the_model_but_is_looked_into(forward: Callable[..., Any]) -> None:
    model = made(forward)
    model.teacher = [Updating()]  # type: ignore[assignment]
    assert may_write_unseen(model)


def test_a_training_step() -> None:
    assert may_write_unseen(made(lambda self, x: x, training_step=update))


def test_a_method_that_a_user_has_given_to_a_class_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(lambda self, x: self.weight.bump())
    monkeypatch.setattr(Tensor, "bump", writes, raising=False)
    assert may_write_unseen(model)


class Raises:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not now")


def test_an_attribute_that_cannot_be_looked_into() -> None:
    """It may be anything; the first forward must not fail for it."""
    gone, model = Object(), made(lambda self, x: x)
    model.owner = weakref.proxy(gone)  # type: ignore[assignment]
    del gone
    assert may_write_unseen(model)
    model.owner = Raises()  # type: ignore[assignment]
    assert may_write_unseen(model)


PLAIN: dict[str, Callable[[Any, Tensor], Any]] = {
    "a constant name": lambda self, x: getattr(self, "weight") * x,  # noqa: B009
    "a constant name with a default": lambda self, x: getattr(self, "scale", 1.0) * self.weight,
    "a dict": lambda self, x: {"a": 1}["a"] * self.weight,
    "a call with keywords": lambda self, x: F.linear(input=x, weight=self.weight),
}


@pytest.mark.parametrize("how", PLAIN)
def test_what_hides_nothing(how: str) -> None:
    assert not may_write_unseen(made(PLAIN[how]))
