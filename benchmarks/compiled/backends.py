"""Compiled training on one GPU: torch.compile, its own options that save memory, eager lean, and leangrad's backend.

    python -m benchmarks.compiled.backends --write compiled_h200                       # the four models of the table
    python -m benchmarks.compiled.backends --timm --write compiled_timm_h200           # timm, batch 128, channels_last
    python -m benchmarks.compiled.backends --all --workers 15 --write compiled_h200    # both

Compiling takes most of the time: ``--workers`` processes compile in parallel and hold the compiled models. When all are
compiled, or after ``--compile-seconds``, the models are measured one at a time on an otherwise idle machine, the ways
of a model one after the other.

A row is one model trained in one way: the time of a step in milliseconds, as training runs it (``ms``), the time of its
kernels alone (``device_ms``), the peak of allocated bytes above parameters and optimizer state, the bytes alive between
forward and backward, and the seconds of the first step, which compiles. For ``leangrad`` a row also has the peak and
the kept bytes that the policy predicted (``simulated_peak_gib``, ``simulated_kept_gib``) and the seconds that choosing
the plan took (``choosing_s``). Ratios are to ``compile`` of the same model in the same run.

compile     torch.compile(model)
budget      the same with activation_memory_budget 0.5
bans        the same with torch's bans on recomputation lifted (aggressive_recomputation)
checkpoint  eager, each block under torch.utils.checkpoint
lean        eager, leangrad.lean(model)
leangrad    torch.compile(model, backend="leangrad")
faster      the same with leangrad.slowdown 1.03
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

import leangrad
from benchmarks import models
from benchmarks.environment import WARM_UP, write_rows
from benchmarks.models import _in_a_row, _memory, _step_of, kernels
from leangrad.compiled import compile_lean
from leangrad.compiled.partitioner import chosen
from tests.support.checkpointed import checkpoint_blocks

TIMM = (
    "beit_base_patch16_224", "convnext_tiny", "cspresnet50", "davit_tiny", "deit3_small_patch16_224", "densenet121",
    "eca_nfnet_l0", "efficientnet_b0", "fastvit_t8", "focalnet_tiny_srf", "gmlp_s16_224", "hrnet_w18", "inception_v3",
    "maxvit_tiny_rw_224", "mixer_b16_224", "mobilenetv3_large_100", "mobilevit_s", "nf_resnet50", "pit_s_224",
    "poolformer_s12", "regnety_016", "repvgg_a2", "res2net50_26w_4s", "swin_tiny_patch4_window7_224",
    "tf_efficientnetv2_s", "vit_base_patch16_224", "xcit_tiny_12_p16_224",
)  # fmt: skip
BLOCKS = ("Bottleneck", "EncoderBlock")  # the blocks of torchvision's models, which have no switch for checkpoints
EAGER = ("checkpoint", "lean")
TURNS = 2
PAUSE = 5  # seconds to wait after the GPU ran out of memory
GRACE = 45  # extra seconds for models that are being compiled when the time is over

Forward = Callable[[nn.Module], Tensor]  # returns the loss of one step of a model, compiled or not
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
        checkpoint_blocks(model, use_reentrant=False)
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


def _ours(model: nn.Module, **settings: float) -> nn.Module:
    options: dict[str, Any] = {f"leangrad.{name}": value for name, value in settings.items()}
    return torch.compile(model, backend=compile_lean, options=options)  # type: ignore[return-value]


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[], AbstractContextManager[Any]]]] = {
    "compile": (_compiled, nullcontext),
    "budget": (_compiled, lambda: config.patch(activation_memory_budget=0.5)),
    "bans": (_compiled, lambda: config.patch(aggressive_recomputation=True)),
    "checkpoint": (_checkpointed, nullcontext),
    "lean": (leangrad.lean, nullcontext),
    "leangrad": (_ours, nullcontext),
    "faster": (functools.partial(_ours, slowdown=1.03), nullcontext),
}


@dataclass
class Prepared:
    """A model that ran its first step, and so is compiled.

    - `model`: the model as made, whose parameters are trained.
    - `ready`: the model as the way prepared it; `loss` is called with it.
    - `row`: the row so far.
    """

    model: nn.Module
    ready: nn.Module
    loss: Forward
    row: dict[str, Any]

    def measure(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        step = _step_of(lambda: self.loss(self.ready), optimizer)
        for _ in range(WARM_UP if self.row["way"] == "lean" else 4):
            step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        row = self.row | _memory(lambda: self.loss(self.ready), optimizer)
        turns = [_in_a_row(step)["ms_in_a_row"] for _ in range(TURNS)]
        return row | {"ms": min(turns), "device_ms": min(kernels(step) for _ in range(TURNS))}


def prepare(name: str, setup: Setup, way: str) -> Prepared:
    """Run the first forward and backward of a model in one way, which compiles it."""
    chosen.clear()
    torch.manual_seed(0)
    model, loss = setup()
    make_ready, settings = WAYS[way]
    ready = make_ready(model)
    row: dict[str, Any] = {"case": name, "way": way}
    with settings():
        start = time.perf_counter()
        loss(ready).backward()
        torch.cuda.synchronize()
        row["first_step_s"] = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    if chosen:
        choices = [one.choice for one in chosen]
        row["choosing_s"] = sum(one.seconds for one in chosen)
        row["graphs"] = len(choices)
        row["simulated_peak_gib"] = max(c.outcome.peak_bytes for c in choices) / 2**30
        row["simulated_kept_gib"] = sum(c.outcome.kept_bytes for c in choices) / 2**30
        row["slowdown"] = max(c.slowdown for c in choices)
        row["reused_reads"] = max(c.reused_reads for c in choices)
        row["held_back"] = any(c.is_held_back for c in choices)
        row["lowest_slowdown"] = max(c.lowest_slowdown for c in choices)
    return Prepared(model, ready, loss, row)


def _work(cases: dict[str, Setup]) -> None:
    """Run a worker process: read requests to prepare or measure a model from stdin, and print a row for each line."""
    torch.set_float32_matmul_precision("high")
    dynamo.automatic_dynamic_shapes = False  # models of one class are held at once, each compiled for its own shapes
    dynamo.recompile_limit = 64
    held: dict[str, Prepared] = {}
    for line in sys.stdin:
        what, name, way = line.split()
        key = f"{name} {way}"
        answer: dict[str, Any] = {"case": name, "way": way}
        try:
            if what == "prepare":
                held[key] = prepare(name, cases[name], way)
                answer = held[key].row
            else:
                answer = held.pop(key).measure()
                gc.collect()
                torch.cuda.empty_cache()
        except Exception as error:  # go on with the other models
            answer["error"] = repr(error)[:400]
        print("row " + json.dumps(answer), flush=True)


class _Worker:
    """A process that compiles models, and holds them until they are measured; see `_work`."""

    def __init__(self, batch: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.compiled.backends", "--all", "--batch", str(batch), "--work"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str, name: str, way: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, name, way, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("row "):
                return json.loads(line.removeprefix("row "))  # type: ignore[no-any-return]
        return {"case": name, "way": way, "error": f"the process ended with {self._process.wait()}"}

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


Job = tuple[str, str]  # the name of a model, a way


def _prepare_all(jobs: list[Job], workers: list[_Worker], seconds: float) -> dict[Job, _Worker]:
    """Distribute ``jobs`` over the workers; return the worker that holds each job that was prepared in ``seconds``."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    holders: dict[Job, _Worker] = {}
    end = time.monotonic() + seconds

    def serve(worker: _Worker) -> None:
        while time.monotonic() < end:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            row = worker.ask("prepare", *job)
            print(json.dumps(row), flush=True)
            if "error" not in row:
                holders[job] = worker
            elif "OutOfMemory" in row["error"]:  # other workers ran their first steps at the same time: try again
                waiting.put(job)
                time.sleep(PAUSE)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread, worker in zip(threads, workers, strict=True):
        thread.join(max(0.0, end + GRACE - time.monotonic()))
        if thread.is_alive():  # still compiling, and cannot answer: the models that it holds are prepared again below
            worker.kill()
            thread.join()
    spare = [worker for worker in workers if worker.is_alive()]
    for job in [job for job, holder in holders.items() if not holder.is_alive()]:
        del holders[job]
        if spare and "error" not in spare[0].ask("prepare", *job):  # takes seconds only, due to the caches on disk
            holders[job] = spare[0]
            spare.append(spare.pop(0))
    return holders


