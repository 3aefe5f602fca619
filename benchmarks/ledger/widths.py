"""Language models of two blocks on a CPU, narrow to wide: time, peak, and the share of replayed ops in the time.

    python -m benchmarks.ledger.widths [--write widths_cpu]

The models of the zoo are small, so that tests are quick. There matmuls, whose work grows with the square of the width,
hardly take longer than the replayed ops, whose work grows with the width, or than the host's work, which is constant.
Here the same blocks have the widths that people train.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import leangrad
from benchmarks.environment import write_rows
from benchmarks.ledger.zoo import replay_ratio, time_ratio

WIDTHS = (128, 256, 512, 768, 1024)
BLOCKS, HEAD, TOKENS, WORDS = 2, 64, (2, 256), 1024


def gpt2(width: int, dropout: float = 0.0) -> nn.Module:
    """Return a GPT-2 of `BLOCKS` blocks."""
    sizes = {"n_embd": width, "n_layer": BLOCKS, "n_head": width // HEAD, "vocab_size": WORDS}
    dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, **ids, n_positions=TOKENS[1], use_cache=False))
    return model


def llama(width: int) -> nn.Module:
    """Return a Llama of `BLOCKS` blocks, with four query heads for each key head."""
    heads = width // HEAD
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": BLOCKS, "vocab_size": WORDS}
    attention = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4)}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, **attention, use_cache=False))
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "llama": llama,
    "gpt2, no dropout": gpt2,
    "gpt2": lambda width: gpt2(width, 0.1),
}


def measure(name: str, width: int) -> dict[str, Any]:
    """Measure one model at one width; return the row."""
    torch.manual_seed(0)
    model, words, ledger = MODELS[name](width).train(), torch.randint(0, WORDS, TOKENS), leangrad.saving()

    def finish(loss: Tensor) -> None:
        loss.backward()
        model.zero_grad(set_to_none=True)

    def plain() -> None:
        finish(model(input_ids=words, labels=words).loss)

    def lean() -> None:
        with ledger:
            loss = model(input_ids=words, labels=words).loss
        finish(loss)

    for _ in range(3):
        lean()
    start = time.process_time()
    plain()
    spent = time.process_time() - start
    before, after = leangrad.measure(plain, timed_runs=0), leangrad.measure(lean, timed_runs=0)
    return {
        "model": name,
        "width": width,
        "plain_ms": 1e3 * spent,
        "time_over_plain": time_ratio(plain, lean),
        "replays_over_plain": replay_ratio(plain, lean),
        "plain_peak_bytes": before.peak_bytes,
        "lean_peak_bytes": after.peak_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", nargs="*", type=int, default=WIDTHS)
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in MODELS:
        for width in arguments.width:
            row = measure(name, width)
            rows.append(row)
            print(
                f"{name:<18} {width:5d} wide, plain {row['plain_ms']:6.0f} ms, "
                f"time {row['time_over_plain']:.3f} x plain, replays {row['replays_over_plain']:.3f}, "
                f"peak {row['plain_peak_bytes'] / 1e6:6.1f} -> {row['lean_peak_bytes'] / 1e6:6.1f} MB",
                flush=True,
            )
    if arguments.write:
        write_rows(arguments.write, "cpu", rows)


if __name__ == "__main__":
    main()
