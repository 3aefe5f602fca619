"""Private names of torch that the ledger uses in place: without one of them lean models run plain, and say so once."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import leangrad
from leangrad import _torch

LEDGER = Path(leangrad.__file__).parent / "ledger"
NOTED = {"_version", "_base", "_is_view", "_sequence_nr"}  # and those that begin with _saved_ and _raw_saved_


WRITERS = ("forms", "matcher")  # which write code, as text
OWN = {"_take", "_is_held"}


@pytest.fixture
def without_a_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_torch, "_MISSING_LEDGER_NAMES", ["Node._gone"])
    _torch.ledger_names_present.cache_clear()
    yield
    _torch.ledger_names_present.cache_clear()


def test_every_name_is_there() -> None:
    assert _torch._missing_ledger_names() == []
    assert _torch.ledger_names_present()


def test_a_missing_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        """A saved tensor that tells nothing."""

    monkeypatch.setattr(_torch, "getattr", lambda *_: Nothing(), raising=False)
    assert _torch._missing_ledger_names() == ["SavedTensor.data", "SavedTensor.unpack_hook"]


def test_grad_mode_does_not_matter() -> None:
    with torch.no_grad():
        assert _torch._missing_ledger_names() == []
    with torch.inference_mode():
        assert _torch._missing_ledger_names() == []


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


def test_the_note_tells_every_name_that_the_ledger_uses_in_place() -> None:
    found: set[str] = set()
    for path in LEDGER.glob("*.py"):  # the rules name ops of ATen instead, as the dispatcher knows them
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "waiter", "a", "v")
                if not own and not node.attr.startswith(("_saved_", "_raw_saved_")):
                    found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.stem in WRITERS:
                found |= set(re.findall(r"\.(_(?!_|saved_|raw_saved_)\w+)", node.value)) - OWN
    assert found == NOTED, "a private name of torch belongs into _torch.py, or into its note"


@pytest.mark.parametrize("has_names", [True, False])
def test_saved_tensor_hooks_are_set_and_taken_back(has_names: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_names:
        monkeypatch.setattr(_torch, "_push_hooks", None)
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
