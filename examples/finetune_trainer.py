"""Fine-tune a small language model with Hugging Face's Trainer, plain and lean, on a text that is shipped.

python examples/finetune_trainer.py            # some minutes on two cores; a model from a config, nothing is downloaded
python examples/finetune_trainer.py --small    # some seconds, as the tests run it

It prints the losses of both, which are the same bit for bit, and what a step of each takes.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import leangrad
from leangrad.integrations.transformers import LeanCallback

TEXT = Path(__file__).parent / "data" / "logbook.txt"


@dataclass(frozen=True)
class Size:
    """Of the model and of its training."""

    width: int = 256
    heads: int = 4
    blocks: int = 4
    length: int = 128
    batch: int = 8
    steps: int = 150


SMALL = Size(width=64, heads=2, blocks=2, length=64, batch=8, steps=40)


@dataclass(frozen=True)
class Result:
    """Of one training."""

    losses: list[float]
    seconds: float
    peak_bytes: int  # of one step, above what stands before it


def pieces(size: Size) -> list[dict[str, Tensor]]:
    """The text in pieces, a token for each character."""
    tokens = torch.tensor(list(TEXT.read_bytes()))
    count = len(tokens) // size.length
    return [{"input_ids": piece, "labels": piece} for piece in tokens[: count * size.length].view(count, size.length)]


def train(size: Size, *, is_lean: bool) -> Result:
    """Train a new model and measure one more step of it."""
    torch.manual_seed(0)
    shape = {"n_embd": size.width, "n_head": size.heads, "n_layer": size.blocks, "n_positions": size.length}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, **shape, bos_token_id=1, eos_token_id=2))
    data = pieces(size)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=size.steps,
            per_device_train_batch_size=size.batch,
            learning_rate=3e-3,
            warmup_steps=size.steps // 10,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(model, args, train_dataset=data, callbacks=[LeanCallback()] if is_lean else [])
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    batch = torch.stack([piece["input_ids"] for piece in data[: size.batch]]).to(model.device)
    if is_lean:
        leangrad.lean(model)  # the callback has given it back plain
    measured = leangrad.measure(lambda: model(input_ids=batch, labels=batch).loss.backward(), timed_runs=0)
    return Result(losses, seconds, measured.peak_bytes)


def main() -> None:
    """Train both and print one beside the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="some seconds instead of some minutes")
    size = SMALL if parser.parse_args().small else Size()
    plain, lean = train(size, is_lean=False), train(size, is_lean=True)
    assert lean.losses == plain.losses, "the losses differ: please report this"
    table = Table("", "last loss", "peak of a step", "seconds")
    for name, one in (("plain", plain), ("lean", lean)):
        table.add_row(name, f"{one.losses[-1]:.4f}", f"{one.peak_bytes / 1e6:.1f} MB", f"{one.seconds:.1f}")
    Console().print(table)
    print(f"the same {len(lean.losses)} losses, bit for bit, in {lean.peak_bytes / plain.peak_bytes:.2f} of the memory")
    last = lean.losses[-max(len(lean.losses) // 10, 1) :]
    print(f"loss {sum(last) / len(last):.3f}")


if __name__ == "__main__":
    main()
