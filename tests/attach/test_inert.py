"""A lean module that trains by another method than forward: one warning that says what to do, and none elsewhere."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import leangrad

WARNING = r"this Stepper got gradients, but its forward has not run .* `with ledger:`"


class Stepper(nn.Module):
    """Trains as a LightningModule does: `training_step` calls the submodules, `forward` is for prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean()


def batch() -> Tensor:
    return torch.randn(128, 64)


def listeners(model: nn.Module) -> int:
    return sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in model.parameters())


def test_a_step_that_passes_forward_by_is_warned_of_once() -> None:
    model = leangrad.lean(Stepper())
    assert listeners(model) == len(list(model.parameters()))
    with pytest.warns(UserWarning, match=WARNING) as caught:
        model.training_step(batch()).backward()
    assert len(caught) == 1
    assert listeners(model) == 0
    model.training_step(batch()).backward()  # warnings are errors here
    assert "its forward has not run" in leangrad.ledger_of(model).summary()


def test_a_forward_without_gradients_is_no_training() -> None:
    """Lightning runs a few validation steps before the first training step."""
    model = leangrad.lean(Stepper())
    with torch.no_grad():
        model(batch())
    with torch.inference_mode():
        model(batch())
    with pytest.warns(UserWarning, match=WARNING):
        model.training_step(batch()).backward()


def test_what_the_warning_says_to_do_ends_it() -> None:
    model, ledger = leangrad.lean(Stepper()), leangrad.saving()
    with ledger:
        loss = model.training_step(batch())
    loss.backward()
    assert "rebuilt" in ledger.summary().split("\n\n")[0]
    model = leangrad.lean(Stepper())
    leangrad.lean(model.body)
    model.training_step(batch()).backward()
    assert "rebuilt" in leangrad.ledger_of(model.body).summary().split("\n\n")[0]


def test_a_model_that_trains_by_forward_is_left_alone() -> None:
    model = leangrad.lean(Stepper())
    loss = model(batch()).sum()
    assert listeners(model) == 0
    loss.backward()
    model.training_step(batch()).backward()  # known to be lean where it can be


def test_a_part_of_the_gradients_is_enough() -> None:
    model = leangrad.lean(Stepper())
    model.body.requires_grad_(False)
    with pytest.warns(UserWarning, match=WARNING):
        model.training_step(batch()).backward()


def test_plain_and_a_new_lean_listen_no_more() -> None:
    model = leangrad.lean(leangrad.lean(Stepper()))
    assert listeners(model) == len(list(model.parameters()))
    assert listeners(leangrad.plain(model)) == 0
    model.training_step(batch()).backward()


def test_frozen_and_lazy_parameters_are_passed_by() -> None:
    leangrad.lean(Stepper().requires_grad_(False))
    leangrad.lean(nn.LazyLinear(4))


def test_copies_are_lean_and_watch_nothing() -> None:
    model = leangrad.lean(Stepper())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert leangrad.is_lean(other)
        assert listeners(other) == 0
        other(batch()).sum().backward()


def test_a_move_to_another_dtype_keeps_the_watch() -> None:
    model = leangrad.lean(Stepper()).to(torch.float64)
    with pytest.warns(UserWarning, match=WARNING):
        model.training_step(batch().double()).backward()


def test_disabled_is_not_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    leangrad.lean(Stepper()).training_step(batch()).backward()


def test_a_compiled_forward_is_a_forward() -> None:
    model = leangrad.lean(Stepper())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, while it compiles
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(batch()).sum().backward()
    assert listeners(model) == 0
