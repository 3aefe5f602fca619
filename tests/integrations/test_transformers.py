"""`LeanCallback` in the real Trainer, on small models: the same losses and weights, bit for bit, with less kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leangrad
from tests.support import assert_same_bits
from tests.support.trainers import MODELS, gpt2, llama, rows

pytest.importorskip("transformers", reason="transformers is not installed: the extra `dev`")
pytest.importorskip("accelerate", reason="accelerate is not installed: the extra `trainers`")

from transformers import Trainer, TrainerCallback, TrainingArguments

from leangrad.integrations.transformers import LeanCallback

STEPS = 5


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


def trainer_for(
    folder: Path, callbacks: list[Any], name: str = "gpt2", *, model: nn.Module | None = None, **options: Any
) -> Trainer:
    make, data = MODELS[name]
    torch.manual_seed(0)
    model = make() if model is None else model
    return Trainer(
        model, arguments(folder, **options), train_dataset=data(), eval_dataset=data()[:8], callbacks=callbacks
    )


def losses(trainer: Trainer, *keys: str) -> list[tuple[float, ...]]:
    keys = keys or ("loss", "grad_norm")
    return [tuple(row[key] for key in keys) for row in trainer.state.log_history if keys[0] in row]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same_training(plain: Trainer, lean: Trainer, *, steps: int = STEPS) -> None:
    assert len(losses(plain)) == steps
    assert losses(lean) == losses(plain)
    assert len({loss for loss, _ in losses(plain)}) > 1  # it learns something
    expected, found = weights(plain), weights(lean)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_same_bits(found[name], expected[name], name)


def assert_saved(trainer: Trainer, least: float = 0.3) -> None:
    """The logs of training say that much is saved."""
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert logged
    assert all(least < row["lean_saved_share"] < 1 for row in logged)
    assert not any("lean_saved_share" in row for row in trainer.state.log_history if "eval_loss" in row)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_training(name: str, bf16: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"bf16": True, "max_steps": 3, "per_device_train_batch_size": 4} if bf16 else {}
    plain = trainer_for(tmp_path, [], name, **options)
    plain.train()
    lean = trainer_for(tmp_path, [LeanCallback()], name, **options)
    capsys.readouterr()
    lean.train()
    told = capsys.readouterr().out
    assert_same_training(plain, lean, steps=options.get("max_steps", STEPS))
    assert_saved(lean)
    kind = type(lean.model).__name__
    assert told.startswith(f"leangrad: {kind} keeps for backward only what cannot be rebuilt; losses and gradients are")
    assert not leangrad.is_lean(lean.model)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"eval_strategy": "steps", "eval_steps": 2},
        {"label_smoothing_factor": 0.1},
    ],
    ids=["accumulation", "checkpoint", "reentrant", "evaluation", "smoothing"],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of a reentrant checkpoint
def test_the_same_training_beside(options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = trainer_for(tmp_path, [], "llama", **options)
    plain.train()
    lean = trainer_for(tmp_path, [LeanCallback()], "llama", **options)
    capsys.readouterr()
    lean.train()
    assert ("gradient_checkpointing is on too" in capsys.readouterr().out) == ("gradient_checkpointing" in options)
    assert_same_training(plain, lean)
    assert_saved(lean)
    evaluations = losses(plain, "eval_loss")
    assert losses(lean, "eval_loss") == evaluations
    assert bool(evaluations) == ("eval_strategy" in options)


def test_a_training_that_is_saved_and_resumed(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    plain = trainer_for(tmp_path / "plain", [], **options)
    plain.train()
    whole = trainer_for(tmp_path / "lean", [LeanCallback()], **options)
    whole.train()
    assert_same_training(plain, whole)
    resumed = trainer_for(tmp_path / "lean", [LeanCallback()], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "lean" / "checkpoint-2"))
    assert_same_training(plain, resumed)
    assert not leangrad.is_lean(resumed.model)
    saved = type(plain.model).from_pretrained(tmp_path / "lean" / "checkpoint-4")
    other = type(plain.model).from_pretrained(tmp_path / "plain" / "checkpoint-4")
    for (name, value), expected in zip(saved.state_dict().items(), other.state_dict().values(), strict=True):
        assert_same_bits(value, expected, name)


def test_one_callback_trains_twice_and_tells_what_it_did(tmp_path: Path) -> None:
    callback = LeanCallback()
    assert callback.summary() == "no training has begun with this LeanCallback yet"
    trainer = trainer_for(tmp_path, [callback])
    for _ in range(2):
        trainer.train()
        assert not leangrad.is_lean(trainer.model)
        assert "steps follow the trace of the recorded one" in callback.summary()
        assert "rebuilt" in callback.summary().split("plain keeps")[0]
    assert_saved(trainer)


def test_settings_are_those_of_lean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="give a budget or a slowdown, not both"):
        LeanCallback(budget="1GB", slowdown=1.1)
    with pytest.raises(TypeError, match="no_such_setting"):
        LeanCallback(no_such_setting=True)
    with pytest.raises(ValueError, match="exact must be True or False, got 'False'"):
        LeanCallback(exact="False")
    plain = trainer_for(tmp_path, [])
    plain.train()
    lean = trainer_for(tmp_path, [LeanCallback(budget="1GB")])
    lean.train()
    assert "keeps for backward as much as fits into the budget of 1GB; losses and" in capsys.readouterr().out
    assert_same_training(plain, lean)
    assert losses(lean, "lean_saved_share")[-1] < losses(lean, "lean_saved_share")[0]  # there is room: more is kept


def test_the_loss_without_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics in between read the logits of evaluation, which are then computed."""

    def trained(callbacks: list[Any]) -> Trainer:
        trainer = trainer_for(tmp_path, callbacks, "gpt2", model=wide(), eval_strategy="steps", eval_steps=2)
        trainer.compute_metrics = lambda found: {
            "hits": float((found.predictions.argmax(-1) == found.label_ids).mean())
        }
        trainer.train()
        return trainer

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return gpt2(vocabulary=512)

    plain = trained([])
    capsys.readouterr()
    lean = trained([LeanCallback(exact=False)])
    assert "without its logits, with plain's error but not plain's bits" in capsys.readouterr().out
    for key in ("loss", "eval_loss", "eval_hits"):
        expected = [row[0] for row in losses(plain, key)]
        assert len(expected) > 1
        assert [row[0] for row in losses(lean, key)] == pytest.approx(expected, rel=1e-4), key
    assert losses(lean, "lean_saved_share")[-1] > (0.5,)


