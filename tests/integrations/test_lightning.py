"""`Lean` and `lean` with the real Lightning: `training_step` is lean, and losses and weights are the same bits."""

from __future__ import annotations

import copy
import importlib
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import leangrad
from tests.support import assert_same_bits

pytest.importorskip("lightning", reason="lightning is not installed: the extra `trainers`")
pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed: the extra `trainers`")

import lightning.pytorch as pl

from leangrad.integrations.lightning import Lean

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        ".*does not have many workers",
        ".*LeafSpec",  # torch's own names, which Lightning uses
        ".*treespec",
        "`isinstance",
        "It is recommended to use .*sync_dist",
    )
]

BATCH, WIDTH, STEPS = 256, 64, 6


def block(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))


def modules_of(lightning: ModuleType) -> dict[str, type]:
    """The same modules under each name of Lightning."""

    class Automatic(lightning.LightningModule):  # type: ignore[name-defined, misc]
        """Its training_step calls submodules; its forward is for prediction."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(block(), block()), nn.Linear(WIDTH, 8)
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = self.head(self.body(batch[0])).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss)
            return {"loss": loss} if batch_idx % 2 else loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("validated", self(batch[0]).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class CallsForward(Automatic):
        """The same by its own forward."""

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = self(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

    class Manual(Automatic):
        """Two optimizers and two backward passes in a step, as a GAN has them."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critics = nn.ModuleDict({"both": nn.ModuleList([block(), block()])})  # lists in dicts have no forward

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            for critic, optimizer in zip(self.critics["both"], self.optimizers(), strict=True):
                loss = critic(self.body(batch[0])).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.losses.append(loss.item())

        def configure_optimizers(self) -> Any:
            both = [[*self.body.parameters(), *critic.parameters()] for critic in self.critics["both"]]
            return [torch.optim.AdamW(parameters, 1e-2) for parameters in both]

    return {"automatic": Automatic, "forward": CallsForward, "manual": Manual}


KINDS = modules_of(pl)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    return DataLoader(TensorDataset(torch.randn(STEPS * BATCH, WIDTH, generator=generator)), batch_size=BATCH)


