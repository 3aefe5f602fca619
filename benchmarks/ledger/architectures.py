"""Architectures of timm that leangrad was not tuned for, plain and lean: do steps follow a trace, are they exact?

    python -m benchmarks.ledger.architectures --write timm_h200             # all of them, both memory formats
    python -m benchmarks.ledger.architectures --only efficientnet_b0 --time # one, with times

A row holds, for one architecture and memory format under bfloat16 autocast: whether every step from the third on
followed the trace of the recorded step, and the ledger's trace status; whether lean's gradients are bitwise equal to
the plain ones, and whether two plain runs are equal; the peak of allocated bytes above those before the step. With
``--time`` also the time of a step in milliseconds, as training runs it: the median over rounds, in which plain and lean
alternate, of the median of twelve steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leangrad
from benchmarks.environment import WARM_UP, write_rows
from benchmarks.models import _compare, _gradients, _in_a_row, _memory, _step_of
from leangrad.ledger import no_regions

# One or two models of each family, at timm's own sizes.
ARCHITECTURES = (
    "beit_base_patch16_224", "cait_xxs24_224", "coatnet_nano_rw_224", "convmixer_768_32", "convnext_tiny",
    "crossvit_tiny_240", "cspresnet50", "davit_tiny", "deit3_small_patch16_224", "densenet121", "dla34", "dpn68",
    "eca_nfnet_l0", "ecaresnet50d", "edgenext_small", "efficientformer_l1", "efficientnet_b0", "eva02_tiny_patch14_224",
    "fastvit_t8", "focalnet_tiny_srf", "gernet_s", "ghostnetv2_100", "gmlp_s16_224", "hardcorenas_a", "hrnet_w18",
    "inception_v3", "levit_128s", "maxvit_tiny_rw_224", "mixer_b16_224", "mnasnet_100",
    "mobilenetv3_large_100", "mobilevit_s", "mvitv2_tiny", "nest_tiny", "nf_resnet50", "pit_s_224", "poolformer_s12",
    "pvt_v2_b1", "regnety_016", "repvgg_a2", "res2net50_26w_4s", "resnest26d", "resnet50", "rexnet_100",
    "sebotnet33ts_256", "selecsls42b", "skresnet18", "swin_tiny_patch4_window7_224", "tf_efficientnetv2_s",
    "twins_svt_small", "vgg16_bn", "visformer_small", "vit_base_patch16_224", "volo_d1_224", "xception41",
    "xcit_tiny_12_p16_224",
)  # fmt: skip
FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
STEPS, TURNS = 6, 3


def setup(name: str, memory_format: torch.memory_format, batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a model in training mode, and a function that runs one forward and returns the loss."""
    import timm

    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = timm.create_model(name).to(memory_format=memory_format).train()
        size: tuple[int, int, int] = model.default_cfg["input_size"]  # type: ignore[assignment, index]
        x = torch.randn(batch, *size).to(memory_format=memory_format)
        target = torch.arange(batch)  # smaller than the number of classes, or of features if there is no classifier

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
            return F.cross_entropy(out[0] if isinstance(out, tuple) else out, target)

    return model, forward


def settles(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """Run a few steps; return the trace status of the first from the third on that follows no trace, or ""."""
    ledger = leangrad.ledger_of(model)
    for n in range(STEPS):
        forward().backward()
        if n >= 2 and (ledger.trace is None or ledger.differences):
            return ledger.trace_status
    return ""


def run(name: str, memory_format: str, batch: int, timed: bool) -> dict[str, Any]:
    """Measure one architecture."""
    model, forward = setup(name, FORMATS[memory_format], batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def plainly() -> Tensor:
        with no_regions():
            return forward()

    plainly().backward()
    optimizer.step()  # allocates the optimizer's state
    leangrad.lean(model)
    status = settles(model, forward)
    row: dict[str, Any] = {"case": name, "memory_format": memory_format, "batch": batch, "settles": not status}
    row["trace_status"] = status or leangrad.ledger_of(model).trace_status
    first, again, lean = _gradients(model, plainly), _gradients(model, plainly), _gradients(model, forward)
    row["plain_equals_itself"] = _compare(first, again)["bitwise"]
    row |= {"bitwise": _compare(first, lean)["bitwise"], "largest_difference": _compare(first, lean)["largest"]}
    del first, again, lean
    for _ in range(WARM_UP):
        _step_of(forward, optimizer)()
    row["plain_gib"], row["lean_gib"] = (_memory(f, optimizer)["peak_gib"] for f in (plainly, forward))
    row["peak_ratio"] = row["lean_gib"] / row["plain_gib"]
    if timed:
        steps = {"plain": _step_of(plainly, optimizer), "lean": _step_of(forward, optimizer)}
        turns = [{way: _in_a_row(step)["ms_in_a_row"] for way, step in steps.items()} for _ in range(TURNS)]
        for way in steps:
            row[f"{way}_ms"] = statistics.median(turn[way] for turn in turns)
        row["time_ratio"] = statistics.median(turn["lean"] / turn["plain"] for turn in turns)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--shard", default="0/1", help="K/N: every Nth architecture from the Kth on")
    parser.add_argument("--write", default="")
    arguments = parser.parse_args()
    k, n = map(int, arguments.shard.split("/"))
    rows = []
    for name in arguments.only[k::n]:
        for memory_format in arguments.formats:
            try:
                row = run(name, memory_format, arguments.batch, arguments.time)
            except Exception as error:  # go on with the other architectures
                row = {"case": name, "memory_format": memory_format, "error": repr(error)[:400]}
            gc.collect()
            torch.cuda.empty_cache()
            rows.append(row)
            print(row, flush=True)
            if arguments.write:
                write_rows(arguments.write, "cuda", rows)


if __name__ == "__main__":
    main()
