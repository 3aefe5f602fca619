"""Peak memory per GPU of Llama 8B and 70B under FSDP2 on 8 and 64 ranks: simulated, without a device.

    OMP_NUM_THREADS=1 python -m benchmarks.distributed.simulated --write simulated

One rank of each is run, without arithmetic (see `untouched.py`): transformers' Llama, FSDP2 per block and for the root,
float32 shards with a policy of bfloat16 for computing and float32 for reducing, fused AdamW, one sequence of 8,192
tokens for each rank. Attention is torch's flash attention for the CPU, which saves the same tensors as CUDA's: query,
key and value (key and value with their own heads, not repeated), output and logsumexp. The fused loss uses the chunk
sizes of a GPU. Tensors are rebuilt op by op, as on a GPU without Triton.

``peak_bytes`` is the peak of a rank's memory in a step: shards, the optimizer's state, and the step's own memory.
``kept_bytes`` are the step's bytes that are allocated between forward and backward. Rows with ``real_peak_bytes`` are
checks of the simulation: a small shape on two ranks, simulated and in two real processes over gloo, in float32, for
which a CPU has fast matmuls; and Llama 1B in bfloat16 on one device, compared with the measurement on an H200, both
without the memory allocated before the step. There the fused loss is that of ``exact=False``. ``--write`` also writes
the table into docs/distributed.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import leangrad
from benchmarks.distributed.untouched import Untouched, avoid_huge_pages, one_of
from benchmarks.environment import RESULTS, write_rows
from benchmarks.models import CASES
from leangrad.measure.measurement import Measurement
from leangrad.ops import linear_cross_entropy
from leangrad.profile.standing import standing_bytes
from tests.support.checkpointed import checkpoint_blocks
from tests.support.ranks import run_ranks

DOCS = Path(__file__).parents[2] / "docs" / "distributed.md"
BEGIN, END = "<!-- made by python -m benchmarks.distributed.simulated -->\n\n", "\n<!-- end of what is made -->\n"

WAYS = ("plain", "checkpoint per block", "lean", "lean, fused loss")
RANKS, TOKENS = (8, 64), 8192
SHAPES = {  # by name: width, units of the MLP, blocks, heads, heads of keys and values, vocabulary size
    "Llama 8B": (4096, 14336, 32, 32, 8, 128256),
    "Llama 70B": (8192, 28672, 80, 64, 8, 128256),
}
SMALL, SMALL_RANKS, SMALL_TOKENS = (256, 896, 4, 8, 2, 2048), 2, 512
ON_A_GPU, GPU_BATCH = "llama_1b", (4, 2048)  # a case of `models.py`
GPU_WAYS = {"plain": "plain", "lean": "lean", "lean, fused loss": "lean, exact=False"}  # by way, its name in those rows
Shape = tuple[int, int, int, int, int, int]


# ----------------------------------------------------------------------------------------------------------- the models


class FusedLoss(LlamaForCausalLM):
    """Llama with its loss computed without logits, by `leangrad.linear_cross_entropy`."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        """Return the loss of predicting each of the ``labels`` from the tokens before it."""
        hidden = self.model(input_ids=input_ids).last_hidden_state
        after = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return CausalLMOutput(loss=leangrad.linear_cross_entropy(hidden, self.lm_head.weight, after))


def llama(shape: Shape, kind: Any = LlamaForCausalLM) -> Any:
    """Return a language model of the class ``kind`` with this shape."""
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    options = dict(zip(names.split(), shape, strict=True))
    return kind(LlamaConfig(**options, tie_word_embeddings=False, use_cache=False)).train()


def sharded(way: str, shape: Shape, dtype: torch.dtype) -> Any:
    """Return the sharded model, prepared for one way; every rank calls this."""
    model = llama(shape, FusedLoss if "fused loss" in way else LlamaForCausalLM)
    if way.startswith("checkpoint"):
        checkpoint_blocks(model, use_reentrant=False)
    elif way.startswith("lean"):
        leangrad.lean(model)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


# ------------------------------------------------------------------------------------------------------------ a step


class Training:
    """A model in training, with its optimizer and tokens of the shape ``batch``."""

    def __init__(self, model: Any, batch: tuple[int, int]) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), fused=True)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, model.config.vocab_size, batch, generator=generator)

    def step(self) -> None:
        """Run one training step."""
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self) -> Measurement:
        """Measure a step after two others, from which the ledger learns; the loss uses the chunk sizes of a GPU."""
        with mock.patch.object(linear_cross_entropy, "chunk_rows", _chunk_rows_on_a_gpu):
            self.step()
            self.step()
            gc.collect()
            return leangrad.measure(self.step, timed_runs=0)


_chunk_rows = linear_cross_entropy.chunk_rows


def _chunk_rows_on_a_gpu(tokens: int, hidden: int, vocabulary: int, device_type: str, **asked: Any) -> int:
    """Return the rows of a chunk such that its float32 logits on a CPU use as many bytes as bfloat16 ones on a GPU."""
    return _chunk_rows(tokens, hidden, vocabulary, "cuda", **{**asked, "itemsize": 2}) // 2


def measured(way: str, shape: Shape, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return peak, standing and kept bytes of a step on this rank."""
    training = Training(sharded(way, shape, dtype), (1, tokens))
    found = training.measure()
    standing = sum(standing_bytes([training.model], [training.optimizer], "cpu").values())
    return {"peak_bytes": standing + found.peak_bytes, "standing_bytes": standing, "kept_bytes": found.kept_bytes}


