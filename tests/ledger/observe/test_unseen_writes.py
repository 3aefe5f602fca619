"""Code that may write into a tensor past its version."""

from __future__ import annotations

import functools
import json
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tests.support
from leangrad.ledger.observe import unseen_writes
from leangrad.ledger.observe.unseen_writes import may_write_unseen


def by_global(w: Tensor) -> None:
    w.data.add_(1)


def through_another(w: Tensor) -> None:
    by_global(w)


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.detach().numpy()[:] = 0
        return x.clone()


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return function(*args)

    return run


class Writes(nn.Module):
    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.data.zero_()  # not in forward
        self.way = way
        if way == "attribute":
            self.function = through_another
        if way == "partial":
            self.function = functools.partial(through_another, self.weight)
        if way == "hook":
            self.register_forward_hook(lambda module, args, out: module.weight.data.add_(1))
        if way == "forward":
            self.forward = lambda x: by_global(self.weight)


class InMethod(Writes):
    def forward(self, x: Tensor) -> Tensor:
        return self._restart(x)

    def _restart(self, x: Tensor) -> Tensor:
        self.weight.data[0] = 1
        return x


class InProperty(Writes):
    @property
    def written(self) -> Tensor:
        self.weight.data = self.weight.data * 2
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.written


class InGlobal(Writes):
    def forward(self, x: Tensor) -> Tensor:
        through_another(self.weight)
        return x


class InFunction(Writes):
    def forward(self, x: Tensor) -> Tensor:
        return Clamped.apply(x)


class InLambda(Writes):
    def forward(self, x: Tensor) -> Tensor:
        return next(f(x) for f in [lambda x: x.data_ptr()]) * x


class ByName(Writes):
    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.weight, "data").add_(x)  # noqa: B009


class Decorated(Writes):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.data * x


class Helper:
    def update(self, weight: Tensor) -> None:
        weight.data.add_(1)


class InHelper(Writes):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def forward(self, x: Tensor) -> Tensor:
        self.helper.update(self.weight)
        return x


class InChild(Writes):
    def __init__(self) -> None:
        super().__init__()
        self.child = InMethod()

    def forward(self, x: Tensor) -> Tensor:
        return self.child._restart(x)


TABLE = {"a": through_another}


class InTable(Writes):
    def forward(self, x: Tensor) -> Tensor:
        TABLE["a"](self.weight)
        return x


