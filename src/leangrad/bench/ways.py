"""The table of the ways that are compared: for each its name, the line that a user writes, the change to a model."""

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from leangrad._torch.compiler import activation_budget
from leangrad.bench.peers import (
    NotForThisError,
    apply_cce,
    apply_inplace_abn,
    apply_liger,
    checkpoint_selectively,
    find_language_model,
    save_on_host,
)
from leangrad.frontier.repeated import repeated_modules
from leangrad.frontier.ways import Way, budget_way, checkpoint_way, lean_way, no_checkpoint, plain_way
from leangrad.lean import lean
from leangrad.loss.lazy.heads import heads_of
from leangrad.nn import convert_abn
from leangrad.packed import PackedGradients, pack_gradients

__all__ = ["BUDGET_OF_TORCH", "WAYS", "Choice", "Given", "find"]

BUDGET_OF_TORCH = 0.5
_STEPS = 4  # warm-up steps until steps no longer change; a compiled model is traced and compiled in the first
_LEAN_STEPS = lean_way().warm_up_steps


@dataclass(frozen=True)
class Given:
    """The input from which `Choice.make` makes a `Way`.

    - `model`: the plain model, for inspection only.
    - `budget`: the peak that lean with a budget may use, in bytes above the memory allocated before.
    - `told`: the same budget as it is passed to `lean`: on a GPU it includes the memory allocated before.
    - `draws_as_eager`: whether a compiled model draws the random numbers that eager PyTorch draws.
    """

    model: nn.Module
    device: torch.device
    budget: int | None = None
    told: int | None = None
    draws_as_eager: bool = False