class Seen(TrainerCallback):
    """What a reporter such as TensorBoard's sees."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        self.logs.append(dict(logs or {}))


def test_callbacks_that_come_after_it_see_what_is_saved(tmp_path: Path) -> None:
    before, after = Seen(), Seen()
    trainer = trainer_for(tmp_path, [before, LeanCallback(), after])
    trainer.train()
    assert all(0.3 < logs["lean_saved_share"] < 1 for logs in after.logs)
    assert len(after.logs) == len(before.logs) == STEPS + 1
    assert not any("lean_saved_share" in logs for logs in before.logs)


# Together with others


def test_a_model_that_is_lean_already_stays_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = trainer_for(tmp_path, [])
    plain.train()
    lean = trainer_for(tmp_path, [LeanCallback(slowdown=3)])
    leangrad.lean(lean.model)
    ledger = leangrad.ledger_of(lean.model)
    capsys.readouterr()
    lean.train()
    told = capsys.readouterr().out
    assert "lean already and stays as it is, and the settings of LeanCallback are not used" in told
    assert_same_training(plain, lean)
    assert_saved(lean)
    assert leangrad.ledger_of(lean.model) is ledger


def test_lean_alone_does_the_same(tmp_path: Path) -> None:
    plain = trainer_for(tmp_path, [])
    plain.train()
    torch.manual_seed(0)
    lean = trainer_for(tmp_path, [], model=leangrad.lean(gpt2()))
    lean.train()
    assert_same_training(plain, lean)
    assert leangrad.ledger_of(lean.model).totals().rebuilt_bytes > 0


def test_two_callbacks_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = trainer_for(tmp_path, [])
    plain.train()
    lean = trainer_for(tmp_path, [LeanCallback(), LeanCallback()])
    capsys.readouterr()
    lean.train()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("leangrad: ")]
    assert len(told) == 2
    assert told[1] == "leangrad: this model has a LeanCallback already; the second one does nothing"
    assert_same_training(plain, lean)
    assert_saved(lean)
    assert not leangrad.is_lean(lean.model)


class FailOnce(nn.Module):
    """Fails in the second forward, as an allocation may."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise MemoryError("no memory")
        return self.model(input_ids=input_ids, labels=labels)


