"""Compiled training on one GPU: torch.compile as it is, its own ways to less memory, eager lean, and ours.

    python -m benchmarks.compiled --write compiled_h200                       # the four models of the table
    python -m benchmarks.compiled --timm --write compiled_timm_h200           # timm, batch 128, channels_last

Compiling takes most of the time and can be shared out, if measuring comes after it, with torch's caches warm:

    for k in 0 1 2 3; do python -m benchmarks.compiled --all --shard $k/4 --compile-only --write first & done; wait
    for k in 0 1 2 3; do python -m benchmarks.compiled --all --shard $k/4 --beside first --write rows & done; wait
    python -m benchmarks.compiled --join rows --write compiled_h200

A row is one model trained in one way: the step in milliseconds, as training runs them (``ms``) and waited for
(``waited_ms``), the time of its kernels alone (``device_ms``), the peak of allocated bytes above parameters and
optimizer state, the bytes alive between forward and backward, the seconds of the first step, which compiles, and for
``leangrad`` what the policy foresaw (``simulated_peak_gib``, ``simulated_kept_gib``) and the seconds it took to choose.
Ratios are to ``compile`` of the same model in the same run. A file lock lets one process at a time measure. What is
known when a graph is compiled for the first time (``first_step_s``, what the policy foresaw) comes from the rows
``--beside`` if measuring is done by a second process.

compile     torch.compile(model)
budget      the same with activation_memory_budget 0.5
bans        the same with torch's bans on recomputation lifted (aggressive_recomputation)
checkpoint  eager, each block under torch.utils.checkpoint
lean        eager, leangrad.lean(model)
leangrad    torch.compile(model, backend="leangrad")
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

import leangrad
from benchmarks import models
from benchmarks.environment import RESULTS, write_rows
from benchmarks.models import _in_a_row, _memory, _step_of, _waited, kernels
from leangrad.compiled import compile_lean
from leangrad.compiled.partitioner import chosen

TIMM = (
    "beit_base_patch16_224", "convnext_tiny", "cspresnet50", "davit_tiny", "deit3_small_patch16_224", "densenet121",
    "eca_nfnet_l0", "efficientnet_b0", "fastvit_t8", "focalnet_tiny_srf", "gmlp_s16_224", "hrnet_w18", "inception_v3",
    "maxvit_tiny_rw_224", "mixer_b16_224", "mobilenetv3_large_100", "mobilevit_s", "nf_resnet50", "pit_s_224",
    "poolformer_s12", "regnety_016", "repvgg_a2", "res2net50_26w_4s", "swin_tiny_patch4_window7_224",
    "tf_efficientnetv2_s", "vit_base_patch16_224", "xcit_tiny_12_p16_224",
)  # fmt: skip
BLOCKS = ("Bottleneck", "EncoderBlock")  # of torchvision, which has no switch for checkpoints
TURNS = 3

Forward = Callable[[nn.Module], Tensor]  # of a model, compiled or not: the loss of one step
Setup = Callable[[], tuple[nn.Module, Forward]]


def _table(case: models.Case) -> Setup:
    def setup() -> tuple[nn.Module, Forward]:
        with torch.device("cuda"):
            model = case.make().train()
        if case.name == "gpt2_medium":
            model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else a warning of it breaks the graph
        batch = case.batch(case.size)

        def forward(run: nn.Module) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16) if case.autocast else nullcontext():
                return case.loss(run, batch)

        return model, forward

    return setup


def _timm(name: str, batch: int) -> Setup:
    def setup() -> tuple[nn.Module, Forward]:
        import timm

        with torch.device("cuda"):
            model: nn.Module = timm.create_model(name).to(memory_format=torch.channels_last).train()
            size: Any = model.default_cfg["input_size"]  # type: ignore[index]
            x = torch.randn(batch, *size).to(memory_format=torch.channels_last)
            target = torch.arange(batch)

        def forward(run: nn.Module) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                out = run(x)
                return F.cross_entropy(out[0] if isinstance(out, tuple) else out, target)

        return model, forward

    return setup


def _checkpointed(model: nn.Module) -> nn.Module:
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()  # type: ignore[operator]
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    else:
        blocks = [module for module in model.modules() if type(module).__name__ in BLOCKS]
        if not blocks:
            raise ValueError(f"{type(model).__name__} has no blocks that a checkpoint could stand around")
        for block in blocks:
            plain = block.forward
            block.forward = lambda *a, plain=plain: checkpoint(plain, *a, use_reentrant=False)
    return model


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def _ours(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=compile_lean)  # type: ignore[return-value]


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[], AbstractContextManager[Any]]]] = {
    "compile": (_compiled, nullcontext),
    "budget": (_compiled, lambda: config.patch(activation_memory_budget=0.5)),
    "bans": (_compiled, lambda: config.patch(aggressive_recomputation=True)),
    "checkpoint": (_checkpointed, nullcontext),
    "lean": (leangrad.lean, nullcontext),
    "leangrad": (_ours, nullcontext),
}


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process of all that share ``lock`` measures; the others wait."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(name: str, setup: Setup, way: str, lock: Path, *, compile_only: bool = False) -> dict[str, Any]:
    """Measure one model in one way."""
    torch._dynamo.reset()
    chosen.clear()
    torch.manual_seed(0)
    model, loss = setup()
    prepare, settings = WAYS[way]
    ready = prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step = _step_of(lambda: loss(ready), optimizer)
    row: dict[str, Any] = {"case": name, "way": way}
    with settings():
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        row["first_step_s"] = time.perf_counter() - start
    if way == "leangrad" and chosen:
        choices = [one.choice for one in chosen]
        row["choosing_s"] = sum(one.seconds for one in chosen)
        row["graphs"] = len(choices)
        row["simulated_peak_gib"] = max(c.outcome.peak_bytes for c in choices) / 2**30
        row["simulated_kept_gib"] = sum(c.outcome.kept_bytes for c in choices) / 2**30
        row["slowdown"] = max(c.slowdown for c in choices)
        row["reused_reads"] = max(c.reused_reads for c in choices)
        row["held_back"] = any(c.is_held_back for c in choices)
        row["lowest_slowdown"] = max(c.lowest_slowdown for c in choices)
    if compile_only:
        return row
    with _alone(lock):
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        row |= _memory(lambda: loss(ready), optimizer)
        turns = [_in_a_row(step)["ms_in_a_row"] for _ in range(TURNS)]
        row |= {"ms": min(turns), "waited_ms": _waited(step), "device_ms": min(kernels(step) for _ in range(TURNS))}
    return row


def _rows(name: str) -> list[dict[str, Any]]:
    """The rows of all shards of a run."""
    files = sorted(RESULTS.glob(f"{name}_*.json")) or [RESULTS / f"{name}.json"]
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


def main() -> None:
    """Measure models in several ways and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", action="store_true", help="timm's architectures instead of the four models")
    parser.add_argument("--all", action="store_true", help="both")
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--compile-only", action="store_true", help="one step of each, to fill torch's caches")
    parser.add_argument("--beside", default="", help="name of the rows of such a run")
    parser.add_argument("--join", default="", help="name of the rows of shards, to be written into one file")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--batch", type=int, default=128, help="for timm")
    parser.add_argument("--shard", default="0/1", help="K/N: every Nth model from the Kth on")
    parser.add_argument("--lock", type=Path, default=Path(tempfile.gettempdir()) / "leangrad_measures")
    parser.add_argument("--write", default="", help="name of the file of rows; the shard is added to it")
    arguments = parser.parse_args()
    if arguments.join:
        write_rows(arguments.write, "cuda", _rows(arguments.join))
        return
    earlier = {(row["case"], row["way"]): row for row in _rows(arguments.beside)} if arguments.beside else {}
    torch.set_float32_matmul_precision("high")
    cases: dict[str, Setup] = {case.name: _table(case) for case in models.CASES}
    timm = {name: _timm(name, arguments.batch) for name in TIMM}
    if arguments.timm or arguments.all:
        cases = {**cases, **timm} if arguments.all else timm
    shard, shards = map(int, arguments.shard.split("/"))
    names = [name for name in arguments.only or cases if name in cases][shard::shards]
    rows: list[dict[str, Any]] = []
    for name in names:
        stock: dict[str, Any] = {}
        for way in arguments.ways:
            try:
                row = run(name, cases[name], way, arguments.lock, compile_only=arguments.compile_only)
                row |= earlier.get((name, way), {})
            except Exception as error:  # one of them must not cost the others their turn on the machine
                row = {"case": name, "way": way, "error": repr(error)[:400]}
            if way == "compile":
                stock = row
            for key in ("ms", "device_ms", "peak_gib"):
                if key in row and key in stock:
                    row[f"{key}_ratio"] = row[key] / stock[key]
            rows.append(row)
            print(row, flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            if arguments.write:
                suffix = f"_{shard}" if shards > 1 else ""
                write_rows(f"{arguments.write}{suffix}", "cuda", rows)


if __name__ == "__main__":
    main()
