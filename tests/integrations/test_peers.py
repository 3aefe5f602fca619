"""Libraries that need no module of ours: `lean(model)` beside Accelerate, PEFT, TRL and diffusers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import leangrad
from tests.support import assert_same_bits
from tests.support.trainers import LENGTH, TEXT, character_tokenizer, gpt2, llama, rows

STEPS = 4


def needs(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: the extra `trainers`")


def assert_same_run(run: Callable[[str], tuple[list[float], nn.Module]], *ways: str) -> None:
    """Each way loses what plain loses, ends with its weights, and rebuilds something."""
    expected, model = run("plain")
    assert len(set(expected)) > 1
    for way in ways:
        losses, lean = run(way)
        assert losses == expected, way
        for (name, value), other in zip(lean.state_dict().items(), model.state_dict().values(), strict=True):
            assert_same_bits(value, other, f"{way}: {name}")
        lean_parts = [module for module in lean.modules() if leangrad.is_lean(module)]
        assert sum(leangrad.ledger_of(part).totals().rebuilt_bytes for part in lean_parts) > 0, way


# Accelerate


@pytest.fixture
def _process_group(tmp_path: Path) -> None:
    """One process that believes to be one of many: Accelerate wraps its models in DDP."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


def accelerated(way: str, *, mixed_precision: str = "no", wrap: Callable[[nn.Module], nn.Module] | None = None) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    net = gpt2().train()
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    if way == "before":
        leangrad.lean(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    size = 16 if mixed_precision == "no" else 4  # some CPUs are slow in bfloat16
    data = DataLoader(rows(size * STEPS), batch_size=size)
    model, optimizer, data = accelerator.prepare(net, optimizer, data)
    if wrap is not None:
        model = wrap(model)
    if way == "after":
        leangrad.lean(model)
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_before_and_after_prepare(mixed_precision: str) -> None:
    needs("accelerate")
    assert_same_run(lambda way: accelerated(way, mixed_precision=mixed_precision), "before", "after")


@pytest.mark.usefixtures("_process_group")
def test_lean_inside_ddp_and_around_it() -> None:
    needs("accelerate")
    assert_same_run(lambda way: accelerated(way, wrap=nn.parallel.DistributedDataParallel), "before", "after")


# PEFT


def test_lora() -> None:
    peft = needs("peft")

    def run(way: str) -> tuple[list[float], nn.Module]:
        torch.manual_seed(0)
        base = llama()
        if way == "base":
            leangrad.lean(base)
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
        model = peft.get_peft_model(base, config).train()
        if way == "whole":
            leangrad.lean(model)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        losses = []
        for batch in DataLoader(rows(16 * STEPS), batch_size=16):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    assert_same_run(run, "base", "whole")


def test_lora_in_the_trainer(tmp_path: Path) -> None:
    peft = needs("peft")
    needs("accelerate")
    from transformers import Trainer, TrainingArguments

    from leangrad.integrations.transformers import LeanCallback

    def run(callbacks: list[Any]) -> list[Any]:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(llama(), config)
        options: dict[str, Any] = {"report_to": [], "save_strategy": "steps", "save_steps": 2, "disable_tqdm": True}
        args = TrainingArguments(str(tmp_path), max_steps=STEPS, logging_steps=1, use_cpu=True, **options)
        trainer = Trainer(model, args, train_dataset=rows(), callbacks=callbacks)
        trainer.train()
        assert (tmp_path / "checkpoint-4" / "adapter_config.json").exists()
        assert not leangrad.is_lean(model)
        return [
            (row["loss"], row["grad_norm"], row.get("lean_saved_share"))
            for row in trainer.state.log_history
            if "loss" in row
        ]

    plain, lean = run([]), run([LeanCallback()])
    assert len(plain) == STEPS
    assert [row[:2] for row in lean] == [row[:2] for row in plain]
    assert all(row[2] > 0.1 for row in lean), lean  # of frozen layers plain keeps little, too


# TRL


@pytest.mark.parametrize("settings", [None, {}, {"exact": False}], ids=["before", "callback", "inexact"])
def test_sft(settings: dict[str, Any] | None, tmp_path: Path) -> None:
    """TRL computes the loss without logits itself, so that `exact=False` has nothing to change."""
    trl, datasets = needs("trl"), needs("datasets")
    from leangrad.integrations.transformers import LeanCallback

    lines = [line[: LENGTH - 2] for line in TEXT.read_text().splitlines()[:32]]
    data = datasets.Dataset.from_generator(
        lambda: ({"text": line} for line in lines), cache_dir=str(tmp_path / "cache")
    )

    def run(lean: bool) -> list[Any]:
        torch.manual_seed(0)
        model = llama()
        callbacks = [LeanCallback(**settings)] if lean and settings is not None else []
        if lean and settings is None:
            leangrad.lean(model)
        options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": False}
        args = trl.SFTConfig(
            str(tmp_path), max_steps=STEPS, logging_steps=1, use_cpu=True, max_length=LENGTH, **options
        )
        trainer = trl.SFTTrainer(
            model, args, train_dataset=data, processing_class=character_tokenizer(), callbacks=callbacks
        )
        trainer.train()
        if lean and settings is None:
            assert leangrad.ledger_of(trainer.model).totals().rebuilt_bytes > 0
        rows = [row for row in trainer.state.log_history if "loss" in row]
        assert not callbacks or all(row["lean_saved_share"] > 0.3 for row in rows)
        return [(row["loss"], row["grad_norm"]) for row in rows]

    plain = run(lean=False)
    assert len(set(plain)) == STEPS
    assert run(lean=True) == plain


def test_dpo(tmp_path: Path) -> None:
    """Two forwards of one model in a step, one of them without gradients, and a loss outside of it."""
    trl, datasets = needs("trl"), needs("datasets")
    from leangrad.integrations.transformers import LeanCallback

    lines = [line for line in TEXT.read_text().splitlines() if len(line) > 24][:16]
    pairs = [{"prompt": line[:8], "chosen": line[8:24], "rejected": line[8:20][::-1]} for line in lines]
    data = datasets.Dataset.from_generator(lambda: iter(pairs), cache_dir=str(tmp_path / "cache"))

    def run(callbacks: list[Any]) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model, reference = llama(), llama()
        options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": False}
        options |= {"gradient_checkpointing": False, "max_length": LENGTH}
        args = trl.DPOConfig(str(tmp_path), max_steps=2, logging_steps=1, use_cpu=True, **options)
        trainer = trl.DPOTrainer(
            model, reference, args, train_dataset=data, processing_class=character_tokenizer(), callbacks=callbacks
        )
        trainer.train()
        return [row for row in trainer.state.log_history if "loss" in row]

    plain, lean = run([]), run([LeanCallback()])
    assert len(plain) == 2
    for one, other in zip(plain, lean, strict=True):
        assert (other["loss"], other["grad_norm"]) == (one["loss"], one["grad_norm"])
        assert other["lean_saved_share"] > 0.3


# Diffusers


def test_a_unet_of_diffusers() -> None:
    diffusers = needs("diffusers")

    def run(way: str) -> tuple[list[float], nn.Module]:
        torch.manual_seed(0)
        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        model = diffusers.UNet2DModel(
            sample_size=16, in_channels=1, out_channels=1, block_out_channels=(32, 64), layers_per_block=1, **blocks
        )
        scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)
        if way == "lean":
            leangrad.lean(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(STEPS):
            images, noise = torch.rand(4, 1, 16, 16), torch.randn(4, 1, 16, 16)
            steps = torch.randint(0, 100, (4,))
            loss = F.mse_loss(model(scheduler.add_noise(images, noise, steps), steps).sample, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    assert_same_run(run, "lean")
