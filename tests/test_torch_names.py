"""Private names of torch that the ledger uses in place: without one of them lean models run plain, and say so once."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import leangrad
from leangrad import _torch
from leangrad._torch import autograd, present
from leangrad.ledger.values.value import Value

LEDGER = Path(leangrad.__file__).parent / "ledger"
NOTED = {"_version", "_base", "_is_view", "_sequence_nr"}  # and those that begin with _saved_ and _raw_saved_


@pytest.fixture
def without_a_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(present, "_MISSING_LEDGER_NAMES", ["Node._gone"])
    _torch.ledger_names_present.cache_clear()
    yield
    _torch.ledger_names_present.cache_clear()


def test_every_name_is_there() -> None:
    assert present._missing_ledger_names() == []
    assert _torch.ledger_names_present()


def test_a_missing_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        """A saved tensor that tells nothing."""

    monkeypatch.setattr(present, "getattr", lambda *_: Nothing(), raising=False)
    assert present._missing_ledger_names() == ["SavedTensor.data", "SavedTensor.unpack_hook"]


def test_grad_mode_does_not_matter() -> None:
    with torch.no_grad():
        assert present._missing_ledger_names() == []
    with torch.inference_mode():
        assert present._missing_ledger_names() == []


@pytest.mark.usefixtures("without_a_name")
def test_without_a_name_regions_are_plain_and_one_warning_says_so() -> None:
    model = leangrad.lean(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), min_bytes=0)
    x = torch.randn(4, 8)
    with pytest.warns(UserWarning, match=r"has no Node\._gone.*run plain"):
        y = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        with leangrad.saving() as ledger:
            z = x @ model[0].weight
    assert y.grad_fn._raw_saved_self.data.grad_fn is not None  # the tensor itself: no hook packed it
    assert z.grad_fn is not None
    assert "recorded no step" in ledger.summary()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_values() -> set[str]:
    """The private names of our values: other files of the ledger use them, and torch has none like them."""
    own = {name for kind in Value.__mro__ for name in vars(kind) if is_private(name)}
    x = torch.ones(1, requires_grad=True)
    node = x.exp().grad_fn
    torchs = {name for thing in (x, node, node._raw_saved_result, torch, torch._C) for name in dir(thing)}
    return own - torchs


def names_that_classes_define(tree: ast.AST) -> set[str]:
    """Methods, attributes of classes, slots, and what is set on ``self``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                match line:
                    case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                        found.add(name)
                    case ast.Assign(targets=[ast.Name(id="__slots__")], value=slots):
                        found |= set(ast.literal_eval(slots))
                    case ast.Assign(targets=targets):
                        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_names_of_others(source: str, on_self: set[str], on_values: set[str]) -> set[str]:
    """The private attributes that ``source`` asks for and that are not ours, but for those that nodes save.

    on_self: what may stand after ``self`` and ``cls``; on_values: what may stand after anything.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if name in on_self:
                pass
            case ast.Attribute(attr=name) if is_private(name):
                found.add(name)
    return {name for name in found - on_values if not name.startswith(("_saved_", "_raw_saved_"))}


def test_the_note_tells_every_name_that_the_ledger_uses_in_place() -> None:
    paths = [path for path in LEDGER.rglob("*.py") if "rules" not in path.parts]  # the rules name ops of ATen instead
    assert len(paths) > 40
    sources = [path.read_text() for path in paths]
    on_self = set().union(*(names_that_classes_define(ast.parse(source)) for source in sources))
    on_values = private_names_of_values()
    assert {"_take", "_rebuild", "_is_held"} <= on_values
    found = [private_names_of_others(source, on_self, on_values) for source in sources]
    assert set().union(*found) == NOTED, "a private name of torch belongs into _torch, or into its note"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a._cdata", {"_cdata"}),
        ("v._backward_hooks", {"_backward_hooks"}),
        ("waiter._grad", {"_grad"}),
        ("self._cdata", {"_cdata"}),  # of a class of ours that is a class of torch's
        ("torch._C._functions", {"_C", "_functions"}),
        ("self._mine, v._take, node._saved_self, x.__class__", set()),
    ],
)
def test_a_private_name_is_found_whatever_its_variable_is_called(line: str, found: set[str]) -> None:
    assert private_names_of_others(line, {"_mine"}, {"_take"}) == found


@pytest.mark.parametrize("has_names", [True, False])
def test_saved_tensor_hooks_are_set_and_taken_back(has_names: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_names:
        monkeypatch.setattr(autograd, "_push_hooks", None)
    put, take_back = _torch.saved_tensor_hooks(lambda x: [x.detach()], lambda packed: packed[0])
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        put()
        inside = x.exp()
        take_back()
        outside = x.exp()
        assert type(inside.grad_fn._raw_saved_result.data) is list
        assert outside.grad_fn._raw_saved_result.unpack_hook is None
        assert not _torch.saved_tensor_hooks_active()
