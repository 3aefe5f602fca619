"""Peak memory per GPU of Llama 8B and 70B under FSDP2 on 8 and 64 ranks: simulated, without a device.

    OMP_NUM_THREADS=1 python -m benchmarks.simulated --write simulated [--docs]

One rank of each runs here, as `untouched.py` says: transformers' Llama, FSDP2 per block and for the root, float32
shards with a policy of bfloat16 for computing and float32 for reducing, fused AdamW, one sequence of 8,192 tokens for
each rank. Attention is torch's flash attention for the CPU, which saves what CUDA's flash attention saves: query, key
and value (of as many heads as there are, not repeated), output and logsumexp. The fused loss takes a GPU's chunks. What
is rebuilt is rebuilt op by op, as on a GPU without Triton.

``peak_bytes`` is the highest that a rank's memory stands in a step: shards, the optimizer's state and the step's own
memory. ``kept_bytes`` stands between forward and backward. Rows with a ``real_peak_bytes`` are the check: a small shape
on two ranks, simulated, and run by two real processes over gloo. ``--docs`` writes the table into docs/distributed.md.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import leangrad
from benchmarks.environment import RESULTS, write_rows
from benchmarks.untouched import Untouched, one_of
from leangrad.ops import linear_cross_entropy
from leangrad.profile.standing import standing_bytes
from tests.support.ranks import run_ranks

DOCS = Path(__file__).parent.parent / "docs" / "distributed.md"
BEGIN, END = "<!-- rows of simulated.json -->", "<!-- end of rows -->"

TOKENS, RANKS, STEPS = 8192, (8, 64), 3
WAYS = ("plain", "checkpoint per block", "lean", "lean, fused loss")
SHAPES: dict[str, dict[str, Any]] = {
    "Llama 8B": {"width": 4096, "inner": 14336, "depth": 32, "heads": 32, "words": 128256},
    "Llama 70B": {"width": 8192, "inner": 28672, "depth": 80, "heads": 64, "words": 128256},
}
SMALL, SMALL_TOKENS, SMALL_RANKS = {"width": 256, "inner": 896, "depth": 4, "heads": 8, "words": 2048}, 1024, 2


def llama(*, width: int, inner: int, depth: int, heads: int, words: int, fused_loss: bool = False) -> Any:
    """A language model of this shape, with four queries for each key, up to 8 keys; called for its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, tokens: Tensor) -> Tensor:
            if not fused_loss:
                loss: Tensor = super().forward(input_ids=tokens, labels=tokens).loss
                return loss
            hidden = self.model(input_ids=tokens).last_hidden_state
            after = F.pad(tokens, (0, 1), value=-100)[:, 1:]
            return leangrad.linear_cross_entropy(hidden, self.lm_head.weight, after)

    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": depth, "vocab_size": words}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": 8 if heads > 8 else 2}
    return Llama(LlamaConfig(**shape, **heads_of, tie_word_embeddings=False, use_cache=False)).train()


def sharded(way: str, shape: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model as this way trains it, on each rank."""
    model = llama(**shape, fused_loss="fused loss" in way)
    if way.startswith("checkpoint"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif way.startswith("lean"):
        leangrad.lean(model)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def measured(way: str, shape: dict[str, Any], tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Peak and kept bytes of a step on this rank, after steps that the ledger learns from."""
    model = sharded(way, shape, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randint(0, shape["words"], (1, tokens), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with mock.patch.object(linear_cross_entropy, "chunk_rows", _chunk_rows_on_a_gpu):
        for _ in range(STEPS - 1):
            step()
        gc.collect()
        standing = sum(standing_bytes([model], [optimizer], "cpu").values())
        found = leangrad.measure(step, timed_runs=0)
    return {"peak_bytes": standing + found.peak_bytes, "standing_bytes": standing, "kept_bytes": found.kept_bytes}


_chunk_rows = linear_cross_entropy.chunk_rows


def _chunk_rows_on_a_gpu(tokens: int, hidden: int, vocabulary: int, device_type: str, **needs: bool) -> int:
    return _chunk_rows(tokens, hidden, vocabulary, "cuda", **needs)


def simulate(way: str, shape: dict[str, Any], tokens: int, dtype: torch.dtype, ranks: int) -> dict[str, Any]:
    """What `measured` finds on one of so many ranks, of which no other exists."""
    with one_of(ranks), Untouched():
        return measured(way, shape, tokens, dtype)


def check_real(rank: int, way: str, found: str) -> None:
    """`measured` of the small shape, in real processes."""
    one = measured(way, SMALL, SMALL_TOKENS, torch.float32)
    if rank == 0:
        Path(found).write_text(json.dumps(one))


def check(way: str) -> dict[str, Any]:
    """A row of the small shape: simulated, and as real processes have it."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        run_ranks(check_real, SMALL_RANKS, Path(folder), way, str(found))
        real = json.loads(found.read_text())
    simulated = simulate(way, SMALL, SMALL_TOKENS, torch.float32, SMALL_RANKS)
    row = {"shape": "small", "ranks": SMALL_RANKS, "way": way, **simulated}
    return {**row, "real_peak_bytes": real["peak_bytes"], "real_kept_bytes": real["kept_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows=[]
    for way in WAYS:
        rows.append(check(way)); print(rows[-1], rows[-1]["peak_bytes"]/rows[-1]["real_peak_bytes"],  flush=True)

if __name__ == "__main__":
    main()