def test_a_training_that_failed_is_begun_anew(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, [LeanCallback()], model=FailOnce(gpt2()))
    with pytest.raises(MemoryError):
        trainer.train()
    trainer.train()
    assert_saved(trainer)
    assert not leangrad.is_lean(trainer.model)


def test_another_callback_takes_over_after_a_training_that_failed(tmp_path: Path) -> None:
    model = FailOnce(gpt2())
    with pytest.raises(MemoryError):
        trainer_for(tmp_path, [LeanCallback()], model=model).train()
    assert leangrad.is_lean(model)
    trainer = trainer_for(tmp_path, [LeanCallback(min_bytes=2**40)], model=model, max_steps=2)
    trainer.train()
    assert losses(trainer, "lean_saved_share")[-1] == (0,)  # by its own settings nothing is rebuilt
    assert not leangrad.is_lean(model)


# Beside the trainer's own options


def test_compiling_is_told_which_way_to_take(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, [LeanCallback()], torch_compile=True, torch_compile_backend="eager", max_steps=1)
    with pytest.warns(UserWarning, match=r'model\.compile\(backend="leangrad"\) before the Trainer'):
        trainer.train()
    assert not leangrad.is_lean(trainer.model)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, of a view
@pytest.mark.usefixtures("backend_name")
def test_a_model_that_our_backend_compiles_has_no_need_of_the_callback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With eager's own kernels, so that its losses are eager's."""
    plain = trainer_for(tmp_path, [])
    plain.train()
    torch.manual_seed(0)
    model = gpt2()
    model.compile(backend="leangrad", options={"leangrad.exact": True})
    lean = trainer_for(tmp_path, [LeanCallback()], model=model)
    capsys.readouterr()
    lean.train()
    assert "this model is compiled, so LeanCallback does nothing" in capsys.readouterr().out
    assert_same_training(plain, lean)
    assert not leangrad.is_lean(model)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_what_it_says_where_no_layer_has_logits_of_words(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary of ASCII is too small, and a classifier has none."""
    callback, model = LeanCallback(exact=False), MODELS[name][0]()
    state = type("State", (), {"is_world_process_zero": True})
    callback.on_train_begin(arguments(tmp_path), state, None, model=model)
    told = capsys.readouterr().out
    assert "plain's, bit for bit; exact=False changes nothing, for no layer of this model" in told
    assert "without its logits" not in told


def test_what_it_says_where_leangrad_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEANGRAD_DISABLE", "1")
    trainer = trainer_for(tmp_path, [LeanCallback()], max_steps=1)
    trainer.train()
    told = capsys.readouterr().out
    assert "leangrad: leangrad is switched off by LEANGRAD_DISABLE, so GPT2LMHeadModel trains as without it\n" in told


def test_what_it_says_beside_liger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path)
    args.use_liger_kernel = True
    callback, model = LeanCallback(), llama()
    state = type("State", (), {"is_world_process_zero": True})
    callback.on_train_begin(args, state, None, model=model)
    assert "Liger's kernels keep what they need, all else is lean" in capsys.readouterr().out
    callback.on_train_end(args, state, None, model=model)
    assert not leangrad.is_lean(model)


def test_only_the_first_process_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = gpt2()
    state = type("State", (), {"is_world_process_zero": False})
    LeanCallback().on_train_begin(arguments(tmp_path), state, None, model=model)
    assert capsys.readouterr().out == ""
    assert leangrad.is_lean(model)


@pytest.mark.gpu
def test_the_peak_of_a_gpu_is_logged_and_not_reset(tmp_path: Path) -> None:
    """Nothing is said of the bits of long trainings: plain's own kernels may differ from run to run there."""
    torch.zeros(2**20, device="cuda")
    highest = torch.cuda.max_memory_allocated()
    lean = trainer_for(tmp_path, [LeanCallback()], use_cpu=False)
    lean.train()
    assert_saved(lean)
    peaks = [peak for (peak,) in losses(lean, "peak_memory_bytes")]
    assert len(peaks) > STEPS  # also with the mean loss at the end
    assert peaks == sorted(peaks)
    assert peaks[0] >= highest > 0
    assert peaks[-1] <= torch.cuda.max_memory_allocated()


def test_rows_are_text() -> None:
    """What the models learn from: as many characters as tokens, all of them known."""
    found = rows()
    assert "".join(chr(n) for n in found[0]["input_ids"].tolist()).startswith("January 1. Sky")
    assert all(int(row["input_ids"].max()) < 128 for row in found)