@dataclass(frozen=True)
class Choice:
    """An entry of the table: one way to train a model.

    - `line`: the line of code that a user writes.
    - `make`: makes the `Way` for a model; raises `NotForThisError` if the way does not apply to the model or device.
    - `package`: the package that has to be installed; "" if none.
    - `around`: makes the context manager that is open while the model is trained this way.
    - `compiles`: whether it compiles the model: the first step takes long, and dropout draws other random numbers than
      in eager mode.
    - `promises_bits`: whether leangrad promises gradients that are bitwise equal to plain PyTorch's.
    - `is_global`: whether it changes classes and functions for the whole process, so that no model is plain afterwards.
    """

    name: str
    line: str
    make: Callable[[Given], Way]
    package: str = ""
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    compiles: bool = False
    promises_bits: bool = False
    is_global: bool = False

    def way(self, given: Given) -> Way:
        """Return the `Way` for this model; raises `NotForThisError` if it does not apply or `package` is missing."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise NotForThisError(f"{self.package} is not installed")
        return self.make(given)


def find(names: list[str]) -> list[Choice]:
    """Return the entries of these names, in the order of the table.

    Raises ValueError for a name that is not in the table.

    >>> [choice.name for choice in find(["lean", "plain"])]
    ['plain', 'lean']
    """
    if unknown := [name for name in names if name not in WAYS]:
        raise ValueError(f"there is no way called {unknown[0]!r}; there are {', '.join(WAYS)}")
    return [choice for name, choice in WAYS.items() if name in names]


def _checkpoint(given: Given) -> Way:
    found = checkpoint_way(given.model)
    if found is None:
        raise NotForThisError(no_checkpoint().note)
    return found


def _in_place(name: str, change: Callable[[nn.Module], object], steps: int = _STEPS) -> Callable[[Given], Way]:
    return lambda given: Way(name, change, steps)


def _selective(given: Given) -> Way:
    if not repeated_modules(given.model):
        raise NotForThisError(no_checkpoint().note)
    return Way("selective", checkpoint_selectively, _STEPS)


def _on_cuda(
    name: str,
    change: Callable[[nn.Module], object],
    why: str,
    look: Callable[[nn.Module], object] = lambda model: None,
) -> Callable[[Given], Way]:
    """Return the `Choice.make` of a way that needs a GPU.

    change: changes the model in place.
    why: the message of the `NotForThisError` for other devices.
    look: raises `NotForThisError` for a model to which ``change`` does not apply.
    """

    def make(given: Given) -> Way:
        if given.device.type != "cuda":
            raise NotForThisError(why)
        look(given.model)
        return Way(name, change, _STEPS)

    return make


def _compiled(name: str, load: Callable[[], Any]) -> Callable[[Given], Way]:
    def make(given: Given) -> Way:
        options = {"fallback_random": True} if given.draws_as_eager else None

        def change(model: nn.Module) -> None:
            torch.compiler.reset()  # else Dynamo would treat the next copy of the model as a recompilation of this one
            model.compile(backend=load(), dynamic=False, options=options)

        return Way(name, change, _STEPS)

    return make


def _leangrad_backend() -> Any:
    # Imported late, because it imports all of Dynamo, which most ways do not need. Not by its name "leangrad", because
    # the backend may not be registered.
    return importlib.import_module("leangrad.compiled").compile_lean


def _lean_budget(given: Given) -> Way:
    if given.budget is None or given.told is None:
        raise NotForThisError("no budget was given, and no other way has shown one")
    return budget_way(given.budget, given.told)


def _no_logits(given: Given) -> Way:
    if not heads_of(given.model):
        raise NotForThisError("found no projection to a vocabulary: it would be the same as lean")
    return Way("no_logits", lambda model: lean(model, exact=False), _LEAN_STEPS)


_packed: list[PackedGradients] = []  # those of the previous copy of the model, which shares its parameters


def _pack(model: nn.Module) -> None:
    while _packed:
        _packed.pop().unpack()
    _packed.append(pack_gradients(model))


def _convert_abn(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that nothing was converted: the error below says so
        convert_abn(model)
    if not model.abn_conversions.converted():  # type: ignore[union-attr, operator]
        raise NotForThisError("found no batch norm with an activation after it")


_CHOICES = (
    Choice("plain", "model", lambda given: plain_way()),
    Choice("checkpoint", "checkpoint(block, x, use_reentrant=False)", _checkpoint),
    Choice("selective", "the same, keeping products and attention", _selective),
    Choice(
        "save_on_cpu",
        "with torch.autograd.graph.save_on_cpu(pin_memory=True):",
        _on_cuda("save_on_cpu", save_on_host, "on a CPU what is saved lies in the host's memory already"),
    ),
    Choice("compile", "torch.compile(model)", _compiled("compile", lambda: "inductor"), compiles=True),
    Choice(
        "compile_budget",
        f"the same with activation_memory_budget = {BUDGET_OF_TORCH}",
        _compiled("compile_budget", lambda: "inductor"),
        around=lambda: activation_budget(BUDGET_OF_TORCH),
        compiles=True,
    ),
    Choice("lean", "leangrad.lean(model)", lambda given: lean_way(), promises_bits=True),
    Choice("lean_budget", 'leangrad.lean(model, budget="20GB")', _lean_budget, promises_bits=True),
    Choice("no_logits", "leangrad.lean(model, exact=False)", _no_logits),
    Choice(
        "compile_leangrad",
        'torch.compile(model, backend="leangrad")',
        _compiled("compile_leangrad", _leangrad_backend),
        compiles=True,
    ),
    Choice("convert_abn", "leangrad.nn.convert_abn(model)", _in_place("convert_abn", _convert_abn)),
    Choice("packed", "leangrad.pack_gradients(model)", _in_place("packed", _pack)),
    Choice(
        "liger",
        "Liger's kernels",
        _on_cuda("liger", apply_liger, "Liger's kernels need a GPU", partial(find_language_model, "liger_kernel")),
        package="liger_kernel",
        is_global=True,
    ),
    Choice(
        "cce",
        "Apple's cut cross entropy",
        _on_cuda("cce", apply_cce, "its kernels need a GPU", partial(find_language_model, "cut_cross_entropy")),
        package="cut_cross_entropy",
        is_global=True,
    ),
    Choice(
        "inplace_abn",
        "inplace_abn.InPlaceABN",
        _on_cuda("inplace_abn", apply_inplace_abn, "its kernels need a GPU"),
        package="inplace_abn",
    ),
)

#: All entries by their names, in the order in which they are run and shown.
WAYS = {choice.name: choice for choice in _CHOICES}