def trainer_with(callbacks: Any, folder: Path, *, lightning: ModuleType = pl, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    defaults = {"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False, "log_every_n_steps": 1}
    return lightning.Trainer(callbacks=callbacks, default_root_dir=folder, **{**quiet, **defaults, **options})


def made(kind: str = "automatic", lightning: ModuleType = pl) -> Any:
    torch.manual_seed(0)
    return (KINDS if lightning is pl else modules_of(lightning))[kind]()


def fitted(callbacks: Any, folder: Path, kind: str = "automatic", *, model: Any = None, **options: Any) -> Any:
    model = made(kind, options.get("lightning", pl)) if model is None else model
    torch.manual_seed(1)
    trainer = trainer_with(callbacks, folder, **options)
    trainer.fit(model, data(), data())
    model.fitted_by = trainer
    return model


def assert_same_training(plain: Any, lean: Any) -> None:
    assert len(plain.losses) >= STEPS
    assert lean.losses == plain.losses
    expected, found = plain.state_dict(), lean.state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        assert_same_bits(found[name], expected[name], name)


def saved_share(model: Any) -> float:
    return float(model.fitted_by.logged_metrics["lean_saved_share"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.1}],
    ids=["plain", "accumulation", "bf16", "clipping"],
)
def test_the_same_training(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    if kind == "manual" and {"accumulate_grad_batches", "gradient_clip_val"} & options.keys():
        pytest.skip("Lightning leaves these to the module where it optimizes manually")
    plain = fitted([], tmp_path, kind, **options)
    lean = fitted([Lean()], tmp_path, kind, **options)
    assert_same_training(plain, lean)
    assert saved_share(lean) > 0.4
    assert not any(leangrad.is_lean(module) for module in lean.modules())
    assert "training_step" not in vars(lean)


@pytest.mark.parametrize("kind", KINDS)
def test_lean_reaches_the_training_step_by_itself(kind: str, tmp_path: Path) -> None:
    """No warning, which would be an error here; and what is lean does save."""
    plain = fitted([], tmp_path, kind)
    lean = fitted([], tmp_path, model=leangrad.lean(made(kind)))
    assert_same_training(plain, lean)
    ledgers = [leangrad.ledger_of(module) for module in lean.modules() if leangrad.is_lean(module)]
    assert sum(ledger.totals().rebuilt_bytes for ledger in ledgers) > 0
    assert len(ledgers) == (5 if kind == "manual" else 1)  # body, head and two critics, and the module itself
    assert all(ledger.differences == 0 for ledger in ledgers)
    if kind == "manual":
        assert "optimizes manually, so its submodules are lean" in leangrad.ledger_of(lean).summary()
    leangrad.plain(lean)
    assert not any(leangrad.is_lean(module) for module in lean.modules())
    assert "training_step" not in vars(lean)


def test_the_loss_is_in_the_region(tmp_path: Path) -> None:
    """One region for the whole training_step: the square of the loss reads the head's product, which is kept once."""
    lean = fitted([], tmp_path, model=leangrad.lean(made()))
    assert len(lean.losses) == STEPS
    kept = [entry for entry in leangrad.ledger_of(lean).entries(planned=True) if entry.outcome == "kept"]
    assert len(kept) == 2  # the products of the two blocks; the head's is small


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_under_each_name(name: str, tmp_path: Path) -> None:
    lightning = importlib.import_module(name)
    callback = Lean()
    assert isinstance(callback, lightning.Callback)
    plain = fitted([], tmp_path, lightning=lightning)
    lean = fitted(callback, tmp_path, lightning=lightning)  # one callback may be given without a list
    assert_same_training(plain, lean)
    assert saved_share(lean) > 0.4


@pytest.mark.parametrize("settings", [{"budget": "1GB"}, {"slowdown": 100}], ids=["budget", "slowdown"])
@pytest.mark.parametrize("kind", ["automatic", "forward"])
def test_with_settings(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """A training_step that calls forward is one step, not two."""
    plain = fitted([], tmp_path, kind)
    model = leangrad.lean(made(kind), **settings)
    ledger = leangrad.ledger_of(model)
    lean = fitted([], tmp_path, model=model)
    assert_same_training(plain, lean)
    assert leangrad.ledger_of(lean) is ledger  # the arguments of forward inside are no other batch
    assert ledger.differences == 0


def test_a_budget_is_for_one_backward_pass() -> None:
    with pytest.raises(ValueError, match=r"optimizes manually.*leangrad\.lean"):
        leangrad.lean(made("manual"), budget="1GB")
    with pytest.raises(ValueError, match="give a budget or a slowdown, not both"):
        Lean(budget="1GB", slowdown=1.1)


def test_fit_twice_and_validate(tmp_path: Path) -> None:
    plain = fitted([], tmp_path)
    lean = fitted([Lean()], tmp_path)
    for model in (plain, lean):
        torch.manual_seed(2)
        model.fitted_by.fit_loop.max_epochs = 2
        model.fitted_by.fit(model, data(), data())
        model.fitted_by.validate(model, data(), verbose=False)
    assert len(plain.losses) == 2 * STEPS
    assert_same_training(plain, lean)
    assert not leangrad.is_lean(lean)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints_are_those_of_the_plain_model(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saved = {}
    for name, callbacks in {"plain": [], "lean": [Lean()]}.items():
        keep = ModelCheckpoint(tmp_path / name, filename="last", every_n_train_steps=3, save_top_k=1)
        fitted([*callbacks, keep], tmp_path, enable_checkpointing=True)
        saved[name] = torch.load(tmp_path / name / "last.ckpt", weights_only=True)
    assert saved["lean"]["state_dict"].keys() == saved["plain"]["state_dict"].keys()
    for key, value in saved["plain"]["state_dict"].items():
        assert_same_bits(saved["lean"]["state_dict"][key], value, key)
    resumed = []
    for callbacks in ([], [Lean()]):
        resumed.append(made())
        torch.manual_seed(1)
        trainer = trainer_with(callbacks, tmp_path, max_epochs=2)
        trainer.fit(resumed[-1], data(), data(), ckpt_path=tmp_path / "lean" / "last.ckpt")
        assert trainer.global_step == 2 * STEPS
    assert_same_training(*resumed)


class Busy(KINDS["automatic"]):  # type: ignore[misc]
    """Much in one step: an average of weights, a gradient of a gradient, a buffer, numbers that leave torch."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.body).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        with torch.no_grad():
            for ours, theirs in zip(self.average.parameters(), self.body.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
            target = self.average(batch[0])
            self.mean.mul_(0.9).add_(target.mean(0))
        hidden = self.body(x)
        (slope,) = torch.autograd.grad(self.head(hidden).sum(), x, create_graph=True)
        loss = (hidden - target).square().mean() + slope.square().mean() + (hidden * self.mean).mean().abs()
        self.losses.append(float(loss.detach().numpy()))
        self.log("norm", hidden.detach().norm())
        return loss


def test_a_step_that_does_much(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return Busy()

    plain, lean = fitted([], tmp_path, model=model()), fitted([Lean()], tmp_path, model=model())
    assert_same_training(plain, lean)
    assert saved_share(lean) > 0.2


class Failing(KINDS["automatic"]):  # type: ignore[misc]
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.body(batch[0])
        raise MemoryError("no memory")


def test_a_fit_that_fails_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = Failing()
    with pytest.raises(MemoryError):
        trainer_with([Lean()], tmp_path).fit(model, data(), data())
    assert not leangrad.is_lean(model)
    assert "training_step" not in vars(model)
    with leangrad.saving():  # no region was left open
        pass


def test_two_callbacks_and_a_model_that_is_lean_already(tmp_path: Path) -> None:
    plain = fitted([], tmp_path)
    assert_same_training(plain, fitted([Lean(), Lean()], tmp_path))
    lean = fitted([Lean()], tmp_path, model=leangrad.lean(made()))
    assert_same_training(plain, lean)
    assert saved_share(lean) > 0.4
    assert leangrad.is_lean(lean)
    with pytest.warns(UserWarning, match="settings of the Lean callback are not used"):
        fitted([Lean(slowdown=2)], tmp_path, model=leangrad.lean(made()))


def test_a_part_that_the_user_made_lean_stays_lean() -> None:
    model = made("manual")
    leangrad.lean(model.body)
    ledger = leangrad.ledger_of(model.body)
    leangrad.plain(leangrad.lean(model))
    assert leangrad.ledger_of(model.body) is ledger
    assert not leangrad.is_lean(model.head)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lean_module_is_copied_and_pickled(kind: str, tmp_path: Path) -> None:
    plain = fitted([], tmp_path, kind)
    model = leangrad.lean(made(kind))
    copies = [copy.deepcopy(model)]
    if kind == "automatic":
        globals()["Automatic"] = KINDS["automatic"]  # a class that a function made is not found by its name
        KINDS["automatic"].__qualname__ = "Automatic"
        copies.append(pickle.loads(pickle.dumps(model)))
    for other in copies:
        assert leangrad.is_lean(other)
        step = vars(other).get("training_step")
        assert step is None or step.module is other
        assert_same_training(plain, fitted([], tmp_path, model=other))
    assert model.losses == []


class OwnLean(Lean):
    """A callback of the user's."""


@pytest.mark.parametrize("kind", [Lean, OwnLean])
def test_the_callback_is_pickled(kind: type) -> None:
    assert issubclass(kind, pl.Callback)  # LightningCLI asks the class
    other = pickle.loads(pickle.dumps(kind(slowdown=1.5)))
    assert other.settings == {"slowdown": 1.5}
    assert isinstance(other, kind)
    assert isinstance(other, pl.Callback)


def test_layers_that_are_made_when_fit_begins(tmp_path: Path) -> None:
    """Callbacks are set up before the module is: its head is found all the same."""

    class Late(pl.LightningModule):
        def configure_model(self) -> None:
            self.embed, self.head = nn.Embedding(512, 32), nn.Linear(32, 512)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            words = (100 * batch[0]).long() % 512
            logits = self.head(self.embed(words))
            assert type(logits).__name__ == "LazyLogits"
            return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    model = Late()
    trainer = trainer_with([Lean(exact=False)], tmp_path, max_steps=2)
    trainer.fit(model, data())
    assert trainer.global_step == 2
    assert "forward" not in vars(model.head)


def test_what_others_put_around_the_step_stays(tmp_path: Path) -> None:
    """Another tool wraps the step of a lean module; plain() takes ours from under it."""
    model = leangrad.lean(made())
    ours, seen = model.training_step, []

    def around(batch: list[Tensor], batch_idx: int) -> Any:
        seen.append(batch_idx)
        return ours(batch, batch_idx)

    around.__wrapped__ = ours  # type: ignore[attr-defined]
    model.training_step = around
    assert_same_training(fitted([], tmp_path), fitted([], tmp_path, model=model))
    assert seen == list(range(STEPS))
    assert leangrad.ledger_of(model).totals().rebuilt_bytes > 0
    leangrad.plain(model)
    assert model.training_step is around
    assert_same_training(fitted([], tmp_path), fitted([], tmp_path, model=leangrad.plain(_like(model))))


def _like(model: Any) -> Any:
    """The same module before its training, with what was put around its step."""
    other = made()
    other.training_step = lambda batch, batch_idx: type(other).training_step(other, batch, batch_idx)
    assert not leangrad.is_lean(model)
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_under_ddp(kind: str, tmp_path: Path) -> None:
    """DDP reaches training_step through the module's forward: one region, not two."""
    from lightning.pytorch.strategies import DDPStrategy

    found = []
    for callbacks in ([], [Lean()]):
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=kind == "manual")
        found.append(fitted(callbacks, tmp_path, kind, strategy=strategy, devices=1))
    assert_same_training(*found)
    assert saved_share(found[1]) > 0.4


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_compiled_module_is_told_of_the_backend(tmp_path: Path) -> None:
    model = torch.compile(made("forward"), backend="eager")
    with pytest.warns(UserWarning, match=r'module\.part\.compile\(backend="leangrad"\)'):
        trainer_with([Lean()], tmp_path, max_steps=1, limit_val_batches=0).fit(model, data())
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_a_lean_module_that_is_compiled_runs_plain(tmp_path: Path) -> None:
    """Its training_step has a graph break, after which Dynamo calls what stands behind ours."""
    found = []
    for module in (made("forward"), leangrad.lean(made("forward"))):
        torch.manual_seed(1)
        trainer_with([], tmp_path, max_steps=2, limit_val_batches=0).fit(torch.compile(module, backend="eager"), data())
        found.append(module.losses)
        torch.compiler.reset()
    assert len(found[0]) == 2
    assert found[1] == found[0]


@pytest.mark.gpu
def test_the_peak_of_a_gpu_is_logged(tmp_path: Path) -> None:
    lean = fitted([Lean()], tmp_path, accelerator="gpu", devices=1)
    assert saved_share(lean) > 0.4
    logged = float(lean.fitted_by.logged_metrics["peak_memory_bytes"])
    assert 0 < logged <= 1.01 * torch.cuda.max_memory_allocated()  # metrics are float32


def test_fabric(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    def run(lean: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(block(), block(), nn.Linear(WIDTH, 8))
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model, optimizer = fabric.setup(
            leangrad.lean(net) if lean else net, torch.optim.AdamW(net.parameters(), lr=1e-2)
        )
        losses = []
        for (x,) in fabric.setup_dataloaders(data()):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert not lean or leangrad.ledger_of(net).totals().rebuilt_bytes > 0
        return losses

    expected = run(lean=False)
    assert len(set(expected)) == STEPS
    assert run(lean=True) == expected