class InBase(InMethod):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class InContext(torch.autograd.Function):
    """Nobody names the method: torch calls it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[0].data.add_(1)


class InSetupContext(Writes):
    def forward(self, x: Tensor) -> Tensor:
        return InContext.apply(x)


class InNestedClass(Writes):
    class Inner:
        def __call__(self, weight: Tensor) -> None:
            weight.data.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        self.Inner()(self.weight)
        return x


class InNewModule(Writes):
    """A module that is made in forward is no part of the model."""

    def forward(self, x: Tensor) -> Tensor:
        return InMethod()(x)


class Kept:
    """Its methods are called by name, on an object that a function makes."""

    def keep(self, weight: Tensor) -> None:
        self._write(weight)

    def _write(self, weight: Tensor) -> None:
        weight.detach().numpy()[0] = 1


def new_object(weight: Tensor) -> None:
    Kept().keep(weight)


class InNewObject(Writes):
    def forward(self, x: Tensor) -> Tensor:
        new_object(self.weight)
        return x


class Reads(Writes):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.add_(1)
        return torch.cat([x.detach(), self.weight]).relu_()


HELPER, HELPERS, SPACE = Helper(), [Helper()], types.SimpleNamespace(helper=Helper())


class InObject(Writes):
    def forward(self, x: Tensor) -> Tensor:
        HELPER.update(self.weight)
        return x


class InList(Writes):
    def forward(self, x: Tensor) -> Tensor:
        for helper in HELPERS:
            helper.update(self.weight)
        return x


class InSpace(Writes):
    def forward(self, x: Tensor) -> Tensor:
        SPACE.helper.update(self.weight)
        return x


class InAttributes(Writes):
    def __init__(self) -> None:
        super().__init__()
        self.helpers = {"a": [through_another]}

    def forward(self, x: Tensor) -> Tensor:
        self.helpers["a"][0](self.weight)
        return x


class InClass(Writes):
    helper = Helper()

    def forward(self, x: Tensor) -> Tensor:
        self.helper.update(self.weight)
        return x


class InDefault(Writes):
    def forward(self, x: Tensor, write: Callable[[Tensor], None] = by_global) -> Tensor:
        write(self.weight)
        return x


class Imported(Writes):
    def forward(self, x: Tensor) -> Tensor:
        from tests.ledger.observe.test_unseen_writes import by_global as write

        write(self.weight)
        return x


class NotYetImported(Writes):
    def forward(self, x: Tensor) -> Tensor:
        import nobody_has_this  # type: ignore[import-not-found]

        nobody_has_this.write(self.weight)
        return x


class InSubmodule(Writes):
    def forward(self, x: Tensor) -> Tensor:
        tests.support.unseen.write(self.weight)  # type: ignore[attr-defined]
        return x


class AsArray(Writes):
    def forward(self, x: Tensor) -> Tensor:
        np.asarray(self.weight.detach())[:] = 0
        return x


class GivenAnObject(Writes):
    def forward(self, x: Tensor, helper: Any) -> Tensor:
        helper.adapt_them(self.weight)  # of an object that nobody has met
        return x


class ByTorch(Writes):
    def forward(self, x: Tensor) -> Tensor:
        torch.nn.utils.vector_to_parameters(torch.zeros(3), [self.weight])
        return x


class Moved(Writes):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0].half().float()(x)


KINDS = [InMethod, InProperty, InGlobal, InFunction, InLambda, ByName, Decorated, InHelper, InChild, InTable, InBase]
KINDS += [InNewModule, InNewObject, InSetupContext, InNestedClass, InObject, InList, InSpace, InAttributes, InClass]
KINDS += [InDefault, Imported, NotYetImported, InSubmodule, AsArray, GivenAnObject, ByTorch, Moved]


@pytest.mark.parametrize("kind", KINDS)
def test_code_that_may_write_unseen(kind: type[Writes]) -> None:
    assert may_write_unseen(nn.Sequential(nn.Linear(3, 3), kind()))


@pytest.mark.parametrize("way", ["attribute", "partial", "hook", "forward"])
def test_what_stands_in_a_module_is_looked_into(way: str) -> None:
    assert may_write_unseen(nn.Sequential(Reads(way)))


class Unused(Reads):
    """What nobody names is not called; the library of Python has names of its own."""

    def reset(self) -> None:
        self.weight.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * len(re.sub("a", "b", json.dumps([]))))


class Casting(nn.Module):
    """Tensors are cast, and attributes are asked of what torch gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.sizes, self.last = nn.LayerNorm(3), {"a": [3]}, 0

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.shape[-1]
        values, _ = self.norm(x).float().max(-1)
        best = x.max(-1)
        return values.to(x.dtype) + x[..., 0].half().sum() + self.sizes["a"][0] + self.last + best.values


def test_casts_of_tensors_write_nothing() -> None:
    assert not may_write_unseen(Casting())


def test_code_that_does_not() -> None:
    layers = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Dropout(), nn.LSTM(3, 3))
    assert not may_write_unseen(nn.Sequential(Reads(), layers, Unused()))


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"]
)
def test_models_of_transformers_write_nothing_unseen(name: str) -> None:
    kind = getattr(pytest.importorskip("transformers"), name)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"n_embd": 16, "n_layer": 1, "n_head": 2, "num_key_value_heads": 2}
    assert not may_write_unseen(kind(kind.config_class(**sizes)))


def test_a_file_with_the_name_of_a_module_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """`code.py` of the user's comes before Python's own."""
    other = types.ModuleType("code")
    other.__file__ = "/somewhere/code.py"
    monkeypatch.setitem(sys.modules, "code", other)
    monkeypatch.setattr(by_global, "__module__", "code")
    unseen_writes._is_pythons_own.cache_clear()
    assert may_write_unseen(nn.Sequential(InGlobal()))
    unseen_writes._is_pythons_own.cache_clear()