def main() -> None:
    """Measure models in several ways and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", action="store_true", help="timm's architectures instead of the four models")
    parser.add_argument("--all", action="store_true", help="both")
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--jobs", nargs="*", metavar="MODEL:WAY", default=[], help="more than --only times --ways")
    parser.add_argument("--batch", type=int, default=128, help="for timm")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile side by side")
    parser.add_argument(
        "--compile-seconds", type=float, default=float(10**6), help="what is not compiled then is left out"
    )
    parser.add_argument("--write", default="", help="name of the file of rows")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases: dict[str, Setup] = {case.name: _table(case) for case in models.CASES}
    timm = {name: _timm(name, arguments.batch) for name in TIMM}
    if arguments.timm or arguments.all:
        cases = {**cases, **timm} if arguments.all else timm
    if arguments.work:
        _work(cases)
        return
    names = [name for name in cases if name in (arguments.only or cases)]
    more: list[Job] = [(name, way) for name, _, way in (job.partition(":") for job in arguments.jobs)]
    jobs = [(name, way) for name in names for way in WAYS if way in arguments.ways or (name, way) in more]
    jobs += [job for job in more if job not in jobs]
    workers = [_Worker(arguments.batch) for _ in range(arguments.workers)]
    holders = _prepare_all([job for job in jobs if job[1] not in EAGER], workers, arguments.compile_seconds)
    print("measuring", flush=True)
    eager = _Worker(arguments.batch)
    rows: list[dict[str, Any]] = []
    stock: dict[str, dict[str, Any]] = {}
    for name, way in jobs:
        holder = eager if way in EAGER else holders.get((name, way))
        if holder is None:
            continue
        row = holder.ask("prepare", name, way) if way in EAGER else {}
        if "error" not in row:
            row = holder.ask("measure", name, way)
        if way == "compile":
            stock[name] = row
        for key in ("ms", "device_ms", "peak_gib"):
            if key in row and key in stock.get(name, {}):
                row[f"{key}_ratio"] = row[key] / stock[name][key]
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.write:
            write_rows(arguments.write, "cuda", rows)
    for worker in (*workers, eager):
        worker.kill()


if __name__ == "__main__":
    main()