def simulate(way: str, shape: Shape, tokens: int, dtype: torch.dtype, ranks: int) -> dict[str, Any]:
    """Return what `measured` returns on one simulated rank out of ``ranks``."""
    with one_of(ranks), Untouched():
        return measured(way, shape, tokens, dtype)


# ----------------------------------------------------------------------------------------------------------- the checks


def run_small(rank: int, found: str) -> None:
    """Measure the small shape in all ways on a real process; rank 0 writes the rows to the file ``found``."""
    rows = {way: measured(way, SMALL, SMALL_TOKENS, torch.float32) for way in WAYS}
    if rank == 0:
        Path(found).write_text(json.dumps(rows))


def checks() -> list[dict[str, Any]]:
    """Return the rows of the small shape: simulated, with the figures of real processes."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        run_ranks(run_small, SMALL_RANKS, Path(folder), str(found))
        real = json.loads(found.read_text())
    rows = []
    for way in WAYS:
        row = {"shape": "small", "ranks": SMALL_RANKS, "tokens": SMALL_TOKENS, "way": way}
        row |= simulate(way, SMALL, SMALL_TOKENS, torch.float32, SMALL_RANKS)
        rows.append(row | {f"real_{name}": real[way][name] for name in ("peak_bytes", "kept_bytes")})
    return rows


def gpu_checks() -> list[dict[str, Any]]:
    """Return the rows of Llama 1B on one device: simulated, with the committed measurements of an H200."""
    committed = json.loads((RESULTS / "loss_models_h200.json").read_text())["rows"]
    make = next(case.make for case in CASES if case.name == ON_A_GPU)
    rows = []
    for way, name in GPU_WAYS.items():
        real = next(row for row in committed if (row["case"], row["way"]) == (ON_A_GPU, name))
        with Untouched():
            model = make().train()
            found = Training(
                model if way == "plain" else leangrad.lean(model, exact=way == "lean"), GPU_BATCH
            ).measure()
        row = {"shape": ON_A_GPU, "ranks": 1, "tokens": GPU_BATCH[0] * GPU_BATCH[1], "way": way}
        row |= {"peak_bytes": found.peak_bytes, "kept_bytes": found.kept_bytes}
        rows.append(row | {f"real_{name}_bytes": int(real[f"{name}_gib"] * 2**30) for name in ("peak", "kept")})
    return rows


# ------------------------------------------------------------------------------------------------------------ the table


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the docs, with the largest error of the simulation in the checks."""
    off: dict[str, float] = {}
    for row in rows:
        if "real_peak_bytes" in row:
            off[row["shape"]] = max(off.get(row["shape"], 0.0), abs(row["peak_bytes"] / row["real_peak_bytes"] - 1))
    lines = [("simulated", "ranks", "shards and state", *WAYS), ("---",) * (3 + len(WAYS))]
    for name in SHAPES:
        for ranks in RANKS:
            found = {row["way"]: row for row in rows if (row["shape"], row["ranks"]) == (name, ranks)}
            sizes = (found["plain"]["standing_bytes"], *(found[way]["peak_bytes"] for way in WAYS))
            lines.append((name, str(ranks), *(f"{size / 1e9:.1f} GB" for size in sizes)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + (
        f"\nHow far the simulation is off: a small shape, in two real processes over gloo, all four ways, "
        f"{off['small']:.2%} at most;\nLlama 1B on one H200, plain, lean and with the fused loss, {off[ON_A_GPU]:.2%} "
        "at most.\n"
    )


def write_table(rows: list[dict[str, Any]]) -> None:
    """Write the table into the docs, between its marks."""
    before, _, rest = DOCS.read_text().partition(BEGIN)
    DOCS.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    avoid_huge_pages()
    rows = checks() + gpu_checks()
    for name, shape in SHAPES.items():
        for ranks in RANKS:
            for way in WAYS:
                row = {"shape": name, "ranks": ranks, "tokens": TOKENS, "way": way}
                rows.append(row | simulate(way, shape, TOKENS, torch.bfloat16, ranks))
                print(f"{name}, {ranks} ranks, {way}: {rows[-1]['peak_bytes'] / 1e9:.1f} GB", flush=True)
    print(table(rows))
    if arguments.write:
        write_rows(arguments.write, "simulated", rows)
        write_table(rows)


if __name__ == "__main__":
    main()
